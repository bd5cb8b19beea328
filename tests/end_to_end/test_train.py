"""The command line, from a config file to a run folder, on a tiny model and few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from jaxrlhf.observe.metrics import read_metrics


def test_a_run_leaves_everything_behind(train, results):
    status, out, err = train()
    assert (status, err) == (0, "")
    folder = Path("runs/latest")
    for shown in ("Plan of the step", "data 8 on 0-7", "fsdp 2 x tensor 2 on", "2 updates of 8 rows, 4 a device",
                  "Samples", "step 3/3", "evaluation after 3 steps", "Written to", "attention", "xla"):  # fmt: skip
        assert shown in " ".join(out.split()), shown

    metrics = read_metrics(folder / "metrics.jsonl")
    warm = [m for m in metrics if "warm_start/actor/loss" in m]
    steps = [m for m in metrics if "actor/pg_loss" in m]
    evaluations = [m for m in metrics if "eval/exact_match" in m]
    assert [m["warm_start/actor/num_updates"] for m in warm] == [m["warm_start/step"] for m in warm] == [2, 4]
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert [m["step"] for m in evaluations] == [0, 2, 3]
    assert all(np.isfinite(list(m.values())).all() for m in metrics)
    assert steps[0]["kl/mean"] == pytest.approx(0, abs=1e-5)
    assert steps[2]["kl/mean"] != pytest.approx(0, abs=1e-5)
    assert steps[0]["rollout/logprob_gap_max"] < 1e-4
    for name in ("timing_s/gen", "timing_s/reward", "timing_s/update_critic", "perf/throughput", "critic/vf_loss"):
        assert name in steps[1]

    graph = json.loads((folder / "graph.json").read_text())
    assert [c["name"] for c in graph["step"]] == [
        "actor.generate", "reference.logprobs", "critic.values", "reward.scores", "ppo_batch", "actor.train",
        "critic.train",
    ]  # fmt: skip
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["step"]["calls"]["actor.train"]["fsdp"] == 2 and plan["step"]["calls"]["actor.generate"]["data"] == 8
    assert json.loads((folder / "versions.json").read_text())["jax"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["split"] for s in samples} == {"train", "held-out"}
    assert "forecast" not in json.loads((folder / "outcome.json").read_text()), "the plan was not found by a search"
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {"actor.generate", "critic.train", "reward.scores"} <= {e["name"] for e in trace}
    steps_of = {phase: {e["args"]["step"] for e in trace if e["args"].get("phase") == phase} for phase in
                ("warm start", "step", "evaluation")}  # fmt: skip
    assert steps_of == {"warm start": {2, 4}, "step": {1, 2, 3}, "evaluation": {0, 2, 3}}, "as metrics count"

    # the resolved config is complete: it gives the same run again, bitwise, also where responses come in parts
    first = results()
    status, _, _ = train("--set", "output.part_tokens=2", config=str((folder / "config.yaml").resolve()))
    assert status == 0
    assert results() == first
    trace = json.loads(Path("runs/latest/timeline.json").read_text())["traceEvents"]
    parts = [e["name"] for e in trace if e["name"].startswith("actor.generate: ") and e["args"]["phase"] == "step"]
    assert {name.partition(",")[0] for name in parts} == {"actor.generate: prefill", "actor.generate: decode"}


def test_a_dry_run_writes_nothing(train):
    status, out, _ = train("--dry-run")
    assert status == 0 and "Plan of the step" in out
    assert "Memory of the step's calls, MB on each device" in out and "The run takes up to about 1" in out
    assert sorted(p.name for p in Path().iterdir()) == ["tiny.yaml"]


def test_bfloat16_with_scanned_and_recomputed_layers(train, results):
    status, _, err = train(
        "--set", "roles.actor.model.num_layers=2", "--set", "roles.actor.model.dtype=bfloat16",
        "--set", "roles.actor.model.scan_layers=true",
        "--set", "plan.calls.actor.train.remat=layer", "--set", "plan.calls.actor.train.micro_batches=2",
        "--set", "roles.actor.model.tie_embeddings=true", "--set", "settings.kl.placement=loss",
        "--set", "settings.kl.estimator=k3", "--set", "evaluation=null",
    )  # fmt: skip
    assert (status, err) == (0, "")
    steps = results()
    assert all(0 < m["rollout/logprob_gap_max"] < 0.2 for m in steps), (
        "bfloat16 decodes and trains a little differently"
    )
    assert all(np.isfinite(list(m.values())).all() for m in steps)
    assert "actor/kl_loss" in steps[0]


def test_an_interrupt_is_no_traceback(train, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrlhf.run.trainer.Trainer._warm_start", interrupted)
    status, out, err = train()
    assert status == 130 and err == "Error: Interrupted.\n" and "is in runs/tiny-" in out


QUESTIONS = [
    {"question": f"Ann has {a} pens and buys {b}. How many has she?", "answer": f"{a} + {b} = {a + b}.\n#### {a + b}"}
    for a in range(2, 12)
    for b in range(2, 8)
]
SMALL_GSM8K = ("batch_size=8", "steps=2", "tokenizer.vocab_size=320", "data.eval_rows=8", "evaluation.num_prompts=8",
               "warm_start.steps=2", "warm_start.updates_per_step=2", "warm_start.batch_size=8",
               "settings.sampling.max_new_tokens=24", "plan={default: {data: 2}, calls: {actor.train: {fsdp: 2}}}",
               "compilation_cache=''", "data.path=questions.jsonl")  # fmt: skip


@pytest.mark.parametrize("config", ["ppo_gsm8k", "ppo_gsm8k_reward_model"])
def test_word_problems_from_a_file(train, config, results, tiny_model):
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    model = {**tiny_model, "vocab_size": 320}
    overrides = [*SMALL_GSM8K, f"roles.actor.model={json.dumps(model)}"]
    if config == "ppo_gsm8k":
        overrides.append(f"roles.reward.function={Path(__file__).parents[2]}/examples/gsm8k_reward.py:gsm8k_reward")
    status, out, err = train(*(x for o in overrides for x in ("--set", o)), config=config)
    assert (status, err) == (0, "")
    steps = results()
    assert len(steps) == 2 and all(np.isfinite(list(m.values())).all() for m in steps)
    assert "completions do not fit" not in out
    assert Path("runs/latest/tokenizer.json").exists()
    if config == "ppo_gsm8k_reward_model":
        assert "model, scalar head" in " ".join(out.split())
        assert steps[0]["critic/score/std"] > 1e-3, "the random head of a model that is never trained says something"


def test_supervised_training_then_an_export_then_ppo_from_it(train, results, tiny_model, optimizer):
    Path("sft.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "sft", "algorithm": "sft", "steps": 3, "batch_size": 16, "devices": "cpu:8",
                "data": {"task": "arithmetic"}, "roles": {"actor": {"model": tiny_model, "optimizer": optimizer}},
                "settings": {"max_new_tokens": 10, "update": {"mini_batches": 2}},
                "plan": {"default": {"data": 2, "fsdp": 2}}, "output": {"export": ["actor"]}, "compilation_cache": "",
            }
        )
    )  # fmt: skip
    status, out, err = train(config="sft.yaml")
    assert (status, err) == (0, "")
    losses = [m["actor/loss"] for m in read_metrics(Path("runs/latest/metrics.jsonl"))]
    assert len(losses) == 3 and losses[2] < losses[0]

    exported = Path("runs/latest/actor").resolve()
    in_bfloat16 = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(exported / "model.safetensors").items()}
    save_file(in_bfloat16, exported / "model.safetensors", metadata={"format": "pt"})
    came = json.loads((exported / "config.json").read_text())
    came |= {"torch_dtype": "bfloat16", "bos_token_id": 5, "eos_token_id": [7, 257], "initializer_range": 0.5}
    (exported / "config.json").write_text(json.dumps(came))
    (exported / "generation_config.json").write_text('{"eos_token_id": [7, 257], "temperature": 0.6}')
    status, out, err = train(
        "--set", f"roles.actor.init={exported}", "--set", "roles.actor.model=null", "--set", "warm_start=null",
        "--set", "roles.actor.optimizer.learning_rate=1e-20", "--set", "output.export=[actor, critic]",
        "--set", "steps=1",
    )  # fmt: skip
    assert (status, err) == (0, ""), out
    actor, critic = Path("runs/latest/actor"), Path("runs/latest/critic")
    first, last = (load_file(folder / "model.safetensors") for folder in (exported, actor))
    assert first.keys() == last.keys()
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, last[name])
    assert json.loads((actor / "config.json").read_text()) == came
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((actor / file).read_text()) == json.loads((exported / file).read_text())
    of_critic = json.loads((critic / "config.json").read_text())
    assert (of_critic["bos_token_id"], of_critic["torch_dtype"]) == (5, "bfloat16")
    assert of_critic["architectures"] == ["LlamaForSequenceClassification"]

    # a reward model from a checkpoint without a scalar head is given a random one
    reward = f"roles.reward={{init: '{exported}', head: scalar}}"
    assert train("--set", reward, "--set", "steps=1")[0] == 0
    assert results()[0]["critic/score/std"] > 1e-3


def test_the_command_itself(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrlhf.train", "--config", "ppo_aritmetic"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and "Did you mean 'ppo_arithmetic'" in done.stderr and "Traceback" not in done.stderr


def test_adapters_are_exported_beside_what_they_adapt_and_start_another_run(train):
    """The policy of a run that begins with them is the one that they were trained to be."""
    lora = ("--set", "roles.actor.lora={rank: 2, alpha: 4}", "--set", "plan={default: {data: 1}}")
    exported = ("--set", "output.export=[actor, reference]", "--set", "output.export_every=2")
    assert train(*lora, *exported, "--set", "steps=2")[0] == 0
    run = Path("runs/latest").resolve()
    assert [path.name for path in (run / "exports" / "2").iterdir()] == ["actor"], "the reference never changes"
    for path in (run / "exports" / "2" / "actor").iterdir():
        assert path.read_bytes() == (run / "actor" / path.name).read_bytes()
    fields = json.loads((run / "actor" / "adapter_config.json").read_text())
    assert fields["base_model_name_or_path"] == str(run / "reference")
    assert (run / "actor" / "tokenizer.json").is_file()
    again = ("--set", f"roles.actor.init={run}/reference", "--set", f"roles.actor.lora.init={run}/actor")
    again += ("--set", "roles.actor.model=null", "--set", "warm_start=null", "--set", "steps=0", "--set", "name=again")
    status, _, err = train(*lora, *again)
    assert status == 0, err
    samples = [
        [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for folder in (run, Path("runs/latest"))
    ]
    held_out = [[s["completion"] for s in each if s["split"] == "held-out"] for each in samples]
    assert held_out[0][-len(held_out[1]) :] == held_out[1]
