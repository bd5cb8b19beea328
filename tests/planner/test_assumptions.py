"""What is said to be assumed of a plan: only what bears on it, with what it would be otherwise."""

import dataclasses
import re

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.make_plan import Planned, plan_workload
from jaxrlhf.planner.report import plan_json
from jaxrlhf.planner.workload import Workload
from tests.planner.described_step import TINY, ppo

STEP = ppo(dataclasses.replace(TINY, hidden_size=1024, intermediate_size=4096, num_heads=8), prompt=64, response=40)
H100 = read_cluster("1x1:h100")


def planned(workload: Workload, cluster=H100) -> Planned:
    return plan_workload(workload, cluster, method="colocate")


def test_a_line_for_each_and_none_for_what_is_not_there():
    found = planned(dataclasses.replace(STEP.workload, on_host=("reward.scores",)))
    peaks, decoding, responses, host = found.assumed
    assert peaks.startswith("Of their peaks h100 devices reach: large matrix products 60%, memory 85%, links 80%, the ")
    assert peaks.endswith("(assumed, and measured on none).")
    assert decoding.startswith("Decoding steps take 1.5 us a kernel and wait for nothing, as in a captured graph")
    assert responses == "Responses have all of their 40 tokens: generation goes on until the last one has ended."
    assert host == "Python functions on the host take no time: reward.scores."
    assert plan_json(found, found.plan_for(STEP.graph))["assumed"] == list(found.assumed)
    scored = dataclasses.replace(STEP.workload.call("reference.logprobs"), needs=())
    assert len(planned(Workload((scored,))).assumed) == 1


def test_the_iteration_with_slow_kernels_is_what_a_plan_with_such_devices_takes():
    found = planned(STEP.workload)
    (group,) = H100.groups
    coefficients = dataclasses.replace(group.kind.coefficients, graph_kernel_seconds=10e-6)
    slow = type(H100)((dataclasses.replace(group, kind=dataclasses.replace(group.kind, coefficients=coefficients)),))
    call, choice = STEP.workload.call("actor.generate"), found.choices["actor.generate"]
    more = CostModel(slow).seconds(call, choice.devices, choice.strategy).total - choice.seconds
    assert more > 0
    match = re.search(r"at 10 us a kernel an iteration takes (\S+) s, not (\S+) s\.$", found.assumed[1])
    assert match is not None
    assert float(match[2]) == pytest.approx(found.seconds, rel=1e-3)
    assert float(match[1]) == pytest.approx(found.seconds + more, rel=1e-3)


def test_nothing_is_said_of_kernels_where_devices_were_measured_or_are_a_processor():
    assert not any("us a kernel" in line for line in planned(STEP.workload, read_cluster("cpu:2")).assumed)
    (group,) = H100.groups
    coefficients = dataclasses.replace(group.kind.coefficients, source="measured on 2026-01-01")
    measured = dataclasses.replace(group, kind=dataclasses.replace(group.kind, coefficients=coefficients))
    (line,) = planned(STEP.workload, type(H100)((measured,))).assumed
    assert line.startswith("Responses have all of")


def test_devices_without_bfloat16_compute_it_in_float32():
    in_half = ppo(dataclasses.replace(TINY, dtype="bfloat16"))
    said = "v100-32g devices know no bfloat16: XLA computes it there in float32, at the rate of float32."
    assert said in planned(in_half.workload, read_cluster("1x1:v100-32g")).assumed
    assert said not in planned(STEP.workload, read_cluster("1x1:v100-32g")).assumed
    assert said not in planned(in_half.workload).assumed


def test_where_work_takes_longer_than_kernels_it_says_so():
    """Thousands of rows in one decoding step."""
    many = ppo(STEP.models["actor"], prompt=64, response=40, rows=2**14).workload
    assert planned(many).assumed[1].endswith("at 10 us a kernel an iteration takes no longer.")
