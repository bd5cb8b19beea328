"""Generation with weights of earlier steps: what it reads, what corrects for it, and what a run keeps for it."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import StalenessConfig
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.testing import SMALL_MODEL, small_run

PLANS = {
    "one device": {"default": {"data": 1}},
    "apart": {
        "default": {"data": 4},
        "calls": {
            "actor.generate": {"data": 2, "devices": "0-1"},
            "actor.train": {"fsdp": 2, "tensor": 2, "devices": "4-7"},
            "critic.train": {"fsdp": 4, "devices": "4-7"},
        },
    },
    "over stages": {
        "default": {"data": 4},
        "calls": {
            "actor.generate": {"pipeline": 2, "data": 2, "devices": "0-3"},
            "actor.train": {"pipeline": 2, "micro_batches": 2, "devices": "6-7"},
        },
    },
}
ADAPTERS = {
    "actor": {
        "model": SMALL_MODEL, "optimizer": {"learning_rate": 0.3},
        "lora": {"rank": 4, "alpha": 64.0, "merge": "always"},
    }
}  # fmt: skip


@functools.cache
def assembled(
    steps: int, max_weight: float | None, plan: str, adapters: bool = False, algorithm: str = "ppo"
) -> Assembly:
    staleness = {"steps": steps, "max_weight": max_weight}
    more: dict[str, Any] = {"roles": ADAPTERS} if adapters else {}
    return assemble(small_run(algorithm, learning_rate=0.03, staleness=staleness, plan=PLANS[plan], **more), 8, 4)


def drawn(assembly: Assembly, steps: int) -> list[tuple[np.ndarray, dict[str, float], int | None]]:
    """Tokens, metrics and staleness of some steps, all on the same rows and with the same noise."""
    phase, found = assembly.train, []
    executor, state = Executor(phase.roles, seed=0), phase.first_state
    try:
        load_first_weights(executor, phase, assembly.config, {})
        for _ in range(steps):
            result = executor.run(phase.graph, phase.plan, state, assembly.train_rows(0), step=0)
            found.append((result.outputs("actor.generate").tokens, flatten(result.fetch()), result.staleness))
            state = result.state
        executor.wait()
    finally:
        executor.close()
    return found


@pytest.mark.parametrize(
    ("plan", "adapters"), [("one device", False), ("apart", False), ("over stages", False), ("apart", True)]
)
def test_it_reads_the_weights_of_earlier_steps(plan, adapters):
    """Weights that have seen one step are those of a synchronous run after one step, since both began alike."""
    current = [tokens for tokens, *_ in drawn(assembled(0, None, plan, adapters), 2)]
    stale = drawn(assembled(2, None, plan, adapters), 4)
    assert [staleness for *_, staleness in stale] == [0, 1, 2, 2]
    for tokens, *_ in stale[:3]:  # in the first steps of a run there are no older weights
        np.testing.assert_array_equal(tokens, current[0])
    np.testing.assert_array_equal(stale[3][0], current[1])
    assert (current[0] != current[1]).any(), "the actor's weights moved"


def test_a_synchronous_run_says_nothing_of_staleness():
    ((_, metrics, staleness),) = drawn(assembled(0, None, "one device"), 1)
    assert staleness is None and not any("staleness" in name for name in metrics)


def test_weights_correct_for_the_policy_that_drew():
    corrected, plain = (drawn(assembled(1, most, "one device"), 3) for most in (1.5, None))
    first, last = corrected[0][1], corrected[2][1]
    assert first["staleness/weight/max"] == pytest.approx(1.0, abs=1e-5), "the first step's weights are current"
    assert last["staleness/weight/max"] == 1.5 and 0 < last["staleness/weight/truncated"] < 1
    assert 0 < last["staleness/weight/mean"] < 1.5 and 0 < last["staleness/weight/effective"] < 1
    assert last["staleness/kl"] > 0
    assert not any("staleness" in name for name in plain[2][1])
    assert last["actor/ratio_max"] != plain[2][1]["actor/ratio_max"]


def test_inference_does_not_wait_for_importance_weights():
    graph = assembled(1, 2.0, "one device").train.graph
    calls = {call.name: call for call in graph.calls}
    assert (calls["actor.generate"].reads, calls["actor.generate"].stale) == (-1, 1)
    assert calls["actor.logprobs"].reads == 0
    for name in ("reference.logprobs", "critic.values", "reward.scores", "actor.logprobs"):
        assert graph.dependencies(calls[name]) == ("actor.generate",)
    assert set(graph.dependencies(calls["ppo_batch"])) > {"importance_weights", "actor.logprobs"}


def test_a_rollout_that_nothing_is_trained_on_is_not_corrected():
    graph = assembled(1, 2.0, "one device", algorithm="remax").train.graph  # a greedy one is the baseline
    generates = [call for call in graph.calls if call.kind == "generate"]
    assert len(generates) == 2 and all(call.stale == 1 for call in generates)
    (weighed,) = (call for call in graph.calls if call.plan_name.startswith("importance_weights"))
    (trained_on,) = {ref.call for ref in weighed.refs} & {call.name for call in generates}
    assert trained_on == generates[0].name


def test_all_sets_but_the_generating_one_forget_their_versions():
    phase = (assembly := assembled(1, 2.0, "one device")).train
    executor, state = Executor(phase.roles, seed=0), phase.first_state
    try:
        load_first_weights(executor, phase, assembly.config, {})
        for step in range(3):
            state = executor.run(phase.graph, phase.plan, state, assembly.train_rows(step), step=step).state
            store = executor.weights
            assert (store.version("actor"), store.oldest("actor")) == (step + 1, step)
            assert store.oldest("critic") == store.version("critic")
            older = store.state("actor")["older"]
            assert list(older) == [str(step)] and jax.tree.structure(older[str(step)]) == jax.tree.structure(
                store.state("actor")["params"]
            )
        executor.wait()
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": -1}, "steps: must lie between 0 and 16. Got -1"),
        ({"steps": 17}, "steps: must lie between 0 and 16. Got 17"),
        ({"max_weight": 0.0}, "max_weight: must be finite and positive. Got 0.0"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        StalenessConfig(**data)


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_step_that_generates_nothing_cannot_be_stale(algorithm):
    with pytest.raises(ConfigError, match="staleness: needs a step that trains a role with which it generates"):
        assemble(small_run(algorithm, staleness=1), 8, 4)
