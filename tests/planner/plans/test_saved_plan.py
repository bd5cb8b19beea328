"""Plans on disk: read as they were written, and refused where they were made for something else."""

import dataclasses
import json
import re

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.plans.saved_plan import CallForecast, SavedPlan, described_work, devices_of, read_plan, write_plan
from jaxrlhf.planner.workload import Workload
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

WORK = ppo(rows=16).workload
NAMES = [call.name for call in WORK.calls]
SAVED = SavedPlan(
    plan=Plan({name: Placement((0, 1), Strategy(data=2)) for name in NAMES}, offload=("reference",)),
    devices=devices_of(read_cluster("2x4:a100-80g")),
    work=described_work(WORK),
    method="search",
    step_seconds=1.5,
    calls={name: CallForecast(0.25, 10**9) for name in NAMES},
    asked={"auto": True},
)


@pytest.fixture
def path(tmp_path):
    write_plan(tmp_path / "plan.json", SAVED)
    return tmp_path / "plan.json"


def test_a_plan_is_read_as_it_was_written(path):
    read = read_plan(path)
    assert read.to_json() == SAVED.to_json() and read.plan == SAVED.plan and read.calls == SAVED.calls
    read.check_work(WORK)
    read.check_devices(devices_per_node=4, kinds=["NVIDIA A100-SXM4-80GB"] * 2)


def test_a_file_can_be_read_by_people(path):
    lines = path.read_text().splitlines()
    assert sum(line == '        "devices": "0-1",' for line in lines) == len(NAMES)
    assert json.loads(path.read_text()) == json.loads(json.dumps(SAVED.to_json()))
    assert [name.name for name in path.parent.iterdir()] == ["plan.json"]


def other(**changes):
    first, *rest = WORK.calls
    return Workload((dataclasses.replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (other(rows=32), r"Got actor\.generate\.rows: 16 there, 32 in this run\. Plan again: "),
        (other(response=16), r"Got actor\.generate\.response: 8 there, 16 in this run"),
        (
            other(model=dataclasses.replace(TINY, num_layers=2)),
            r"Got actor\.generate\.model\.num_layers: 4 there, 2 in this run",
        ),
        (Workload(WORK.calls[:1]), r"Got a plan for reference\.logprobs, .*, which this run does not have\."),
        (
            Workload((*WORK.calls, dataclasses.replace(WORK.calls[0], name="judge.scores"))),
            r"Got no plan for judge\.scores\. Plan again: python -m jaxrlhf\.plan --config \.\.\. --out ",
        ),
    ],
)
def test_a_plan_for_other_calls_is_refused(path, work, message):
    with pytest.raises(PlanError, match=r"plan\.json: must have been made for the calls of this run\. " + message):
        read_plan(path).check_work(work)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((4, ["NVIDIA A100-SXM4-80GB"]), r"as many nodes .* Got a plan for 2x4:a100-80g, 2 nodes of 4 devices, where"),
        ((8, ["NVIDIA A100-SXM4-80GB"]), r"there are 1 of 8\. Plan again"),
        (
            (4, ["NVIDIA H200"] * 2),
            r"the kind of devices .* Got a plan for 2x4:a100-80g \(NVIDIA A100.*\), where there are NVIDIA H200\.",
        ),
        (
            (4, ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]),
            r"NVIDIA A100-SXM4-80GB, NVIDIA H200, of NVIDIA H200 on node 1",
        ),
    ],
)
def test_a_plan_for_other_devices_is_refused(path, devices, message):
    devices_per_node, kinds = devices
    with pytest.raises(PlanError, match=message):
        read_plan(path).check_devices(devices_per_node=devices_per_node, kinds=kinds)


def test_nodes_of_different_kinds_stand_in_their_order(tmp_path):
    mixed = dataclasses.replace(SAVED, devices=devices_of(read_cluster("1x4:h100+1x4:a100-80g")))
    write_plan(tmp_path / "mixed.json", mixed)
    h100, a100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
    read_plan(tmp_path / "mixed.json").check_devices(devices_per_node=4, kinds=[h100, a100])
    for kinds in ([a100, h100], [h100, h100], [a100, a100]):
        with pytest.raises(PlanError, match="must have been made for the kind of devices"):
            read_plan(tmp_path / "mixed.json").check_devices(devices_per_node=4, kinds=kinds)


def without(*keys):
    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


def put(*keys, value):
    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("version"), "must be a plan of version 2, as python -m jaxrlhf.plan --out writes it. Got something"),
        (
            put("version", value=1),
            "must be a plan of version 2, as python -m jaxrlhf.plan --out writes it. Got version",
        ),
        (without("devices"), "devices: required. Got nothing."),
        (put("devices", "nodes", value=2), "devices: unknown key 'nodes'. Known: cluster, num_devices,"),
        (put("devices", "devices_per_node", value=3), "devices: must be whole nodes. Got 8 devices, 3 a node."),
        (put("step_seconds", value="long"), "step_seconds: expected a number. Got 'long'."),
        (put("plan", value=[]), "plan: expected a mapping. Got []."),
        (
            without("plan", "calls", "actor.train"),
            "must have a placement and a forecast for each of its calls. Got none",
        ),
        (without("calls", "actor.train"), "must have a placement and a forecast for each of its calls. Got none"),
        (put("plan", "calls", "actor.train", "tensr", value=2), "plan.calls.actor.train: unknown key 'tensr'. Known: "),
    ],
)
def test_what_is_no_plan_is_refused(path, change, message):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        read_plan(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path, path):
    with pytest.raises(PlanError, match="Got a file that cannot be read: No such file or directory"):
        read_plan(tmp_path / "none.json")
    path.write_text("{")
    with pytest.raises(PlanError, match=r"must be JSON\. Got Expecting property name"):
        read_plan(path)
    path.write_bytes(b"\xff")
    with pytest.raises(PlanError, match="Got a file that cannot be read: no text"):
        read_plan(path)
    path.write_text("[1]")
    with pytest.raises(PlanError, match="must be a plan of version 2"):
        read_plan(path)
