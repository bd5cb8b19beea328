"""Utilization of the devices during a step: busy time, overlap of calls, and time spent on moving arrays.

Steps overlap: a generation of step t + 1 may run while a critic still trains on step t. So that every second of a run
counts once, the span of a step begins where the step before ended, and all calls in it count, whatever their step.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.step_timers import Spans, covered_seconds

BUSY, OVERLAP = "perf/busy_fraction", "perf/overlap"
REALLOCATION, BYTES = "perf/reallocation_share", "perf/reallocated_bytes"
MAX_DEVICE_METRICS = 16
"""With more devices than this there is no metric for each, so that dashboards stay readable."""


@dataclasses.dataclass(frozen=True)
class Utilization:
    """The use of devices in a span of time."""

    busy: Mapping[int, float]
    """Device -> the fraction of the span in which something ran on it."""
    busy_fraction: float
    """The mean of these over all devices, idle ones too."""
    overlap: float
    """Of the time in which anything ran on any device, the fraction in which two or more calls did."""
    reallocation_share: float
    """Of the busy time of all devices, the fraction in which weights or data were moved."""


def step_span(events: Sequence[Event], step: int) -> tuple[float, float] | None:
    """The span from the end of all earlier work to the end of a training step's last call.

    Earlier work is that of earlier steps, evaluations and checkpoints; without any, the span begins with the step's
    first call. Consecutive steps share their borders.

    Returns:
        None if the step has no time of its own: it has no calls, or it ended before an earlier step did.
    """
    own = [event for event in events if event.phase == STEP and event.step == step and event.kind != WAIT]
    if not own:
        return None
    end = max(event.end for event in own)
    # work of earlier steps, and of what else came before
    earlier = [e for e in events if (e.step < step and e.kind != WAIT if e.phase == STEP else e.end <= end)]
    before = [event.end for event in earlier]
    start = max(before) if before else min(event.start for event in own)
    return (start, end) if start < end else None


def utilization(events: Sequence[Event], span: tuple[float, float], devices: Sequence[int]) -> Utilization:
    """The use of `devices` in a span of time. Work on the host does not count. Events are on one clock."""
    start, end = span
    on_device: dict[int, Spans] = {device: [] for device in devices}
    moving: dict[int, Spans] = {device: [] for device in devices}
    of_call: dict[tuple[Any, ...], Spans] = {}
    for event in events:
        clipped = max(start, event.start), min(end, event.end)
        if clipped[0] >= clipped[1] or not event.devices:
            continue
        of_call.setdefault(event.call, []).append(clipped)
        for device in event.devices:
            on_device[device].append(clipped)
            if event.kind in MOVING:
                moving[device].append(clipped)
    busy = {device: covered_seconds(spans) for device, spans in on_device.items()}
    running = covered_seconds([each for spans in of_call.values() for each in spans])
    return Utilization(
        busy={device: seconds / (end - start) for device, seconds in busy.items()},
        busy_fraction=sum(busy.values()) / (len(devices) * (end - start)),
        overlap=_overlapped_seconds(list(of_call.values())) / (running or 1.0),
        reallocation_share=sum(map(covered_seconds, moving.values())) / (sum(busy.values()) or 1.0),
    )


def utilization_metrics(events: Sequence[Event], step: int, devices: Sequence[int]) -> dict[str, float]:
    """`perf/busy_fraction`, `perf/busy_fraction/device_<i>` of up to 16 devices, `perf/overlap`,
    `perf/reallocation_share` and `perf/reallocated_bytes`, which counts the step's own calls, of a step's span. Empty
    if it has none, or no devices.

    Events are those of this step and its neighbors, including those in progress; devices all of the run, idle ones too.
    """
    span = step_span(events, step)
    if span is None or not devices:
        return {}
    used = utilization(events, span, devices)
    metrics = {BUSY: used.busy_fraction}
    if 1 < len(devices) <= MAX_DEVICE_METRICS:
        metrics |= {f"{BUSY}/device_{device}": busy for device, busy in used.busy.items()}
    moved = sum(event.bytes for event in events if event.phase == STEP and event.step == step and event.kind in MOVING)
    return metrics | {OVERLAP: used.overlap, REALLOCATION: used.reallocation_share, BYTES: float(moved)}


def utilization_line(records: Sequence[Mapping[str, Any]]) -> str:
    """A line about the utilization over a run, from the records of its metrics; empty if they do not have it.

    The first step is left out, since it compiles, unless it is the only one.
    """
    steps = [record for record in records if BUSY in record]
    steps = steps[1:] or steps
    if not steps:
        return ""
    seconds = sum(record["timing_s/step"] for record in steps)

    def mean(name: str) -> float:
        return sum(record.get(name, 0.0) * record["timing_s/step"] for record in steps) / seconds

    moved = sum(record[BYTES] for record in steps) / len(steps)
    return (
        f"Devices: busy {mean(BUSY):.0%} of the time; of that, two or more calls at once {mean(OVERLAP):.0%}, moving "
        f"weights and data {mean(REALLOCATION):.0%}{f' ({decimal(round(moved))} a step)' if moved else ''}."
    )


def _overlapped_seconds(calls: Sequence[Spans]) -> float:
    """Seconds in which two or more calls ran. A call runs while any of its pieces does."""
    changes = [change for i, spans in enumerate(calls) for a, b in spans for change in ((a, 1, i), (b, -1, i))]
    pieces: collections.Counter[int] = collections.Counter()
    overlapped = reached = 0.0
    for time, change, number in sorted(changes):
        if len(+pieces) > 1:
            overlapped += time - reached
        reached = time
        pieces[number] += change
    return overlapped
