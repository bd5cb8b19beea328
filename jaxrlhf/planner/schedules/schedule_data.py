"""Schedules as plain data, which JSON can hold."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.planner.schedules.schedule import Instruction, Pipe, Schedule, ScheduleError, validate


def to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON can hold it."""
    return {
        "pipes": [{**vars(pipe), "nodes": list(pipe.nodes)} for pipe in schedule.pipes],
        "orders": [[[*x[:3], "F" if x.forward else "B"] for x in order] for order in schedule.orders],
    }


def from_data(data: Mapping[str, Any]) -> Schedule:
    """The schedule that `to_data` wrote, checked.

    Raises:
        ScheduleError: It is none, or not a valid one.
    """
    try:
        pipes = tuple(Pipe(**{**pipe, "nodes": tuple(pipe["nodes"])}) for pipe in data["pipes"])
        kinds = {"F": True, "B": False}
        orders = tuple(
            tuple(Instruction(pipe, micro_batch, stage, kinds[kind]) for pipe, micro_batch, stage, kind in order)
            for order in data["orders"]
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(
            f"Data of a schedule: must have 'pipes' and 'orders' as to_data writes them. Got {brief(data)}, "
            f"where {type(error).__name__} {error}. Write it anew."
        ) from error
    schedule = Schedule(pipes, orders)
    validate(schedule)
    return schedule
