"""The algorithm of docs/own_algorithm.md: its functions, and its runs as a user starts them."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from examples.raft import RaftConfig, raft_batch, raft_loss
from jaxrlhf.algorithms.sft import SupervisedUpdate
from jaxrlhf.experience import STOP, PolicyOutputs, Rollout, Sampling
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.testing import SMALL_MODEL, check_plan_invariance, learning_curve
from jaxrlhf.train import main
from tests.subprocesses import ROOT, environment

RAFT = f"{ROOT / 'examples' / 'raft.py'}:raft_step"
B, P, R, K = 6, 3, 4, 3
SCORES_B = [0.1, 0.9, 0.9, -1.0, -3.0, -0.5]


@pytest.fixture
def rollout():
    """Two prompts with three responses each, of different lengths."""
    rng = np.random.default_rng(0)
    response_BR = np.arange(R)[None] < np.array([1, 2, 3, 4, 3, 2])[:, None]
    logprobs_BR = jnp.asarray(rng.uniform(-2, 0, (B, R)), jnp.float32)
    return Rollout(
        tokens=jnp.asarray(rng.integers(0, 9, (B, P + R)), jnp.int32),
        mask=jnp.asarray(np.concatenate([np.ones((B, P), bool), response_BR], axis=1)),
        response=jnp.asarray(response_BR),
        logprobs=logprobs_BR,
        sampled_logprobs=logprobs_BR,
        finish=jnp.full(B, STOP, jnp.int32),
        row=jnp.arange(B, dtype=jnp.int32) // K,
        id=jnp.arange(B, dtype=jnp.uint32),
    )


def test_the_best_response_to_each_prompt_is_kept_the_first_of_equal_ones(rollout):
    batch, metrics = raft_batch(rollout, jnp.array(SCORES_B), K)
    best = []
    for prompt in range(B // K):
        rows = range(prompt * K, (prompt + 1) * K)
        best.append(max(rows, key=lambda row: (SCORES_B[row], -row)))
    assert best == [1, 5] and batch["sequences"].id.tolist() == best
    np.testing.assert_array_equal(batch["sequences"].tokens, np.asarray(rollout.tokens)[best])
    assert float(metrics["raft/best_score"]) == pytest.approx((0.9 - 0.5) / 2)
    assert float(metrics["critic/score/mean"]) == pytest.approx(sum(SCORES_B) / B)


def test_the_loss_is_the_negative_log_likelihood_of_response_tokens(rollout):
    entropy_BR = jnp.full((B, R), 0.5)
    outputs = PolicyOutputs(logprobs=rollout.logprobs, entropy=entropy_BR)
    loss, weight, metrics = raft_loss(outputs, {"sequences": rollout}, SupervisedUpdate())
    tokens = [(b, t) for b in range(B) for t in range(R) if rollout.response[b, t]]
    assert float(loss) == pytest.approx(-sum(float(rollout.logprobs[token]) for token in tokens), rel=1e-6)
    assert float(weight) == len(tokens) and float(metrics["entropy"]) == 0.5 * len(tokens)


def test_one_sample_is_refused():
    with pytest.raises(ValueError, match=r"sampling.num_samples: must be at least 2\. Got 1\."):
        RaftConfig(sampling=Sampling())


def test_no_plan_changes_the_result():
    check_plan_invariance(RAFT, num_plans=1, batch_size=8, settings={"sampling": {"num_samples": 4}})


def test_it_learns():
    curve = learning_curve(RAFT, metric="critic/score/mean", steps=30, batch_size=8)
    assert np.mean(curve[-5:]) - np.mean(curve[:5]) > 0.5, curve


SMALL = {
    "steps": 1, "batch_size": 4, "roles.actor.model": SMALL_MODEL, "settings.sampling.num_samples": 2,
    "warm_start": None, "evaluation.num_prompts": 8, "evaluation.every": 0, "compilation_cache": "",
    "plan": {"default": {"data": 2}, "calls": {"raft_batch": {"data": 1}}},
}  # fmt: skip


def options(**more: object) -> list[str]:
    given = {**SMALL, **more}
    return ["--config", "examples/raft_arithmetic.yaml"] + [
        word for key, value in given.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]


def test_the_example_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    output = {"output.folder": str(tmp_path), "output.tensorboard": False}
    assert main(options(**output)) == 0, capsys.readouterr().err
    (folder,) = tmp_path.glob("raft_arithmetic-*")
    assert "algorithm: examples/raft.py:raft_step" in (folder / "config.yaml").read_text()
    assert main(["--resume", str(folder), "--set", "steps=2"]) == 0, capsys.readouterr().err
    assert "after 1 steps" in capsys.readouterr().out
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "raft/best_score" in record]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["raft/best_score"] >= record["critic/score/mean"] for record in records)


def test_every_process_of_a_run_finds_the_algorithm():
    """Checked and planned in two processes, which each import it and trace it."""
    command = [sys.executable, str(ROOT / "scripts" / "launch_local"), "--processes", "2", "--", sys.executable]
    done = subprocess.run(
        [*command, "-m", "jaxrlhf.train", "--dry-run", *options()],
        cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "raft_batch" in done.stdout
