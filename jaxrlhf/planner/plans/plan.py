"""The plan: a placement for every call, as plain data.

A placement is devices and a strategy. The plan changes where and how fast a call runs, never what it gives.
`check_plan.py` says what it must keep to.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from flax.core import FrozenDict

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.config.reading import to_tree
from jaxrlhf.schedules.instructions import Schedule, ScheduleError
from jaxrlhf.schedules.schedule import from_data, to_data

SCHEDULES = "fused_schedules"
"""Where plain data of a plan have the schedules of calls that are fused."""


class PlanError(ValueError):
    """A plan that does not fit its graph, its models or the devices."""


class NoRoomError(PlanError):
    """Devices have too little memory for any plan."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Call, by its name in the graph -> placement."""

    placements: Mapping[str, Placement]
    offload: tuple[str, ...] = ()
    """Roles whose weights rest in host memory where no call needs them."""
    fuse: tuple[str, ...] = ()
    """Two train calls that run as one pipeline."""
    schedules: tuple[Schedule, ...] = ()
    """In which order they work: of data-parallel groups that share devices, one for all sets of groups that are alike.
    Empty: they are found when the run starts (`fusion.with_schedules`)."""

    def __getitem__(self, call: Call) -> Placement:
        return self.placements[call.plan_name]

    def to_json(self) -> dict[str, Any]:
        """As plain data, in the form of a config's `plan`, with the schedules of fused calls beside it."""
        lists = {"offload": self.offload, "fuse": self.fuse, SCHEDULES: [to_data(x) for x in self.schedules]}
        return {"calls": to_tree(self.placements)} | {key: list(items) for key, items in lists.items() if items}


@dataclasses.dataclass(frozen=True)
class PlanData:
    """What `Plan.to_json` wrote, in the form in which `config.reading` reads it."""

    calls: Mapping[str, Placement] = FrozenDict()
    offload: tuple[str, ...] = ()
    fuse: tuple[str, ...] = ()
    fused_schedules: tuple[Any, ...] = ()

    def plan(self) -> Plan:
        """The plan.

        Raises:
            PlanError: A schedule is none.
        """
        try:
            schedules = tuple(from_data(each) for each in self.fused_schedules)
        except ScheduleError as error:
            raise PlanError(
                f"{SCHEDULES}: {error} Without `{SCHEDULES}` the run finds its own; or plan again."
            ) from error
        placements = {name: placement.with_devices() for name, placement in self.calls.items()}
        return Plan(placements, self.offload, self.fuse, schedules)


def placement_of(call: str, placements: Mapping[str, Placement]) -> Placement | None:
    """The placement under a call's own name (`actor.generate#2`), else under its name without the ordinal."""
    return placements.get(call) or placements.get(call.split("#")[0])


def resolve(
    graph: CallGraph,
    default: Placement,
    placements: Mapping[str, Placement] = FrozenDict(),
    *,
    offload: Iterable[str] = (),
    fuse: Iterable[str] = (),
) -> Plan:
    """A plan by hand: of each call its own placement, or the default. Work on the host has none."""
    names = [call.plan_name for call in graph.calls if call.kind != "host"]
    found = {name: placement_of(name, placements) or default for name in names}
    return Plan(found, tuple(offload), tuple(fuse))
