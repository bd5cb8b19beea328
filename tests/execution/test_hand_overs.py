"""Outputs reach the calls that need them beside what runs between, and no result depends on when they are sent."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

from jaxrlhf.execution import executor, hand_overs
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.hand_overs import HandOvers
from jaxrlhf.models.heads import INFERENCE_OUTPUTS
from jaxrlhf.programs import call_programs
from jaxrlhf.reshard import exchange
from jaxrlhf.reshard import reallocate as module
from jaxrlhf.reshard.reallocate import in_buckets, transfer_method
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.testing import small_run

WHOLE_SHARDS = {"data": 4}
ACROSS_SHARDS = {"data": 2, "tensor": 2}


@pytest.fixture
def apart(monkeypatch):
    """A run whose critic and reward model have devices apart from the others', which have memory of their own."""
    monkeypatch.setattr(module, "host_memory_is_theirs", lambda devices: False)
    for cache in (transfer_method, in_buckets):
        cache.cache_clear()

    def apart(split: dict[str, int]) -> Assembly:
        beside, first, last = {"devices": "4-7", **split}, {"data": 4, "devices": "0-3"}, {"data": 4, "devices": "4-7"}
        update = {"mini_batches": 1}
        run = small_run(
            "ppo", steps=2, batch_size=8, num_layers=1, roles={"reward": {"init": "actor", "head": "scalar"}},
            settings={"sampling": {"max_new_tokens": 4}, "actor_update": update, "critic_update": update},
            plan={"default": first, "calls": {
                "critic.values": beside, "reward.scores": beside, "critic.train": last,
            }},
        )  # fmt: skip
        return assemble(run, 8)

    yield apart
    for cache in (transfer_method, in_buckets):
        cache.cache_clear()


def run(assembly: Assembly, *, one_at_a_time: bool = False) -> list[Any]:
    """What two steps give: all metrics, and the tokens."""
    executor = Executor(assembly.train.roles, seed=0, one_at_a_time=one_at_a_time)
    load_first_weights(executor, assembly.train, assembly.config, {})
    state, given = assembly.train.first_state, []
    try:
        for step in range(2):
            rows = assembly.train_rows(step)
            result = executor.run(assembly.train.graph, assembly.train.plan, state, rows, step=step)
            state = result.state
            given.append((result.fetch(), result.outputs("actor.generate")))
            assert executor._hand_overs is not None
            assert not executor._hand_overs._brought, "whatever was sent has been used, and is kept no longer"
    finally:
        executor.close()
    return given


def assert_same_bits(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal(one, other)
    assert len(jax.tree.leaves(one)) > 20


def in_order(assembly: Assembly, monkeypatch) -> list[str]:
    """The calls of the first step, and what is moved between them, as they are dispatched: 'a -> b' for outputs of a
    that b needs."""
    dispatched: list[str] = []
    start, inputs = HandOvers.start, HandOvers.inputs
    reallocate, own = hand_overs.reallocate, ["", ""]

    def moved(arrays: Any, shardings: Any) -> Any:
        results = reallocate(arrays, shardings)
        if any(x is not y and not isinstance(x, np.ndarray) for x, y in zip(arrays, results, strict=True)):
            dispatched.append(" -> ".join(own))
        return results

    def start_noted(self: HandOvers, source: Any, outputs: Any) -> None:
        dispatched.append(source.name)
        own[:] = [source.name, "later"]
        start(self, source, outputs)

    def inputs_noted(self: HandOvers, call: Any, refs: Any, lookup: Any) -> Any:
        own[:] = ["now", call.name]
        return inputs(self, call, refs, lookup)

    monkeypatch.setattr(hand_overs, "reallocate", moved)
    monkeypatch.setattr(HandOvers, "start", start_noted)
    monkeypatch.setattr(HandOvers, "inputs", inputs_noted)
    run(assembly)
    return dispatched[: dispatched.index("critic.train") + 1]


@pytest.mark.parametrize("split", [WHOLE_SHARDS, ACROSS_SHARDS], ids=str)
def test_calls_that_could_run_wait_for_nothing_else(split, apart, monkeypatch):
    """The critic and the reward do not wait for the reference. Values are exchanged with the actor's devices, where the
    reference may still run: after the scores, which would else wait for it. Copies of whole shards hold up nobody."""
    dispatched = in_order(apart(split), monkeypatch)
    sent = dispatched.index("actor.generate -> later")
    assert dispatched[sent - 1] == "actor.generate"
    assert sent < dispatched.index("reference.logprobs") < dispatched.index("critic.values")
    assert not {"now -> critic.values", "now -> reward.scores"} & set(dispatched)
    ahead = ("critic.values -> later" in dispatched, "now -> ppo_batch" in dispatched)
    assert ahead == ((True, False) if split == WHOLE_SHARDS else (False, True))


@pytest.mark.parametrize("split", [WHOLE_SHARDS, ACROSS_SHARDS], ids=str)
def test_when_outputs_are_sent_changes_no_bit(split, apart, monkeypatch):
    assembly = apart(split)
    early = run(assembly)
    monkeypatch.setattr(HandOvers, "start", lambda self, source, outputs: None)
    assert_same_bits(early, run(assembly))


def test_one_at_a_time_nothing_is_sent_ahead(apart, monkeypatch):
    assembly = apart(WHOLE_SHARDS)
    monkeypatch.setattr(HandOvers, "start", lambda self, source, outputs: pytest.fail("sent ahead"))
    run(assembly, one_at_a_time=True)


def test_a_run_whose_moves_are_all_exchange_programs_gives_the_same(apart, monkeypatch):
    """Between processes and GPUs, weights, rows and outputs go through programs over both layouts."""
    assembly, ways = apart(ACROSS_SHARDS), set()
    plain = run(assembly)

    def by_exchange(signature: Any) -> str | None:
        ways.add(way := transfer_method(signature))
        return way if way in (None, "memory") else "exchange"

    for each in (module, hand_overs):
        monkeypatch.setattr(each, "transfer_method", by_exchange)
    in_buckets.cache_clear()
    programs = exchange.exchange_program.cache_info().misses
    assert_same_bits(plain, run(assembly))
    assert {"shards", "jit", "exchange"} <= ways
    assert exchange.exchange_program.cache_info().misses >= programs + 4


def test_the_programs_of_a_step_are_traced_once(apart, monkeypatch):
    """In two steps: one generation; log-probabilities, values and scores; two updates."""
    monkeypatch.setattr(executor, "shared_program", lambda call, key, make: make())  # not those of other tests
    chex.clear_trace_counter()
    for function, programs in (("generate", 1), ("apply_gradient", 2)):
        traced = chex.assert_max_traces(getattr(call_programs, function), programs)
        monkeypatch.setattr(call_programs, function, traced)
    # of all readings together, since they are one function; those of train programs do not count
    read = {name: chex.assert_max_traces(reading.__call__, 3) for name, reading in INFERENCE_OUTPUTS.items()}
    monkeypatch.setattr(call_programs, "INFERENCE_OUTPUTS", read)
    run(apart(WHOLE_SHARDS))
