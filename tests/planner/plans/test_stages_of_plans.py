"""What a plan may say of pipeline stages, and what is said of them."""

import dataclasses
import re

import pytest

from jaxrlhf.planner.plans.check_plan import check, check_entries, stage_warnings
from jaxrlhf.planner.plans.plan import Placement, PlanError, resolve
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.planned_graph import GRAPH, MODELS, over, plan_with

DEEP = {"actor": dataclasses.replace(MODELS["actor"], num_layers=5)}


@pytest.mark.parametrize(
    "placement",
    [
        over(4, pipeline=4),
        over(4, pipeline=2, data=2, micro_batches=3),
        over(8, pipeline=2, fsdp=2, tensor=2, schedule="gpipe"),
        Placement((0, 1), Strategy(pipeline=2), protocol="3D_PROTO"),
    ],
)
def test_plans_with_stages_that_fit(placement):
    check(resolve(GRAPH, placement), GRAPH, DEEP, num_devices=8)
    check(plan_with("actor.train", over(2, pipeline=2, chunks=2)), GRAPH, DEEP, num_devices=8)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "actor.train",
            over(8, pipeline=8),
            ": pipeline must be at most num_layers=5, a layer for each stage. Got 8. Use pipeline 5 or fewer.",
        ),
        (
            "actor.train",
            over(2, pipeline=2, chunks=3),
            ": pipeline x chunks must be at most num_layers=5, a layer for each stage. Got 2 x "
            "3 = 6. Use chunks 2 or fewer.",
        ),
        (
            "actor.train",
            over(4, pipeline=4, chunks=2),
            ": pipeline x chunks must be at most num_layers=5, a layer for each stage. Got 4 x "
            "2 = 8. Leave chunks out.",
        ),
        (
            "actor.generate",
            over(4, pipeline=2, chunks=2, data=2),
            ".chunks: must be 1 where a call generates, since its stages have one part of the "
            "layers each. Got 2. Leave chunks out; if they are from `default`, give the call an entry of its own, "
            "{pipeline: 2, data: 2, fsdp: 1, tensor: 1}.",
        ),
        (
            "actor.generate",
            over(8, pipeline=4, data=2, micro_batches=4),
            ": micro_batches x pipeline x data x fsdp must be at most 24 rows. Got 4 x 4 x 2 "
            "x 1 = 32. Lower a degree, or use another batch_size.",
        ),
        (
            "actor.train",
            Placement((0, 1), Strategy(pipeline=2), protocol="DP_PROTO"),
            ".protocol: must give each stage all rows, split over data x fsdp, where a call has "
            "stages. Got 'DP_PROTO'. Use auto or 3D_PROTO.",
        ),
    ],
)
def test_stages_that_do_not_fit(name, placement, message):
    with pytest.raises(PlanError, match=re.escape(f"plan.calls.{name}{message}")):
        check(plan_with(name, placement), GRAPH, DEEP, num_devices=8)


def test_a_model_of_one_layer_has_no_stages():
    model = {"actor": dataclasses.replace(MODELS["actor"], num_layers=1)}
    with pytest.raises(PlanError, match=re.escape("num_layers=1, a layer for each stage. Got 2. Leave pipeline out.")):
        check(plan_with("actor.train", over(2, pipeline=2)), GRAPH, model, num_devices=8)


def test_arrays_have_no_stages_but_those_of_the_default():
    entries = {"actor.train": over(2, pipeline=2)}
    check_entries(entries, [GRAPH])
    check(resolve(GRAPH, over(4, pipeline=2, data=2), entries), GRAPH, DEEP, num_devices=4)
    message = (
        "plan.calls.halve.pipeline: must be 1, since a `compute` call has no layers to put on stages. Got 2. Leave "
        "pipeline out, or use data."
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_entries({**entries, "halve": over(2, pipeline=2)}, [GRAPH])


def test_fewer_micro_batches_than_stages_are_allowed_with_a_warning():
    plan = resolve(GRAPH, over(2, pipeline=2, micro_batches=1))
    check(plan, GRAPH, DEEP, num_devices=2)
    (warning,) = stage_warnings(plan, GRAPH)  # generation makes as many as there are stages, arrays have no stages
    assert warning == (
        "plan.calls.actor.train: 1 micro-batch for 2 pipeline stages: the devices wait 50% of the time (the bubble "
        "fraction). Use 2 micro-batches or more, or fewer stages."
    )
    assert not stage_warnings(resolve(GRAPH, over(2, pipeline=2, micro_batches=2)), GRAPH)


def test_the_table_says_how_layers_are_cut():
    def cut(name, placement):
        (row,) = (r for r in plan_rows(plan_with(name, placement), GRAPH, DEEP) if r["call"] == name)
        return row["cut into"]

    assert cut("actor.train", over(2, pipeline=2, micro_batches=2)).endswith(
        "in 2 micro-batches of 6, 6 a device; through 2 stages of 3 + 2 layers, 1F1B"
    )
    assert cut("actor.train", over(2, pipeline=2, micro_batches=2, schedule="gpipe")).endswith(" layers, GPipe")
    assert cut("actor.train", over(2, pipeline=2, chunks=2)).endswith(
        "through 2 stages with 2 chunks each of 2 + 1 + 1 + 1 layers, interleaved 1F1B"
    )
    assert cut("actor.generate", over(4, pipeline=2, data=2, micro_batches=2)) == (
        "4 micro-batches of 6, 3 a device; through 2 stages of 3 + 2 layers"
    )
    assert cut("actor.generate", over(5, pipeline=5)).endswith("through 5 stages of 1 layer")
    more = {"actor": dataclasses.replace(MODELS["actor"], num_layers=8)}
    row = plan_rows(plan_with("actor.train", over(5, pipeline=5)), GRAPH, more)[4]
    assert row["cut into"].endswith("through 5 stages of 3 x 2 + 2 x 1 layers, 1F1B")
    assert "stages" not in cut("halve", over(2, pipeline=2))
