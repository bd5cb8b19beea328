"""What a picture of a timeline shows: the steps that were asked for, in rows, and how busy the devices were in them."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.observe.call_colors import call_colors
from jaxrlhf.observe.chrome_trace import Rows
from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.utilization import step_span, utilization

DEFAULT_STEPS = 3
"""The number of steps, the last ones, that are drawn by default."""
MAX_DEVICE_ROWS = 32
"""With more devices than this, neighbors with the same events share a row."""


class PictureError(ValueError):
    """A picture that cannot be drawn."""


@dataclasses.dataclass(frozen=True)
class TimelineView:
    """Some steps of a timeline, ready to be drawn."""

    rows: Rows
    """A row for each device, or group of neighbors with the same events, and for the hosts, from top to bottom. Events
    of other steps and of evaluations are in it where they reach into the span."""
    spans: Mapping[int, tuple[float, float]]
    """Step -> its beginning and end, for steps that have time of their own."""
    start: float
    end: float
    colors: Mapping[str, str]
    """Call -> color, for all calls of the run."""
    facts: tuple[str, ...]
    """How busy the devices were, in words."""


def choose_steps(rows: Rows, text: str | None) -> tuple[int, int]:
    """The first and the last step to draw, from '7' or '3-5', or the last ones; PictureError if there are none."""
    there = sorted({event.step for _, row in rows for event in row if event.phase == STEP and event.devices})
    if not there:
        raise PictureError("A picture: needs a step of training. Got a timeline without any. Name that of another run.")
    if text is None:
        return there[-DEFAULT_STEPS:][0], there[-1]
    span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
    if not any(first <= step <= last for step in there):
        raise PictureError(
            f"--steps: must be a step, or the first and the last one of several, of those that the timeline has: "
            f"{there[0]}-{there[-1]}. Got {text[:40]!r}. Such as --steps {there[-2:][0]}-{there[-1]}."
        )
    return max(first, there[0]), min(last, there[-1])


def timeline_view(rows: Rows, steps: tuple[int, int], *, most_device_rows: int = MAX_DEVICE_ROWS) -> TimelineView:
    """The view of some steps, the first and the last one of `steps`. Raises PictureError if they have no time."""
    events = [event for _, row in rows for event in row]
    spans = {step: span for step in range(steps[0], steps[1] + 1) if (span := step_span(events, step)) is not None}
    if not spans:
        raise PictureError(
            f"--steps: must have a span of time. Got {steps[0]}-{steps[1]}, of which nothing ran by itself."
        )
    start, end = min(span[0] for span in spans.values()), max(span[1] for span in spans.values())
    within = [(label, [each for each in row if each.start < end and each.end > start]) for label, row in rows]
    shown = joined(within, most_device_rows)
    used = utilization(events, (start, end), sorted({device for event in events for device in event.devices}))
    facts = (
        f"devices busy {used.busy_fraction:.0%}",
        f"two or more calls at once {used.overlap:.0%}",
        f"moving weights and data {used.reallocation_share:.0%}",
    )
    return TimelineView(
        [(label, row) for label, row in shown if row or label.startswith("device")],
        spans, start, end, colors_of_events(events), facts,
    )  # fmt: skip


def colors_of_events(events: Sequence[Event]) -> dict[str, str]:
    """Call -> color, the same in every picture of a run."""
    return call_colors({name: event.kind for event in events if (name := call_of(event)) is not None})


def call_of(event: Event) -> str | None:
    """The key of an event's color, 'actor.generate' for any call of that name; None if it is not a call."""
    return None if event.kind in (*MOVING, WAIT) else event.name.partition("#")[0]


def joined(rows: Rows, most: int = MAX_DEVICE_ROWS) -> Rows:
    """The rows of many devices, with neighbors that have the same events joined into one."""
    if sum(label.startswith("device ") for label, _ in rows) <= most:
        return rows

    def does(labelled: tuple[str, list[Event]]) -> Any:
        label, row = labelled
        return [(event.call, event.start, event.end) for event in row] if label.startswith("device ") else id(row)

    shown = []
    for _, group in itertools.groupby(rows, does):
        (first, row), *others = group
        label = f"{first.replace('device', 'devices')}-{others[-1][0].split()[-1]}" if others else first
        shown.append((label, row))
    return shown
