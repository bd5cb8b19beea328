"""What is said of a plan's memory before it runs."""

import dataclasses
import re

import pytest

from jaxrlhf.call_graph import Part
from jaxrlhf.cluster import cluster_text
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.plan_config import Tail
from jaxrlhf.config.schema import load_run
from jaxrlhf.models.architecture import num_parameters
from jaxrlhf.planner import memory_forecast
from jaxrlhf.planner.costs.memory import call_memory, weight_bytes
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.memory_forecast import MemoryForecast, forecast_memory
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.report import memory_rows, plan_json, summary_lines
from jaxrlhf.planner.search.choices import memory_problem
from jaxrlhf.planner.search.peak_memory import memory_during
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.run.assembly import assemble
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.testing import small_run
from tests.planner.described_step import TINY, ppo

STEP = ppo(dataclasses.replace(TINY, hidden_size=1024, intermediate_size=4096, vocab_size=4096, num_heads=8))
EVERYWHERE = Placement(tuple(range(4)), Strategy(data=4))
PLAN = Plan({call.name: EVERYWHERE for call in STEP.workload.calls})
WHOLE = weight_bytes(STEP.models["actor"], Strategy(), 4)
GB = 10**9


@pytest.fixture
def machine(monkeypatch) -> Cluster:
    """Four virtual devices, where 20 of 24 GB are available."""
    monkeypatch.setattr(memory_forecast, "host_memory", lambda: 20 * GB)
    monkeypatch.setattr(memory_forecast, "total_memory", lambda: 24 * GB)
    monkeypatch.setattr(cluster_text, "host_room", lambda limit=None: 10 * GB)
    return read_cluster("cpu:4")


def test_every_call_has_a_row_of_what_it_takes_of_a_device(machine):
    rows = {row["call"]: row for row in forecast_memory(STEP.workload, machine, PLAN).rows}
    assert list(rows) == [call.name for call in STEP.workload.calls]
    train = rows["actor.train"]
    assert (train["weights"], train["optimizer"]) == tuple(round(n * WHOLE / GB, 3) for n in (1, 2))
    memory = call_memory(STEP.workload.call("actor.generate"), EVERYWHERE.strategy, is_trained=True, on_cpu=True)
    assert rows["actor.generate"]["cache"] == round(memory.cache / GB, 3)
    assert rows["actor.generate"]["weights"] == rows["actor.generate"]["optimizer"] == "-"


def test_a_small_model_is_shown_in_megabytes(machine):
    small = ppo()
    forecast = forecast_memory(small.workload, machine, PLAN)
    train = next(row for row in forecast.rows if row["call"] == "actor.train")
    assert forecast.unit == "MB" and train["optimizer"] == float(f"{8e-6 * num_parameters(TINY):.3g}")


def test_calls_that_are_fused_are_at_work_at_once(machine):
    stages = Placement(tuple(range(4)), Strategy(pipeline=4, micro_batches=4))
    trained = {"actor.train": stages, "critic.train": stages}
    apart = Plan({**PLAN.placements, **trained})
    fused = dataclasses.replace(apart, fuse=tuple(trained))
    more = _arrays(forecast_memory(STEP.workload, machine, fused)) - _arrays(
        forecast_memory(STEP.workload, machine, apart)
    )
    working = [
        call_memory(STEP.workload.call(n), stages.strategy, is_trained=True, on_cpu=True).working for n in trained
    ]
    assert 0.5 * min(working) < more / 4 <= max(working)


def test_replicas_on_virtual_devices_add_up(machine):
    """Two sets of weights are trained in four copies each, with two moments, and gradients twice; what reads them there
    reads the very weights that are trained."""
    forecast = forecast_memory(STEP.workload, machine, PLAN)
    lean = Plan({call.name: Placement((0,), Strategy()) for call in STEP.workload.calls})
    of_one, of_four = (_arrays(forecast_memory(STEP.workload, machine, plan)) for plan in (lean, PLAN))
    assert 24 * WHOLE < of_four < 40 * WHOLE and 6 * WHOLE < of_one < of_four / 3
    assert forecast.lines[0].endswith("the rest of the process 2.35 GB. Available: 20 GB.")
    assert "in the memory that devices 0-3 share during" in forecast.lines[1] and not forecast.excess


def test_a_plan_that_takes_more_than_there_is_says_by_how_much_and_during_which_calls(machine, monkeypatch):
    forecast = forecast_memory(STEP.workload, machine, PLAN, limit=3 * GB)
    assert forecast.excess.startswith("plan: a step must fit into the 3 GB that devices_memory allows. Got about ")
    assert forecast.room == 3 * GB < forecast.needed and not forecast.is_certain
    assert set(forecast.crowded) == set(PLAN.placements), "weights at rest leave room for no call"
    monkeypatch.setattr(memory_forecast, "host_memory", lambda: 4 * GB)
    forecast = forecast_memory(STEP.workload, machine, PLAN, limit=30 * GB)
    assert "the 4 GB that are available on the host. Got" in forecast.excess
    roomy = forecast_memory(STEP.workload, machine, PLAN, limit=forecast.needed)
    monkeypatch.setattr(memory_forecast, "host_memory", lambda: forecast.needed - 1)
    tight = forecast_memory(STEP.workload, machine, PLAN)
    assert not forecast_memory(STEP.workload, machine, PLAN, limit=None).is_certain and roomy.crowded
    assert tight.excess and tight.crowded == ("actor.train",)


def test_what_cannot_fit_at_rest_is_certain(machine, monkeypatch):
    monkeypatch.setattr(memory_forecast, "total_memory", lambda: 2 * GB)
    rule = "plan: weights and optimizer state at rest must fit into the 2 GB of the host of devices 0-3. Got 7.98 GB ("
    forecast = forecast_memory(STEP.workload, machine, PLAN)
    assert forecast.excess.startswith(rule) and forecast.is_certain


def test_sizes_are_read_as_they_are_written():
    run = load_run("ppo_arithmetic", ["devices_memory=20 GB"])
    assert (run.devices_memory.device_bytes, run.devices_memory.host_bytes) == (20 * GB, 20 * GB)
    limits = load_run("ppo_arithmetic", ["devices_memory={host: 1.5GiB}"]).devices_memory
    assert (limits.device_bytes, limits.host_bytes) == (None, 3 * 2**29)


def test_devices_with_memory_of_their_own_have_a_line_each():
    cluster = read_cluster("1x4:h100")
    apart = Placement((2, 3), Strategy(data=2))
    plan = Plan({name: apart if "critic" in name else p for name, p in PLAN.placements.items()}, ("reference",))
    forecast = forecast_memory(STEP.workload, cluster, plan)
    assert [line.partition(":")[0] for line in forecast.lines] == ["Each of devices 0-1", "Each of devices 2-3"]
    assert all(" GB of 76.4 GB, during " in line for line in forecast.lines) and not forecast.excess
    row = next(row for row in forecast.rows if row["call"] == "reference.logprobs")
    assert str(row["weights"]).endswith(" (host)")
    excess = forecast_memory(STEP.workload, _with_memory(cluster, 2 * GB), plan).excess
    assert re.match(
        r"plan: a step must fit into the 2 GB that a run may take of a device\. Got \d.* on device 2 ", excess
    )


def test_a_plan_that_is_looked_for_fits_into_the_memory_that_devices_share(machine):
    """The fastest of all does not fit."""
    roomy, tight = (_with_memory(machine, size) for size in (100 * GB, 3 * GB))
    fastest = plan_workload(STEP.workload, roomy, seconds=1.0)
    assert fastest.memory[0].total > 3 * GB
    found = plan_workload(STEP.workload, tight, seconds=1.0)
    assert len(found.memory) == 1 and found.memory[0].total <= 3 * GB
    assert found.seconds > fastest.seconds
    (row,) = memory_rows(found)
    assert row["devices"] == "0-3, shared" and row["of GB"] == 3.0
    assert any(line.startswith("The run takes up to about ") for line in summary_lines(found))
    devices = plan_json(found, found.plan_for(STEP.graph))["devices"]
    assert [each["memory_shared_by"] for each in devices] == [4] * 4
    assert {each["capacity_bytes"] for each in devices} == {3 * GB}
    assert not any(choice.offloaded for call in found.problem.calls for choice in call.choices)


def _arrays(forecast: MemoryForecast) -> float:
    """Bytes of arrays that a forecast says."""
    match = re.search(r"arrays (\S+) GB", forecast.lines[0])
    assert match is not None
    return float(match[1]) * GB


def _with_memory(cluster: Cluster, size: int) -> Cluster:
    """The same with so many bytes for a plan."""
    (group,) = cluster.groups
    memory = dataclasses.replace(group.kind.memory, bytes=size, usable=1.0)
    return Cluster((dataclasses.replace(group, kind=dataclasses.replace(group.kind, memory=memory)),))


@pytest.mark.parametrize(
    ("devices", "degrees", "has_copy"), [((2, 3), {"data": 2}, False), ((0, 1), {"tensor": 2}, True)]
)
def test_a_tail_on_some_devices_of_its_share_has_the_same_weights(devices, degrees, has_copy):
    train = assemble(small_run("ppo"), 8, 4).train
    tail = Tail(devices, Strategy(**degrees), rows=0.25)
    whole = Placement(tuple(range(4)), Strategy(data=4), parts=2, tail=tail)
    placed = {**train.plan.placements, "actor.generate": whole}
    graph, plan = in_parts(train.graph, dataclasses.replace(train.plan, placements=placed))
    problem = memory_problem(step_workload(graph, train.roles), read_cluster("1x8:h100"), plan.placements)
    *_, last = (call.plan_name for call in graph.calls if call.part is not None and call.part.migrate)
    during = memory_during(problem, [0] * len(problem.calls))[last]
    assert (last in during.copies) == has_copy


def test_gradients_of_parts_stay_between_them():
    """A number for each weight, in float32, beside the weights and the optimizer's state."""
    call = STEP.workload.call("actor.train")
    whole, part = (
        call_memory(dataclasses.replace(call, part=each), Strategy(), is_trained=True)
        for each in (None, Part(of="actor.train", number=0, count=2))
    )
    assert part.resting - whole.resting == WHOLE
