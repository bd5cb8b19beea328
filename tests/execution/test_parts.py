"""Calls in parts, shares and tails give what whole calls give: tokens, log-probabilities, scores, the batch."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.config.plan_config import Placement, Tail
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.testing import small_run

TWO, ONE = Strategy(data=2), Strategy()
LENGTHS = {"max_new_tokens": 12, "stop_ids": [10, *range(43, 57, 2), *range(90, 160, 7)]}
COMPARED = ("actor.generate", "reference.logprobs", "critic.values", "reward.scores", "ppo_batch")


@functools.cache
def assembled(algorithm: str = "ppo", num_samples: int = 1) -> Assembly:
    sampling = LENGTHS | ({"num_samples": num_samples} if num_samples > 1 else {})
    return assemble(small_run(algorithm, num_layers=2, settings={"sampling": sampling}), 8, 4)


def planned(assembly: Assembly, **placements: Placement) -> Plan:
    """The plan of one device, but for some calls; checked."""
    named = {name.replace("__", "."): placement for name, placement in placements.items()}
    plan = dataclasses.replace(assembly.train.plan, placements={**assembly.train.plan.placements, **named})
    models = {name: role.model for name, role in assembly.train.roles.items() if isinstance(role, ModelRole)}
    check(plan, assembly.train.graph, models, 8, 4)
    return plan


def outputs(assembly: Assembly, plan: Plan, timeline: Timeline | None = None, steps: int = 1) -> dict[str, Any]:
    """What the calls of a step give."""
    executor = Executor(assembly.train.roles, seed=0, timeline=timeline)
    state, given = assembly.train.first_state, {}
    try:
        load_first_weights(executor, assembly.train, assembly.config, {})
        for step in range(steps):
            result = executor.run(assembly.train.graph, plan, state, assembly.train_rows(step), step=step)
            state = result.state
            names = {call.name for call in assembly.train.graph.calls}
            given = {name: result.outputs(name) for name in COMPARED if name in names} | {"metrics": result.fetch()}
    finally:
        executor.close()
    return given


@functools.cache
def expected(algorithm: str = "ppo", num_samples: int = 1) -> dict[str, Any]:
    assembly = assembled(algorithm, num_samples)
    return outputs(assembly, assembly.train.plan)


def assert_same(got: dict[str, Any], want: dict[str, Any], *, bits: tuple[str, ...] = ()) -> None:
    np.testing.assert_array_equal(got["actor.generate"].tokens, want["actor.generate"].tokens)
    assert got.keys() == want.keys()
    for name in want:
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(got[name]), jax.tree.leaves(want[name]), strict=True
        ):
            where = name + jax.tree_util.keystr(path)
            if name in bits or not np.issubdtype(np.asarray(other).dtype, np.floating):
                np.testing.assert_array_equal(one, other, err_msg=where)
            elif "logprob_gap" not in where:  # it is rounding
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=where)


def test_responses_are_worth_cutting():
    lengths = np.sort(expected()["actor.generate"].response.sum(axis=1))
    assert lengths[0] <= 2 and lengths[-1] == 12 and len(set(lengths)) >= 5


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [0, 4])
def test_parts_change_nothing(parts, slots):
    assembly = assembled()
    plan = planned(
        assembly,
        actor__generate=Placement((0, 1), Strategy(data=2, slots=slots), parts=parts),
        reference__logprobs=Placement((2, 3), TWO, parts=parts),
        critic__values=Placement((0, 1), TWO, parts=parts if parts != 2 else 5),
        reward__scores=Placement(parts=parts),
    )
    assert_same(outputs(assembly, plan), expected())


def test_parts_of_equal_slots_have_the_same_bits():
    assembly = assembled()
    whole, parts = (
        outputs(assembly, planned(assembly, actor__generate=Placement((0, 1), Strategy(data=2, slots=4), parts=n)))
        for n in (1, 4)
    )
    assert_same(parts, whole, bits=("actor.generate", "reward.scores"))


@pytest.mark.parametrize("migrate", ["cache", "prefill"])
@pytest.mark.parametrize("rows", [i / 10 for i in range(11)])
def test_a_tail_of_any_size_changes_nothing(rows, migrate):
    assembly = assembled()
    plan = planned(
        assembly,
        actor__generate=Placement(
            (0, 1), Strategy(data=2, slots=4), parts=2, tail=Tail((0,), ONE, rows=rows, migrate=migrate)
        ),
        reference__logprobs=Placement((1,), ONE, parts=2),
        reward__scores=Placement(parts=2),
    )
    assert_same(outputs(assembly, plan), expected())


SPLITS = {
    "two shares": [Placement((0, 1), TWO, shares=(Placement((4, 5), Strategy(tensor=2), rows=0.5),))],
    "shares in parts, and a tail on devices of its own": [
        Placement(
            (0, 1), TWO, parts=3, shares=(Placement((4, 5), TWO, rows=0.25, parts=2),),
            tail=Tail((2, 3), Strategy(tensor=2), parts=2, rows=0.5),
        )
    ],
    "a tail that is prefilled, from stages": [
        Placement((0, 1), Strategy(pipeline=2), parts=2, tail=Tail((2, 3), TWO, rows=0.5, migrate="prefill"))
    ],
    "a tail over stages": [
        Placement(
            (0, 1, 2, 3), Strategy(pipeline=2, data=2, slots=4), parts=2,
            tail=Tail((4, 5), Strategy(pipeline=2), rows=0.5),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_shares_and_tails_change_nothing(name):
    assembly, (generation,) = assembled(), SPLITS[name]
    plan = planned(
        assembly,
        actor__generate=generation,
        reference__logprobs=Placement((6, 7), TWO, parts=2, shares=(Placement((0, 1), Strategy(fsdp=2), rows=0.25),)),
        critic__values=Placement((4, 5), Strategy(pipeline=2), parts=3),
        reward__scores=Placement(parts=3),
    )
    assert_same(outputs(assembly, plan, steps=2), outputs(assembly, assembly.train.plan, steps=2))


@pytest.mark.parametrize("shared", [0, 3])
def test_samples_of_a_prompt_change_nothing(shared):
    """Two samples of each prompt, in slots that share their prompts or do not."""
    assembly = assembled("grpo", 2)
    slots = Strategy(data=2, slots=6, shared_prompts=shared)
    plan = planned(
        assembly,
        actor__generate=Placement((0, 1), slots, parts=2, tail=Tail((1,), ONE, rows=0.4)),
        reference__logprobs=Placement((2,), ONE, parts=3),
        reward__scores=Placement(parts=3),
    )
    assert_same(outputs(assembly, plan), expected("grpo", 2))


def test_a_share_of_which_nothing_moves_leaves_nothing_to_the_tail():
    assembly = assembled()
    generation = Placement(
        (0, 1), TWO, parts=2, shares=(Placement((4, 5), TWO, rows=0.25),), tail=Tail((2,), ONE, rows=0.2)
    )
    assert_same(outputs(assembly, planned(assembly, actor__generate=generation)), expected())
