"""Graphs in parts: which calls they have, in which order, and what is refused."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import CallGraph, Ref
from jaxrlhf.config.device_text import devices_from_text
from jaxrlhf.config.plan_config import Placement, Tail, expand_plan
from jaxrlhf.config.reading import ConfigError, build
from jaxrlhf.planner.plans.check_plan import check, tail_warnings
from jaxrlhf.planner.plans.parts import in_order, in_parts
from jaxrlhf.planner.plans.plan import Plan, PlanData, PlanError
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.assembly import assemble
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.testing import small_run

TWO, ONE = Strategy(data=2), Strategy()


@functools.cache
def ppo() -> Any:
    """16 prompts, a response to each."""
    return assemble(small_run("ppo"), 8, 4).train


def planned(**placements: Placement) -> Plan:
    named = {name.replace("__", "."): placement for name, placement in placements.items()}
    return dataclasses.replace(ppo().plan, placements={**ppo().plan.placements, **named})


def expanded(**placements: Placement) -> tuple[CallGraph, Plan]:
    return in_parts(ppo().graph, planned(**placements))


def names(graph: CallGraph) -> list[str]:
    return [call.name for call in graph.calls]


def sizes(graph: CallGraph, call: str) -> list[int]:
    """Rows of the blocks of a call, in order."""
    parts = [c for c in graph.calls if c.part is not None and c.part.of == call]
    return [c.output_refs[0].shape[0] for c in parts if c.output_refs]


def test_whole_calls_stay_what_they_are():
    graph, plan = ppo().graph, ppo().plan
    assert in_parts(graph, plan) == (graph, plan)


def test_parts_follow_the_blocks_of_the_generation():
    graph, plan = expanded(
        actor__generate=Placement((0, 1), TWO, parts=2),
        reference__logprobs=Placement((4, 5), TWO, parts=2),
        reward__scores=Placement(parts=2),
    )
    assert names(graph)[:6] == [
        "actor.generate/1", "reference.logprobs/1", "reward.scores/1",
        "actor.generate/2", "reference.logprobs/2", "reward.scores/2",
    ]  # fmt: skip
    assert sizes(graph, "actor.generate") == sizes(graph, "reference.logprobs") == [8, 8]
    assert plan.placements["reference.logprobs/2"] == Placement((4, 5), TWO)
    calls = {call.name: call for call in graph.calls}
    assert graph.dependencies(calls["actor.generate/2"]) == ("actor.generate/1",)
    assert graph.dependencies(calls["reference.logprobs/1"]) == ("actor.generate/1",)
    whole = calls["actor.generate"]
    assert whole.kind == "compute" and graph.dependencies(whole) == ("actor.generate/1", "actor.generate/2")
    assert names(graph).index("critic.values") > names(graph).index("actor.generate"), "it is whole, and takes all rows"
    for call in graph.calls:
        assert set(graph.dependencies(call)) <= set(names(graph)[: names(graph).index(call.name)])


def test_parts_on_devices_of_the_generation_wait_until_it_has_ended():
    graph, _ = expanded(
        actor__generate=Placement((0, 1), TWO, parts=2, tail=Tail((0,), ONE, rows=0.25)),
        reference__logprobs=Placement((0, 1), TWO, parts=2),
        critic__values=Placement((1,), ONE, parts=2, shares=(Placement((0,), ONE, rows=0.25),)),
    )
    order = names(graph)
    assert order[:4] == ["actor.generate/1", "actor.generate/2", "actor.generate/3", "critic.values/1"]
    assert order.index("reference.logprobs/1") > order.index("actor.generate/3"), "device 0 is that of the tail"
    tail = next(call for call in graph.calls if call.name == "actor.generate/3")
    assert graph.dependencies(tail) == ("actor.generate/2",)
    assert sizes(graph, "actor.generate") == [6, 6, 4]
    assert sizes(graph, "critic.values") == [6, 6, 4], "as many parts as blocks"


def test_blocks_that_differ_are_cut_anew():
    graph, _ = expanded(
        actor__generate=Placement((0, 1), TWO, parts=2), reference__logprobs=Placement((4,), ONE, parts=3)
    )
    calls = {call.name: call for call in graph.calls}
    assert sizes(graph, "reference.logprobs") == [5, 5, 6]
    across = calls["reference.logprobs/2.rows"]
    assert across.kind == "compute" and across.args[1] == ((5, 8), (0, 2))
    assert graph.dependencies(across) == ("actor.generate/1", "actor.generate/2")
    assert names(graph).index("reference.logprobs/1") < names(graph).index("actor.generate/2")


@pytest.mark.parametrize("rows", [i / 10 for i in range(11)])
@pytest.mark.parametrize("on", [ONE, Strategy(data=4), Strategy(data=3)])
def test_every_sequence_is_handed_on_once(rows, on):
    tail = Tail(tuple(range(on.num_devices)), on, parts=2, rows=rows)
    graph, _ = expanded(
        actor__generate=Placement((0, 1), TWO, parts=3, shares=(Placement((4,), ONE, rows=0.25, parts=2),), tail=tail)
    )
    assert sum(sizes(graph, "actor.generate")) == 16
    moved = sum(sizes(graph, "actor.generate")) - sum(
        rows for call in graph.calls if call.part and not call.part.migrate and call.output_refs
        for rows in [call.output_refs[0].shape[0]] if call.part.of == "actor.generate"
    )  # fmt: skip
    assert moved <= 16 * rows and moved % on.num_row_shards == 0


SPANS = (None, None, (6, 10))


def test_blocks_come_back_in_order():
    whole, places = np.arange(10) * 1.5, np.random.default_rng(0).permutation(6).astype(np.int32)
    blocks = [[whole[:6][places][:2]], [whole[:6][places][2:]], [whole[6:]]]
    (joined,) = in_order(jax.tree.map(jnp.asarray, blocks), list(map(jnp.asarray, (places[:2], places[2:]))), SPANS)
    np.testing.assert_array_equal(joined, whole.astype(joined.dtype))


def test_references_are_those_of_the_parts():
    graph, _ = expanded(actor__generate=Placement((0, 1), TWO, parts=2), reward__scores=Placement(parts=4))
    there = {"state", "data"} | set(names(graph))
    assert all(ref.call in there for call in graph.calls for ref in call.refs)
    for call in graph.calls:
        for ref in call.refs:
            source = next((c for c in graph.calls if c.name == ref.call), None)
            if source is not None:
                same = [x for x in source.output_refs if x.leaf == ref.leaf and x.call == ref.call]
                assert [(x.shape, x.dtype) for x in same] == [(ref.shape, ref.dtype)], (call.name, ref)
    assert isinstance(graph.results[0], dict) and all(isinstance(x, Ref) for x in call.refs)


REFUSED = {
    "parts of a compute call": (
        dict(ppo_batch=Placement((0,), ONE, parts=2)), "Got a call of kind 'compute', which may need a statistic",
    ),
    "more parts than sequences": (
        dict(actor__generate=Placement((0, 1), TWO, parts=9)),
        "plan.calls.actor.generate.parts: must be at most the sequences of each row shard, 8. Got 9. Use fewer parts.",
    ),
    "more parts than rows": (
        dict(reward__scores=Placement(parts=17)),
        "plan.calls.reward.scores.parts: must be at most its rows, 16. Got 17. Use fewer parts.",
    ),
    "a share without rows": (
        dict(actor__generate=Placement((0, 1), TWO, shares=(Placement((4, 5, 6, 7), Strategy(data=4), rows=0.1),))),
        "plan.calls.actor.generate: each placement of a call must have rows divisible by 4. Got 0.1 of 16 rows for "
        "placement 2 of 2. Change `rows`, or leave the placement out.",
    ),
    "shares on one device": (
        dict(actor__generate=Placement((0, 1), TWO, shares=(Placement((1,), ONE, rows=0.5),))),
        "plan.calls.actor.generate: each placement of a call must have devices of its own. Got 1 in two of them.",
    ),
    "a tail of an inference": (
        dict(reference__logprobs=Placement((0,), ONE, tail=Tail((1,), ONE))),
        "plan.calls.reference.logprobs.tail: is for calls that generate. Got a call of kind 'infer'.",
    ),
    "shares of a Python function": (
        dict(reward__scores=Placement(shares=(Placement(rows=0.5),))),
        "plan.calls.reward.scores: a call on the host has no shares and no tail. Leave all but `parts` out.",
    ),
    "micro-batches": (
        dict(actor__generate=Placement((0,), Strategy(micro_batches=2), parts=2)),
        "plan.calls.actor.generate.micro_batches: must be 1 for a generation in parts. Got 2. Use slots",
    ),
    "prompts that do not divide": (
        dict(actor__generate=Placement((0, 1, 2), Strategy(data=3), parts=2)),
        "plan.calls.actor.generate: data x fsdp x pipeline must divide the prompts of a generation in parts. Got 3 for "
        "16 prompts of placement 1.",
    ),
    "caches from other stages": (
        dict(actor__generate=Placement((0, 1), Strategy(pipeline=2), tail=Tail((2,), ONE))),
        "plan.calls.actor.generate.tail.pipeline: must be that of all placements where sequences move with their "
        "caches. Got 1 and 2 stages. Use `migrate: prefill`, or equal numbers of stages.",
    ),
    "prefill over stages": (
        dict(actor__generate=Placement((0,), ONE, tail=Tail((1, 2), Strategy(pipeline=2), migrate="prefill"))),
        "plan.calls.actor.generate.tail.pipeline: must be 1 where sequences are prefilled anew. Got 2.",
    ),
    "slots of a tail": (
        dict(actor__generate=Placement((0,), ONE, tail=Tail((1,), Strategy(slots=4)))),
        "plan.calls.actor.generate.tail.slots: are as many as sequences move. Got 4. Leave slots out.",
    ),
    "micro-batches of a tail": (
        dict(actor__generate=Placement((0,), ONE, tail=Tail((1,), Strategy(micro_batches=2)))),
        "plan.calls.actor.generate.tail.micro_batches: must be 1. Got 2. Leave micro_batches out.",
    ),
    "a tail on devices that do not exist": (
        dict(actor__generate=Placement((0,), ONE, tail=Tail((9,), ONE))), "plan.calls.actor.generate.tail.devices",
    ),
    "parts that do not divide over their devices": (
        dict(reference__logprobs=Placement(tuple(range(8)), Strategy(data=8), parts=4)),
        "must be at most the 4 rows of a part. Got 1 x 8 x 1 = 8. Lower a degree, or use fewer parts, or another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    placements, message = REFUSED[name]
    models = {name: role.model for name, role in ppo().roles.items() if isinstance(role, ModelRole)}
    with pytest.raises(PlanError, match=re.escape(message)):
        check(planned(**placements), ppo().graph, models, 8, 4)


def read(entry: Any) -> Placement:
    tree = {"plan": {"calls": {"actor.generate": entry}}}
    expand_plan(tree, "run.yaml")
    return build(PlanData, tree["plan"], where="run.yaml", path="plan").plan().placements["actor.generate"]


def test_a_list_of_placements_is_a_call_in_shares():
    tail = {"devices": "0-1", "data": 2, "rows": 0.1}
    given = read([{"devices": "0-3", "data": 4, "tail": tail}, {"devices": "4-7", "data": 4, "rows": 0.5, "parts": 2}])
    share = Placement(devices_from_text("4-7"), Strategy(data=4), rows=0.5, parts=2)
    assert given.shares == (share,) and given.tail == Tail((0, 1), TWO, rows=0.1)
    plan = Plan({"actor.generate": given})
    again = build(PlanData, plan.to_json(), where="a plan").plan()
    assert again == plan, "a plan in JSON is read back as it was"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([{"parts": 0}], "plan.calls.actor.generate.parts: must be at least 1. Got 0."),
        ([{}, {"rows": 1.0}], "rows: must be less than 1 for each placement but the first. Got 1.0."),
        ([{"rows": 0.5}, {"rows": 0.5}], "rows: must be left out for the first placement, which has what is left. Got"),
        ([{}, {"rows": 0.6}, {"rows": 0.5}], "rows: must leave rows to the first placement. Got 1.1. Lower the"),
        ([{}, {"rows": 0.5, "tail": {}}], "tail: must stand with the first placement of a call."),
        ([{"tail": {"rows": 1.5}}], "plan.calls.actor.generate.tail.rows: must lie in [0, 1]. Got 1.5."),
        ([{"tail": {"migrate": "fly"}}], "plan.calls.actor.generate.tail.migrate: expected one of cache, prefill."),
    ],
)
def test_entries_that_are_refused(entry, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(entry)


def test_a_tail_to_which_nothing_moves_gets_a_note():
    tail = Tail((0, 1, 2, 3), Strategy(data=4), rows=0.1)
    (note,) = tail_warnings(planned(actor__generate=Placement((0, 1), TWO, tail=tail)), ppo().graph)
    assert note == (
        "plan.calls.actor.generate.tail: no sequence moves, since 0.1 of them are fewer than divide over its devices. "
        "Raise rows, or use fewer devices for the tail."
    )
    enough = dataclasses.replace(tail, rows=0.25)
    assert not tail_warnings(planned(actor__generate=Placement((0, 1), TWO, tail=enough)), ppo().graph)
