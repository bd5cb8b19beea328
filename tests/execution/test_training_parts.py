"""Train calls in parts make the update that the whole batch makes, while other rows are still being generated."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import Call, Ref
from jaxrlhf.config.plan_config import Placement, Tail
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Plan, PlanError
from jaxrlhf.programs.roles import FunctionRole, ModelRole
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.testing import ATOL, RTOL, small_run

TWO, FOUR = Strategy(data=2), Strategy(data=4)
SAMPLING = {"max_new_tokens": 12, "stop_ids": [10, *range(43, 57, 2), *range(90, 160, 7)]}
ONE_UPDATE = {"mini_batches": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"whiten_advantages": False, "actor_update": ONE_UPDATE, "critic_update": ONE_UPDATE},
    "safe_rlhf": {"whiten_advantages": False, "actor_update": ONE_UPDATE, "critic_update": ONE_UPDATE},
    "ppo_shared": {"whiten_advantages": False, "actor_update": ONE_UPDATE},
    "grpo": {"sampling": {"num_samples": 4}, "actor_update": ONE_UPDATE},
    "rloo": {"sampling": {"num_samples": 4}},
}


@functools.cache
def assembled(algorithm: str) -> Assembly:
    settings = SETTINGS[algorithm]
    more: dict[str, Any] = {"settings": {**settings, "sampling": SAMPLING | settings.get("sampling", {})}}
    if algorithm == "ppo_shared":
        more |= {"roles": {"critic": {"shares": "actor", "head": "scalar"}}}
    return assemble(small_run(algorithm, num_layers=2, **more), 8, 4)


def planned(algorithm: str, train: Placement, generate: Placement, critic: Placement | None = None) -> Plan:
    """A plan with everything up to the train calls in parts; checked."""
    phase, placed = assembled(algorithm).train, {}
    for call in phase.graph.calls:
        kinds = {
            "generate": generate,
            "train": train,
            "infer": Placement((4, 5), TWO, parts=4),
            "host": Placement(parts=4),
        }
        if call.kind in kinds:
            placed[call.plan_name] = kinds[call.kind]
        if critic is not None and call.kind == "train" and call.role != "actor":
            placed[call.plan_name] = critic
    plan = dataclasses.replace(phase.plan, placements={**phase.plan.placements, **placed})
    models = {name: role.model for name, role in phase.roles.items() if isinstance(role, ModelRole)}
    check(plan, phase.graph, models, 8, 4)
    return plan


def results(algorithm: str, plan: Plan, timeline: Timeline | None = None, steps: int = 2) -> list[dict[str, Any]]:
    """Tokens, metrics and weights of some steps: the second one samples from what the first has made."""
    assembly, found = assembled(algorithm), []
    phase = assembly.train
    executor = Executor(phase.roles, seed=0, timeline=timeline)
    state = phase.first_state
    trained = {call.weights for call in phase.graph.calls if call.kind == "train"}
    try:
        load_first_weights(executor, phase, assembly.config, {})
        for step in range(steps):
            result = executor.run(phase.graph, plan, state, assembly.train_rows(step), step=step)
            state = result.state
            weights = {name: jax.tree.map(np.asarray, executor.weights.snapshot(name)[1]) for name in trained if name}
            found.append(
                {"tokens": result.outputs("actor.generate").tokens, "metrics": result.fetch(), "weights": weights}
            )
    finally:
        executor.close()
    return found


@functools.cache
def expected(algorithm: str) -> list[dict[str, Any]]:
    return results(algorithm, assembled(algorithm).train.plan)


def assert_same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        paths = jax.tree_util.tree_leaves_with_path(other)
        for (path, x), y in zip(paths, jax.tree.leaves(one), strict=True):
            where = f"step {step + 1}: {jax.tree_util.keystr(path)}"
            if "logprob_gap" not in where:  # it is rounding
                np.testing.assert_allclose(y, x, RTOL, ATOL, err_msg=where)


WHOLE = Placement((0, 1, 2, 3), FOUR, parts=2)
WITH_TAIL = Placement((0, 1, 2, 3), FOUR, parts=3, tail=Tail((6, 7), TWO, rows=0.25))
ON_TWO = Placement((0, 1), TWO, parts=2)
IN_SLOTS = Placement((0, 1), Strategy(data=2, slots=8), parts=3, shares=(Placement((2, 3), TWO, rows=0.5),))
PLANS = {
    "ppo": ("ppo", Placement((4, 5), TWO, parts=4), WITH_TAIL, Placement((0, 1), Strategy(fsdp=2), parts=2)),
    "losses on data too": ("safe_rlhf", ON_TWO, WHOLE, Placement((2, 3), TWO, parts=4)),
    "a shared trunk": ("ppo_shared", Placement((0, 1), Strategy(fsdp=2, micro_batches=2), parts=4), WITH_TAIL, None),
    "groups": ("grpo", Placement((0, 1), TWO, parts=4), WITH_TAIL, None),
    "groups in slots and shares": ("rloo", ON_TWO, IN_SLOTS, None),
    "groups over stages": ("grpo", ON_TWO, Placement((0, 1), Strategy(pipeline=2, slots=8), parts=3), None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_update_is_that_of_the_whole_batch(name):
    algorithm, train, generate, critic = PLANS[name]
    assert_same(results(algorithm, planned(algorithm, train, generate, critic)), expected(algorithm))


def test_gradients_are_added_up_while_the_tail_decodes():
    """In the order of dispatch: the first part needs no row of the tail."""
    plan = planned("grpo", *PLANS["groups"][1:3])
    graph, _ = in_parts(assembled("grpo").train.graph, plan)
    names = [call.name for call in graph.calls]
    (tail,) = (call for call in graph.calls if call.part is not None and call.part.migrate)
    first = next(call for call in graph.calls if call.whole_name == "actor.train")
    assert tail.name not in _behind(graph, first) and names.index(first.name) < names.index("actor.train")
    assert tail.name in _behind(graph, next(call for call in graph.calls if call.name == "actor.train"))


def _behind(graph: Any, call: Call) -> set[str]:
    """All calls that must have ended before a call."""
    names: set[str] = set()
    for other in reversed(graph.calls):
        if other.name == call.name or other.name in names:
            names |= set(graph.dependencies(other))
    return names


def test_rows_that_belong_together_are_handed_on_together():
    plan = planned("grpo", *PLANS["groups"][1:3])
    graph, _ = in_parts(assembled("grpo").train.graph, plan)
    generated = [call for call in graph.calls if call.kind == "generate"]
    assert {call.part.together for call in generated if call.part} == {4}
    assert all(bound % 4 == 0 for call in generated if call.part for bound in call.part.handed_on)


def test_every_part_is_in_the_timeline():
    timeline = Timeline()
    results("grpo", planned("grpo", *PLANS["groups"][1:3]), timeline, steps=1)
    assert [event.name for event in timeline.events() if event.kind == "train"] == ["actor.train"] * 4


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_declared_groups_suffice(algorithm):
    """What a batch function makes of a group of rows is what it makes of them among all rows."""
    checked = 0
    for call, arguments in computed(algorithm):
        assert isinstance(call.groups_of, int) and call.function is not None
        whole, size = call.function(*arguments), 2 * call.groups_of
        rows = max(ref.shape[0] for ref in call.refs if ref.has_rows)
        for start in range(0, rows, size):
            some = call.function(*_rows(call.args, arguments, start, start + size))
            for ref, x, y in zip(call.output_refs, jax.tree.leaves(whole), jax.tree.leaves(some), strict=True):
                if ref.has_rows:
                    np.testing.assert_allclose(y, x[start : start + size], rtol=1e-5, atol=1e-6)
                    checked += 1
    assert checked


def test_whitening_needs_more_than_groups():
    """A declaration that does not hold would be found."""
    ((call, arguments),) = computed("ppo")
    assert call.function is not None
    arguments = *arguments[:-1], dataclasses.replace(arguments[-1], whiten_advantages=True)
    whole, some = call.function(*arguments), call.function(*_rows(call.args, arguments, 0, 4))
    assert not np.allclose(some[0]["advantages"], whole[0]["advantages"][:4], rtol=1e-3)


def computed(algorithm: str) -> list[tuple[Call, tuple[Any, ...]]]:
    """The `compute` calls of a step, and their arguments."""
    assembly = assembled(algorithm)
    phase, executor = assembly.train, Executor(assembly.train.roles, seed=0)
    given = {"state": phase.first_state, "data": assembly.train_rows(0)}
    leaves = {name: jax.tree.leaves(tree) for name, tree in given.items()}
    try:
        load_first_weights(executor, phase, assembly.config, {})
        result = executor.run(phase.graph, phase.plan, phase.first_state, given["data"], step=0)
        for call in phase.graph.calls:
            leaves[call.name] = jax.tree.leaves(result.outputs(call.name))
    finally:
        executor.close()
    return [
        (call, jax.tree.map(lambda x: jnp.asarray(leaves[x.call][x.leaf]) if isinstance(x, Ref) else x, call.args))
        for call in phase.graph.calls
        if call.kind == "compute"
    ]


def _rows(args: Any, arguments: Any, start: int, stop: int) -> Any:
    def some(ref: Any, x: Any) -> Any:
        return x[start:stop] if isinstance(ref, Ref) and ref.has_rows else x

    return jax.tree.map(some, args, arguments)


REFUSED = {
    "several updates": (
        {"actor_update": {"mini_batches": 2}}, {},
        "plan.calls.actor.train.parts: must be 1 where mini_batches is above 1, since the first update takes rows of "
        "all parts. Got 2 parts with mini_batches 2. Leave `parts` out, or set mini_batches to 1.",
    ),
    "a statistic of the whole batch": (
        {"whiten_advantages": True}, {},
        "plan.calls.actor.train.parts: a train call begins on some rows only if the calls that make them need no "
        "others. Got ppo_batch, which needs the whole batch for whiten_advantages. Leave `parts` out, or change",
    ),
    "scores by moments of the run": (
        {"score_normalization": "running"}, {}, "needs the whole batch for score_normalization: running. Leave `parts`",
    ),
    "a call between that is whole": (
        {}, {"critic.values": Placement((4,), Strategy())},
        "plan.calls.actor.train.parts: all calls between one generation in parts and a train call in parts must be in "
        "parts too. Got actor.generate as actor.generate hands them on, reference.logprobs as actor.generate hands "
        "them on, critic.values whole, reward.scores as",
    ),
    "a generation that is whole": (
        {}, {"actor.generate": Placement((0,), Strategy())},
        "plan.calls.actor.train.parts: a train call in parts begins while a generation in parts goes on. Got rows of "
        "no generation in parts. Leave `parts` out here, or give them to one generation.",
    ),
    "stages": (
        {}, {"actor.train": Placement((0, 1), Strategy(pipeline=2), parts=2)},
        "plan.calls.actor.train.parts: must be 1 for a train call over stages. Got 2 parts with pipeline 2. Leave",
    ),
    "shares": (
        {}, {"actor.train": Placement((0, 1), TWO, shares=(Placement((2, 3), TWO, rows=0.5),))},
        "plan.calls.actor.train: a train call has no shares and no tail. Leave all but `parts` out.",
    ),
    "parts that do not divide": (
        {}, {"actor.train": Placement((0,), Strategy(), parts=3)},
        "plan.calls.actor.train.parts: must divide 16 rows. Got 3. Use another number of parts.",
    ),
    "more parts than rows": (
        {}, {"actor.train": Placement((0,), Strategy(), parts=32)},
        "plan.calls.actor.train.parts: must divide 16 rows.",
    ),
    "a part that does not divide over its devices": (
        {}, {"actor.train": Placement((0, 1, 2, 3), FOUR, parts=8)},
        "plan.calls.actor.train: micro_batches x data x fsdp must divide the 2 rows of a part. Got 1 x 4 x 1 = 4. "
        "Lower a degree, or use fewer parts, or another batch_size.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    settings, placements, message = REFUSED[name]
    phase = assemble(small_run("ppo", settings=SETTINGS["ppo"] | settings), 8, 4).train
    kinds = {"generate": WHOLE, "infer": Placement((4, 5), TWO, parts=4), "host": Placement(parts=4)}
    placed = {call.plan_name: kinds[call.kind] for call in phase.graph.calls if call.kind in kinds}
    placed |= {"actor.train": ON_TWO} | placements
    plan = dataclasses.replace(phase.plan, placements={**phase.plan.placements, **placed})
    models = {name: role.model for name, role in phase.roles.items() if isinstance(role, ModelRole)}
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan, phase.graph, models, 8, 4)


def test_groups_are_not_cut():
    with pytest.raises(PlanError, match=r"actor\.train\.parts: must divide 16 groups of 4 rows\. Got 32\. Use"):
        planned("grpo", Placement((0,), Strategy(), parts=32), WHOLE)
    with pytest.raises(PlanError, match=r"must be at most the groups of 4 sequences of each row shard, 4\. Got 5"):
        planned("grpo", ON_TWO, Placement((0, 1, 2, 3), FOUR, parts=5))


def test_a_step_that_failed_leaves_no_gradients_behind():
    """Its first part had added its own when the reward of a later one failed."""
    assembly, plan, left = assembled("grpo"), planned("grpo", *PLANS["groups"][1:3]), [3]
    phase = assembly.train
    reward = phase.roles["reward"]
    assert isinstance(reward, FunctionRole)

    def score(rollout: Any) -> Any:
        if not left[0]:
            raise RuntimeError("no reward")
        left[0] -= 1
        assert reward.score is not None
        return reward.score(rollout)

    roles = {**phase.roles, "reward": dataclasses.replace(reward, score=score)}
    executor = Executor(roles, seed=0, one_at_a_time=True)  # Python functions one after another, too
    try:
        load_first_weights(executor, phase, assembly.config, {})
        with pytest.raises(Exception, match="no reward"):
            executor.run(phase.graph, plan, phase.first_state, assembly.train_rows(0), step=0).fetch()
        left[0] = 4
        again = executor.run(phase.graph, plan, phase.first_state, assembly.train_rows(0), step=0)
        want, metrics = expected("grpo")[0]["metrics"]["actor"], again.fetch()["actor"]
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(metrics[name], want[name], RTOL, ATOL)
    finally:
        executor.close()
