"""The tails of a run's generation, whose sizes follow the lengths of its responses.

    tails = TailRefinement(assembly.train, every=50, ..., history)
    tails.saw(metrics)                 # after every step
    if tails.is_due(steps_done):
        tails.refine(channel)
    executor.run(graph, tails.plan, ...)

A tail of another size changes when things happen, and results by rounding alone. What is chosen depends on the recorded
lengths and on the forecast's costs, so that a resumed run chooses the same.
"""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.planner.cost_sources import costs_from, usual_source
from jaxrlhf.planner.fusion.fused_generation import refined_tails
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.run.assembly import Phase
from jaxrlhf.run.recorded_lengths import LAST_STEPS, lengths_like
from jaxrlhf.run.step_metrics import RESPONSE_LENGTH

TAIL_ROWS = "perf/tail_rows/"
"""Begins the names of metrics that say which fraction of the sequences of a call moves to its tail."""


class TailRefinement:
    """The plan of a run's steps, and when it gets tails of other sizes.

    Args:
        every: Steps between two choices; 0 means that the plan stays as it is.
        most: The most tokens of a response.
        cluster: Makes the description of the devices, for forecasts.
        history: The records of metrics of a run that is resumed.
    """

    def __init__(
        self,
        phase: Phase,
        *,
        every: int,
        most: int,
        cluster: Callable[[], Cluster],
        history: Sequence[Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self.plan = phase.plan
        self._phase, self._every, self._most, self._cluster, self._say = phase, every, most, cluster, say
        self._lengths: collections.deque[tuple[float, float]] = collections.deque(maxlen=LAST_STEPS)
        for record in history:
            self.saw(record)
        if every and history:
            recorded = {key.removeprefix(TAIL_ROWS): x for key, x in history[-1].items() if key.startswith(TAIL_ROWS)}
            self.plan = _with_rows(self.plan, recorded)

    def saw(self, metrics: Mapping[str, Any]) -> None:
        """Takes the lengths of a step's responses in."""
        if f"{RESPONSE_LENGTH}mean" in metrics:
            self._lengths.append((metrics[f"{RESPONSE_LENGTH}mean"], metrics[f"{RESPONSE_LENGTH}p99"]))

    def metrics(self) -> dict[str, float]:
        """Call with a tail -> the fraction of its sequences that moves, if it may change."""
        return {f"{TAIL_ROWS}{name}": rows for name, rows in _rows(self.plan).items()} if self._every else {}

    def is_due(self, done: int) -> bool:
        """Whether sizes are to be chosen after so many steps, whose metrics must have been seen."""
        return bool(self._every and done and done % self._every == 0 and self._lengths and _rows(self.plan))

    def refine(self, channel: Channel) -> None:
        """Chooses the sizes by the lengths of the last steps. Every process calls it."""
        before = _rows(self.plan)
        rows = channel.share(self._chosen)
        if rows != before:
            self.plan = _with_rows(self.plan, rows)
            for name in (name for name in rows if rows[name] != before[name]):
                self._say(f"The tail of {name} gets {rows[name]:.0%} of the sequences, {before[name]:.0%} before")

    def _chosen(self) -> dict[str, float]:
        mean, p99 = (statistics.mean(each) for each in zip(*self._lengths, strict=True))
        cluster, phase = self._cluster(), self._phase
        costs, _ = costs_from(usual_source(cluster), step_workload(phase.graph, phase.roles), cluster)
        lengths = lengths_like(mean, p99, [self._most])
        return _rows(refined_tails(phase.graph, phase.roles, self.plan, costs, lengths)[0])


def _rows(plan: Plan) -> dict[str, float]:
    return {name: each.tail.rows for name, each in plan.placements.items() if each.tail is not None}


def _with_rows(plan: Plan, rows: Mapping[str, float]) -> Plan:
    placements = {
        name: dataclasses.replace(each, tail=dataclasses.replace(each.tail, rows=rows[name]))
        if each.tail is not None and name in rows
        else each
        for name, each in plan.placements.items()
    }
    return dataclasses.replace(plan, placements=placements)
