"""Generation fused with inference: the tail that would make a plan faster, by simulation.

    found = fuse_generation(graph, roles, plan, costs, lengths)
    found.rows      # fraction of the sequences that move -> devices of the tail, seconds of an iteration
    found.plan      # the fastest; None if none is faster than the plan as it is, for `found.reason`

The last sequences move to the first devices of the generation. The inference calls that take its rows, and nothing
else, run on its other devices, on rows that have finished, while the tail decodes; and on the tail's when it has ended.
Every candidate is simulated as a graph in parts (`plans.parts`), with all other calls as they are.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 4.2.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.plan_config import ResponseLengths, Tail
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.plans.saved_plan import CallForecast, SavedPlan
from jaxrlhf.planner.plans.splits import divisors
from jaxrlhf.planner.search.choices import on_cpu, problem_of
from jaxrlhf.planner.search.peak_memory import memory_during, peak_memory
from jaxrlhf.planner.search.problem import CallChoices, PairSeconds, Problem
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.programs.roles import ModelRole, Role
from jaxrlhf.sharding.strategy import Strategy

PERCENTS = range(5, 100, 5)
"""Sequences that move, as a percentage: those that the paper tries."""
PARTS = 2
"""Parts of the generation before its tail."""
WORTH = 0.98
"""A tail is worth it if an iteration takes at most so much of the time that it takes without."""


_FREE = PairSeconds.of(np.zeros((1, 1)))


@dataclasses.dataclass(frozen=True)
class FusedGeneration:
    """What tails would bring to a plan."""

    seconds: float
    """Of an iteration under the plan as it is."""
    rows: tuple[dict[str, Any], ...]
    """A table: for each fraction of the sequences that move, its fastest way."""
    plan: Plan | None = None
    """The fastest of all; None if none is faster."""
    fused_seconds: float = 0.0
    """Of an iteration under it."""
    calls: Mapping[str, CallForecast] = dataclasses.field(default_factory=dict)
    """Call of a model -> its forecast under it: the sum of its parts, of which some run at the same time."""
    reason: str = ""
    """Why it is faster, or none is."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data."""
        plan = None if self.plan is None else self.plan.to_json()
        return {"seconds": self.seconds, "tails": list(self.rows), "plan": plan, "step_seconds": self.fused_seconds}

    def summary(self) -> str:
        """The outcome in words."""
        if self.plan is None:
            return f"No tail makes the plan faster. {self.reason}"
        return (
            f"With a tail an iteration takes {self.fused_seconds:.4g} s, {self.fused_seconds / self.seconds:.3f} of "
            f"the {self.seconds:.4g} s that it takes without. {self.reason}"
        )

    def adopted_by(self, saved: SavedPlan) -> SavedPlan:
        """A plan on disk with the fastest tail, if one is faster."""
        if self.plan is None:
            return saved
        return dataclasses.replace(saved, plan=self.plan, step_seconds=self.fused_seconds, calls=self.calls)


def fuse_generation(
    graph: CallGraph,
    roles: Mapping[str, Role],
    plan: Plan,
    costs: CostModel,
    lengths: ResponseLengths | None,
) -> FusedGeneration:
    """Looks for the tail of the first generation of a step that makes its plan fastest. All calls of `plan` are
    whole."""
    return _Search(graph, roles, plan, costs, lengths).run()


def problem_in_parts(
    graph: CallGraph, roles: Mapping[str, Role], plan: Plan, costs: CostModel, lengths: ResponseLengths
) -> Problem:
    """The calls of a plan, in parts or whole, as they are simulated: the only choice of each is that of the plan."""
    return _Search(graph, roles, plan, costs, lengths)._problem(plan)


def refined_tails(
    graph: CallGraph, roles: Mapping[str, Role], plan: Plan, costs: CostModel, lengths: ResponseLengths
) -> tuple[Plan, float, float]:
    """The plan with other fractions of sequences that move to the tails that it has, where lengths of responses make
    that faster; its seconds of an iteration, and those of the plan as it is."""
    return _Search(graph, roles, plan, costs, lengths).refined()


class _Search:
    def __init__(
        self,
        graph: CallGraph,
        roles: Mapping[str, Role],
        plan: Plan,
        costs: CostModel,
        lengths: ResponseLengths | None,
    ) -> None:
        self._graph, self._roles, self._plan, self._costs, self._lengths = graph, roles, plan, costs, lengths
        self._models: dict[str, ModelConfig] = {n: r.model for n, r in roles.items() if isinstance(r, ModelRole)}

    def run(self) -> FusedGeneration:
        before = self.seconds(self._plan)
        generation = next((call for call in self._graph.calls if call.kind == "generate"), None)
        reason = self._unfit(generation)
        if generation is None or reason or before is None:
            return FusedGeneration(before or 0.0, (), reason=reason or "The plan as it is does not fit.")
        rows, best = [], (before * WORTH, self._plan)
        for percent in PERCENTS:
            tried = [
                (seconds, tail, plan)
                for tail, plan in self._candidates(generation, percent / 100)
                if (seconds := self.seconds(plan)) is not None
            ]
            if not tried:
                continue
            seconds, tail, fused = min([*tried, *self._as_tokens(generation, tried)], key=lambda each: each[0])
            best = min(best, (seconds, fused), key=lambda each: each[0])
            rows.append(
                {
                    "sequences that move": f"{percent} %", "devices of the tail": len(tail.devices),
                    "move": tail.migrate, "seconds": seconds, "of the plan as it is": f"{seconds / before:.3f}",
                }
            )  # fmt: skip
        fused_seconds, fused = best
        if fused is not self._plan:
            return FusedGeneration(before, tuple(rows), fused, fused_seconds, *self._details(generation, fused))
        why = f"None takes less than {WORTH:g} of the time."
        why = why if rows else "No tail fits: it must leave devices free that inference can use."
        return FusedGeneration(before, tuple(rows), reason=why)

    def refined(self) -> tuple[Plan, float, float]:
        """The plan with other fractions of sequences that move to the tails that it has, if such a plan is faster; its
        seconds, and those of the plan as it is."""
        before = self.seconds(self._plan)
        best = (math.inf if before is None else before * WORTH, self._plan)
        tails = {name: each for name, each in self._plan.placements.items() if each.tail is not None}
        for percent in PERCENTS:
            placements = {
                name: dataclasses.replace(each, tail=dataclasses.replace(each.tail, rows=percent / 100))
                for name, each in tails.items()
                if each.tail is not None
            }
            plan = dataclasses.replace(self._plan, placements={**self._plan.placements, **placements})
            if self._is_valid(plan) and (seconds := self.seconds(plan)) is not None:
                best = min(best, (seconds, plan), key=lambda each: each[0])
        seconds, plan = best
        return plan, (before or 0.0) if plan is self._plan else seconds, before or 0.0

    def _details(self, generation: Call, plan: Plan) -> tuple[dict[str, CallForecast], str]:
        """The forecast of each call under a plan with a tail, and why that is faster."""
        problem = self._problem(plan)
        graph, _ = in_parts(self._graph, plan)
        seconds, memory = dict[str, float](), dict[str, int]()
        during = memory_during(problem, [0] * len(problem.calls))
        whole_names = {call.plan_name: call.whole_name for call in graph.calls}
        of_tail = 0.0
        for call in problem.calls:
            name, takes = whole_names[call.name], call.choices[0].seconds
            seconds[name] = seconds.get(name, 0.0) + takes
            memory[name] = max(memory.get(name, 0), during[call.name].total)
            part = next(c.part for c in graph.calls if c.plan_name == call.name)
            of_tail += takes if part is not None and part.migrate else 0.0
        tail = plan[generation].tail
        assert tail is not None
        beside = [call.plan_name for call in self._inferences(generation)]
        why = (
            f"The last {tail.rows:.0%} of the sequences take {of_tail:.3g} of the {seconds[generation.plan_name]:.3g} "
            f"s of {generation.plan_name}, on {len(tail.devices)} of its devices; meanwhile {', '.join(beside)} "
            f"({sum(seconds[name] for name in beside):.3g} s) run on the others."
        )
        return {name: CallForecast(seconds[name], memory[name]) for name in seconds}, why

    def _as_tokens(self, generation: Call, tried: list[tuple[float, Tail, Plan]]) -> Iterator[tuple[float, Tail, Plan]]:
        """The fastest of some plans with sequences that are prefilled where they go on."""
        _, tail, plan = min(tried, key=lambda each: each[0])
        tail = dataclasses.replace(tail, migrate="prefill")
        placement = dataclasses.replace(plan[generation], tail=tail)
        plan = dataclasses.replace(plan, placements={**plan.placements, generation.plan_name: placement})
        if (seconds := self.seconds(plan)) is not None:
            yield seconds, tail, plan

    def _unfit(self, generation: Call | None) -> str:
        """Why a generation can have no tail."""
        if generation is None:
            return "The step does not generate."
        if on_cpu(self._costs.cluster) and self._costs.cluster.num_nodes == 1:
            return "Virtual devices of one process share its CPUs: nothing runs beside the tail."
        strategy = self._plan[generation].strategy
        if self._lengths is None or self._lengths.mean == self._lengths.p99:
            return "All responses are taken to be equally long. Give their lengths."
        if strategy.num_row_shards == 1:
            return f"{generation.name} has one row shard, so that a tail would leave no device free."
        if strategy.micro_batches > 1 or strategy.pipeline > 1:
            return f"{generation.name} has micro-batches or stages."
        return "" if self._inferences(generation) else f"No inference call takes the rows of {generation.name} alone."

    def _inferences(self, generation: Call) -> list[Call]:
        """The inference calls whose rows are those of a generation."""
        return [
            call
            for call in self._graph.calls
            if call.kind == "infer" and call.row_wise and {r.call for r in call.refs if r.has_rows} == {generation.name}
        ]

    def _candidates(self, generation: Call, fraction: float) -> Iterator[tuple[Tail, Plan]]:
        """Plans with a tail, over every number of row shards that leaves some free. The paper takes the fewest whose
        batch does not saturate a device, and whose memory has room; a simulation knows what a batch costs."""
        placement = self._plan[generation]
        devices, strategy = tuple(sorted(placement.devices)), placement.strategy
        width = len(devices) // strategy.num_row_shards
        for shards in divisors(strategy.num_row_shards)[:-1]:
            on, free = devices[: shards * width], devices[shards * width :]
            on_tail = dataclasses.replace(strategy, data=shards, fsdp=1, slots=0, shared_prompts=0)
            for share, tensor in itertools.product((0.0, len(on) / len(devices)), (0, 4, 8)):
                tail = Tail(on, on_tail, rows=fraction)
                fused = {generation.plan_name: dataclasses.replace(placement, parts=PARTS, tail=tail)}
                for call in self._inferences(generation):
                    like = self._plan[call].strategy
                    if tensor:  # parts of few rows do not fill a pipeline
                        like = dataclasses.replace(like, pipeline=1, tensor=tensor)
                    fused[call.plan_name] = _inference(call, like, on, free, share, fraction)
                plan = dataclasses.replace(self._plan, placements={**self._plan.placements, **fused})
                if self._is_valid(plan):
                    yield tail, plan

    def _is_valid(self, plan: Plan) -> bool:
        cluster = self._costs.cluster
        try:
            check(plan, self._graph, self._models, cluster.num_devices, cluster.devices_per_node)
        except PlanError:
            return False
        return True

    def seconds(self, plan: Plan) -> float | None:
        """Seconds of an iteration under a plan; None if it does not fit into memory."""
        problem = self._problem(plan)
        chosen = [0] * len(problem.calls)
        if any(peak > room for peak, room in zip(peak_memory(problem, chosen), problem.capacity, strict=True)):
            return None
        return steady_state(problem, chosen).seconds

    def _problem(self, plan: Plan) -> Problem:
        """The problem whose only choices are those of a plan."""
        graph, plan = in_parts(self._graph, plan)
        strategies = {name: placement.strategy for name, placement in plan.placements.items()}
        workload = step_workload(graph, self._roles, self._lengths, strategies)
        placements = {call.name: [plan.placements[call.name]] for call in workload.calls}
        problem = problem_of(workload, self._costs.cluster, self._costs, placements, offload=plan.offload)
        of_tails = {i for i, call in enumerate(workload.calls) if call.part is not None and call.part.migrate}
        here = {pair: s if pair[1] not in of_tails else _FREE for pair, s in problem.reallocations.items()}
        calls = (_with_shared_copy(call) if i in of_tails else call for i, call in enumerate(problem.calls))
        return dataclasses.replace(problem, reallocations=here, calls=tuple(calls))


def _with_shared_copy(call: CallChoices) -> CallChoices:
    """A tail, whose weights are those of its share, on the same devices."""
    choices = tuple(dataclasses.replace(c, copy=0, shared_with_training=0, resting=0) for c in call.choices)
    return dataclasses.replace(call, choices=choices)


def _inference(
    call: Call, like: Strategy, on_tail: tuple[int, ...], free: tuple[int, ...], share: float, fraction: float
) -> Placement:
    """An inference call on the free devices, and on those of the tail with a share of the rows. Degrees but those of
    rows are as given; micro-batches at most those for which a part has rows."""
    least = max(1, round(call.num_rows * min(fraction, (1 - fraction) / PARTS, share or 1.0)))

    def over(devices: tuple[int, ...]) -> Strategy:
        data = max(1, len(devices) // (like.tensor * like.pipeline))
        micro_batches = max(1, min(like.micro_batches, least // data))
        return dataclasses.replace(like, data=data, fsdp=1, micro_batches=micro_batches)

    if not share:
        return Placement(free, over(free), parts=PARTS + 1)
    return Placement(free, over(free), parts=PARTS, shares=(Placement(on_tail, over(on_tail), rows=share),))
