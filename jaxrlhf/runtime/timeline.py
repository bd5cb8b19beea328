"""When each call ran, on which devices: completion times, seconds per call, and a trace to look at.

A dispatched program returns at once, so the clock around a dispatch tells who waited, not who worked. A `Watcher` waits
for the results instead, off the main thread, and a `Timeline` keeps what it saw.
"""

import collections
import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from jaxrlhf.runtime.run_folder import write_atomically
from jaxrlhf.runtime.stages import Spans, timing_metrics

STEP = "step"
"""The phase of the steps of training, beside those of the warm start and of evaluations."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One piece of work. Times are seconds of `time.perf_counter`."""

    name: str
    kind: str
    devices: tuple[int, ...]
    """Ids of the devices that it occupied; none for work on the host."""
    step: int
    """As metrics count: 1 is the first step."""
    start: float
    end: float
    phase: str = STEP
    """The part of the run that it belongs to."""


class Timeline:
    """The latest events of a run, recorded from any thread."""

    def __init__(self, max_events: int = 20_000) -> None:
        self._events: collections.deque[Event] = collections.deque(maxlen=max_events)
        self._num_dropped = 0
        self._last_dropped_step: int | None = None
        self._lock = threading.Lock()
        self._origin = time.perf_counter()
        self._origin_unix = time.time()

    def record(self, event: Event) -> None:
        """Adds an event; past `max_events`, the oldest one is dropped."""
        with self._lock:
            if len(self._events) == self._events.maxlen:
                dropped = self._events[0]
                self._num_dropped += 1
                if dropped.phase == STEP:
                    self._last_dropped_step = max(dropped.step, self._last_dropped_step or dropped.step)
            self._events.append(event)

    @contextlib.contextmanager
    def host(self, name: str, *, kind: str, step: int, phase: str = STEP) -> Iterator[None]:
        """Records what runs inside as work on the host, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(Event(name, kind, (), step, start, time.perf_counter(), phase))

    def events(self) -> list[Event]:
        """The events that are still kept, in the order of recording."""
        with self._lock:
            return list(self._events)

    def summary(self, step: int) -> dict[str, float]:
        """Seconds of every stage of one step of training, as `stages.timing_metrics` names them.

        Raises:
            ValueError: Events as late as this step's have been dropped.
        """
        if self._last_dropped_step is not None and step <= self._last_dropped_step:
            raise ValueError(
                f"Timeline of step {step}: events up to step {self._last_dropped_step} are no longer all kept. "
                f"Got max_events={self._events.maxlen}. Raise it, or ask for the summary when the step is done."
            )
        spans: dict[tuple[str, str], Spans] = {}
        for event in self.events():
            if event.step == step and event.phase == STEP:
                spans.setdefault((event.name, event.kind), []).append((event.start, event.end))
        return timing_metrics(spans)

    def write_chrome_trace(self, path: Path) -> None:
        """Writes a Chrome trace, which opens in ui.perfetto.dev: a row per device, and rows for the host.

        Its "metadata" holds `dropped_events` and the Unix time of the trace's zero, by which the traces of several
        processes can be lined up.
        """
        events = self.events()
        device_rows: dict[int, list[Event]] = {}
        for event in events:
            for device in event.devices:
                device_rows.setdefault(device, []).append(event)
        rows = [(f"device {device}", device_rows[device]) for device in sorted(device_rows)]
        rows += [("host", row) for row in _host_rows(events)]
        entries: list[dict[str, Any]] = [_label("process_name", 1, name="jaxrlhf")]
        # Thread 0 of process 0 is the idle thread to viewers: both count from 1.
        for thread, (name, row) in enumerate(rows, start=1):
            entries += [
                _label("thread_name", thread, name=name),
                _label("thread_sort_index", thread, sort_index=thread),
            ]
            entries += [
                {
                    "name": event.name,
                    "cat": event.kind,
                    "ph": "X",
                    "pid": 1,
                    "tid": thread,
                    "ts": 1e6 * (event.start - self._origin),
                    "dur": 1e6 * (event.end - event.start),
                    "args": {"phase": event.phase, "step": event.step, "kind": event.kind},
                }
                for event in row
            ]
        metadata = {"dropped_events": self._num_dropped, "origin_unix_seconds": self._origin_unix}
        write_atomically(path, json.dumps({"traceEvents": entries, "displayTimeUnit": "ms", "metadata": metadata}))


@dataclasses.dataclass(eq=False)
class _Watched:
    """A dispatched call whose completion is awaited."""

    name: str
    kind: str
    devices: tuple[int, ...]
    step: int
    phase: str
    dispatched: float
    arrays: list[Any]
    predecessors: list["_Watched"]
    """The calls dispatched just before this one to each of its devices."""
    end: float = 0.0
    stamped: threading.Event = dataclasses.field(default_factory=threading.Event)


class Watcher:
    """Records in a timeline when dispatched calls complete, without holding up whoever dispatches.

    A device works off its calls in the order of dispatch: a call starts when it is dispatched, or when the last call
    before it on any of its devices completes, whichever is later. Every set of devices has a thread of its own, so
    that a long call delays the stamps of nobody on other devices.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._lanes: dict[tuple[int, ...], queue.SimpleQueue[_Watched | None]] = {}
        self._threads: list[threading.Thread] = []
        self._latest_on: dict[int, _Watched] = {}
        self._num_pending: collections.Counter[tuple[str, int]] = collections.Counter()
        self._error: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()

    def watch(
        self,
        arrays: Any,
        *,
        name: str,
        kind: str,
        devices: tuple[int, ...],
        step: int,
        dispatched: float,
        phase: str = STEP,
    ) -> None:
        """Takes note of a call that was just dispatched. Returns at once.

        Args:
            arrays: Outputs of the call, which are kept alive until it completes. One small output does: all outputs
                of a program complete together. It must not be donated or deleted, which would leave nothing to
                wait for and counts as a failure of the call.
            dispatched: `time.perf_counter()` from just before the dispatch.
        """
        assert devices, f"Call {name!r} must name its devices; work on the host goes to Timeline.host."
        with self._changed:
            assert not self._closed, "The watcher is closed."
            predecessors = {id(call): call for device in devices if (call := self._latest_on.get(device))}
            leaves = jax.tree.leaves(arrays)
            call = _Watched(name, kind, devices, step, phase, dispatched, leaves, list(predecessors.values()))
            self._latest_on.update(dict.fromkeys(devices, call))
            self._num_pending[phase, step] += 1
            if devices not in self._lanes:
                self._lanes[devices] = queue.SimpleQueue()
                lane = (self._lanes[devices],)
                self._threads.append(threading.Thread(target=self._serve, args=lane, name="timeline", daemon=True))
                self._threads[-1].start()
            self._lanes[devices].put(call)

    def drain(self, step: int | None = None) -> None:
        """Waits until what was dispatched so far (of a step of training) is in the timeline, then checks."""
        pending = self._num_pending
        with self._changed:
            self._changed.wait_for(lambda: not (pending.total() if step is None else pending[STEP, step]))
        self.check()

    def check(self) -> None:
        """Raises the error of the first call that failed, if one did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Waits for everything dispatched, ends the threads, then checks."""
        with self._changed:
            self._closed = True
            for lane in self._lanes.values():
                lane.put(None)
            self._lanes.clear()
        for thread in self._threads:
            thread.join()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            # An error that is already on its way tells more than what failed after it.
            if error is None:
                raise

    def _serve(self, lane: "queue.SimpleQueue[_Watched | None]") -> None:
        while (call := lane.get()) is not None:
            self._stamp(call)

    def _stamp(self, call: _Watched) -> None:
        # Predecessors were all dispatched earlier, so these waits cannot form a circle.
        for predecessor in call.predecessors:
            predecessor.stamped.wait()
        failure: Exception | None = None
        try:
            jax.block_until_ready(call.arrays)
        except Exception as error:
            error.add_note(f"This came up in call {call.name!r} of {call.phase} {call.step}.")
            failure = error
        call.end = time.perf_counter()
        if failure is None:
            start = max(call.dispatched, *(predecessor.end for predecessor in call.predecessors), 0.0)
            self._timeline.record(Event(call.name, call.kind, call.devices, call.step, start, call.end, call.phase))
        # Nothing may keep the arrays alive now, nor chain every call to all those before it.
        call.arrays = []
        call.predecessors = []
        call.stamped.set()
        with self._changed:
            self._error = self._error or failure
            self._num_pending[call.phase, call.step] -= 1
            if not self._num_pending[call.phase, call.step]:
                del self._num_pending[call.phase, call.step]
            self._changed.notify_all()


def _host_rows(events: list[Event]) -> list[list[Event]]:
    """The events of the host, in as few rows as it takes for no two of a row to overlap."""
    rows: list[list[Event]] = []
    for event in sorted((event for event in events if not event.devices), key=lambda event: event.start):
        row = next((row for row in rows if row[-1].end <= event.start), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def _label(name: str, thread: int, /, **arguments: str | int) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 1, "tid": thread, "args": arguments}
