"""Schedules as plain data, which JSON can hold and people can read: of every node its instructions in a line.

    {"version": 1,
     "pipes": [{"nodes": [0, 1], "micro_batches": 2, "forward": 1, "backward": 2, "activation": 1, "model": 0}],
     "orders": ["F0.0.0 F0.1.0 B0.0.0 B0.1.0", "F0.0.1 B0.0.1 F0.1.1 B0.1.1"]}

`B0.1.1` is the backward of pipe 0, micro-batch 1, stage 1.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.planner.schedules.schedule import Instruction, Pipe, Schedule, ScheduleError, validate

VERSION = 1
"""Of the form."""
_INSTRUCTION = re.compile(r"([FB])(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


def to_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON can hold it."""
    return {
        "version": VERSION,
        "pipes": [
            {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(pipe).items()}
            for pipe in schedule.pipes
        ],
        "orders": [
            " ".join(f"{'F' if x.forward else 'B'}{x.pipe}.{x.micro_batch}.{x.stage}" for x in order)
            for order in schedule.orders
        ],
    }


def from_data(data: Any) -> Schedule:
    """The schedule that `to_data` wrote, checked.

    Raises:
        ScheduleError: It is none, or not a valid one.
    """
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}. Got {brief(data['version'])}.")
        if unknown := [key for key in data if key not in ("version", "pipes", "orders")]:
            raise ValueError(f"unknown key {brief(unknown[0])}")
        pipes = tuple(_pipe(pipe) for pipe in data["pipes"])
        orders = tuple(tuple(_instruction(word) for word in order.split()) for order in data["orders"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(
            f"Data of a schedule: must have 'version', 'pipes' and 'orders' as to_data writes them. Got {brief(data)}, "
            f"with a fault: {reason} Write it anew."
        ) from error
    schedule = Schedule(pipes, orders)
    validate(schedule)
    return schedule


def _pipe(data: Mapping[str, Any]) -> Pipe:
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list | tuple) else value for key, value in data.items()
    }
    for key, value in given.items():
        whole = key in ("nodes", "micro_batches", "model")
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is not int and (whole or (type(each) is not float and each is not None)):
                raise ValueError(f"{key}: must be {'whole ' if whole else ''}numbers. Got {brief(each)}.")
    return Pipe(**given)


def _instruction(word: str) -> Instruction:
    match = _INSTRUCTION.fullmatch(word)
    if match is None:
        raise ValueError(f"an instruction must be such as F0.1.2. Got {brief(word)}.")
    return Instruction(int(match[2]), int(match[3]), int(match[4]), match[1] == "F")
