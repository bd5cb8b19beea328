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

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.plan_config import ResponseLengths, Tail
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast, PlanInParts, takers, with_placements
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.plans.saved_plan import CallForecast
from jaxrlhf.planner.plans.splits import divisors
from jaxrlhf.planner.search.choices import on_cpu, strategies
from jaxrlhf.programs.roles import Role
from jaxrlhf.sharding.strategy import Strategy

PERCENTS = range(5, 100, 5)
"""Sequences that move, as a percentage: those that the paper tries."""
PARTS = 2
"""Parts of the generation before its tail."""
WORTH = 0.98
"""A tail is worth it if an iteration takes at most so much of the time that it takes without."""
_MEANS = "a tail"


def fuse_generation(
    graph: CallGraph,
    roles: Mapping[str, Role],
    plan: Plan,
    costs: CostModel,
    lengths: ResponseLengths | None,
) -> PlanInParts:
    """Looks for the tail of the first generation of a step that makes its plan fastest. All calls of `plan` are
    whole."""
    return _Search(PartsForecast(graph, roles, costs, lengths), plan).run()


def refined_tails(
    graph: CallGraph, roles: Mapping[str, Role], plan: Plan, costs: CostModel, lengths: ResponseLengths
) -> tuple[Plan, float, float]:
    """The plan with other fractions of sequences that move to the tails that it has, where lengths of responses make
    that faster; its seconds of an iteration, and those of the plan as it is."""
    return _Search(PartsForecast(graph, roles, costs, lengths), plan).refined()


class _Search:
    def __init__(self, forecast: PartsForecast, plan: Plan) -> None:
        self._forecast, self._plan = forecast, plan
        self._graph, self._costs = forecast.graph, forecast.costs

    def run(self) -> PlanInParts:
        before = self._forecast.seconds(self._plan)
        generation = next((call for call in self._graph.calls if call.kind == "generate"), None)
        reason = self._unfit(generation)
        if generation is None or reason or before is None:
            return PlanInParts(_MEANS, before or 0.0, (), reason=reason or "The plan as it is does not fit.")
        starts = self._one_stage(generation)
        if not starts:
            reason = f"{generation.name} has micro-batches or stages, and runs on its devices in no other way."
            return PlanInParts(_MEANS, before, (), reason=reason)
        rows, best = [], (before * WORTH, self._plan)
        for percent in PERCENTS:
            tried = [
                (seconds, tail, plan)
                for start in starts
                for tail, plan in self._candidates(start, generation, percent / 100)
                if (seconds := self._forecast.seconds(plan)) is not None
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
            return PlanInParts(_MEANS, before, tuple(rows), fused, fused_seconds, *self._details(generation, fused))
        why = f"None takes less than {WORTH:g} of the time."
        why = why if rows else "No tail fits: it must leave devices free that inference can use."
        return PlanInParts(_MEANS, before, tuple(rows), reason=why)

    def refined(self) -> tuple[Plan, float, float]:
        """The plan with other fractions of sequences that move to the tails that it has, if such a plan is faster; its
        seconds, and those of the plan as it is."""
        before = self._forecast.seconds(self._plan)
        best = (math.inf if before is None else before * WORTH, self._plan)
        tails = {name: each for name, each in self._plan.placements.items() if each.tail is not None}
        for percent in PERCENTS:
            placements = {
                name: dataclasses.replace(each, tail=dataclasses.replace(each.tail, rows=percent / 100))
                for name, each in tails.items()
                if each.tail is not None
            }
            plan = with_placements(self._plan, placements)
            if self._forecast.is_valid(plan) and (seconds := self._forecast.seconds(plan)) is not None:
                best = min(best, (seconds, plan), key=lambda each: each[0])
        seconds, plan = best
        return plan, (before or 0.0) if plan is self._plan else seconds, before or 0.0

    def _details(self, generation: Call, plan: Plan) -> tuple[dict[str, CallForecast], str]:
        """The forecast of each call under a plan with a tail, and why that is faster."""
        calls = self._forecast.calls(plan)
        of_tail = sum(each.seconds for _, part, each in self._forecast.parts(plan) if part is not None and part.migrate)
        tail = plan[generation].tail
        assert tail is not None
        beside = [call.plan_name for call in takers(self._graph, generation, "infer")]
        why = (
            f"The last {tail.rows:.0%} of the sequences take {of_tail:.3g} of the "
            f"{calls[generation.plan_name].seconds:.3g} s of {generation.plan_name}, on {len(tail.devices)} of its "
            f"devices; meanwhile {', '.join(beside)} "
            f"({sum(calls[name].seconds for name in beside):.3g} s) run on the others."
        )
        return calls, why

    def _as_tokens(self, generation: Call, tried: list[tuple[float, Tail, Plan]]) -> Iterator[tuple[float, Tail, Plan]]:
        """The fastest of some plans with sequences that are prefilled where they go on."""
        _, tail, plan = min(tried, key=lambda each: each[0])
        tail = dataclasses.replace(tail, migrate="prefill")
        plan = with_placements(plan, {generation.plan_name: dataclasses.replace(plan[generation], tail=tail)})
        if (seconds := self._forecast.seconds(plan)) is not None:
            yield seconds, tail, plan

    def _unfit(self, generation: Call | None) -> str:
        """Why a generation can have no tail."""
        if generation is None:
            return "The step does not generate."
        if on_cpu(self._costs.cluster) and self._costs.cluster.num_nodes == 1:
            return "Virtual devices of one process share its CPUs: nothing runs beside the tail."
        lengths = self._forecast.lengths
        if lengths is None or lengths.mean == lengths.p99:
            return "All responses are taken to be equally long. Give their lengths."
        strategy = self._plan[generation].strategy
        if strategy.num_row_shards == 1 and strategy.pipeline == 1:
            return f"{generation.name} has one row shard, so that a tail would leave no device free."
        has_takers = bool(takers(self._graph, generation, "infer"))
        return "" if has_takers else f"No inference call takes the rows of {generation.name} alone."

    def _one_stage(self, generation: Call) -> list[Plan]:
        """The plan as it is, if its generation has one stage and no micro-batches; else the fastest whose generation
        has, on the same devices. If none of these fits, all of them: there may be room when inference runs elsewhere.
        A tail takes whole row shards, which stages do not have side by side."""
        placement, cluster = self._plan[generation], self._costs.cluster
        if placement.strategy.pipeline == placement.strategy.micro_batches == 1:
            return [self._plan]
        call = self._forecast.workload.call(generation.plan_name)
        valid, fitting = list[Plan](), list[tuple[float, Plan]]()
        for strategy in strategies(call, len(placement.devices), cluster.devices_per_node):
            if strategy.pipeline > 1 or strategy.micro_batches > 1 or strategy.slots or strategy.num_row_shards == 1:
                continue
            other = dataclasses.replace(placement, strategy=strategy)
            plan = with_placements(self._plan, {generation.plan_name: other})
            if self._forecast.is_valid(plan):
                valid.append(plan)
                if (seconds := self._forecast.seconds(plan)) is not None:
                    fitting.append((seconds, plan))
        return [min(fitting, key=lambda each: each[0])[1]] if fitting else valid

    def _candidates(self, start: Plan, generation: Call, fraction: float) -> Iterator[tuple[Tail, Plan]]:
        """Plans like `start` with a tail, over every number of row shards that leaves some free. The paper takes the
        fewest whose batch does not saturate a device, and whose memory has room; a simulation knows what a batch costs.
        """
        placement = start[generation]
        devices, strategy = tuple(sorted(placement.devices)), placement.strategy
        width = len(devices) // strategy.num_row_shards
        for shards in divisors(strategy.num_row_shards)[:-1]:
            on, free = devices[: shards * width], devices[shards * width :]
            on_tail = dataclasses.replace(strategy, data=shards, fsdp=1, slots=0, shared_prompts=0)
            for share, tensor in itertools.product((0.0, len(on) / len(devices)), (0, 4, 8)):
                tail = Tail(on, on_tail, rows=fraction)
                fused = {generation.plan_name: dataclasses.replace(placement, parts=PARTS, tail=tail)}
                for call in takers(self._graph, generation, "infer"):
                    like = self._plan[call].strategy
                    if tensor:  # parts of few rows do not fill a pipeline
                        degree = max(n for n in self._tensor_degrees(call) if n <= tensor)
                        like = dataclasses.replace(like, pipeline=1, tensor=degree)
                    fused[call.plan_name] = _inference(call, like, on, free, share, fraction)
                on_host = {
                    call.plan_name: Placement(parts=PARTS + 1) for call in takers(self._graph, generation, "host")
                }
                plan = with_placements(start, fused | on_host)
                if self._forecast.is_valid(plan):
                    yield tail, plan

    def _tensor_degrees(self, call: Call) -> set[int]:
        """The degrees of `tensor` within a node that the model of a call has."""
        per_node = self._costs.cluster.devices_per_node
        return {each.tensor for each in strategies(self._forecast.workload.call(call.plan_name), per_node, per_node)}


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
