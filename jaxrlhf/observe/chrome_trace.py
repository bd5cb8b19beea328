"""Timelines as files: the Chrome trace format, which ui.perfetto.dev and chrome://tracing open.

A trace has a row for each device, and rows for the host of each process: one with the waits of its main thread, the
others with the work of other threads.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.observe.events import MOVING, WAIT, Event, ProcessEvents, on_one_clock
from jaxrlhf.writing import write_atomically

Rows = list[tuple[str, list[Event]]]
"""(label, events, no two of which overlap), from top to bottom."""


class TraceError(ValueError):
    """A file is not the trace of a run."""


def write_chrome_trace(path: Path, processes: Sequence[ProcessEvents]) -> None:
    """Writes the events of the processes of a run, the first process first, as one trace.

    Its "metadata" holds `dropped_events` and the Unix time of the trace's zero.
    """
    entries: list[dict[str, Any]] = [_label("process_name", 1, name="jaxrlhf")]
    # Thread 0 of process 0 is the idle thread to viewers: both count from 1.
    for thread, (label, row) in enumerate(trace_rows(on_one_clock(processes)), start=1):
        entries += [_label("thread_name", thread, name=label), _label("thread_sort_index", thread, sort_index=thread)]
        entries += [_entry(event, thread) for event in row]
    metadata = {
        "dropped_events": sum(process.num_dropped for process in processes),
        "origin_unix_seconds": min(process.origin_unix_seconds for process in processes),
    }
    trace = {"traceEvents": entries, "displayTimeUnit": "ms", "metadata": metadata}
    write_atomically(path, json.dumps(trace))


def trace_rows(processes: Sequence[ProcessEvents]) -> Rows:
    """The rows of the trace of processes that are on one clock: each device, then the host of each process."""
    events = [event for process in processes for event in process.events]
    devices = sorted({device for event in events for device in event.devices})
    rows: Rows = [(f"device {device}", [event for event in events if device in event.devices]) for device in devices]
    for number, process in enumerate(processes):
        host = f"host {number}" if len(processes) > 1 else "host"
        on_host = [event for event in process.events if not event.devices]
        rows += [(host, row) for row in _apart(event for event in on_host if event.kind != WAIT)]
        rows += [(f"{host} waits", row) for row in _apart(event for event in on_host if event.kind == WAIT)]
    return rows


def read_rows(path: Path) -> Rows:
    """The rows of a trace that `write_chrome_trace` wrote. Events of several devices are on each of their rows."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        label_of = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
        rows: dict[int, list[Event]] = {thread: [] for thread in label_of}
        for entry in entries:
            if entry["ph"] == "X":
                rows[entry["tid"]].append(_event(entry, label_of[entry["tid"]]))
    except OSError as error:
        raise TraceError(
            f"{path}: must be the timeline.json of a run. Got no file that can be read ({error.strerror}). Name the "
            "folder of a run that has ended, such as runs/latest; output.timeline must be on."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path}: must be a timeline that jaxrlhf wrote. Got something else ({type(error).__name__}: {error}). "
            "Name the folder of a run, or the timeline.json in it."
        ) from error
    return [(label_of[thread], rows[thread]) for thread in sorted(rows)]


def _apart(events: Iterable[Event]) -> list[list[Event]]:
    """Events in as few rows as possible without overlaps in a row, which viewers would misdraw."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        row = next((row for row in rows if row[-1].end <= event.start), [])
        if not row:
            rows.append(row)
        row.append(event)
    return rows


def _entry(event: Event, thread: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"phase": event.phase, "step": event.step, "kind": event.kind}
    if event.devices:
        arguments |= {"devices": devices_to_text(tuple(sorted(event.devices))), "bytes": event.bytes}
    if event.kind == WAIT:
        arguments["waited_for"] = event.name
    if event.part:
        arguments["part"] = event.part
    entry = {
        "name": f"{event.name}: {event.part}" if event.part else event.name,
        "cat": event.kind,
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "ts": 1e6 * event.start,
        "dur": 1e6 * (event.end - event.start),
        "args": arguments,
    }
    # One of the color names that chrome://tracing knows; Perfetto has colors by name alone, and `cat` to filter by.
    return entry | {"cname": "grey"} if event.kind in (*MOVING, WAIT) else entry


def _event(entry: Mapping[str, Any], label: str) -> Event:
    arguments = entry["args"]
    devices = (int(label.removeprefix("device ")),) if label.startswith("device ") else ()
    start, end = entry["ts"] / 1e6, (entry["ts"] + entry["dur"]) / 1e6
    moved, part = arguments.get("bytes", 0), arguments.get("part", "")
    name = entry["name"].removesuffix(f": {part}")
    return Event(name, arguments["kind"], devices, arguments["step"], start, end, arguments["phase"], moved, part)


def _label(name: str, thread: int, /, **arguments: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 1, "tid": thread, "args": arguments}
