"""Moments of the optimizer in bfloat16: as good as in float32, smaller, under any plan, resumed exactly."""

import jax
import numpy as np
import pytest

from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.run.trainer import Outcome
from jaxrlhf.testing import SMALL_MODEL, small_run
from jaxrlhf.train import execute, prepare

ONE_DEVICE = ("--set", "plan={default: {data: 1}}", "--set", "warm_start=null", "--set", "evaluation=null")
IN_BFLOAT16 = [f"roles.{role}.optimizer.state_dtype=bfloat16" for role in ("actor", "critic")]


def trained(tmp_path, **config) -> Outcome:
    output = {"folder": str(tmp_path / "runs"), "tensorboard": False, "timeline": False}
    return execute(prepare(small_run(output=output, **config), Console(quiet=True)), Console(quiet=True))


def losses(outcome: Outcome, name: str) -> np.ndarray:
    records = read_metrics(outcome.folder.metrics)
    return np.array([record[name] for record in records if name in record])


def moment_bytes(outcome: Outcome, role: str) -> int:
    state = outcome.weights.state(role)["optimizer"]
    return sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim)


def test_a_loss_curve_is_that_of_float32_with_half_of_the_bytes(tmp_path):
    runs = {
        dtype: trained(
            tmp_path / dtype, algorithm="sft", steps=24, batch_size=16,
            roles={"actor": {"model": SMALL_MODEL, "optimizer": {"learning_rate": 3e-3, "state_dtype": dtype}}},
        )
        for dtype in ("float32", "bfloat16")
    }  # fmt: skip
    whole, half = (losses(run, "actor/loss") for run in runs.values())
    assert whole[-4:].mean() < 0.8 * whole[:4].mean(), "it learned"
    np.testing.assert_allclose(half, whole, rtol=0.02)
    assert not np.array_equal(half, whole)
    assert 2 * moment_bytes(runs["bfloat16"], "actor") == moment_bytes(runs["float32"], "actor")


STAGES = {"pipeline": 2, "micro_batches": 2}


@pytest.mark.parametrize(
    "plan",
    [
        {"calls": {"actor.train": {"fsdp": 2, "tensor": 2}, "critic.train": {"data": 2, "micro_batches": 2}}},
        {"calls": {"actor.train": STAGES, "critic.train": STAGES}, "fuse": ["actor.train", "critic.train"]},
        {"offload": ["actor", "critic"]},
    ],
    ids=["shards", "fused", "offload"],
)
def test_under_any_plan(tmp_path, plan):
    optimizer = {"learning_rate": 1e-3, "eps": 1e-5, "state_dtype": "bfloat16"}
    roles = {
        "actor": {"model": SMALL_MODEL, "optimizer": optimizer},
        "critic": {"init": "actor", "head": "scalar", "optimizer": optimizer},
    }
    one, other = (
        trained(tmp_path / name, algorithm="ppo", steps=3, roles=roles, plan={"default": {"data": 1}, **each})
        for name, each in (("one", {}), ("other", plan))
    )
    for name in ("critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
        np.testing.assert_allclose(losses(other, name), losses(one, name), rtol=2e-3, err_msg=name)
    for role in ("actor", "critic"):
        moments = jax.tree.leaves(other.weights.state(role)["optimizer"].adamw)
        assert {str(x.dtype) for x in moments if x.ndim} == {"bfloat16"}


def test_a_run_goes_on_exactly(train, results):
    settings = [*ONE_DEVICE, *(part for key in IN_BFLOAT16 for part in ("--set", key))]
    assert train(*settings)[0] == 0
    whole = results()
    assert train(*settings, "--set", "steps=2")[0] == 0
    status, out, _ = train(*settings, "--resume", "runs/latest")
    assert status == 0 and "after 2 steps" in out
    assert results() == whole
    status, _, err = train(*ONE_DEVICE, "--set", "steps=4", "--resume", "runs/latest")
    assert status == 1 and "must hold the arrays of this run's roles" in " ".join(err.split())
