"""The plan never changes the result: the same tokens and, to rtol 1e-5 and atol 1e-6, the same losses, KL, rewards and
gradient norms under any devices, degrees and micro-batches."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxrlhf.config.schema import load_run
from jaxrlhf.runtime.assembly import assemble
from jaxrlhf.runtime.console import Console
from jaxrlhf.runtime.metrics import read_metrics
from jaxrlhf.runtime.run_folder import RunFolder
from jaxrlhf.runtime.trainer import Trainer

STEPS, ROWS = 3, 32
MODEL = "{vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}"
REWARD = Path(__file__).parent / "digits.py"

# Adam divides a gradient by its own size: where one is all but zero, it turns rounding into whole steps. A larger eps
# keeps the comparison about the plan.
RUN = f"""
name: invariance
steps: {STEPS}
batch_size: {ROWS}
seed: 3
data: {{task: arithmetic}}
roles:
  actor: {{model: {MODEL}, optimizer: &optimizer {{learning_rate: 5.0e-4, eps: 1.0e-5}}}}
  critic: {{init: actor, head: scalar, optimizer: *optimizer}}
  reference: {{init: actor}}
  reward: {{function: "{REWARD}:share_of_digits"}}
settings:
  sampling: {{max_new_tokens: 8, stop_ids: [10, 32, 43, 48, 50, 52, 54, 56, 90, 95, 100, 110, 120, 130, 140, 150]}}
  kl: {{coef: 0.1, adaptive: true}}
  actor_update: {{mini_batches: 2, entropy_coef: 0.01}}
  critic_update: {{mini_batches: 2}}
output: {{samples_every: 1, num_samples: {ROWS}, timeline: false}}
compilation_cache: ""
"""

ONE_DEVICE = "{default: {data: 1}}"
PLANS = {
    "generate data 8, train data 2 x fsdp 2 x tensor 2": "{default: {data: 8}, actor.train: {data: 2, fsdp: 2, "
    "tensor: 2}, critic.train: {data: 2, fsdp: 2, tensor: 2}}",
    "generate tensor 2, train fsdp 8, in micro-batches": "{default: {data: 4, tensor: 2, devices: '7,6,5,4,3,2,1,0', "
    "micro_batches: 2}, actor.train: {fsdp: 8, micro_batches: 2}, critic.train: {data: 4, micro_batches: 4}}",
    "disjoint roles, layers recomputed": "{default: {data: 2, devices: '6-7'}, actor.generate: {data: 4}, "
    "actor.train: {fsdp: 2, tensor: 2, remat: layer}, critic.values: {data: 2, devices: '4-5'}, critic.train: {tensor: "
    "2, devices: '4-5', remat: dots}, reference.logprobs: {fsdp: 4, devices: '2-5', micro_batches: 4}}",
    "one device, one micro-batch a row": "{default: {data: 1, devices: '5'}, actor.train: {micro_batches: 16}, "
    "critic.train: {micro_batches: 16, devices: '3'}}",
}


def run(folder: Path, plan: str) -> tuple[list[dict[str, float]], list[dict[str, object]]]:
    """Metrics of every step and all sampled completions."""
    config_file = folder / "run.yaml"
    config_file.write_text(f"{RUN}plan: {plan}\n")
    config = load_run(config_file)
    run_folder = RunFolder.create(folder, "run")
    Trainer(assemble(config, 8), run_folder, Console(quiet=True)).run()
    samples = [json.loads(line) for line in run_folder.samples.read_text().splitlines()]
    return read_metrics(run_folder.metrics), samples


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), ONE_DEVICE)


def test_run_is_worth_comparing(expected):
    metrics, samples = expected
    assert len(metrics) == STEPS and len(samples) == STEPS * ROWS
    assert metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-4)
    assert abs(metrics[-1]["kl/mean"]) > 1e-3, "the actor's weights moved"
    assert metrics[-1]["kl/coef"] != metrics[0]["kl/coef"]
    assert metrics[-1]["critic/vpred_mean"] != metrics[0]["critic/vpred_mean"]
    assert 0.0 < metrics[0]["response_length/clip_ratio"] < 0.9, "responses of different lengths"
    assert metrics[0]["critic/score/std"] > 0
    assert all(m["rollout/logprob_gap_max"] < 1e-4 for m in metrics)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_plan_does_not_change_the_result(plan, expected, tmp_path):
    metrics, samples = run(tmp_path, plan)
    expected_metrics, expected_samples = expected
    assert [s["completion"] for s in samples] == [s["completion"] for s in expected_samples]
    for got, want in zip(metrics, expected_metrics, strict=True):
        compared = [
            n for n in want if not n.startswith(("time", "timing_", "perf/")) and n != "rollout/logprob_gap_max"
        ]
        assert "actor/grad_norm" in compared and "critic/vf_loss" in compared and "kl/mean" in compared
        for name in compared:
            np.testing.assert_allclose(
                got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {want['step']}"
            )
