"""Objects that show themselves in a notebook: graphs, plans, timelines, forecasts."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import Event
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.assembly import Phase


def _models(phase: Phase) -> dict[str, ModelConfig]:
    return {name: role.model for name, role in phase.roles.items() if isinstance(role, ModelRole)}


class PlanDisplay(Mapping[str, Placement]):
    """The plan of a step: call -> its placement."""

    def __init__(self, phase: Phase) -> None:
        self.plan: Plan = phase.plan
        self.graph: CallGraph = phase.graph
        self._models = _models(phase)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The plan as a table: a row for each call."""
        return plan_rows(self.plan, self.graph, self._models)

    def __getitem__(self, call: str) -> Placement:
        return self.plan.placements[call]

    def __iter__(self) -> Any:
        return iter(self.plan.placements)

    def __len__(self) -> int:
        return len(self.plan.placements)

    def __repr__(self) -> str:
        return as_text("Plan", self.rows)


class GraphDisplay:
    """The calls of a step, and which needs which."""

    def __init__(self, phase: Phase) -> None:
        self.graph: CallGraph = phase.graph
        self.plan: Plan = phase.plan

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each call."""
        return self.graph.to_rows()

    def __repr__(self) -> str:
        return as_text("Calls", self.rows)


class TimelineDisplay:
    """What ran when, and on which devices."""

    def __init__(self, events: Sequence[Event], steps: Sequence[int] | None) -> None:
        self.events = [event for event in events if steps is None or event.step in steps]

    def __repr__(self) -> str:
        return f"<timeline of {len(self.events)} events>"


def as_text(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A table in plain text."""
    import io

    out = io.StringIO()
    Console(output=out, width=120).table(title, rows)
    return out.getvalue().strip()
