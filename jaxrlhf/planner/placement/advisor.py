"""The advisor: FlexRLHF's guideline, each of its advices simulated, beside the plan that a search found; and what would
change the time of a step.

    advice = advise(planned, graph, roles)
    for line in advice.lines:
        print(line)
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.placement_strategy import REPLICAS, STRATEGIES, TRAIN, PlacementStrategy
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.fusion.parts_forecast import PlanInParts
from jaxrlhf.planner.make_plan import Planned, plan_workload
from jaxrlhf.planner.placement.guideline import FULL, guideline
from jaxrlhf.planner.placement.pipelined import pipelined
from jaxrlhf.planner.plans.plan import NoRoomError, Plan, PlanError
from jaxrlhf.planner.plans.saved_plan import SavedPlan
from jaxrlhf.planner.search.methods import PLACEMENT
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.programs.roles import Role

WITHIN = 0.1
"""The guideline's best plan is recommended if an iteration takes at most so much longer than under the found plan."""
COLOCATE = "colocate"


@dataclasses.dataclass(frozen=True)
class Tried:
    """A placement, simulated."""

    name: str
    seconds: float | None
    """Of an iteration; None if no such plan fits."""
    note: str = ""
    """How it runs, or why there is none."""
    saved: SavedPlan | None = None
    strategy: PlacementStrategy | None = None
    is_advised: bool = False
    """True if the guideline advises it."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do, and why."""

    rows: tuple[dict[str, Any], ...]
    """A table: each placement with its seconds, beside the plan that was found."""
    lines: tuple[str, ...]
    """In words."""
    recommended: str
    """The placement to take; the name of the method that found the plan if that is better by more than `WITHIN`."""
    saved: SavedPlan | None
    """Its plan; None if it is the one that was found."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data."""
        return {"placements": list(self.rows), "recommended": self.recommended, "lines": list(self.lines)}


def advise(
    planned: Planned,
    graph: CallGraph,
    roles: Mapping[str, Role],
    found: PlanInParts | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Simulates what the guideline advises, and the placement strategies by name, beside a plan that was found, with
    its calls in parts if that was looked for."""
    return _Advisor(planned, graph, roles, found, say).run()


class _Advisor:
    def __init__(
        self,
        planned: Planned,
        graph: CallGraph,
        roles: Mapping[str, Role],
        found: PlanInParts | None,
        say: Callable[[str], None],
    ) -> None:
        self._planned, self._graph, self._roles, self._say = planned, graph, roles, say
        self._workload, self._cluster = planned.workload, planned.cluster
        self._costs = planned.costs or CostModel(planned.cluster)
        self._lengths = next((c.lengths for c in self._workload.calls if c.lengths is not None), None)
        in_parts = found is not None and found.plan is not None
        self._seconds = found.seconds_in_parts if found is not None and in_parts else planned.seconds

    def run(self) -> Advice:
        rules = guideline(self._workload, self._cluster)
        advised = [*dict.fromkeys(rules.strategies)]
        named = [PlacementStrategy(name) for name in STRATEGIES]
        tried = [self._try(strategy, is_advised=True) for strategy in advised]
        tried += [self._try(each) for each in (None, *named) if each not in advised]
        found = Tried(self._planned.method, self._seconds, "the plan above")
        first = tried[0]
        best = min((x for x in tried if x.is_advised and x.seconds), key=_seconds, default=None)
        better = best is None or _seconds(best) > (1 + WITHIN) * self._seconds
        recommended = found if best is None or better else best
        base = next((x.seconds for x in tried if x.name == COLOCATE), None)
        rows = tuple(self._row(each, base) for each in sorted([found, *tried], key=_seconds))
        lines = [str(rule) for rule in rules.rules]
        lines += self._comparison(first, best, recommended)
        lines += self._what_if()
        return Advice(rows, tuple(lines), recommended.name, recommended.saved)

    def _try(self, strategy: PlacementStrategy | None, *, is_advised: bool = False) -> Tried:
        """A placement, with parts and replicas where they are faster."""
        name = COLOCATE if strategy is None else name_of(strategy, self._cluster)
        self._say(f"Looking what {name} would take")
        try:
            planned = self._plan(self._workload, self._costs, strategy)
            plan = planned.plan_for(self._graph)
            saved, note = planned.saved(plan), "whole calls"
            if strategy is not None:
                parts = pipelined(self._graph, self._roles, plan, planned.groups, self._costs, self._lengths, strategy)
                saved, note = parts.adopted_by(saved), _in_parts(parts.plan)
        except NoRoomError as error:
            return Tried(name, None, f"does not fit: {_first_sentence(error)}", is_advised=is_advised)
        except PlanError as error:
            return Tried(name, None, _first_sentence(error), is_advised=is_advised)
        return Tried(name, saved.step_seconds, note, saved, strategy, is_advised)

    def _plan(self, workload: Workload, costs: CostModel, strategy: PlacementStrategy | None) -> Planned:
        """A plan of the method of a placement."""
        method = COLOCATE if strategy is None else PLACEMENT
        offload = self._planned.offload
        return plan_workload(
            workload, costs.cluster, method=method, costs=costs, placement=strategy, offload=offload, compare=False
        )

    def _row(self, tried: Tried, base: float | None) -> dict[str, Any]:
        return {
            "placement": tried.name,
            "guideline": "yes" if tried.is_advised else "-",
            "seconds": tried.seconds,
            "samples/s": self._samples / tried.seconds if tried.seconds else None,
            "times colocate": f"{base / tried.seconds:.2f}" if tried.seconds and base else "-",
            "how": tried.note,
        }

    @property
    def _samples(self) -> int:
        """Sequences of a step."""
        drawn = [call.sequences for call in self._workload.calls if call.kind == "generate"]
        return sum(drawn) or max(call.sequences for call in self._workload.calls)

    def _comparison(self, first: Tried, best: Tried | None, recommended: Tried) -> list[str]:
        """Where the guideline and the found plan agree, and by how much one is better."""
        method = self._planned.method
        if best is None:
            return [
                f"Nothing that the guideline advises fits. Take the plan of {method}, {self._seconds:.4g} s a step."
            ]
        lines = []
        if first is not best:
            got = "does not fit" if first.seconds is None else f"takes {first.seconds:.4g} s"
            lines.append(
                f"The guideline begins with {first.name}, which {got}; of what it advises, {best.name} is best."
            )
        longer = _seconds(best) / self._seconds - 1
        if recommended is best:
            beside = f"{abs(longer):.1%} {'slower' if longer > 0 else 'faster'} than"
            beside = "as fast as" if abs(longer) < 0.005 else beside
            lines.append(
                f"The guideline and {method} agree within {WITHIN:.0%}: {best.name} takes {_seconds(best):.4g} s a "
                f"step, {beside} the plan of {method}, {self._seconds:.4g} s. {_in_config(best.strategy)}"
            )
        else:
            lines.append(
                f"Take the plan of {method}, {self._seconds:.4g} s a step: {best.name}, the best that the guideline "
                f"advises, takes {longer:.0%} longer, {_seconds(best):.4g} s. {self._why(best)}"
            )
        return lines

    def _why(self, best: Tried) -> str:
        """The call in which the guideline's plan loses most."""
        assert best.saved is not None
        mine = {name: self._planned.call_seconds(name) for name in self._planned.choices}
        longer = {name: each.seconds - mine[name] for name, each in best.saved.calls.items() if name in mine}
        name = max(longer, key=lambda each: longer[each])
        if longer[name] <= 0:
            return "Its calls are as fast by themselves, but fewer of them run side by side."
        devices = best.saved.plan.placements[name].devices
        return (
            f"It loses most in {name}: {best.saved.calls[name].seconds:.4g} s on {len(devices)} devices, "
            f"{mine[name]:.4g} s on {len(self._planned.choices[name].devices)}."
        )

    # What would change the time

    def _what_if(self) -> list[str]:
        lines = [self._bottleneck(), *self._batch()]
        group = self._cluster.groups[-1]
        more = Cluster((*self._cluster.groups[:-1], dataclasses.replace(group, nodes=group.nodes + 1)))
        lines.append(self._changed(f"One more node ({more})", self._workload, more))
        shorter = dataclasses.replace(
            self._workload, calls=tuple(_with_half_the_response(call) for call in self._workload.calls)
        )
        lines.append(self._changed("Responses half as long", shorter, self._cluster))
        return lines

    def _bottleneck(self) -> str:
        """The role whose calls take most of the time of devices, and what decides the step."""
        work: dict[str, float] = {}
        for name, choice in self._planned.choices.items():
            role = self._workload.call(name).role
            work[role] = work.get(role, 0.0) + choice.busy * len(choice.devices)
        role = max(work, key=lambda each: work[each])
        deciding = [name for name in self._planned.simulation.critical if ":" not in name]
        calls = ", ".join(dict.fromkeys(deciding)) or "no single call"
        return (
            f"Bottleneck: {role}, whose calls have {work[role] / sum(work.values()):.0%} of the busy time of devices. "
            f"A step gets shorter only if one of these does: {calls}."
        )

    def _batch(self) -> Iterable[str]:
        """How full the memory is, and what twice the batch would do."""
        fullest = max(each.total / self._cluster.capacity(each.devices.start) for each in self._planned.memory)
        line = f"Memory: {fullest:.0%} of what a plan may fill is full at the most."
        if fullest >= FULL:
            yield f"{line} There is no room for a larger batch."
            return
        calls = tuple(
            dataclasses.replace(call, rows=2 * call.rows, row_counts=tuple(2 * n for n in call.row_counts))
            for call in self._workload.calls
        )
        twice = self._changed("Twice the batch", Workload(calls, self._workload.on_host), self._cluster, samples=2)
        yield f"{line} {twice}"

    def _changed(self, what: str, workload: Workload, cluster: Cluster, *, samples: int = 1) -> str:
        """What another workload or cluster would bring, under a plan of the same method."""
        self._say(f"{what}?")
        method = self._planned.method
        try:
            other = plan_workload(
                workload, cluster, method=method, costs=self._costs.on(cluster), offload=self._planned.offload,
                placement=self._planned.placement, compare=False,
            )  # fmt: skip
        except PlanError as error:
            return f"{what}: no plan. {_first_sentence(error)}"
        before = self._planned.seconds
        ratio = samples * before / other.seconds
        per = "" if samples == 1 else f", {ratio:.2f} times as many samples a second"
        if samples > 1:
            return f"{what}: {other.seconds:.4g} s a step instead of {before:.4g}{per}."
        change = f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 / ratio:.2f} times as slow"
        return f"{what}: {other.seconds:.4g} s a step instead of {before:.4g}, {change}."


def name_of(strategy: PlacementStrategy, cluster: Cluster) -> str:
    """A placement strategy in words."""
    if strategy.name:
        return strategy.name
    parts = []
    for key, extent in strategy.extents.items():
        size = len(extent) if isinstance(extent, tuple) else math.floor(extent * cluster.num_devices)
        parts.append(f"{key} {devices_to_text(extent)}" if isinstance(extent, tuple) else f"{key} {size} devices")
    if strategy.replicas:
        parts.append(f"{strategy.replicas} {REPLICAS}")
    return ", ".join(parts) if TRAIN not in strategy.extents else f"apart ({', '.join(parts)})"


def _in_config(strategy: PlacementStrategy | None) -> str:
    """How a config asks for a placement."""
    if strategy is None:
        return "For it, plan with --strategy colocate."
    return f"For it, write in a config: plan.placement={json.dumps(strategy.to_data())}"


def _with_half_the_response(call: ModelCall) -> ModelCall:
    """A call whose responses are half as long."""
    lengths = call.lengths
    if lengths is not None:
        lengths = ResponseLengths(mean=max(1.0, lengths.mean / 2), p99=max(1, math.ceil(lengths.p99 / 2)))
    scored = min(call.scored, max(1, call.response // 2))
    return dataclasses.replace(call, response=max(1, call.response // 2), scored=scored, lengths=lengths)


def _in_parts(plan: Plan | None) -> str:
    """How the calls of a plan are cut, in a few words."""
    if plan is None:
        return "whole calls"
    cut = [f"{name} in {p.parts} x {1 + len(p.shares)}" for name, p in plan.placements.items() if not p.is_whole]
    return f"parts x replicas: {', '.join(cut[:2])}{', ...' if len(cut) > 2 else ''}"


def _first_sentence(error: Exception) -> str:
    """The beginning of a message."""
    text = str(error)
    return text if len(text) < 160 else f"{text[:157]}..."


def _seconds(tried: Tried) -> float:
    return math.inf if tried.seconds is None else tried.seconds
