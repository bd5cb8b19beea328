"""Plans: how they are written, what they may say, and what is said of them."""

import dataclasses
import json
import re

import pytest

from jaxrlhf.config.reading import ConfigError
from jaxrlhf.planner.plans.check_plan import check, check_entries, check_offload
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError, resolve
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.planner.plans.splits import copied_rows, splits_rows, term_rows
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import ppo
from tests.planner.planned_graph import GRAPH, MODELS, NAMES, ONE, Update, make_graph, over, plan_with, read


def test_a_call_takes_its_own_placement_or_that_of_its_name_or_the_default():
    first, second = over(2, data=2), over(4, fsdp=4)
    plan = resolve(GRAPH, ONE, {"actor.generate": first, "actor.generate#2": second})
    assert plan.placements == {
        "actor.generate": first,
        "actor.generate#2": second,
        "halve": ONE,
        "actor.train": ONE,
        "count_up": ONE,
    }
    assert resolve(GRAPH, ONE, {"actor.generate": first}).placements["actor.generate#2"] == first
    assert set(resolve(GRAPH, ONE).placements.values()) == {ONE}


def test_a_plan_is_read_by_call_whatever_its_iteration():
    plan = resolve(GRAPH, ONE, {"actor.train": over(2, data=2)})
    train = GRAPH.calls[4]
    assert plan[train] == plan[dataclasses.replace(train, name="3:actor.train")] == over(2, data=2)


def test_names_of_a_written_plan():
    check_entries(dict.fromkeys(["actor.generate", "actor.generate#2", "actor.train", "halve"], ONE), [GRAPH])
    message = (
        "plan.calls.actor.generated: no call of this run has that name. Calls: actor.generate, actor.generate#2, "
        "actor.train, count_up, halve. Did you mean 'actor.generate'?"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_entries(dict.fromkeys(["actor.generated"], ONE), [GRAPH])
    message = r"plan\.calls\.actor\.train\.slots: are for calls that generate. Got 4 for a call of kind 'train'."
    with pytest.raises(PlanError, match=message):
        check_entries({"actor.train": over(1, slots=4)}, [GRAPH])
    with pytest.raises(PlanError, match=re.escape("plan.calls.actor.train#2: no call of this run has that name.")):
        check_entries(dict.fromkeys(["actor.train#2"], ONE), [GRAPH])
    message = "plan.calls.judge.scores: is plain Python on the host and takes no devices. Got [0, 1]."
    with pytest.raises(PlanError, match=re.escape(message)):
        check_entries({"judge.scores": Placement((0, 1), parts=2)}, [GRAPH])
    check_entries({"judge.scores": Placement(parts=2)}, [GRAPH])


@pytest.mark.parametrize(
    "placement",
    [
        ONE,
        over(8, data=4, tensor=2),
        over(8, data=2, fsdp=2, tensor=2),
        over(8, data=2, tensor=4),  # twice as many as key-value heads
        over(4, fsdp=4, micro_batches=3),
        Placement((7, 6), Strategy(tensor=2)),
    ],
)
def test_plans_that_fit(placement):
    check(resolve(GRAPH, placement), GRAPH, MODELS, num_devices=8)


def test_samples_of_a_prompt_need_a_slot_each():
    step = ppo(num_samples=4, mini_batches=1)
    check(resolve(step.graph, ONE, {"actor.generate": over(1, slots=4)}), step.graph, step.models, num_devices=1)
    message = r"slots: must be at least num_samples=4, since the samples of a prompt enter together. Got 3. Use 4"
    with pytest.raises(PlanError, match=message):
        check(resolve(step.graph, ONE, {"actor.generate": over(1, slots=3)}), step.graph, step.models, num_devices=1)


def test_a_run_on_one_device_has_no_list_of_them():
    where = r"^plan\.calls\.actor\.generate\.devices: must be device 0, the only one of this run\. Got 1, 2\. Lower"
    with pytest.raises(PlanError, match=where):
        check(resolve(GRAPH, over(3, data=3)), GRAPH, MODELS, num_devices=1)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "actor.train",
            Placement((1, 1), Strategy(data=2)),
            ".devices: each device must be listed at most once. Got [1, 1].",
        ),
        (
            "halve",
            Placement((3, 4), Strategy(data=2)),
            ".devices: must be among the 4 devices of this run, 0 to 3. Got 4. Lower the degrees, or "
            "run on more devices.",
        ),
        (
            "actor.generate",
            over(3, data=2, tensor=2),
            ": pipeline x data x fsdp x tensor must be the number of devices, 3. Got 1 x 2 x "
            "1 x 2 = 4. Change a degree or `devices`.",
        ),
        ("actor.generate", over(3, tensor=3), ".tensor: 3 does not divide num_heads=4. Use 1, 2 or 4."),
        (
            "actor.generate#2",
            over(4, data=4, micro_batches=7),
            ": micro_batches x data x fsdp must be at most 24 rows. Got 7 x 4 x 1 = 28. "
            "Lower a degree, or use another batch_size.",
        ),
        (
            "actor.generate",
            over(2, pipeline=2, slots=7),
            ".slots: must be a multiple of the 2 stages, each of which works on as many. Got 7. Use 8.",
        ),
        (
            "actor.generate",
            over(2, data=2, slots=8, shared_prompts=4),
            ".shared_prompts: are for calls that draw several samples of a prompt. Got 4 with num_samples 1. Leave",
        ),
        (
            "actor.generate",
            over(2, data=2, slots=8, micro_batches=3),
            ".micro_batches: must be 1 where a call has slots. Got 3 with slots 8.",
        ),
        (
            "actor.train",
            over(4, data=2, fsdp=2, micro_batches=2),
            ": micro_batches x data x fsdp must divide a mini-batch of 12 rows (24 / 2). Got 2 "
            "x 2 x 2 = 8. Lower a degree, or use another batch_size.",
        ),
    ],
)
def test_plans_that_do_not_fit(name, placement, message):
    with pytest.raises(PlanError, match=re.escape(f"plan.calls.{name}{message}")):
        check(plan_with(name, placement), GRAPH, MODELS, num_devices=4)


@pytest.mark.parametrize(
    ("devices", "devices_per_node"),
    [
        ((2, 3, 4), None),
        ((4, 2, 3), None),
        ((5, 6), 4),
        ((4, 5, 6, 7, 8, 9, 10, 11), 4),
        ((8, 3, 2, 1, 0, 9, 11, 10), 4),
        ((0,), 1),
        ((3, 0), 1),
    ],
)
def test_devices_are_a_part_of_a_node_or_whole_nodes(devices, devices_per_node):
    placement = Placement(devices, Strategy(data=len(devices)))
    check(plan_with("halve", placement), GRAPH, MODELS, 12, devices_per_node)


@pytest.mark.parametrize(
    ("devices", "devices_per_node", "message"),
    [
        ((0, 2, 4), None, "must be a consecutive part of one node, in any order. Got [0, 2, 4]. Use 0-2, say."),
        ((11, 9), None, "must be a consecutive part of one node, in any order. Got [11, 9]. Use 9-10, say."),
        ((8, 11), 4, "must be a consecutive part of one node, in any order. Got [8, 11]. Use 8-9, say."),
        (
            (3, 4),
            4,
            "must be a consecutive part of one node, in any order (a node has 4 devices). Got [3, 4]. Use 2-3, say.",
        ),
        (
            (4, 5, 6, 7, 8, 9),
            4,
            "must be whole nodes (a node has 4 devices). Got [4, 5, 6, 7, 8, 9]. Use 4-11, say.",
        ),
    ],
)
def test_devices_that_lie_scattered(devices, devices_per_node, message):
    placement = Placement(devices, Strategy(data=len(devices)))
    with pytest.raises(PlanError, match=re.escape(f"plan.calls.halve.devices: {message}")):
        check(plan_with("halve", placement), GRAPH, MODELS, 12, devices_per_node)


def test_sizes_that_tensor_splits():
    """A vocabulary is padded where it does not divide."""
    plan, model = resolve(GRAPH, over(2, tensor=2)), MODELS["actor"]
    check(plan, GRAPH, {"actor": dataclasses.replace(model, vocab_size=63)}, num_devices=2)
    message = "plan.calls.actor.generate.tensor: 2 does not divide intermediate_size=63. Use 1, 3, 7, 9, 21 or 63."
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan, GRAPH, {"actor": dataclasses.replace(model, intermediate_size=63)}, num_devices=2)


def test_fsdp_splits_the_hidden_size():
    models = {"actor": dataclasses.replace(MODELS["actor"], hidden_size=34, head_dim=8)}
    message = "plan.calls.actor.generate.fsdp: 4 does not divide hidden_size=34. Use 1, 2, 17 or 34."
    with pytest.raises(PlanError, match=re.escape(message)):
        check(resolve(GRAPH, over(4, fsdp=4)), GRAPH, models, num_devices=4)


def test_rows_that_do_not_divide_are_filled_up_where_each_is_worked_on_by_itself():
    generate = next(call for call in GRAPH.calls if call.plan_name == "actor.generate")
    for placement, copies in ((over(4, data=4, micro_batches=4), 8), (over(3, data=3), 0), (over(5, data=5), 1)):
        check(plan_with("actor.generate", placement), GRAPH, MODELS, num_devices=8)
        assert copied_rows(generate, placement.strategy) == copies
    (row, *_) = plan_rows(plan_with("actor.generate", over(5, data=5)), GRAPH, MODELS)
    assert row["rows"] == 24 and row["cut into"] == "5 a device (1 of no weight among them)"
    train = next(call for call in GRAPH.calls if call.kind == "train")
    assert copied_rows(train, Strategy(data=5)) == 0  # which must divide
    with pytest.raises(
        PlanError, match=r"plan\.calls\.actor\.generate\.rows: data x fsdp must divide them\. Got 24 rows for 5 parts"
    ):
        placement = dataclasses.replace(over(5, data=5), protocol="3D_PROTO")
        check(plan_with("actor.generate", placement), GRAPH, MODELS, num_devices=5)


def test_arrays_are_computed_on_whole_and_need_no_rows():
    check(plan_with("halve", over(4, data=4, micro_batches=5)), GRAPH, MODELS, num_devices=4)
    halve = next(call for call in GRAPH.calls if call.plan_name == "halve")
    for name in ("count_up", "halve"):
        check(plan_with(name, over(5, data=5)), GRAPH, MODELS, num_devices=5)
    assert splits_rows(halve, Strategy(data=4)) and not splits_rows(halve, Strategy(data=5))


def test_mini_batches_divide_the_rows():
    message = (
        "plan.calls.actor.train: mini_batches must divide the rows of the batch. Got 5 for 24 rows. Use 1, 2, 3, 4, "
        "6, 8, 12 or 24, or another batch_size."
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan_with("halve", ONE), make_graph(Update(mini_batches=5)), MODELS, num_devices=1)


def test_every_call_has_a_placement():
    with pytest.raises(PlanError, match=re.escape("plan: needs a placement for every call. Got none for 'halve'.")):
        check(Plan({name: ONE for name in NAMES if name != "halve"}), GRAPH, MODELS, num_devices=1)


def test_rows_of_the_terms_of_a_train_call():
    assert term_rows(GRAPH.calls[4]) == (24,)


def test_json_round_trip():
    strategy = Strategy(fsdp=2, micro_batches=3, remat="layer", balance=True)
    plan = resolve(GRAPH, Placement((5, 2), strategy), {"halve": ONE, "actor.train": over(4, data=4)})
    assert [plan.to_json()["calls"][name]["devices"] for name in NAMES] == ["5,2", "5,2", "0", "0-3", "5,2"]
    assert read(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_with_offload_and_protocols():
    plan = Plan({"halve": Placement((0,), Strategy(), protocol="ONE_TO_ALL")}, offload=("reference", "reward"))
    assert plan.to_json()["offload"] == ["reference", "reward"]
    assert read(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(ConfigError, match=re.escape("plan: offload: expected a list. Got 'reward'. Write [reward].")):
        read({"offload": "reward"})


def test_roles_to_offload():
    check_offload(["actor"], ["actor", "judge"], ["actor"])
    assert resolve(GRAPH, ONE, offload=["actor"]).offload == ("actor",)
    for offload, message in (
        (["actr"], "plan.offload: must be roles of the run. Got 'actr'. Roles: actor, judge. Did you mean 'actor'?"),
        (
            ["judge"],
            "plan.offload: 'judge' has no weights of its own. Roles with weights: actor. Remove it.",
        ),
        (["actor"] * 2, "plan.offload: each role must be listed at most once. Got 'actor' again. Remove it."),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            check_offload(offload, ["actor", "judge"], ["actor"])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Placement((0,), Strategy(), protocol="DP_PROTOCOL"),
            "plan.calls.halve.protocol: must be auto or one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, "
            "DP_PROTO, ALL_TO_ALL. Got 'DP_PROTOCOL'. Did you mean 'DP_PROTO'?",
        ),
        (
            Placement(tuple(range(16)), Strategy(data=8, tensor=2), protocol="DP_PROTO"),
            "plan.calls.halve.rows: pipeline x data x fsdp x tensor must divide them. Got 24 rows for 16 parts. Lower",
        ),
    ],
)
def test_protocols_of_a_plan(placement, message):
    check(plan_with("halve", Placement((0, 1), Strategy(tensor=2), protocol="DP_PROTO")), GRAPH, MODELS, 16)
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan_with("halve", placement), GRAPH, MODELS, 16)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"devices": [0]}, ".devices: expected text. Got [0]."),
        ({"devices": "all"}, ".devices: must be positions of devices, such as '0-3' or '3,2,1,0'. Got 'all'."),
        ({"devices": "0-9999999"}, ".devices: must be positions of devices"),
        ({"datas": 1}, ": unknown key 'datas'. Known: devices, data, fsdp, "),
        ({"data": 0}, ".data: must be at least 1. Got 0."),
        ({"data": "1"}, ".data: expected an integer. Got '1'."),
        ({"offload": True}, ": unknown key 'offload'."),
        (None, ": expected a mapping. Got null."),
    ],
)
def test_json_that_is_no_plan(entry, why):
    with pytest.raises(ConfigError, match=re.escape(f"plan: calls.halve{why}")):
        read({"calls": {"actor.train": {"devices": "0"}, "halve": entry}})


def test_devices_that_are_left_out_are_the_first_ones():
    plan = read({"calls": {"halve": {"fsdp": 2, "tensor": 2}}})
    assert plan.placements["halve"] == over(4, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (ONE, "one device on 0"),
        (Placement((4, 5, 6, 7), Strategy(data=2, tensor=2)), "data 2 x tensor 2 on 4-7"),
        (Placement((6, 4), Strategy(fsdp=2)), "fsdp 2 on 6,4"),
    ],
)
def test_a_placement_in_words(placement, words):
    assert str(placement) == words


def test_rows_of_the_plan():
    plan = Plan(
        {
            "actor.generate": over(4, data=4, micro_batches=2),
            "actor.generate#2": ONE,
            "halve": over(2, data=2),
            "actor.train": over(4, data=2, fsdp=2, micro_batches=3),
            "count_up": ONE,
        }
    )
    expected = [
        ("actor.generate", "-", "data 4 on 0-3", 24, 168, "2 micro-batches of 12, 3 a device"),
        ("actor.generate#2", "-", "one device on 0", 24, 168, "24 a device"),
        ("judge.scores", "actor.generate", "host", 24, 168, "-"),
        ("halve", "actor.generate", "data 2 on 0-1", 24, None, "12 a device"),
        (
            "actor.train",
            "actor.generate, actor.generate#2, halve",
            "data 2 x fsdp 2 on 0-3",
            24,
            168,
            "3 epochs of 2 updates of 12 rows in 3 micro-batches of 4, 1 a device",
        ),
        ("count_up", "-", "one device on 0", 0, None, "-"),
    ]
    columns = ("call", "needs", "placement", "rows", "tokens", "cut into")
    assert plan_rows(plan, GRAPH, MODELS) == [dict(zip(columns, row, strict=True)) for row in expected]
