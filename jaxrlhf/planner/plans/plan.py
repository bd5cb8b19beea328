"""The plan: a placement for every call, as plain data.

A placement is devices and a strategy. The plan changes where and how fast a call runs, never its results.
`check_plan.py` has the rules of plans.
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
"""The key of the schedules of fused calls in the plain data of a plan."""


class PlanError(ValueError):
    """A plan that does not fit its graph, its models or the devices."""


class NoRoomError(PlanError):
    """Devices have too little memory for any plan."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement for every call that takes devices, by its name in the graph, and for those on the host that run in
    parts."""

    placements: Mapping[str, Placement]
    offload: tuple[str, ...] = ()
    """Roles whose weights rest in host memory where no call needs them."""
    fuse: tuple[str, ...] = ()
    """Two train calls that run as one pipeline."""
    schedules: tuple[Schedule, ...] = ()
    """Their schedules: one for all equal sets of data-parallel groups that share devices. If empty, they are found when
    the run starts (`fusible.with_schedules`)."""

    def __getitem__(self, call: Call) -> Placement:
        return self.placements[call.plan_name]

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data, in the form of a config's `plan`, with the schedules of fused calls beside it."""
        lists = {"offload": self.offload, "fuse": self.fuse, SCHEDULES: [to_data(x) for x in self.schedules]}
        return {"calls": to_tree(self.placements)} | {key: list(items) for key, items in lists.items() if items}


@dataclasses.dataclass(frozen=True)
class PlanData:
    """The output of `Plan.to_json`, in the form in which `config.reading` reads it."""

    calls: Mapping[str, Placement] = FrozenDict()
    offload: tuple[str, ...] = ()
    fuse: tuple[str, ...] = ()
    fused_schedules: tuple[Any, ...] = ()

    def plan(self) -> Plan:
        """The plan. Raises PlanError if a schedule is not valid."""
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
    """A plan from given placements: each call has its own or the default. Calls on the host have no default."""
    found = {
        call.plan_name: placement
        for call in graph.calls
        if (placement := placement_of(call.plan_name, placements) or (default if call.kind != "host" else None))
    }
    return Plan(found, tuple(offload), tuple(fuse))
