import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plan import (
    DEFAULT,
    Placement,
    Plan,
    PlanError,
    TrainSizes,
    check,
    check_computes,
    check_names,
    check_offload,
    copied_rows,
    plan_rows,
    resolve,
    splits_rows,
    stage_warnings,
    train_sizes,
)
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import Method, RoleMethods, compute, trace
from tests.made_up_step import one_term

ROWS, COLUMNS = 24, 7
ONE = Placement((0,), Strategy())
MODELS = {"actor": ModelConfig(vocab_size=96, hidden_size=48, intermediate_size=64, num_heads=4, num_kv_heads=2)}


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 3


def halve(tokens):
    return {"tokens": tokens, "half": tokens // 2}


def count_up(count):
    return count + 1


def step(roles, state, prompts, update):
    rollout = roles.actor.generate(prompts)
    roles.actor.generate(prompts)
    roles.judge.scores(rollout)
    batch = compute(halve, rollout)
    return roles.actor.train("loss", batch, update), compute(count_up, state)


def make_graph(update: Update = Update()) -> CallGraph:
    tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    methods = {
        "generate": Method("generate", lambda prompts: tokens),
        "train": Method("train", lambda terms, update: scalar, row_wise=False, bind=one_term),
    }
    roles = {
        "actor": RoleMethods(methods, weights="actor"),
        "judge": RoleMethods({"scores": Method("host", lambda rollout: jax.ShapeDtypeStruct((ROWS,), jnp.float32))}),
    }
    return trace(step, roles, scalar, jax.ShapeDtypeStruct((ROWS, 3), jnp.int32), update)


GRAPH = make_graph()
NAMES = ["actor.generate", "actor.generate#2", "halve", "actor.train", "count_up"]


def over(num_devices: int, **strategy: Any) -> Placement:
    return Placement(tuple(range(num_devices)), Strategy(**strategy))


def test_a_call_takes_its_own_placement_or_that_of_its_name_or_the_default():
    first, second = over(2, data=2), over(4, fsdp=4)
    plan = resolve({DEFAULT: ONE, "actor.generate": first, "actor.generate#2": second}, GRAPH)
    assert plan.placements == {
        "actor.generate": first,
        "actor.generate#2": second,
        "halve": ONE,
        "actor.train": ONE,
        "count_up": ONE,
    }
    assert resolve({DEFAULT: ONE, "actor.generate": first}, GRAPH).placements["actor.generate#2"] == first
    assert set(resolve({DEFAULT: ONE}, GRAPH).placements.values()) == {ONE}


def test_a_plan_is_read_by_call_whatever_its_iteration():
    plan = resolve({DEFAULT: ONE, "actor.train": over(2, data=2)}, GRAPH)
    train = GRAPH.calls[4]
    assert plan[train] == plan[dataclasses.replace(train, name="3:actor.train")] == over(2, data=2)


def test_names_of_a_written_plan():
    check_names([DEFAULT, "actor.generate", "actor.generate#2", "actor.train", "halve"], [GRAPH])
    message = (
        "plan.actor.generated: no call of this run has that name. Calls: actor.generate, actor.generate#2, "
        "actor.train, count_up, default, halve. Did you mean 'actor.generate'?"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_names(["actor.generated"], [GRAPH])
    with pytest.raises(PlanError, match=re.escape("plan.actor.train#2: no call of this run has that name.")):
        check_names(["actor.train#2"], [GRAPH])
    message = "plan.judge.scores: is plain Python on the host and takes no devices. Remove it."
    with pytest.raises(PlanError, match=re.escape(message)):
        check_names(["judge.scores"], [GRAPH])


def plan_with(name: str, placement: Placement) -> Plan:
    return Plan({**dict.fromkeys(NAMES, ONE), name: placement})


@pytest.mark.parametrize(
    "placement",
    [
        ONE,
        over(8, data=4, tensor=2),
        over(8, data=2, fsdp=2, tensor=2),
        over(4, fsdp=4, micro_batches=3),
        Placement((7, 6), Strategy(tensor=2)),
    ],
)
def test_plans_that_fit(placement):
    check(resolve({DEFAULT: placement}, GRAPH), GRAPH, MODELS, num_devices=8)


def test_a_run_on_one_device_has_no_list_of_them():
    where = (
        r"^plan\.actor\.generate\.devices: must be device 0, the only one of this run\. Got 1, 2\. Lower the degrees"
    )
    with pytest.raises(PlanError, match=where):
        check(resolve({DEFAULT: Placement((0, 1, 2), Strategy(data=3))}, GRAPH), GRAPH, MODELS, num_devices=1)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "actor.train",
            Placement((1, 1), Strategy(data=2)),
            "plan.actor.train.devices: a device may stand there once. Got [1, 1].",
        ),
        (
            "halve",
            Placement((3, 4), Strategy(data=2)),
            "plan.halve.devices: must be among the 4 devices of this run, 0 to 3. Got 4. Lower the degrees, "
            "or run on more "
            "devices.",
        ),
        (
            "halve",
            Placement((-1,), Strategy()),
            "plan.halve.devices: must be among the 4 devices of this run, 0 to 3. Got -1.",
        ),
        (
            "actor.generate",
            over(3, data=2, tensor=2),
            "plan.actor.generate: pipeline x data x fsdp x tensor must be the number of devices, 3. Got 1 x 2 x 1 x 2 "
            "= 4. Change a degree or `devices`.",
        ),
        (
            "actor.generate",
            over(3, tensor=3),
            "plan.actor.generate.tensor: 3 does not divide num_heads=4. Use 1, 2 or 4.",
        ),
        (
            "actor.generate",
            over(4, tensor=4),
            "plan.actor.generate.tensor: 4 does not divide num_kv_heads=2. Use 1 or 2.",
        ),
        (
            "actor.generate#2",
            over(4, data=4, micro_batches=7),
            "plan.actor.generate#2: micro_batches x data x fsdp must be at most 24 rows. Got 7 x 4 x 1 = 28. Lower "
            "a degree, or "
            "use another batch_size.",
        ),
        (
            "actor.train",
            over(4, data=2, fsdp=2, micro_batches=2),
            "plan.actor.train: micro_batches x data x fsdp must divide a mini-batch of 12 rows (24 / 2). Got 2 "
            "x 2 x 2 = 8. "
            "Lower a degree, or use another batch_size.",
        ),
    ],
)
def test_plans_that_do_not_fit(name, placement, message):
    with pytest.raises(PlanError, match=re.escape(message)):
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
    with pytest.raises(PlanError, match=re.escape(f"plan.halve.devices: {message}")):
        check(plan_with("halve", placement), GRAPH, MODELS, 12, devices_per_node)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            "intermediate_size",
            "plan.actor.generate.tensor: 2 does not divide intermediate_size=63. Use 1, 3, 7, 9, 21 or 63.",
        ),
        ("vocab_size", "plan.actor.generate.tensor: 2 does not divide vocab_size=63. Use 1, 3, 7, 9, 21 or 63."),
    ],
)
def test_every_size_that_tensor_splits(size, message):
    models = {"actor": dataclasses.replace(MODELS["actor"], **{size: 63})}
    with pytest.raises(PlanError, match=re.escape(message)):
        check(resolve({DEFAULT: over(2, tensor=2)}, GRAPH), GRAPH, models, num_devices=2)


def test_fsdp_splits_the_hidden_size():
    models = {"actor": dataclasses.replace(MODELS["actor"], hidden_size=34, head_dim=8)}
    message = "plan.actor.generate.fsdp: 4 does not divide hidden_size=34. Use 1, 2, 17 or 34."
    with pytest.raises(PlanError, match=re.escape(message)):
        check(resolve({DEFAULT: over(4, fsdp=4)}, GRAPH), GRAPH, models, num_devices=4)


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
    check(resolve({DEFAULT: placement}, GRAPH), GRAPH, DEEP, num_devices=8)
    check(plan_with("actor.train", over(2, pipeline=2, chunks=2)), GRAPH, DEEP, num_devices=8)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "actor.train",
            over(8, pipeline=8),
            "plan.actor.train: pipeline must be at most num_layers=5, a layer for each stage. Got 8. Use pipeline 5 or "
            "fewer.",
        ),
        (
            "actor.train",
            over(2, pipeline=2, chunks=3),
            "plan.actor.train: pipeline x chunks must be at most num_layers=5, a layer for each stage. Got 2 x 3 = 6. "
            "Use chunks 2 or fewer.",
        ),
        (
            "actor.train",
            over(4, pipeline=4, chunks=2),
            "plan.actor.train: pipeline x chunks must be at most num_layers=5, a layer for each stage. Got 4 x 2 = 8. "
            "Leave chunks out.",
        ),
        (
            "actor.generate",
            over(4, pipeline=2, chunks=2, data=2),
            "plan.actor.generate.chunks: must be 1 where a call generates, since its stages have one part of the "
            "layers each. Got 2. Leave chunks out; if they are from `default`, give the call an entry of its own, "
            "{pipeline: 2, data: 2, fsdp: 1, tensor: 1}.",
        ),
        (
            "actor.generate",
            over(8, pipeline=4, data=2, micro_batches=4),
            "plan.actor.generate: micro_batches x pipeline x data x fsdp must be at most 24 rows. Got 4 x 4 x 2 x 1 = "
            "32. Lower a degree, or use another batch_size.",
        ),
        (
            "actor.train",
            over(6, pipeline=2, data=3, micro_batches=5),
            "plan.actor.train: micro_batches x data x fsdp must divide a mini-batch of 12 rows (24 / 2). Got 5 x 3 x 1 "
            "= 15.",
        ),
        (
            "actor.generate",
            Placement((0, 1, 2), Strategy(pipeline=2)),
            "plan.actor.generate: pipeline x data x fsdp x tensor must be the number of devices, 3. Got 2 x 1 x 1 x 1 "
            "= 2.",
        ),
        (
            "actor.train",
            Placement((0, 1), Strategy(pipeline=2), protocol="DP_PROTO"),
            "plan.actor.train.protocol: must give each stage all rows, split over data x fsdp, where a call has "
            "stages. Got 'DP_PROTO'. Use auto or 3D_PROTO.",
        ),
    ],
)
def test_stages_that_do_not_fit(name, placement, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan_with(name, placement), GRAPH, DEEP, num_devices=8)


def test_a_model_of_one_layer_has_no_stages():
    model = {"actor": dataclasses.replace(MODELS["actor"], num_layers=1)}
    with pytest.raises(PlanError, match=re.escape("num_layers=1, a layer for each stage. Got 2. Leave pipeline out.")):
        check(plan_with("actor.train", over(2, pipeline=2)), GRAPH, model, num_devices=8)


def test_arrays_have_no_stages_but_those_of_the_default():
    written = {DEFAULT: over(4, pipeline=2, data=2), "actor.train": over(2, pipeline=2)}
    check_computes(written, [GRAPH])
    check(resolve(written, GRAPH), GRAPH, DEEP, num_devices=4)
    message = (
        "plan.halve.pipeline: must be 1, since a `compute` call has no layers to put on stages. Got 2. Leave pipeline "
        "out, or use data."
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check_computes({**written, "halve": over(2, pipeline=2)}, [GRAPH])


def test_fewer_micro_batches_than_stages_are_allowed_with_a_warning():
    plan = resolve({DEFAULT: over(2, pipeline=2, micro_batches=1)}, GRAPH)
    check(plan, GRAPH, DEEP, num_devices=2)
    (warning,) = stage_warnings(plan, GRAPH)  # generation makes as many as there are stages, arrays have no stages
    assert warning == (
        "plan.actor.train: 1 micro-batch for 2 pipeline stages: the devices wait 50% of the time (the bubble "
        "fraction). Use 2 micro-batches or more, or fewer stages."
    )
    assert not stage_warnings(resolve({DEFAULT: over(2, pipeline=2, micro_batches=2)}, GRAPH), GRAPH)


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
        PlanError, match=r"plan\.actor\.generate\.rows: data must divide them\. Got 24 rows for 5 parts"
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
        "plan.actor.train: mini_batches must divide the rows of the batch. Got 5 for 24 rows. Use 1, 2, 3, 4, 6, 8, 12 "
        "or 24, or another batch_size."
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan_with("halve", ONE), make_graph(Update(mini_batches=5)), MODELS, num_devices=1)


def test_every_call_has_a_placement():
    with pytest.raises(PlanError, match=re.escape("plan: needs a placement for every call. Got none for 'halve'.")):
        check(Plan({name: ONE for name in NAMES if name != "halve"}), GRAPH, MODELS, num_devices=1)


def test_train_sizes():
    (sizes,) = train_sizes(GRAPH.calls[4], Strategy(data=2, micro_batches=3))
    assert sizes == TrainSizes(rows=24, mini_batches=2, epochs=3, micro_batches=3)
    assert (sizes.mini_batch_rows, sizes.micro_batch_rows) == (12, 4)


def test_json_round_trip():
    plan = resolve(
        {DEFAULT: Placement((5, 2), Strategy(fsdp=2, micro_batches=3, remat="layer", balance=True)), "halve": ONE},
        GRAPH,
    )
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_with_offload_and_protocols():
    plan = Plan({"halve": Placement((0,), Strategy(), protocol="ONE_TO_ALL")}, offload=("reference", "reward"))
    assert plan.to_json()["offload"] == ["reference", "reward"]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(PlanError, match=re.escape("plan: offload: must be a list of roles. Got 'reward'. Write [")):
        Plan.from_json({"offload": "reward"})


def test_roles_to_offload():
    check_offload(["actor"], ["actor", "judge"], ["actor"])
    assert resolve({DEFAULT: ONE}, GRAPH, ["actor"]).offload == ("actor",)
    for offload, message in (
        (["actr"], "plan.offload: must be roles of the run. Got 'actr'. Roles: actor, judge. Did you mean 'actor'?"),
        (["judge"], "plan.offload: 'judge' has no weights of its own to offload. Roles that have: actor. Remove it."),
        (["actor"] * 2, "plan.offload: a role may stand there once. Got 'actor' again. Remove it."),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            check_offload(offload, ["actor", "judge"], ["actor"])


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            Placement((0,), Strategy(), protocol="DP_PROTOCOL"),
            "plan.halve.protocol: must be auto or one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO, "
            "ALL_TO_ALL. Got 'DP_PROTOCOL'. Did you mean 'DP_PROTO'?",
        ),
        (
            Placement(tuple(range(16)), Strategy(data=8, tensor=2), protocol="DP_PROTO"),
            "plan.halve.rows: pipeline x data x micro_data x tensor must divide them. Got 24 rows for 16 parts. Lower",
        ),
    ],
)
def test_protocols_of_a_plan(placement, message):
    check(plan_with("halve", Placement((0, 1), Strategy(tensor=2), protocol="DP_PROTO")), GRAPH, MODELS, 16)
    with pytest.raises(PlanError, match=re.escape(message)):
        check(plan_with("halve", placement), GRAPH, MODELS, 16)


GOOD = {"devices": [0], "strategy": {"data": 1}}


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"devices": [0]}, "no 'strategy'"),
        ({"strategy": {}}, "no 'devices'"),
        ({"devices": 0, "strategy": {}}, "not iterable"),
        ({"devices": ["0"], "strategy": {}}, "cannot be interpreted as an integer"),
        ({"devices": [0], "strategy": {"datas": 1}}, "unknown key 'datas'. Did you mean 'data'?"),
        ({"devices": [0], "strategy": {"data": 0}}, "data: must be at least 1. Got 0."),
        ({"devices": [0], "strategy": {"remat": "all"}}, "remat: must be none, dots or layer. Got 'all'."),
        (GOOD | {"offload": True}, "unknown key 'offload'."),
        ("everywhere", ""),
        (None, ""),
    ],
)
def test_json_that_is_no_plan(entry, why):
    message = "plan.halve: must be a placement, {devices: [...], strategy: {data: ..., ...}}. Got one with a fault: "
    with pytest.raises(PlanError, match=re.escape(message)) as raised:
        Plan.from_json({"actor.train": GOOD, "halve": entry})
    assert why in str(raised.value)


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
