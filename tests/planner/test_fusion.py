import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.fusion import (
    MEMORY_CAP,
    StageCost,
    check_fusion,
    fused_order,
    fusion_notes,
    oppose,
    opposite,
    stages_per_node,
)
from jaxrlhf.planner.plan import DEFAULT, Placement, Plan, PlanError, plan_rows, resolve, stage_warnings
from jaxrlhf.planner.schedules.instructions import needed
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import Method, RoleMethods, compute, trace
from tests.made_up_step import one_term

COSTS = StageCost(5, 10, 2), StageCost(4, 8, 1)


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 1


def halve(tokens):
    return {"tokens": tokens, "half": tokens // 2}


def step(roles, state, prompts, updates):
    batch = compute(halve, prompts)
    actor = roles.actor.train("loss", batch, updates[0])
    critic = roles.critic.train("loss", batch, updates[1])
    return (actor, critic, roles.critic.train("loss", batch, updates[1])), state


def waiting_step(roles, state, prompts, updates):
    actor = roles.actor.train("loss", compute(halve, prompts), updates[0])
    later = compute(scaled, prompts, actor)
    return (actor, roles.critic.train("loss", later, updates[1])), state


def scaled(tokens, loss):
    return {"tokens": tokens * loss["loss"]}


def graph_of(step: Any = step, updates: tuple[Update, Update] = (Update(), Update())) -> CallGraph:
    tokens = jax.ShapeDtypeStruct((32, 7), jnp.int32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    train = Method("train", lambda *_: {"loss": scalar}, row_wise=False, bind=one_term)
    roles = {name: RoleMethods({"train": train}, weights=name) for name in ("actor", "critic")}
    return trace(step, roles, (), tokens, updates)


def over(count: int, **strategy: Any) -> Placement:
    return Placement(tuple(range(count)), Strategy(**strategy))


def plan_of(actor: Placement, critic: Placement, *, step: Any = step, **more: Any) -> tuple[Plan, CallGraph]:
    graph = graph_of(step, more.pop("updates", (Update(), Update())))
    written = {DEFAULT: Placement((0,), Strategy()), "actor.train": actor, "critic.train": critic}
    return resolve(written, graph, fuse=more.pop("fuse", ("actor.train", "critic.train"))), graph


FOUR, TWO = over(8, pipeline=4, tensor=2, micro_batches=4), over(8, pipeline=2, data=2, tensor=2, micro_batches=2)


def test_the_second_goes_over_the_nodes_of_the_first_the_other_way():
    """Four stages beside two groups of two: groups follow one another, each from its last node to its first."""
    mesh = [(2, 3), (6, 7), (0, 1), (4, 5)]  # stage 0 of both groups, stage 1 of both
    assert opposite(FOUR, TWO).devices == tuple(device for node in mesh for device in node)
    # nodes of the first in an order that a user chose
    mixed = dataclasses.replace(FOUR, devices=(6, 7, 0, 1, 2, 3, 4, 5))
    assert opposite(mixed, TWO).devices == (0, 1, 4, 5, 6, 7, 2, 3)
    same = over(8, pipeline=4, tensor=2)
    assert opposite(FOUR, same).devices == (6, 7, 4, 5, 2, 3, 0, 1)


def test_stages_of_fewer_devices_are_merged():
    """Of stages with one device beside stages with two, two become one."""
    narrow = over(8, pipeline=4, data=2, micro_batches=2)
    wide = over(8, pipeline=2, data=2, tensor=2)
    assert stages_per_node(narrow.strategy, wide.strategy) == (2, 1)
    assert stages_per_node(wide.strategy, narrow.strategy) == (1, 2)
    turned = opposite(wide, narrow)
    assert set(turned.devices) == set(range(8))
    stages = [set(turned.devices[i : i + 2]) for i in range(0, 8, 2)]  # a device of each group
    nodes = [{0, 1}, {4, 5}], [{2, 3}, {6, 7}]  # of the groups of the wide one
    for one, (first, last) in enumerate(nodes):
        assert all(len(stage & (last | first)) == 1 for stage in stages), one


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FOUR, TWO),
        (over(8, pipeline=2, data=2, tensor=2, micro_batches=2), over(8, pipeline=4, data=2, micro_batches=3)),
        (over(4, pipeline=2, fsdp=2, micro_batches=4), over(4, pipeline=2, tensor=2, micro_batches=1)),
    ],
)
def test_every_instruction_of_both_comes_once_and_after_what_it_needs(first, second):
    order = fused_order(first, opposite(first, second), COSTS)
    groups = first.strategy.data + second.strategy.data
    assert {x.pipe for x in order.instructions} == set(range(groups))
    done = set()
    for instruction in order.instructions:
        model = instruction.pipe >= first.strategy.data
        stages = (first, second)[model].strategy.pipeline // order.merged[model]
        pipe = type("Pipe", (), {"stages": stages})
        before = needed([pipe] * groups, instruction)  # pyright: ignore[reportArgumentType]
        assert before is None or before in done
        assert instruction not in done
        done.add(instruction)
    expected = sum(
        2 * p.strategy.data * p.strategy.micro_batches * p.strategy.pipeline // merged
        for p, merged in zip((first, second), order.merged, strict=True)
    )
    assert len(done) == expected


def test_a_fused_plan_that_fits_and_its_second_call_turned():
    plan, graph = plan_of(FOUR, TWO)
    check_fusion(plan, graph)
    turned = oppose(plan, graph)
    assert turned.placements["critic.train"] == opposite(FOUR, TWO)
    assert turned.placements["actor.train"] == FOUR
    chosen = dataclasses.replace(TWO, devices=(7, 6, 5, 4, 3, 2, 1, 0))  # stays as a user wrote it
    plan, graph = plan_of(FOUR, chosen)
    assert oppose(plan, graph).placements["critic.train"] == chosen
    assert fusion_notes(plan, graph) == [] == fusion_notes(turned, graph)
    assert oppose(dataclasses.replace(plan, fuse=()), graph).placements["critic.train"] == chosen
    assert Plan.from_json(plan.to_json()) == plan


def test_calls_that_go_the_same_way_are_noted():
    same = over(8, pipeline=4, tensor=2)
    plan, graph = plan_of(FOUR, same)
    assert fusion_notes(oppose(plan, graph), graph) == []
    (note,) = fusion_notes(plan, graph)  # as if a user had written these devices
    assert note == (
        "plan.fuse: actor.train and critic.train go over their devices in the same direction, and fill few of each "
        "other's bubbles. Leave plan.critic.train.devices out."
    )
    assert fusion_notes(dataclasses.replace(plan, fuse=()), graph) == []


def test_the_table_and_the_notes_speak_of_fused_calls_together():
    few = dataclasses.replace(FOUR, strategy=dataclasses.replace(FOUR.strategy, micro_batches=1))
    plan, graph = plan_of(few, TWO)
    model = ModelConfig(num_layers=4)
    rows = {row["call"]: row["cut into"] for row in plan_rows(plan, graph, {"actor": model, "critic": model})}
    assert rows["actor.train"].endswith("through 4 stages of 1 layer, fused with critic.train")
    assert rows["critic.train"].endswith("through 2 stages of 2 layers, fused with actor.train")
    assert stage_warnings(plan, graph) == []  # each works while the other waits
    (alone,) = stage_warnings(dataclasses.replace(plan, fuse=()), graph)
    assert alone.startswith("plan.actor.train: 1 micro-batch for 4 pipeline stages: the devices wait 75% of the time")


UNFIT = {
    "one call": (
        dict(fuse=("actor.train",)),
        "plan.fuse: must be two train calls. Got ['actor.train']. Train calls: actor.train, critic.train, "
        "critic.train#2. Name two of them, or remove it.",
    ),
    "what is no train call": (
        dict(fuse=("actor.train", "critic.trian")),
        "plan.fuse: must be two train calls. Got ['actor.train', 'critic.trian'], and 'critic.trian' is none. Did you "
        "mean 'critic.train'?",
    ),
    "a schedule of its own": (
        dict(critic=over(8, pipeline=2, data=2, tensor=2, schedule="gpipe")),
        "plan.fuse: fused calls have a schedule in common. Got gpipe for critic.train. Remove its `schedule`.",
    ),
    "the same weights": (
        dict(fuse=("critic.train", "critic.train#2")),
        "plan.fuse: calls must train different weights. Got 'critic' twice. Remove it.",
    ),
    "one that waits for the other": (
        dict(step=waiting_step),
        "plan.fuse: critic.train must not have to wait for actor.train. Got scaled between them, which needs it. Do "
        "not fuse them.",
    ),
    "no pipeline": (
        dict(critic=over(8, data=8)),
        "plan.fuse: critic.train must have a pipeline without chunks. Got pipeline 1, chunks 1. Set its pipeline to 2, "
        "say.",
    ),
    "chunks": (dict(critic=over(8, pipeline=2, chunks=2, data=4)), "Got pipeline 2, chunks 2."),
    "other devices": (
        dict(critic=over(4, pipeline=2, data=2)),
        "plan.fuse: both calls must have the same devices. Got pipeline 4 x tensor 2 on 0-7 and pipeline 2 x data 2 on "
        "0-3. Give them equally many, or do not fuse them.",
    ),
    "stages that do not divide": (
        dict(actor=over(6, pipeline=2, tensor=3), critic=over(6, pipeline=3, tensor=2)),
        "plan.fuse: fsdp x tensor, the devices of a stage, must divide that of the other. Got 3 and 2. Use powers of "
        "two.",
    ),
    "stages that cannot be merged": (
        dict(actor=over(6, pipeline=3, tensor=1, data=2), critic=over(6, pipeline=3, tensor=2)),
        "plan.fuse: 2 stages of actor.train become one beside stages of 2 devices, so its pipeline must be a multiple "
        "of 2. Got 3. Use 2, say.",
    ),
    "other numbers of updates": (
        dict(updates=(Update(), Update(mini_batches=4))),
        "plan.fuse: both calls must make equally many updates, which are fused one by one. Got 2 for actor.train and 4 "
        "for critic.train. Change mini_batches or epochs of one.",
    ),
}


@pytest.mark.parametrize(("changes", "message"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_fused(changes, message):
    plan, graph = plan_of(**{"actor": FOUR, "critic": TWO, **changes})
    with pytest.raises(PlanError, match=re.escape(message)):
        check_fusion(plan, graph)


def test_the_order_keeps_little_more_than_one_call_after_the_other():
    eight = over(8, pipeline=8, micro_batches=16)
    costs = StageCost(12, 24, 12), StageCost(9, 18, 12)
    order = fused_order(eight, opposite(eight, eight), costs)
    kept, most = dict.fromkeys(range(8), 0), 0
    for x in order.instructions:
        node = x.stage if x.pipe == 0 else 7 - x.stage
        kept[node] += 12 if x.forward else -12
        most = max(most, kept[node])
    assert most <= MEMORY_CAP * 8 * 12, "1F1B of either keeps 8 micro-batches on its first stage"


def test_devices_in_an_order_that_breaks_stages_apart():
    broken = dataclasses.replace(TWO, devices=(0, 2, 1, 3, 4, 6, 5, 7))
    message = "plan.fuse: stages of both calls must lie on the same devices. Got [0, 1, 2, 3, 4, 5, 6, 7] and [0, 2, 1"
    with pytest.raises(PlanError, match=re.escape(message)):
        fused_order(FOUR, broken, COSTS)
    plan, graph = plan_of(FOUR, broken)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_fusion(plan, graph)
