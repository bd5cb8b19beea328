"""A run that was saved under one plan goes on under another, also where layers cannot lie as they were saved."""

import functools

import jax
import numpy as np
import pytest

from jaxrlhf.checkpoint.store import CheckpointError
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.models.params import with_layers
from jaxrlhf.run.assembly import assemble
from jaxrlhf.run.checkpoints import Checkpoints, check_checkpoint, restore
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.run.resume_point import Position, ResumePoint
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.testing import SMALL_MODEL, small_run

MODEL = {**SMALL_MODEL, "num_layers": 3, "tie_embeddings": True}
STAGES, FLAT = {"pipeline": 2, "fsdp": 2}, {"fsdp": 2}


@functools.cache
def assembled(scan_layers, pipelined, num_layers=3):
    optimizer = {"learning_rate": 1e-3}
    lora = {"rank": 2, "targets": ["query", "down"]}
    run = small_run(
        "ppo",
        roles={
            "actor": {
                "model": {**MODEL, "scan_layers": scan_layers, "num_layers": num_layers},
                "optimizer": optimizer,
                "lora": lora,
            },
            "critic": {"init": "actor", "head": "scalar", "optimizer": optimizer},
        },
        plan={"default": {"data": 1}, "calls": {
            "actor.train": STAGES if pipelined else FLAT, "critic.train": STAGES if pipelined else {"data": 2},
        }},
    )  # fmt: skip
    return assemble(run, 8, 4)


def numbers_of(executor):
    """All arrays of all sets, layers as a list."""

    def as_list(tree):
        return with_layers(tree, stacked=False) if isinstance(tree, dict) and "layers" in tree else tree

    states = {name: executor.weights.state(name) for name in executor.weights.sets}
    on_host = jax.tree.map(np.asarray, states)
    return jax.tree.map(as_list, on_host, is_leaf=lambda x: isinstance(x, dict) and "layers" in x)


def executor_of(assembly):
    return Executor(assembly.train.roles, seed=0)


@pytest.fixture
def saved(tmp_path, request):
    """A run's folder, and what it holds, saved under the plan and form of the parameter."""
    assembly = assembled(*request.param)
    executor = executor_of(assembly)
    load_first_weights(executor, assembly.train, assembly.config, {})
    for role in ("actor", "critic"):  # moments and counters that are not zero
        home = executor.weights.home(role)
        params, optimizer, _ = executor.weights.take_for_training(role, home)
        executor.weights.trained(role, home, params, jax.tree.map(lambda x: x + 3, optimizer))
    folder = RunFolder.create(tmp_path, "run")
    checkpoints = Checkpoints(assembly, folder, Channel())
    checkpoints.save_steps(1, executor, assembly.train.first_state)
    checkpoints.close()
    executor.close()
    return folder, numbers_of(executor)


@pytest.mark.parametrize("saved", [(True, True), (True, False)], indirect=True, ids=["stages", "stacked"])
def test_a_run_goes_on_under_another_plan(saved):
    folder, want = saved
    point = ResumePoint(folder, Position("steps", 1))
    for scan_layers, pipelined in ((True, True), (True, False), (False, False)):
        assembly = assembled(scan_layers, pipelined)
        check_checkpoint(point, assembly)
        executor = executor_of(assembly)
        restore(point, assembly.train, executor)
        executor.close()
        got = numbers_of(executor)
        assert got.keys() == {"actor", "actor.base", "critic"}
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert executor.weights.version("critic") == 1
        layers = executor.weights.state("critic")["params"]["layers"]
        assert isinstance(layers, dict) == (scan_layers and not pipelined)


@pytest.mark.parametrize("saved", [(True, True)], indirect=True, ids=["stages"])
def test_another_model_is_refused_in_any_form(saved):
    folder, _ = saved
    point = ResumePoint(folder, Position("steps", 1))
    with pytest.raises(CheckpointError, match="must hold the arrays of this run's roles"):
        check_checkpoint(point, assembled(True, True, num_layers=4))


def test_first_weights_are_the_same_on_stages():
    numbers = []
    for pipelined in (True, False):
        assembly = assembled(True, pipelined)
        executor = executor_of(assembly)
        load_first_weights(executor, assembly.train, assembly.config, {})
        executor.close()
        assert executor.weights.home("critic").is_pipelined == pipelined
        numbers.append(numbers_of(executor))
    jax.tree.map(np.testing.assert_array_equal, *numbers)
