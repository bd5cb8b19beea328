"""Roles that score: several at once with weights, and Python functions that are slow or break, beside the devices."""

import concurrent.futures
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrlhf.calibration.measure_host import COMPILING_STEPS, run_steps
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.function_threads import any_left_behind
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import MOVING
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.run.interruption import StopRequest
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.trainer import Trainer

MODEL = "{vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}"
RUN = f"""
name: scoring
steps: 2
batch_size: 16
data: {{task: arithmetic}}
roles:
  actor: {{model: {MODEL}, optimizer: &optimizer {{learning_rate: 5.0e-4}}}}
  critic: {{init: actor, head: scalar, optimizer: *optimizer}}
  reference: {{init: actor}}
  short: {{function: length_penalty, options: {{target: 2, scale: 0.5, unit: tokens}}}}
  digits: {{function: "digits.py:share_of_digits"}}
  taste: {{init: actor, head: scalar}}
  both: {{weighted_sum: {{short: 2, digits: 1}}}}
  reward: {{weighted_sum: {{both: 0.5, taste: -1.5}}}}
settings: {{sampling: {{max_new_tokens: 8}}, actor_update: {{mini_batches: 1}}, critic_update: {{mini_batches: 1}}}}
plan: {{default: {{data: 2}}, calls: {{taste.scores: {{data: 4, devices: 4-7}}, reward.weighted_sum: {{data: 1}}}}}}
evaluation: {{num_prompts: 8, scorers: [reward, short]}}
output: {{samples_every: 1, num_samples: 16}}
compilation_cache: ""
"""
DIGITS = """
import itertools
import os
import time

CALLS = itertools.count()

def share_of_digits(completions):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]

def slow(completions):
    time.sleep(1.5)
    return [0.0 for _ in completions]

def hangs(completions):
    call = next(CALLS)
    while call in (3, 10, 12) and not os.path.exists(__file__ + ".released"):
        time.sleep(0.02)
    return share_of_digits(completions)
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The config above with changes, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("digits.py").write_text(DIGITS)
    Path("run.yaml").write_text(RUN)

    def load(*overrides: str) -> RunConfig:
        return load_run("run.yaml", overrides)

    return load


def test_a_sum_is_planned_part_by_part(load):
    assembly = assemble(load(), 8)
    graph = assembly.train.graph
    assert {c.name: graph.dependencies(c) for c in graph.calls if "scores" in c.name or "sum" in c.name} == {
        "short.scores": ("actor.generate",),
        "digits.scores": ("actor.generate",),
        "taste.scores": ("actor.generate",),
        "both.weighted_sum": ("short.scores", "digits.scores"),
        "reward.weighted_sum": ("taste.scores", "both.weighted_sum"),
    }
    placements = assembly.train.plan.placements
    assert placements["taste.scores"].devices == (4, 5, 6, 7) and placements["reward.weighted_sum"].devices == (0,)
    assert "short.scores" not in placements
    assert {row["role"]: row["what"] for row in assembly.role_rows()}["reward"] == "0.5 x both + -1.5 x taste"
    assert assembly.evaluation is not None
    names = [call.name for call in assembly.evaluation.graph.calls]
    assert names.count("short.scores") == 1 and "short.scores#2" not in names


def test_a_sum_is_the_sum_of_its_parts(load):
    assembly = assemble(load("evaluation=null"), 8)
    folder = RunFolder.create(Path("runs"), "scoring")
    Trainer(assembly, folder, Console(quiet=True), resume=None, stop=StopRequest(), channel=Channel()).run()
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    trained = [s["scores"] for s in samples if s["split"] == "train" and s["step"] == 1]
    assert all({"short", "digits", "taste"} <= scores.keys() for scores in trained) and len(trained) == 16
    totals = [0.5 * (2 * s["short"] + s["digits"]) - 1.5 * s["taste"] for s in trained]
    metrics = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    first = next(m for m in metrics if "critic/score/mean" in m)
    assert first["critic/score/mean"] == pytest.approx(np.mean(totals), rel=1e-5)
    assert first["critic/score/std"] == pytest.approx(np.std(totals), rel=1e-4) and np.std(totals) > 0.01
    for role in ("short", "digits", "taste", "reward"):
        told = totals if role == "reward" else [s[role] for s in trained]
        assert first[f"reward/{role}/mean"] == pytest.approx(np.mean(told), rel=1e-5)
    scoring = {f"timing_s/reward/{part}.scores" for part in ("short", "digits", "taste")}
    assert scoring | {"timing_s/adv/reward.weighted_sum"} <= first.keys()


def test_samples_that_take_too_long_are_counted_and_left_behind(load):
    limits = "workers: 4, sample_timeout_seconds: 2, timeout_score: -3"
    config = load(f"roles.digits={{function: 'digits.py:hangs', {limits}}}")  # called 8, 16, 16 and 8 times
    folder = RunFolder.create(Path("runs"), "scoring")
    trainer = Trainer(
        assemble(config, 8), folder, Console(quiet=True), resume=None, stop=StopRequest(), channel=Channel()
    )
    try:
        trainer.run()
        assert any_left_behind()
    finally:
        Path("digits.py.released").touch()
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    names = ("eval/digits/timeouts", "reward/digits/timeouts")
    assert [[record.get(name) for name in names] for record in records] == [[1, None], [None, 2], [None, 0], [0, None]]
    assert not any("short/timeouts" in name for record in records for name in record)
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    late = [sample["step"] for sample in samples if sample["split"] == "train" and sample["scores"]["digits"] == -3]
    assert late == [1, 1]


def test_timeouts_are_those_of_all_calls_of_a_role():
    calls = [("a", "host", 2), ("a", "host", 3), ("b", "host", None), ("c", "host", 0), ("d", "infer", 7)]
    calls += [("e", "host", 4)]
    named = [(f"{i}", role, kind, "encode" if role == "e" else "scores") for i, (role, kind, _) in enumerate(calls)]
    graph: Any = SimpleNamespace(
        calls=[SimpleNamespace(name=name, role=role, kind=kind, method=method) for name, role, kind, method in named]
    )
    values: Any = {f"{i}": concurrent.futures.Future() for i in range(len(calls))}
    for i, (_, _, count) in enumerate(calls):
        values[f"{i}"].set_result([np.zeros(2), count])
    on_host = tuple(call for call in graph.calls if call.kind == "host")
    assert StepResult(graph, None, values, _on_host=on_host).counts() == {
        "a/timeouts": 5,
        "c/timeouts": 0,
        "e/cut_sequences": 4,
    }


def two_steps(assembly: Assembly) -> Timeline:
    timeline = Timeline()
    executor = Executor(assembly.train.roles, seed=0, timeline=timeline)
    load_first_weights(executor, assembly.train, assembly.config, {})
    state = assembly.train.first_state
    try:
        for step in range(2):
            result = executor.run(
                assembly.train.graph, assembly.train.plan, state, assembly.train_rows(step), step=step
            )
            state = result.state
        executor.wait()
    finally:
        executor.close()
    return timeline


def test_a_slow_reward_holds_up_nobody_who_does_not_need_it(load):
    slow = ["roles.digits.function=digits.py:slow", "roles.reward={weighted_sum: {digits: 1, taste: 1}}"]
    timeline = two_steps(assemble(load("evaluation=null", *slow), 8))
    # step 0 compiles
    events = {event.name: event for event in timeline.events() if event.step == 1 and event.kind != "wait"}
    scoring = events["digits.scores"]
    assert scoring.end - scoring.start >= 1.5
    for name in ("reference.logprobs", "critic.values", "taste.scores"):
        assert events[name].end < scoring.end, f"{name} ran beside the reward function"
    for name in ("reward.weighted_sum", "ppo_batch", "actor.train"):
        assert events[name].end > scoring.end
    waits = [event.name for event in timeline.events() if event.kind == "wait" and event.step == 1]
    assert "digits.scores" in waits


def test_one_at_a_time_no_call_runs_beside_another(load):
    """Calls are measured so where all devices share a CPU."""
    slow = ["roles.digits.function=digits.py:slow", "roles.reward={weighted_sum: {digits: 1, taste: 1}}"]
    assembly, timeline = assemble(load("evaluation=null", *slow), 8), Timeline()
    taken = run_steps(assembly, assembly.train.plan, 1, timeline=timeline, one_at_a_time=True)
    assert 0 < taken < 5
    events = [event for event in timeline.events() if event.step == COMPILING_STEPS + 1 and event.kind != "wait"]
    assert {event.kind for event in events} >= {"generate", "infer", "train", "host", "compute"}
    calls = sorted((e for e in events if e.kind not in MOVING), key=lambda event: event.start)
    for before, after in itertools.pairwise(calls):
        assert before.end <= after.start, f"{after.name} began before {before.name} had ended"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward={weighted_sum: {shrt: 1}}", r"roles\.reward\.weighted_sum: must be of roles of the run\. Got 'shrt'\. "
         r"Roles: actor, .*\. Did you mean 'short'\?"),
        ("reward.weighted_sum={}", r"roles\.reward\.weighted_sum: must have at least one part"),
        ("reward.weighted_sum.taste=.inf", r"roles\.reward\.weighted_sum\.taste: must be finite\. Got inf\."),
        ("reward.weighted_sum.taste=.nan", r"roles\.reward\.weighted_sum\.taste: expected a number\. Got nan"),
        ("both={weighted_sum: {short: 1, reward: 1}}", r"roles\.reward\.weighted_sum: roles must not add each other up "
         r"in a circle\. Got both -> reward -> both\."),
        ("both={weighted_sum: {both: 1}}", r"in a circle\. Got both -> both\."),
        ("both={weighted_sum: {actor: 1}}", r"roles\.both\.weighted_sum: must be of roles that score: .* Got 'actor', "
         r"a language model\. Set roles\.actor\.head"),
        ("both.function=exact_match", r"roles\.both: a role is a function, a weighted_sum or a model\. Got function "
         r"and weighted_sum\. Keep one\."),
        ("short.init=actor", r"roles\.short: a role is .* Got function and a model\."),
        ("taste.init=both", r"roles\.taste\.init: 'both' is a weighted_sum and has no weights to start from\."),
        ("taste.init=short", r"roles\.taste\.init: 'short' is a function and has no weights to start from\."),
        ("short.timeout_seconds=-1", r"roles\.short\.timeout_seconds: must lie between 0 and 1e9\. Got -1"),
        ("short.sample_timeout_seconds=1e10", r"roles\.short\.sample_timeout_seconds: must lie between 0 and 1e9\."),
        ("short.workers=-1", r"roles\.short\.workers: must lie between 0 and 1024\. Got -1\."),
        ("short.workers=2000", r"roles\.short\.workers: must lie between 0 and 1024\. Got 2000\."),
        ("taste.workers=2", r"roles\.taste\.workers: needs a function, which .*\. Got 2\. Remove it\."),
        ("short.sample_timeout_seconds=2", r"roles\.short\.sample_timeout_seconds: needs workers, .* Got 2.* 16, say"),
        ("short.timeout_score=0", r"roles\.short\.timeout_score: needs sample_timeout_seconds, .*\. Got 0.* 60, say"),
        ("short.timeout_score=1e39", r"roles\.short\.timeout_score: must be finite in float32\. Got 1e\+39"),
        ("short.timeout_score=.inf", r"roles\.short\.timeout_score: must be finite in float32\. Got inf"),
        ("short.timeout_score=.nan", r"roles\.short\.timeout_score: .*number"),
        ("short.options.unit=word", r"Reward 'length_penalty': unit must be one of .* Did you mean 'words'\?"),
    ],
)  # fmt: skip
def test_what_a_sum_may_not_be(load, override, message):
    with pytest.raises(ValueError, match=message):
        assemble(load(f"roles.{override}"), 8)
