"""Forecasts of plans with calls in parts: the graph in parts is simulated as any other.

forecast = PartsForecast(graph, roles, costs, lengths)
forecast.seconds(plan)      # of an iteration; None if the plan does not fit
forecast.calls(plan)        # call -> its seconds and memory, those of its parts together
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrlhf.call_graph import Call, CallGraph, Part
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.plans.saved_plan import CallForecast, SavedPlan
from jaxrlhf.planner.search.choices import problem_of
from jaxrlhf.planner.search.peak_memory import memory_during, peak_memory
from jaxrlhf.planner.search.problem import CallChoices, PairSeconds, Problem
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.programs.roles import ModelRole, Role

_FREE = PairSeconds.of(np.zeros((1, 1)))


@dataclasses.dataclass(frozen=True)
class PlanInParts:
    """What a plan gains by calls in parts."""

    means: str
    """What was looked for: 'a tail'."""
    seconds: float
    """Of an iteration under the plan as it is."""
    rows: tuple[dict[str, Any], ...]
    """A table of the ways that were tried, with their seconds."""
    plan: Plan | None = None
    """The plan to take in its place; None if it stays as it is."""
    seconds_in_parts: float = 0.0
    """Of an iteration under it."""
    calls: Mapping[str, CallForecast] = dataclasses.field(default_factory=dict)
    """Call of a model -> its forecast under it: the sum of its parts, of which some run at the same time."""
    reason: str = ""
    """Why it is faster, or none is."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data."""
        plan = None if self.plan is None else self.plan.to_json()
        return {
            "means": self.means, "seconds": self.seconds, "tried": list(self.rows), "plan": plan,
            "step_seconds": self.seconds_in_parts,
        }  # fmt: skip

    def summary(self) -> str:
        """The outcome in words."""
        if self.plan is None:
            return f"The plan stays as it is, without {self.means}. {self.reason}"
        ratio = f"{self.seconds_in_parts / self.seconds:.3f} of " if self.seconds else ""
        return (
            f"With {self.means} an iteration takes {self.seconds_in_parts:.4g} s, {ratio}the {self.seconds:.4g} s that "
            f"it takes without. {self.reason}"
        )

    def adopted_by(self, saved: SavedPlan) -> SavedPlan:
        """A plan on disk with the calls in parts, where they are faster."""
        if self.plan is None:
            return saved
        return dataclasses.replace(saved, plan=self.plan, step_seconds=self.seconds_in_parts, calls=self.calls)


class PartsForecast:
    """Forecasts of the plans of one step."""

    def __init__(
        self, graph: CallGraph, roles: Mapping[str, Role], costs: CostModel, lengths: ResponseLengths | None
    ) -> None:
        self.graph, self.costs, self.lengths = graph, costs, lengths
        self._roles = roles
        self._models: dict[str, ModelConfig] = {n: r.model for n, r in roles.items() if isinstance(r, ModelRole)}
        self.workload = step_workload(graph, roles, lengths)
        """The calls of the step, whole."""

    def is_valid(self, plan: Plan) -> bool:
        """True if a plan keeps the rules."""
        return not self.refusal(plan)

    def refusal(self, plan: Plan) -> str:
        """The rule that a plan breaks; empty if it keeps all."""
        cluster = self.costs.cluster
        try:
            check(plan, self.graph, self._models, cluster.num_devices, cluster.devices_per_node)
        except PlanError as error:
            return str(error)
        return ""

    def seconds(self, plan: Plan) -> float | None:
        """Seconds of an iteration under a plan; None if it does not fit into memory."""
        problem = self.problem(plan)
        chosen = [0] * len(problem.calls)
        if any(peak > room for peak, room in zip(peak_memory(problem, chosen), problem.capacity, strict=True)):
            return None
        return steady_state(problem, chosen).seconds

    def problem(self, plan: Plan) -> Problem:
        """The calls of a plan as they are simulated: the only choice of each is that of the plan."""
        graph, plan = in_parts(self.graph, plan)
        of_calls = {name: placement.strategy for name, placement in plan.placements.items()}
        workload = step_workload(graph, self._roles, self.lengths, of_calls)
        placements = {call.name: [plan.placements[call.name]] for call in workload.calls}
        problem = problem_of(workload, self.costs.cluster, self.costs, placements, offload=plan.offload)
        of_tails = {i for i, call in enumerate(workload.calls) if call.part is not None and call.part.migrate}
        here = {pair: s if pair[1] not in of_tails else _FREE for pair, s in problem.reallocations.items()}
        calls = (_with_shared_copy(call) if i in of_tails else call for i, call in enumerate(problem.calls))
        return dataclasses.replace(problem, reallocations=here, calls=tuple(calls))

    def parts(self, plan: Plan) -> list[tuple[str, Part | None, CallForecast]]:
        """For each part, or whole call, the name of the whole call, the part, and its forecast."""
        problem = self.problem(plan)
        graph, _ = in_parts(self.graph, plan)
        of_names: dict[str, Call] = {call.plan_name: call for call in graph.calls}
        during = memory_during(problem, [0] * len(problem.calls))
        return [
            (of.whole_name, of.part, CallForecast(call.choices[0].seconds, during[call.name].total))
            for call in problem.calls
            for of in [of_names[call.name]]
        ]

    def calls(self, plan: Plan) -> dict[str, CallForecast]:
        """Call of a model -> its forecast, that of its parts together."""
        found: dict[str, CallForecast] = {}
        for name, _, part in self.parts(plan):
            before = found.get(name, CallForecast(0.0, 0))
            memory = max(before.memory_bytes, part.memory_bytes)
            found[name] = CallForecast(before.seconds + part.seconds, memory)
        return found


def with_placements(plan: Plan, placements: Mapping[str, Placement]) -> Plan:
    """A plan with other placements of some calls."""
    return dataclasses.replace(plan, placements={**plan.placements, **placements})


def takers(graph: CallGraph, generation: Call, *kinds: str) -> list[Call]:
    """The row-wise calls of some kinds whose rows are those of a generation, and no others."""
    return [
        call
        for call in graph.calls
        if call.kind in kinds and call.row_wise and {r.call for r in call.refs if r.has_rows} == {generation.name}
    ]


def _with_shared_copy(call: CallChoices) -> CallChoices:
    """A tail, whose weights are those of its share, on the same devices."""
    choices = tuple(dataclasses.replace(c, copy=0, shared_with_training=0, resting=0) for c in call.choices)
    return dataclasses.replace(call, choices=choices)
