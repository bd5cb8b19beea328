"""When each call ran, and on which devices.

A dispatch returns at once, so the time that it takes is not the time of the call. A `Watcher` waits for the results
instead, in other threads, and a `Timeline` records when they were complete.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax

from jaxrlhf.observe.events import STEP, WAIT, Event, ProcessEvents, note_call, on_one_clock
from jaxrlhf.observe.step_timers import Spans, timing_metrics
from jaxrlhf.observe.utilization import utilization_metrics

MIN_WAIT_SECONDS = 1e-4
"""Shorter waits are not recorded: these found that there was nothing to wait for."""


class Timeline:
    """The latest events, recorded in any thread. `own_devices` are those of this process, idle ones too."""

    def __init__(self, max_events: int = 20_000, *, own_devices: tuple[int, ...] = ()) -> None:
        self._events: collections.deque[Event] = collections.deque(maxlen=max_events)
        self._running: dict[int, Event] = {}
        self._own_devices = own_devices
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
    def running(self, event: Event) -> Iterator[None]:
        """Shows an event as in progress, by `events(running=True)`, while the block runs. It is not recorded."""
        with self._lock:
            self._running[id(event)] = event
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(event)]

    @contextlib.contextmanager
    def host(self, name: str, *, kind: str, step: int, phase: str = STEP) -> Iterator[None]:
        """Records the block as work on the host, also if it raises; a wait only from `MIN_WAIT_SECONDS` on."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            if kind != WAIT or end - start >= MIN_WAIT_SECONDS:
                self.record(Event(name, kind, (), step, start, end, phase))

    def events(self, *, running: bool = False) -> list[Event]:
        """The latest events, in the order of recording; if `running`, also those in progress, as if they ended now."""
        with self._lock:
            events = list(self._events)
            if running:
                now = time.perf_counter()
                events += [dataclasses.replace(event, end=max(event.start, now)) for event in self._running.values()]
            return events

    def seen(self, *, steps: Container[int] | None = None) -> ProcessEvents:
        """The events of this process, to be merged with those of others, in seconds since it was made: those of some
        steps, with those in progress, or all that have ended.
        """
        events = self.events(running=steps is not None)
        chosen = tuple(
            dataclasses.replace(event, start=event.start - self._origin, end=event.end - self._origin)
            for event in events
            if steps is None or event.step in steps
        )
        return ProcessEvents(chosen, self._origin_unix, self._own_devices, self._num_dropped)

    def summary(self, step: int, others: Sequence[ProcessEvents] = ()) -> dict[str, float]:
        """The timers of one step of training, and the utilization of the devices. Raises ValueError if events as late
        as this step's have been dropped.

        Args:
            others: The events of other processes: their `seen(steps=range(step - 1, step + 2))`. Without them, the
                utilization is that of the devices of this process.
        """
        if self._last_dropped_step is not None and step <= self._last_dropped_step:
            raise ValueError(
                f"Timeline of step {step}: events up to step {self._last_dropped_step} are no longer all kept. "
                f"Got max_events={self._events.maxlen}. Raise it, or ask for the summary when the step is done."
            )
        # older events do not matter to this step, and there may be many
        recent = tuple(event for event in self.events(running=True) if event.step >= step - 1)
        own = ProcessEvents(recent, self._origin_unix - self._origin, self._own_devices)
        events = [event for process in on_one_clock([own, *others]) for event in process.events]
        devices = {device for process in (own, *others) for device in process.own_devices}
        devices |= {device for event in events for device in event.devices}
        spans: dict[tuple[str, str], Spans] = {}
        for event in events:
            if event.step == step and event.phase == STEP:
                spans.setdefault((event.name, event.kind), []).append((event.start, event.end))
        return timing_metrics(spans) | utilization_metrics(events, step, sorted(devices))


@dataclasses.dataclass(eq=False)
class _Watched:
    """A dispatched call whose completion is awaited."""

    event: Event
    """The call, as if it had ended when it was dispatched."""
    arrays: Any
    inputs: Any
    describe: Callable[[Any], str] | None
    predecessors: list["_Watched"]
    """The calls dispatched just before this one to each of its devices."""
    end: float = 0.0
    stamped: threading.Event = dataclasses.field(default_factory=threading.Event)


class Watcher:
    """Records in a timeline when dispatched calls complete, without delaying the thread that dispatches them.

    A device runs its calls in the order of dispatch: a call starts when it is dispatched, when the last call before it
    on any of its devices completes, or when its inputs arrive, whichever is latest. Every set of devices has a thread
    of its own, so that a long call does not delay the recording of calls on other devices.
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
        self, event: Event, arrays: Any, *, inputs: Any = (), describe: Callable[[Any], str] | None = None
    ) -> None:
        """Takes note of a call that was just dispatched. Returns at once.

        Args:
            event: The call, with the `time.perf_counter()` from just before the dispatch as its start and its end.
            arrays: Outputs of the call, which are kept alive until it completes. One small output is enough: all
                outputs of a program complete together. It must not be donated or deleted, which counts as a failure of
                the call, since nothing is left to wait for.
            inputs: Arrays on their way to the call's devices, which it waits for. They must not be donated either.
            describe: For one of a call's several parts: gets its arrays, in another thread, and returns what the
                event says of the part.
        """
        devices = event.devices
        assert devices, f"Call {event.name!r} must name its devices; work on the host goes to Timeline.host."
        with self._changed:
            assert not self._closed, "The watcher is closed."
            predecessors = {id(call): call for device in devices if (call := self._latest_on.get(device))}
            call = _Watched(event, arrays, inputs, describe, list(predecessors.values()))
            self._latest_on.update(dict.fromkeys(devices, call))
            self._num_pending[event.phase, event.step] += 1
            if devices not in self._lanes:
                self._lanes[devices] = queue.SimpleQueue()
                lane = (self._lanes[devices],)
                self._threads.append(threading.Thread(target=self._serve, args=lane, name="timeline", daemon=True))
                self._threads[-1].start()
            self._lanes[devices].put(call)

    def drain(self, step: int | None = None) -> None:
        """Waits until all calls dispatched so far (of one step of training) are in the timeline, then checks."""
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

    def _serve(self, lane: "queue.SimpleQueue[_Watched | None]") -> None:
        while (call := lane.get()) is not None:
            self._stamp(call)

    def _stamp(self, call: _Watched) -> None:
        # Predecessors were all dispatched earlier, so these waits cannot form a circle.
        for predecessor in call.predecessors:
            predecessor.stamped.wait()
        event, failure = call.event, None
        start = max([event.start, *(predecessor.end for predecessor in call.predecessors)])
        try:
            looked = time.perf_counter()
            jax.block_until_ready(call.inputs)
            if time.perf_counter() - looked >= MIN_WAIT_SECONDS:
                start = max(start, time.perf_counter())
            event = dataclasses.replace(event, start=start, end=start)
            with self._timeline.running(event):
                jax.block_until_ready(call.arrays)
                call.end = time.perf_counter()
                part = call.describe(call.arrays) if call.describe is not None else ""
                self._timeline.record(dataclasses.replace(event, end=call.end, part=part))
        except Exception as error:
            note_call(error, event.name, event.phase, event.step)
            failure, call.end = error, time.perf_counter()
        # From here on nothing may keep the arrays alive, nor chain every call to all calls before it.
        call.arrays = call.inputs = []
        call.predecessors = []
        call.stamped.set()
        with self._changed:
            self._error = self._error or failure
            self._num_pending[event.phase, event.step] -= 1
            if not self._num_pending[event.phase, event.step]:
                del self._num_pending[event.phase, event.step]
            self._changed.notify_all()
