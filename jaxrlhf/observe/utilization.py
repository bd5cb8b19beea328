"""Utilization of the devices during a step: busy time, overlap of calls, and time spent on moving arrays.

Steps overlap: a generation of step t + 1 may run while a critic still trains on step t. So that every second of a run
counts once, the span of a step begins where the step before ended, and all calls in it count, whatever their step.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.step_timers import Spans, covered_seconds

BUSY, OVERLAP = "perf/busy_fraction", "perf/overlap"
REALLOCATION, BYTES = "perf/reallocation_share", "perf/reallocated_bytes"
MAX_DEVICE_METRICS = 16
"""With more devices than this there is no metric for each, so that dashboards stay readable."""


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Seconds of devices in a span of time, by activity."""

    seconds: float
    """Length of the span."""
    busy_seconds: Mapping[int, float]
    """Device -> seconds in which something ran on it."""
    moving_seconds: float
    """Seconds in which weights or data were moved, summed over all devices; a part of `busy_seconds`."""
    running_seconds: float
    """Seconds in which anything ran on any device."""
    overlapped_seconds: float
    """Seconds in which two or more calls ran at once; a part of `running_seconds`."""

    @property
    def busy_fraction(self) -> float:
        """The fraction of time in which devices were busy: the mean over all of them, idle ones too."""
        return sum(self.busy_seconds.values()) / (len(self.busy_seconds) * self.seconds)

    @property
    def overlap(self) -> float:
        return self.overlapped_seconds / self.running_seconds if self.running_seconds else 0.0

    @property
    def reallocation_share(self) -> float:
        busy = sum(self.busy_seconds.values())
        return self.moving_seconds / busy if busy else 0.0


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
    before = [event.end for event in events if _is_before(event, step, end)]
    start = max(before) if before else min(event.start for event in own)
    return (start, end) if start < end else None


def utilization(events: Sequence[Event], span: tuple[float, float], devices: Sequence[int]) -> Utilization:
    """The use of `devices` in a span of time. Work on the host does not count.

    Args:
        events: On one clock; those of several processes each on the devices of its own process.
    """
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
    running, overlapped = _running_seconds(list(of_call.values()))
    return Utilization(
        seconds=end - start,
        busy_seconds={device: covered_seconds(spans) for device, spans in on_device.items()},
        moving_seconds=sum(map(covered_seconds, moving.values())),
        running_seconds=running,
        overlapped_seconds=overlapped,
    )


def utilization_metrics(events: Sequence[Event], step: int, devices: Sequence[int]) -> dict[str, float]:
    """Utilization metrics of a step's span.

    Args:
        events: The events of this step and its neighbors, including those in progress.
        devices: All devices of the run, idle ones too.

    Returns:
        `perf/busy_fraction`, `perf/busy_fraction/device_<i>` of up to 16 devices, `perf/overlap`,
        `perf/reallocation_share` and `perf/reallocated_bytes`, which counts the step's own calls. Empty if the step has
        no span or there are no devices.
    """
    span = step_span(events, step)
    if span is None or not devices:
        return {}
    used = utilization(events, span, devices)
    metrics = {BUSY: used.busy_fraction}
    if 1 < len(devices) <= MAX_DEVICE_METRICS:
        metrics |= {f"{BUSY}/device_{device}": busy / used.seconds for device, busy in used.busy_seconds.items()}
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
        f"weights and data {mean(REALLOCATION):.0%}{f' ({_bytes(moved)} a step)' if moved else ''}."
    )


def _is_before(event: Event, step: int, end: float) -> bool:
    """True for an event of work that came before a step that ended at `end`."""
    if event.phase != STEP:
        return event.end <= end
    return event.step < step and event.kind != WAIT


def _running_seconds(calls: Sequence[Spans]) -> tuple[float, float]:
    """Seconds in which any call ran, and in which two or more did. A call runs while any of its pieces does."""
    changes: list[tuple[float, int, int]] = []
    for number, spans in enumerate(calls):
        for start, end in spans:
            changes += [(start, 1, number), (end, -1, number)]
    pieces: collections.Counter[int] = collections.Counter()
    running = overlapped = 0.0
    reached = 0.0
    for time, change, number in sorted(changes):
        if pieces:
            running += time - reached
        if len(pieces) > 1:
            overlapped += time - reached
        reached = time
        pieces[number] += change
        if not pieces[number]:
            del pieces[number]
    return running, overlapped


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
