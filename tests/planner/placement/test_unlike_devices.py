"""A cluster of two kinds of devices, from the plan to the results."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.placement.pipelined import pipelined
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.programs.roles import GAP_METRIC
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.testing import ATOL, RTOL, small_run

TWO_KINDS = """
kinds:
  fast:
    base: a100-80g
    peak_flops: {float32: 2.0e+9, tf32: 2.0e+9, bfloat16: 2.0e+9}
    memory: {bytes: 200000000, bandwidth: 1.0e+9}
    coefficients: {kernel_seconds: 0, graph_kernel_seconds: 0, dispatch_seconds: 0, half_dim: 0, collective_seconds: 0}
  slow:
    base: fast
    peak_flops: {float32: 1.0e+9, tf32: 1.0e+9, bfloat16: 1.0e+9}
    memory: {bytes: 100000000, bandwidth: 0.4e+9}
groups:
  - {nodes: 1, kind: fast, devices_per_node: 4}
  - {nodes: 1, kind: slow, devices_per_node: 4}
"""
SETTINGS: dict[str, Any] = {
    "whiten_advantages": False, "actor_update": {"mini_batches": 1}, "critic_update": {"mini_batches": 1},
    "sampling": {"max_new_tokens": 12},
}  # fmt: skip


def results(assembly: Assembly, plan: Plan) -> list[tuple[np.ndarray, dict[str, float]]]:
    """Tokens and metrics of two steps."""
    phase, found = assembly.train, []
    executor, state = Executor(phase.roles, seed=0), phase.first_state
    try:
        load_first_weights(executor, phase, assembly.config, {})
        for step in range(2):
            result = executor.run(phase.graph, plan, state, assembly.train_rows(step), step=step)
            state = result.state
            found.append((result.outputs("actor.generate").tokens, flatten(result.fetch())))
        executor.wait()
    finally:
        executor.close()
    return found


def test_unlike_devices_end_together_and_give_the_same_results(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(TWO_KINDS)
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assembly = assemble(small_run("ppo", batch_size=128, settings=SETTINGS), 8, 4)
    phase = assembly.train
    strategy = PlacementStrategy.from_data({"train": "0-1", "infer": "2-7", "parts": 2})
    assert strategy is not None
    forecast = PartsForecast(phase.graph, phase.roles, plan_costs := _costs(cluster), None)
    made = plan_workload(forecast.workload, cluster, method="placement", placement=strategy, costs=plan_costs)
    found = pipelined(phase.graph, phase.roles, made.plan_for(phase.graph), made.groups, plan_costs, None, strategy)
    assert found.plan is not None
    seconds = _seconds_of_shares(forecast, found.plan)
    assert {"actor.generate", "critic.values", "reference.logprobs"} == set(seconds)
    for name, (one, other) in seconds.items():
        assert 0.9 < one / other < 1.1, (name, one, other)
        on = {cluster.kind_of(placement.devices[0]).name for placement in _shares(found.plan, name)}
        assert on == {"fast", "slow"}
    for (tokens, metrics), (want, expected) in zip(
        results(assembly, found.plan), results(assembly, phase.plan), strict=True
    ):
        np.testing.assert_array_equal(tokens, want)
        for name in expected.keys() - {f"rollout/{GAP_METRIC}"}:
            np.testing.assert_allclose(metrics[name], expected[name], RTOL, ATOL, err_msg=name)


def _costs(cluster: Any) -> Any:
    from jaxrlhf.planner.costs.cost_model import CostModel

    return CostModel(cluster)


def _shares(plan: Plan, name: str) -> list[Any]:
    placement = plan.placements[name]
    return [dataclasses.replace(placement, shares=()), *placement.shares]


def _seconds_of_shares(forecast: PartsForecast, plan: Plan) -> dict[str, list[float]]:
    """Call on both kinds -> the forecast seconds of its shares."""
    found: dict[str, list[float]] = {}
    for name, placement in plan.placements.items():
        if placement.shares:
            found[name] = [0.0, 0.0]
    for name, part, call in forecast.parts(plan):
        if name in found and part is not None:
            first = plan.placements[name].parts
            share = part.share if name == "actor.generate" else int(part.number >= first)
            found[name][share] += call.seconds
    return found
