import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.costs.stage_costs import StageCost, reference_costs
from jaxrlhf.planner.fusion.fusible import (
    check_fusion,
    find_schedules,
    fused_order,
    fusion_notes,
    oppose,
    opposite,
    stages_per_worker,
    with_schedules,
)
from jaxrlhf.planner.plans.check_plan import stage_warnings
from jaxrlhf.planner.plans.plan import SCHEDULES, Placement, Plan, PlanError, resolve
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.planner.workload import Workload
from jaxrlhf.schedules.instructions import Pipe, Schedule, needed
from jaxrlhf.schedules.schedule import makespan, topological_order
from jaxrlhf.schedules.schedule_bounds import lower_bound
from jaxrlhf.tracing import Method, RoleMethods, compute, trace
from tests.made_up_step import one_term
from tests.planner.planned_graph import halve, over, read
from tests.programs.pipelined_calls import Update

COSTS = StageCost(5, 10, 2), StageCost(4, 8, 1)


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


def plan_of(actor: Placement, critic: Placement, *, step: Any = step, **more: Any) -> tuple[Plan, CallGraph]:
    graph = graph_of(step, more.pop("updates", (Update(), Update())))
    fuse = more.pop("fuse", ("actor.train", "critic.train"))
    return resolve(graph, over(1), {"actor.train": actor, "critic.train": critic}, fuse=fuse), graph


FOUR, TWO = over(8, pipeline=4, tensor=2, micro_batches=4), over(8, pipeline=2, data=2, tensor=2, micro_batches=2)


def test_the_second_goes_over_the_workers_of_the_first_the_other_way():
    """Four stages beside two groups of two: groups follow one another, each from its last worker to its first."""
    mesh = [(2, 3), (6, 7), (0, 1), (4, 5)]  # stage 0 of both groups, stage 1 of both
    assert opposite(FOUR, TWO).devices == tuple(device for worker in mesh for device in worker)
    # workers of the first in an order that a user chose
    mixed = dataclasses.replace(FOUR, devices=(6, 7, 0, 1, 2, 3, 4, 5))
    assert opposite(mixed, TWO).devices == (0, 1, 4, 5, 6, 7, 2, 3)
    same = over(8, pipeline=4, tensor=2)
    assert opposite(FOUR, same).devices == (6, 7, 4, 5, 2, 3, 0, 1)


def test_stages_of_fewer_devices_are_merged():
    """Two stages with one device become one beside stages with two devices."""
    narrow = over(8, pipeline=4, data=2, micro_batches=2)
    wide = over(8, pipeline=2, data=2, tensor=2)
    assert stages_per_worker(narrow.strategy, wide.strategy) == (2, 1)
    assert stages_per_worker(wide.strategy, narrow.strategy) == (1, 2)
    turned = opposite(wide, narrow)
    assert set(turned.devices) == set(range(8))
    stages = [set(turned.devices[i : i + 2]) for i in range(0, 8, 2)]  # a device of each group
    workers = [{0, 1}, {4, 5}], [{2, 3}, {6, 7}]  # of the groups of the wide one
    for one, (first, last) in enumerate(workers):
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
    second = opposite(first, second)
    order = fused_order(first, second, find_schedules(first, second, COSTS))
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
    assert read(plan.to_json()) == plan


def test_calls_that_go_the_same_way_are_noted():
    same = over(8, pipeline=4, tensor=2)
    plan, graph = plan_of(FOUR, same)
    assert fusion_notes(oppose(plan, graph), graph) == []
    (note,) = fusion_notes(plan, graph)  # as if a user had written these devices
    assert note == (
        "plan.fuse: actor.train and critic.train go over their devices in the same direction, and fill few of each "
        "other's bubbles. Leave plan.calls.critic.train.devices out."
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
    assert alone.startswith(
        "plan.calls.actor.train: 1 micro-batch for 4 pipeline stages: the devices wait 75% of the time"
    )


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


def test_the_order_keeps_no_more_than_both_calls_by_themselves():
    eight = over(8, pipeline=8, micro_batches=16)
    costs = StageCost(12, 24, 12), StageCost(9, 18, 6)
    order = fused_order(eight, opposite(eight, eight), find_schedules(eight, opposite(eight, eight), costs))
    kept, most = dict.fromkeys(range(8), 0), 0
    for x in order.instructions:
        worker, size = (x.stage, 12) if x.pipe == 0 else (7 - x.stage, 6)
        kept[worker] += size if x.forward else -size
        most = max(most, kept[worker])
    assert most <= 8 * 12 + 8 * 6, "1F1B of each keeps 8 micro-batches on its first stage"


def test_stages_that_differ_are_scheduled_by_what_each_takes():
    """A head makes the last stage of one twice as long: the bound is that of its worker, and it is reached."""
    four = over(4, pipeline=4, micro_batches=8)
    costs = StageCost((1, 1, 1, 0), (2, 2, 2, 6), 1), StageCost((1, 1, 1, 0), (2, 2, 2, 3), 1)
    (schedule,) = find_schedules(four, opposite(four, four), costs)
    assert [pipe.workers for pipe in schedule.pipes] == [(0, 1, 2, 3), (3, 2, 1, 0)]
    assert schedule.pipes[0].forward == (167, 167, 167, 1) and schedule.pipes[0].backward == (333, 333, 333, 1000)
    ends = max(x.backward[3] for x in schedule.pipes if isinstance(x.backward, tuple))
    assert ends == 1000
    exact = (Pipe((0, 1, 2, 3), 8, *costs_of(costs[0])), Pipe((3, 2, 1, 0), 8, *costs_of(costs[1]), model=1))
    assert makespan(Schedule(exact, schedule.orders)) <= 1.03 * lower_bound(exact)


def costs_of(cost: StageCost) -> tuple[Any, Any, Any]:
    return cost.forward, cost.backward, cost.activation


def with_found(plan: Plan, graph: CallGraph) -> Plan:
    turned = oppose(plan, graph)
    return dataclasses.replace(
        plan, schedules=find_schedules(turned.placements["actor.train"], turned.placements["critic.train"], COSTS)
    )


def test_a_plan_with_its_schedule_is_read_as_it_was_written_and_runs_by_it():
    plan = with_found(*plan_of(FOUR, TWO))
    _, graph = plan_of(FOUR, TWO)
    again = read(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.schedules == plan.schedules
    check_fusion(again, graph)
    turned = oppose(again, graph)
    first, second = turned.placements["actor.train"], turned.placements["critic.train"]
    order = fused_order(first, second, again.schedules)
    assert order.instructions == topological_order(plan.schedules[0])  # of one set of groups
    assert with_schedules(turned, graph, Workload(()), reference_costs(8, 8)) is turned


def edited(plan: Plan, change: Callable[[Any], None]) -> Plan:
    tree = json.loads(json.dumps(plan.to_json()))
    change(tree[SCHEDULES])
    return read(tree)


def forwards_first(schedules: Any) -> None:
    for worker, order in enumerate(schedules[0]["orders"]):
        words = sorted(order.split(), key=lambda word: (word[0] == "B", not word.startswith(("F0", "B0"))))
        schedules[0]["orders"][worker] = " ".join(words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda schedules: schedules[0]["orders"].reverse(), "Worker 0 of a schedule: must run its own stages."),
        (lambda schedules: schedules[0]["orders"].pop(), "A schedule: every worker of its pipes must have an order."),
        (lambda schedules: schedules[0].update(version=7), "version must be 2. Got 7."),
        (
            lambda schedules: schedules[0]["orders"].__setitem__(0, "F0.0.0"),
            "every instruction of its pipes must stand once.",
        ),
        (
            forwards_first,
            "must keep no more than both calls by themselves. Worker 0 of a schedule: must keep activations",
        ),
    ],
)
def test_a_schedule_that_was_edited_wrongly_is_refused(change, message):
    many = over(8, pipeline=4, tensor=2, micro_batches=8)
    plan, graph = plan_of(many, many)
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        check_fusion(edited(with_found(plan, graph), change), graph)
    assert str(error.value).startswith((f"plan.{SCHEDULES}: ", f"{SCHEDULES}: "))
    assert str(error.value).endswith("the run finds its own; or plan again.")


def test_a_schedule_of_other_groups_is_refused():
    plan, graph = plan_of(FOUR, TWO)
    fewer = over(8, pipeline=4, tensor=2, micro_batches=2)
    other = with_found(*plan_of(fewer, TWO)).schedules
    message = (
        f"plan.{SCHEDULES}: must have a schedule for all groups of both calls. Got none for 1 group of 4 stages in 4 "
        "micro-batches and 2 groups of 2 stages in 2 micro-batches over workers 0-1-2-3, 1-0, 3-2, but 1 group of 4 "
        "stages in 2 micro-batches and 2 groups of 2 stages in 2 micro-batches over workers 0-1-2-3, 1-0, 3-2. Remove "
        f"`{SCHEDULES}`, and the run finds its own; or plan again."
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_fusion(dataclasses.replace(plan, schedules=other), graph)
    right = with_found(plan, graph).schedules
    with pytest.raises(PlanError, match="must have one schedule for all groups that are alike"):
        check_fusion(dataclasses.replace(plan, schedules=right + other), graph)
    with pytest.raises(PlanError, match=re.escape(f"plan.{SCHEDULES}: are for calls that are fused. Got no `fuse`.")):
        check_fusion(dataclasses.replace(with_found(plan, graph), fuse=()), graph)
    with pytest.raises(ConfigError, match=re.escape(f"plan: {SCHEDULES}: expected a list. Got 3.")):
        read({SCHEDULES: 3})
    assert dataclasses.replace(plan, schedules=()).to_json().get(SCHEDULES) is None


def test_devices_in_an_order_that_breaks_stages_apart():
    broken = dataclasses.replace(TWO, devices=(0, 2, 1, 3, 4, 6, 5, 7))
    message = "plan.fuse: stages of both calls must lie on the same devices. Got [0, 1, 2, 3, 4, 5, 6, 7] and [0, 2, 1"
    with pytest.raises(PlanError, match=re.escape(message)):
        find_schedules(FOUR, broken, COSTS)
    plan, graph = plan_of(FOUR, broken)
    with pytest.raises(PlanError, match=re.escape(message)):
        check_fusion(plan, graph)
