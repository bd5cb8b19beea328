"""Events: what ran when, on which devices, and how those that several processes saw come onto one clock."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

STEP = "step"
"""The phase of the steps of training, beside those of the warm start and of evaluations."""
MOVING = ("reallocate", "offload")
"""Kinds of what moves bytes and computes nothing: between layouts, and to or from pinned host memory."""
WAIT = "wait"
"""The kind of a wait of the main thread, on the host. Such an event is named after what it waited for."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One piece of work, or a wait for one. Times are seconds of a clock of the process that saw it."""

    name: str
    kind: str
    """That of a call, or one of `MOVING`, or `WAIT`."""
    devices: tuple[int, ...]
    """The devices that it occupied, as positions in `jax.devices()`; none for work on the host."""
    step: int
    """As metrics count: 1 is the first step."""
    start: float
    end: float
    phase: str = STEP
    """The part of the run that it belongs to."""
    bytes: int = 0
    """Moved to the devices (or the host memory) of the process that saw it. 0: it moved none."""

    @property
    def call(self) -> tuple[str, int, str, str]:
        """A key of its call. Processes that work on one call together each have an event of it."""
        return self.phase, self.step, self.name, self.kind


@dataclasses.dataclass(frozen=True)
class ProcessEvents:
    """The events of one process."""

    events: tuple[Event, ...]
    origin_unix_seconds: float
    """The Unix time of the zero of its clock."""
    own_devices: tuple[int, ...] | None = None
    """The devices of which it can tell. None: all are its own."""
    num_dropped: int = 0
    """Events that it no longer has."""

    def to_json(self) -> dict[str, Any]:
        """As plain data, for another process or for a file."""
        return dataclasses.asdict(self)

    def told_of(self, event: Event) -> tuple[int, ...]:
        """Those of an event's devices that are this process' own. Of others it does not know when they were done."""
        own = self._own
        return event.devices if own is None else tuple(device for device in event.devices if device in own)

    @functools.cached_property
    def _own(self) -> frozenset[int] | None:
        return None if self.own_devices is None else frozenset(self.own_devices)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ProcessEvents":
        """The inverse of `to_json`, also where JSON has made lists of its tuples."""
        events = tuple(Event(**{**event, "devices": tuple(event["devices"])}) for event in data["events"])
        own = data["own_devices"]
        return cls(**{**data, "events": events, "own_devices": None if own is None else tuple(own)})


def on_one_clock(processes: Sequence[ProcessEvents]) -> list[ProcessEvents]:
    """The same events, all in seconds since the earliest of the clocks' zeros.

    The clocks are lined up by Unix time, so hosts that disagree on it are drawn as far apart as they disagree:
    milliseconds, where NTP keeps them.
    """
    zero = min((process.origin_unix_seconds for process in processes), default=0.0)
    lined_up = []
    for process in processes:
        shift = process.origin_unix_seconds - zero
        events = tuple(
            dataclasses.replace(event, start=event.start + shift, end=event.end + shift) for event in process.events
        )
        lined_up.append(dataclasses.replace(process, events=events, origin_unix_seconds=zero))
    return lined_up


def merged(processes: Sequence[ProcessEvents]) -> list[Event]:
    """The events of all processes on one clock, each on those of its devices that its process can tell of.

    A call of several processes stays one event of each, since each knows when it was done with it.
    """
    found = []
    for process in on_one_clock(processes):
        for event in process.events:
            devices = process.told_of(event)
            if devices or not event.devices:
                found.append(dataclasses.replace(event, devices=devices))
    return found
