"""From a workload and a cluster to a plan for a graph, and what is said about it."""

import dataclasses
import json
import math
import re

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.plan_pictures import plan_rows
from jaxrlhf.planner import make_plan as planning
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.fusion.fused_choice import best_fused
from jaxrlhf.planner.fusion.fusible import check_fusion
from jaxrlhf.planner.make_plan import Planned, plan_workload, without_needless_offload
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import NoRoomError, Placement, PlanError
from jaxrlhf.planner.plans.saved_plan import read_plan, write_plan
from jaxrlhf.planner.report import (
    call_rows,
    devices_in_words,
    memory_rows,
    plan_json,
    runner_up_lines,
    summary_lines,
)
from jaxrlhf.planner.search.problem import PairSeconds
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

WIDE = dataclasses.replace(TINY, hidden_size=1024, intermediate_size=4096, num_layers=8, num_heads=8)
STEP = ppo(WIDE, rows=32, prompt=64, response=64, mini_batches=2)
FOUR = read_cluster("1x4:a100-80g")


@pytest.fixture(scope="module")
def found() -> Planned:
    return plan_workload(STEP.workload, FOUR, seconds=1.0)


def test_a_plan_is_what_its_parts_say(found):
    assert found.seconds == steady_state(found.problem, found.result.plan).seconds
    assert found.heuristic is not None and found.gain == found.heuristic.seconds / found.seconds >= 1
    assert found.tokens_per_second == pytest.approx(32 * 128 / found.seconds)
    costs = CostModel(FOUR)
    for name, choice in found.choices.items():
        call = STEP.workload.call(name)
        assert choice.seconds == pytest.approx(costs.seconds(call, choice.devices, choice.strategy).total)
        fullest = max(found.memory[d].total for d in choice.devices)
        assert choice.working < found.call_memory(name) <= fullest <= FOUR.capacity(0)


def test_the_plan_of_a_graph_has_all_of_its_calls(found):
    plan = found.plan_for(STEP.graph)
    assert list(plan.placements) == [call.plan_name for call in STEP.graph.calls]
    assert {name: plan.placements[name] for name in found.placements()} == found.placements()
    assert set(plan.placements["ppo_batch"].devices) <= set(plan.placements["actor.train"].devices)
    check(plan, STEP.graph, STEP.models, 4, 4)


def test_a_graph_of_other_calls_has_no_plan(found):
    twice = dataclasses.replace(STEP.graph.calls[0], name="actor.generate#2")
    graph = dataclasses.replace(STEP.graph, calls=(*STEP.graph.calls, twice))
    with pytest.raises(
        PlanError, match=r"plan\.calls\.actor\.generate#2: must be a call of the workload that was planned"
    ):
        found.plan_for(graph)


def test_what_is_fixed_stays():
    on_last = Placement((3,), Strategy(micro_batches=2))
    in_turn = Placement((1, 0), Strategy(data=2))
    found = plan_workload(
        STEP.workload, FOUR, fixed={"critic.train": on_last, "critic.values": in_turn}, offload=["reference"],
        seconds=0.5,
    )  # fmt: skip
    plan = found.plan_for(STEP.graph)
    assert plan.placements["critic.train"] == on_last and plan.placements["critic.values"] == in_turn
    assert "reference" in plan.offload and found.choices["reference.logprobs"].offloaded
    assert not any(each.resting.get("reference") for each in found.memory)


def test_a_cluster_that_is_too_small_is_said_to_be():
    large = ModelConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, num_kv_heads=8,
        dtype="bfloat16",
    )  # fmt: skip
    work = ppo(large, critic=TINY, rows=32).workload
    with pytest.raises(NoRoomError) as error:
        plan_workload(work, FOUR)
    text = str(error.value)
    assert text.startswith("plan.calls.actor.train: must fit into the 76.6 GB that a plan may fill of a device. Got ")
    assert " GB too much, on 4 devices as " in text and text.endswith("There would be room on 2x8:a100-80g.")


def test_a_whole_plan_that_does_not_fit_names_clusters_that_would_do():
    """Every call has room by itself, all of them together have not."""
    model = dataclasses.replace(TINY, hidden_size=2048, intermediate_size=8192, num_layers=24, num_heads=16)
    work = ppo(model, rows=32).workload
    with pytest.raises(NoRoomError) as error:
        plan_workload(work, read_cluster("1x1:v100-32g"))
    text = str(error.value)
    assert text.startswith("plan: must fit into the ") and "V100" not in text
    found = re.search(r"There would be room on (\S+) or on (\S+)\.$", text)
    assert found is not None and found[1].endswith(":v100-32g") and found[2].startswith("1x1:")
    for name in found.groups():
        assert plan_workload(work, read_cluster(name), seconds=0.5).seconds > 0


def test_a_strategy_that_nobody_knows_is_refused_at_once():
    with pytest.raises(PlanError, match=r"Got 'serach'.* Did you mean 'search'\?"):
        plan_workload(STEP.workload, FOUR, method="serach", say=lambda line: pytest.fail("it began"))


def test_what_is_saved_is_what_was_found(found, tmp_path):
    saved = found.saved(found.plan_for(STEP.graph), asked={"auto": True})
    write_plan(tmp_path / "plan.json", saved)
    again = read_plan(tmp_path / "plan.json")
    assert again.plan == saved.plan and again.step_seconds == found.seconds
    again.check_work(STEP.workload)
    assert sum(forecast.seconds for forecast in again.calls.values()) == pytest.approx(
        sum(choice.seconds for choice in found.choices.values())
    )


def test_the_report_says_it_in_rows_and_lines(found):
    rows = call_rows(found)
    assert [row["call"] for row in rows] == [call.name for call in STEP.workload.calls]
    for row in rows:
        devices = row["data"] * row["fsdp"] * row["tensor"] * row["pipeline"]
        assert devices == len(found.choices[row["call"]].devices)
    groups = memory_rows(found)
    assert groups[0]["devices"].startswith("0") and len(groups) <= 4
    assert groups[0]["peak GB"] * 1e9 == pytest.approx(found.memory[0].total)
    lines = "\n".join(summary_lines(found))
    assert f"{found.seconds:.4g} s an iteration" in lines and "x as fast as the heuristic plan" in lines
    losers = runner_up_lines(found)
    reasons = [line for line in losers if not line.startswith("  ")]
    assert len(reasons) == len(found.result.runners_up) > 0 and all(" s, " in line for line in reasons)
    others = [line.split()[0] for line in losers if line.startswith("  ")]
    assert len(others) >= len(reasons) and set(others) <= set(found.choices)


def test_the_document_for_machines_is_plain_and_whole(found):
    document = json.loads(json.dumps(plan_json(found, found.plan_for(STEP.graph)), allow_nan=False))
    assert document["step_seconds"] == found.seconds and document["cluster"] == "1x4:a100-80g"
    assert set(document["calls"]) == set(found.choices)
    assert len(document["devices"]) == 4
    for device in document["devices"]:
        parts = [*device["resting_bytes"].values(), *device["copy_bytes"].values(), device["working_bytes"]]
        assert sum(parts) == device["memory_bytes"] <= device["capacity_bytes"]
    assert {span["call"] for span in document["timeline"]} == set(found.choices)
    assert all(math.isfinite(each["seconds"]) for each in document["search"]["history"])


def test_devices_in_words():
    assert devices_in_words(3, 4, 8) == "3"
    assert devices_in_words(4, 8, 8) == "4-7"
    assert devices_in_words(8, 24, 8) == "8-23, 2 nodes"
    assert devices_in_words(8, 16, 8) == "8-15, 1 node"


def test_weights_rest_on_the_host_only_where_that_is_good_for_something(found):
    """The other readings of the plan, with more weights on the host, are not faster."""
    assert found.offloaded == ()
    number = [call.name for call in found.problem.calls].index("reference.logprobs")
    call, pick = found.problem.calls[number], found.result.plan[number]
    on_host = dataclasses.replace(call.choices[pick], load=1e-9, offloaded=True, resting=0)
    calls = list(found.problem.calls)
    calls[number] = dataclasses.replace(call, choices=(*call.choices, on_host))
    tables = {key: table_with_row_again(table, key, number, pick) for key, table in found.problem.transfers.items()}
    problem = dataclasses.replace(found.problem, calls=tuple(calls), transfers=tables)
    plan = tuple(len(call.choices) if i == number else p for i, p in enumerate(found.result.plan))
    needless = dataclasses.replace(found.result, plan=plan, simulation=steady_state(problem, plan))
    assert without_needless_offload(problem, needless).plan == found.result.plan
    full = dataclasses.replace(problem, capacity=tuple(each.total - 1 for each in found.memory))
    assert without_needless_offload(full, needless).plan == plan


def table_with_row_again(table: PairSeconds, key: tuple[int, int], number: int, pick: int) -> PairSeconds:
    """Seconds of one more choice of a call, which are those of another choice of it."""
    ones, others = ([*range(n), *([pick] if each == number else [])] for n, each in zip(table.shape, key, strict=True))
    return table.of_choices(ones, others)


def test_two_train_calls_are_fused_where_that_is_faster(monkeypatch):
    monkeypatch.setattr(planning, "best_fused", lambda *args, beat: best_fused(*args, beat=math.inf))
    step = ppo(dataclasses.replace(WIDE, hidden_size=2048, num_layers=16), rows=16, prompt=64, mini_batches=1)
    cluster = read_cluster("4x1:a100-80g")
    found = plan_workload(step.workload, cluster, seconds=0.2)
    assert found.fuse == ("actor.train", "critic.train") and "run as one pipeline" in found.notes[0]
    plan = found.plan_for(step.graph)
    check_fusion(plan, step.graph)
    assert plan.fuse == found.fuse and plan.schedules == found.schedules != ()
    without_graph = found.saved().plan
    assert (without_graph.fuse, without_graph.schedules) == (found.fuse, found.schedules)
    rows = {row["call"]: row for row in call_rows(found)}
    assert rows["critic.train"]["seconds"] == "(fused)"
    assert rows["actor.train"]["devices"] == rows["critic.train"]["devices"]
    apart = found.result.runners_up[0]
    assert (apart.lacking, apart.plan != found.result.plan) == (0, True)
    forecast = found.saved(plan).calls
    assert forecast["critic.train"] == forecast["actor.train"]
    assert forecast["actor.train"].seconds == pytest.approx(found.choices["actor.train"].seconds)
    calls = [span for rows in plan_rows(found) for span in rows[1] if span.kind == "train"]
    assert {event.name for event in calls} == {"actor.train + critic.train"}
    by_hand = {"actor.train": Placement((0,), Strategy())}
    assert plan_workload(step.workload, cluster, seconds=0.1, fixed=by_hand).fuse == ()
