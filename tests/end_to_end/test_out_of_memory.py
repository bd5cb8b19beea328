"""A run that finds no memory says what it needs, and loses no step that was saved."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.checkpoint.store import checkpoint_numbers
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.console import Console
from jaxrlhf.planner import memory_forecast
from jaxrlhf.run.memory_remedies import OutOfMemoryError, is_out_of_memory
from jaxrlhf.train import execute, prepare, read

ONE_DEVICE = ("--set", "plan={default: {data: 1}}", "--set", "warm_start=null", "--set", "evaluation=null")
ALL_MEMORY = 2**55
"""More bytes than any machine has."""


def exhausted() -> jax.Array:
    """An array that no device has room for."""
    return jax.block_until_ready(jnp.zeros(ALL_MEMORY // 4, jnp.float32))


def test_a_device_that_is_full_is_known_by_its_error():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        exhausted()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


@pytest.mark.parametrize("in_call", ["actor.generate", "critic.train"])
def test_a_run_out_of_memory_names_the_call_what_would_help_and_what_was_kept(train, results, monkeypatch, in_call):
    status, *_ = train(*ONE_DEVICE)
    assert status == 0
    undisturbed = results()
    dispatch = Executor._call_device

    def full(self, call, plan, values, step):
        if (step, call.name) == (2, in_call):
            exhausted()
        return dispatch(self, call, plan, values, step)

    with monkeypatch.context() as broken:
        broken.setattr(Executor, "_call_device", full)
        status, out, err = train(*ONE_DEVICE, "--set", "output.checkpoint_every=1")
    assert status == 1 and "Traceback" not in err
    said = " ".join(err.split())
    assert (
        f"The memory ran out in call '{in_call}' of step 3" in said and "Got RESOURCE_EXHAUSTED: Out of memory" in said
    )
    assert "evaluations, checkpoints and other programs come on top" in said
    folder = Path("runs/latest").resolve()
    assert f"Kept: runs/{folder.name}/checkpoints/steps/2, after 2 steps. Start again with --resume auto" in said
    assert out.count("Memory of the step's calls") == 2, "before the run, and with the error"
    assert checkpoint_numbers(folder / "checkpoints" / "steps")[-1] == 2

    status, *_ = train(*ONE_DEVICE, "--set", "output.checkpoint_every=1", "--resume", "auto")
    assert status == 0 and results() == undisturbed


def test_a_host_without_memory_is_answered_in_the_same_way(train, monkeypatch):
    def full(self, call, plan, values, step):
        raise MemoryError

    train("--dry-run")  # starts JAX's devices
    monkeypatch.setattr(Executor, "_call_device", full)
    run = prepare(read("tiny.yaml", [override for override in ONE_DEVICE if override != "--set"]), Console(quiet=True))
    rule = r"The memory ran out in call 'actor\.generate' of step 1: .* Got MemoryError"
    with pytest.raises(OutOfMemoryError, match=rule) as caught:
        execute(run, Console(quiet=True))
    assert isinstance(caught.value.__cause__, MemoryError)
    assert "No checkpoint was saved before" in str(caught.value)


def test_a_run_that_cannot_fit_stops_before_anything_is_written(train, monkeypatch):
    monkeypatch.setattr(memory_forecast, "host_memory", lambda: 10**9)
    status, out, err = train(*ONE_DEVICE)
    assert status == 1 and "plan: a step must fit into the 1 GB that are available on the host. Got about 1" in err
    assert "Memory of the step's calls, MB on each device" in out and not Path("runs").exists()
    status, out, _ = train(*ONE_DEVICE, "--set", "devices_memory.may_exceed=true", "--dry-run")
    assert status == 0 and "It goes on, since devices_memory.may_exceed is set." in " ".join(out.split())
