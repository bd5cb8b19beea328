"""What an evaluation says of several responses to a prompt and of rows by category, beside its own samples."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jaxrlhf.config.schema import load_run
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.console import Console
from jaxrlhf.run.assembly import MOST_CATEGORIES, assemble
from jaxrlhf.run.interruption import StopRequest
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.trainer import Trainer

MODEL = "{vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}"
RUN = f"""
name: evaluating
algorithm: grpo
steps: 0
batch_size: 2
data: {{path: train.jsonl, eval_path: held_out.jsonl}}
roles:
  actor: {{model: {MODEL}, optimizer: {{learning_rate: 5.0e-4}}}}
  reference: {{init: actor}}
  reward: {{function: "score.py:even"}}
settings: {{sampling: {{max_new_tokens: 4, num_samples: 2}}, actor_update: {{mini_batches: 1}}}}
plan: {{default: {{data: 2}}}}
evaluation:
  num_prompts: 6
  batch_size: 2
  sampling: {{max_new_tokens: 2, min_new_tokens: 2, num_samples: 4, allowed_tokens: [49, 50]}}
  pass_at: [1, 3]
  pass_score: 0.5
  majority: last
  by: source
  best_by: reward/pass@3
output: {{num_samples: 8, timeline: false, tensorboard: false}}
compilation_cache: ""
"""
SCORE = """
def even(completions):
    return [float(text[-1] == "2") + 0.25 * (text[0] == "1") for text in completions]
"""
SOURCES = ["openai/gsm8k", None, "algebra", "algebra", "openai/gsm8k", "algebra"]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The config above with changes, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(SCORE)
    Path("run.yaml").write_text(RUN)
    rows = [{"prompt": f"{number}=", "source": source} for number, source in enumerate(SOURCES)]
    for name in ("train", "held_out"):
        Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return lambda *overrides: load_run("run.yaml", overrides)


def test_metrics_are_those_of_the_samples(load):
    assembly, folder = assemble(load(), 8), RunFolder.create(Path("runs"), "evaluating")
    assert assembly.best_by == "reward/pass@3"
    outcome = Trainer(assembly, folder, Console(quiet=True), resume=None, stop=StopRequest(), channel=Channel()).run()
    (metrics,) = [line for line in map(json.loads, folder.metrics.read_text().splitlines()) if "eval/reward" in line]
    samples = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    by_prompt = {prompt: list(each) for prompt, each in itertools.groupby(samples, key=lambda sample: sample["prompt"])}
    assert list(by_prompt) == [f"{number}=" for number in range(6)] and {*map(len, by_prompt.values())} == {4}
    scores_GN = np.array([[each["scores"]["reward"] for each in group] for group in by_prompt.values()])
    assert 0 < scores_GN.mean() < 1 and metrics["eval/reward"] == pytest.approx(scores_GN.mean())

    triples = [scores_GN[:, subset].max(axis=1) for subset in itertools.combinations(range(4), 3)]
    assert metrics["eval/reward/best@1"] == pytest.approx(scores_GN.mean())
    assert metrics["eval/reward/pass@1"] == pytest.approx((scores_GN >= 0.5).mean())
    assert metrics["eval/reward/best@3"] == pytest.approx(np.mean(triples))
    assert metrics["eval/reward/pass@3"] == pytest.approx(np.mean(np.array(triples) >= 0.5))

    majorities = []
    for group in by_prompt.values():
        answers = [each["completion"] for each in group]
        first = max(answers, key=answers.count)
        majorities.append(np.mean([each["scores"]["reward"] for each in group if each["completion"] == first]))
    assert metrics["eval/reward/majority"] == pytest.approx(np.mean(majorities))

    by_source = {name: value for name, value in metrics.items() if "/source/" in name}
    assert by_source == pytest.approx({
        "eval/reward/source/algebra": scores_GN[[2, 3, 5]].mean(),
        "eval/reward/source/none": scores_GN[1].mean(),
        "eval/reward/source/openai/gsm8k": scores_GN[[0, 4]].mean(),
    })  # fmt: skip
    assert outcome.evaluations[0][1]["eval/reward/pass@3"] == metrics["eval/reward/pass@3"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pass_at=[1, 5]", r"evaluation\.pass_at: must lie in \[1, sampling\.num_samples=4\], each once\. "
         r"Got \[1, 5\]\. Raise sampling\.num_samples\."),
        ("pass_at=[2, 2]", r"evaluation\.pass_at: must lie in .*\. Got \[2, 2\]"),
        ("sampling=null", r"evaluation\.pass_at: must lie in \[1, sampling\.num_samples=1\], each once\. Got \[1, 3\]"),
        ("sampling.temperature=0", r"evaluation\.sampling\.temperature: must be above 0 where responses .*\. Got 0\.0"),
        ("pass_score=.inf", r"evaluation\.pass_score: must be finite\. Got inf\."),
        ("majority=most", r"evaluation\.majority: .*'most'"),
        ("scorers=[]", r"evaluation\.pass_at: needs scorers, whose scores it is about\. Got \(1, 3\)\. Remove it\."),
        ("by=sources", r"evaluation\.by: must be a column of the rows\. Got 'sources'\. Known: source\. Did you mean "
         r"'source'\?"),
        ("best_by=reward/pass@2", r"evaluation\.best_by: must be what is measured, reward, reward/best@1, "
         r"reward/pass@1, .*reward/majority\. Got 'reward/pass@2'\."),
    ],
)  # fmt: skip
def test_what_an_evaluation_may_not_be(load, override, message):
    with pytest.raises(ValueError, match=message):
        assemble(load(f"evaluation.{override}"), 8)


def test_a_vote_needs_several_responses(load):
    one = ["evaluation.pass_at=[]", "evaluation.sampling.num_samples=1"]
    with pytest.raises(
        ValueError, match=r"evaluation\.majority: needs several responses to a prompt\. Got 1\. Set samp"
    ):
        load(*one)


def test_categories_are_few_and_name_metrics(load):
    rows = [{"prompt": f"{number}=", "source": number} for number in range(MOST_CATEGORIES + 1)]
    Path("held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sizes = [f"evaluation.num_prompts={len(rows)}", "evaluation.batch_size=0"]
    with pytest.raises(
        ValueError, match=r"evaluation\.by: a column must have at most 100 values .* Got 101 in 'source'\."
    ):
        assemble(load(*sizes), 8)
    Path("held_out.jsonl").write_text("".join(f"{json.dumps({**row, 'source': 'a//b'})}\n" for row in rows))
    with pytest.raises(ValueError, match=r"evaluation\.by: Metric 'eval/reward/source/a//b': a name must be"):
        assemble(load(), 8)
