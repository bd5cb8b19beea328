"""Executors of a process share programs, except those with a function of a user, which may read what changes."""

from typing import Any

from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.shared_programs import is_of_package, made
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.testing import SMALL_MODEL, small_run
from tests.invariance.test_algorithms import WHOLE


def run(assembly: Assembly) -> dict[str, float]:
    phase = assembly.train
    own = Executor(phase.roles, seed=0)
    try:
        load_first_weights(own, phase, assembly.config, {})
        return flatten(own.run(phase.graph, phase.plan, phase.first_state, assembly.train_rows(0), step=0).fetch())
    finally:
        own.close()


def test_a_second_run_takes_over_the_programs_of_the_first():
    made.cache_clear()
    small: dict[str, Any] = {"batch_size": 8, "num_layers": 1, "settings": {"sampling": {"max_new_tokens": 4}}}
    first = run(assemble(small_run("ppo", **small), 8, 8))
    num_programs = made.cache_info().misses
    assert num_programs == 6  # all calls but the reward
    assert run(assemble(small_run("ppo", **small), 8, 8)) == first
    assert made.cache_info().misses == num_programs
    longer: dict[str, Any] = {**small, "settings": {"sampling": {"max_new_tokens": 5}}}
    assert run(assemble(small_run("ppo", **longer), 8, 8)) != first
    assert made.cache_info().misses == 2 * num_programs
    slower = run(assemble(small_run("ppo", learning_rate=1e-5, **small), 8, 8))
    assert made.cache_info().misses == 2 * num_programs + 2, "the two train calls are others"
    assert slower["actor/lr"] != first["actor/lr"]


def test_what_holds_a_function_of_a_user_is_not_shared():
    graph = assemble(
        small_run("tests.invariance.every_method:every_method", roles={**WHOLE, "reference": {"model": SMALL_MODEL}}),
        8, 8,
    ).train.graph  # fmt: skip
    shared = {call.name: is_of_package(call) for call in graph.calls if call.kind != "host"}
    own = {name for name, is_shared in shared.items() if not is_shared}
    assert own == {call.name for call in graph.calls if call.kind in ("compute", "train") or call.method == "loss"}
    assert any(shared.values())
