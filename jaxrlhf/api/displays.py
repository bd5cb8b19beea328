"""Graphs, plans and timelines of runs, which show themselves in a notebook, and as plain text elsewhere."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.observe.chrome_trace import TraceError
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import Event
from jaxrlhf.observe.timeline_picture import PictureError
from jaxrlhf.pages.graph_html import graph_html
from jaxrlhf.pages.plan_html import plan_html
from jaxrlhf.pages.timeline_html import timeline_html
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.programs.roles import ModelRole, Role
from jaxrlhf.run.assembly import Phase


class PlanDisplay(Mapping[str, Placement]):
    """The plan of a run's step: call -> its placement. In a notebook, a picture of the devices and a table.

    >>> list(run.plan)[-1], run.plan["actor.train"].devices
    ('actor.train', (0,))
    """

    def __init__(self, plan: Plan, graph: CallGraph, roles: Mapping[str, Role]) -> None:
        self._plan, self._graph = plan, graph
        self._models = {name: role.model for name, role in roles.items() if isinstance(role, ModelRole)}

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self._plan

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The plan as a table: a row for each call."""
        return plan_rows(self._plan, self._graph, self._models)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, in the form of a config's `plan`."""
        return self._plan.to_json()

    def __getitem__(self, call: str) -> Placement:
        return self._plan.placements[call]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.placements)

    def __len__(self) -> int:
        return len(self._plan.placements)

    def __repr__(self) -> str:
        return as_text("Plan of the step", self.rows)

    def _repr_html_(self) -> str:
        return plan_html(self._plan, self._graph, self._models)


class GraphDisplay:
    """The calls of a run's step, and which needs which. In a notebook, a picture.

    >>> run.graph.rows[1]["needs"]
    ['actor.generate']
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    @property
    def graph(self) -> CallGraph:
        """The graph itself."""
        return self._phase.graph

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each call: its name, kind and role, and what it needs."""
        calls = self._phase.graph.calls
        needs = {call.name: list(self._phase.graph.dependencies(call)) for call in calls}
        return [{"call": call.name, "kind": call.kind, "role": call.role, "needs": needs[call.name]} for call in calls]

    def __repr__(self) -> str:
        return as_text("Calls of the step", [{**row, "needs": ", ".join(row["needs"]) or "-"} for row in self.rows])

    def _repr_html_(self) -> str:
        return graph_html(self._phase.graph, self._phase.plan)


class TimelineDisplay:
    """The timeline of a run: its events by device. In a notebook, a picture of some steps: by default the last three.

    >>> {row["step"] for row in run.timeline((1, 2)).rows}
    {1, 2}
    """

    def __init__(self, source: Sequence[Event] | Path, steps: tuple[int, int] | None) -> None:
        self._source, self._steps = source, steps

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The events that this process saw: name, kind, devices, step, start and end in seconds from the run's start,
        and bytes moved. Empty for a run of another process."""
        events = [] if isinstance(self._source, Path) else self._source
        first, last = self._steps or (0, 2**63)
        return [
            {
                "name": event.name, "kind": event.kind, "devices": list(event.devices), "phase": event.phase,
                "step": event.step, "start": event.start, "end": event.end, "bytes": event.bytes,
            }
            for event in events
            if first <= event.step <= last
        ]  # fmt: skip

    def __repr__(self) -> str:
        if isinstance(self._source, Path):
            return f"<timeline in {self._source}>"
        steps = sorted({row["step"] for row in self.rows})
        return f"<timeline of {len(self.rows)} events{f' of steps {steps[0]} to {steps[-1]}' if steps else ''}>"

    def _repr_html_(self) -> str | None:
        try:
            return timeline_html(self._source, steps=self._steps)
        except (PictureError, TraceError):
            return None  # nothing ran yet: the text says so


def as_text(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in plain text."""
    out = io.StringIO()
    Console(output=out, width=120).table(title, rows)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
