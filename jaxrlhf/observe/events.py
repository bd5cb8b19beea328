"""Events: what ran when, on which devices, and the events of several processes on one clock."""

import dataclasses
from collections.abc import Sequence

STEP = "step"
"""The phase of training steps; the warm start and evaluations have others."""
MOVING = ("reallocate", "offload")
"""Kinds of events that move bytes and compute nothing: between layouts, and to or from pinned host memory."""
WAIT = "wait"
"""The kind of a wait of the main thread, on the host. Such an event is named after what it waited for."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One piece of work, or a wait for one. Times are in seconds, on the clock of the process that recorded it."""

    name: str
    kind: str
    """The kind of a call, one of `MOVING`, or `WAIT`."""
    devices: tuple[int, ...]
    """Positions in `jax.devices()` of the devices of this process that it occupied; empty for work on the host."""
    step: int
    """The number of the step as in the metrics: the first step is 1."""
    start: float
    end: float
    phase: str = STEP
    """The part of the run that it belongs to."""
    bytes: int = 0
    """Bytes moved to the devices, or the host memory, of the process that recorded the event; 0 if it moved none."""
    part: str = ""
    """The part of a call that it is, if the call has several, and how much was done in it."""

    @property
    def call(self) -> tuple[str, int, str, str]:
        """A key of its call. Processes that run one call together each record an event with this key."""
        return self.phase, self.step, self.name, self.kind


@dataclasses.dataclass(frozen=True)
class ProcessEvents:
    """The events of one process."""

    events: tuple[Event, ...]
    origin_unix_seconds: float
    """The Unix time of the zero of its clock."""
    own_devices: tuple[int, ...] = ()
    """Its devices, idle ones too, as far as they are known."""
    num_dropped: int = 0
    """The number of events that were dropped."""


def on_one_clock(processes: Sequence[ProcessEvents]) -> list[ProcessEvents]:
    """The same events, all in seconds since the earliest of the clocks' zeros.

    The clocks are aligned by Unix time, so the error is that of the hosts' clocks: milliseconds with NTP. A call of
    several processes remains one event for each, since each knows when its own part was done.
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


def note_call(error: BaseException, name: str, phase: str, step: int) -> None:
    """Adds a note to an error: in which call it came up. A note that it has already stays the only one."""
    if not noted_call(error):
        error.add_note(f"This came up in call {name!r} of {phase} {step}.")


def noted_call(error: BaseException) -> str:
    """The call and its step in the note of an error; empty without one.

    >>> error = ValueError()
    >>> note_call(error, "actor.train", "step", 3)
    >>> noted_call(error)
    "call 'actor.train' of step 3"
    """
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("This came up in call ")]
    return notes[0].removeprefix("This came up in ").removesuffix(".") if notes else ""
