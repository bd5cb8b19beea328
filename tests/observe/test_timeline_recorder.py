import contextlib
import gc
import json
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.observe import timeline_recorder as timeline_module
from jaxrlhf.observe.chrome_trace import write_chrome_trace
from jaxrlhf.observe.timeline_recorder import Event, Timeline, Watcher


class Result:
    """Stands for an array of a call that completes when told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.released = threading.Event()
        self.awaited = threading.Event()

    def block_until_ready(self) -> "Result":
        self.awaited.set()
        assert self.released.wait(10)
        if self.error is not None:
            raise self.error
        return self

    def complete(self) -> None:
        self.released.set()


class Clock:
    """Stands in for the time module in the code under test."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline_module, "time", clock)
    return clock


def watch(watcher: Watcher, result: Any, name: str, devices: tuple[int, ...], dispatched: float, step: int = 0) -> None:
    watcher.watch(Event(name, "infer", devices, step, dispatched, dispatched), [result])


def timings(timeline: Timeline, step: int) -> dict[str, float]:
    """The timers of a step's summary."""
    return {name: value for name, value in timeline.summary(step).items() if name.startswith("timing_s/")}


def await_events(timeline: Timeline, count: int) -> list[Event]:
    deadline = time.monotonic() + 10
    while len(timeline.events()) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(timeline.events()) == count
    return timeline.events()


def test_a_call_starts_when_its_devices_are_free(clock: Clock) -> None:
    timeline = Timeline()
    first, second, third, results = Result(), Result(), Result(), {}
    with contextlib.closing(Watcher(timeline)) as watcher:
        # Dispatched at 100, 101 and 102, completed at 110, 115 and 130.
        watch(watcher, first, "first", (0, 1), 100.0)
        watch(watcher, second, "second", (1, 2), 101.0)
        clock.now = 110.0
        first.complete()
        await_events(timeline, 1)
        clock.now = 115.0
        second.complete()
        await_events(timeline, 2)
        # Dispatched to a device that has been idle since 110.
        watch(watcher, third, "third", (0,), 120.0)
        clock.now = 130.0
        third.complete()
        results = {event.name: event for event in await_events(timeline, 3)}
    assert results["first"] == Event("first", "infer", (0, 1), 0, 100.0, 110.0)
    assert results["second"] == Event("second", "infer", (1, 2), 0, 110.0, 115.0)
    assert results["third"] == Event("third", "infer", (0,), 0, 120.0, 130.0)


def test_a_long_call_does_not_delay_the_stamp_of_a_short_one_elsewhere(clock: Clock) -> None:
    timeline = Timeline()
    long, short = Result(), Result()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watch(watcher, long, "long", (0,), 100.0)
        watch(watcher, short, "short", (1,), 100.0)
        clock.now = 101.0
        short.complete()
        await_events(timeline, 1)
        clock.now = 110.0
        long.complete()
    assert [(event.name, event.end) for event in timeline.events()] == [("short", 101.0), ("long", 110.0)]


def test_on_one_device_stamps_come_in_the_order_of_dispatch(clock: Clock) -> None:
    timeline = Timeline()
    first, second = Result(), Result()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watch(watcher, first, "first", (0,), 100.0)
        watch(watcher, second, "second", (0, 1), 100.0)
        second.complete()
        assert first.awaited.wait(10)
        clock.now = 105.0
        first.complete()
    assert [(event.name, event.start, event.end) for event in timeline.events()] == [
        ("first", 100.0, 105.0),
        ("second", 105.0, 105.0),
    ]


def test_watch_returns_before_the_call_completes_and_drain_waits_for_its_step() -> None:
    timeline = Timeline()
    early, late = Result(), Result()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watch(watcher, early, "early", (0,), time.perf_counter(), step=1)
        watch(watcher, late, "late", (1,), time.perf_counter(), step=2)
        assert timeline.events() == []
        releaser = threading.Timer(0.05, early.complete)
        releaser.start()
        watcher.drain(1)
        assert [event.name for event in timeline.events()] == ["early"]
        watcher.drain(0)
        threading.Timer(0.05, late.complete).start()
        watcher.drain()
        assert [event.name for event in timeline.events()] == ["early", "late"]


def test_a_failed_call_is_raised_by_check_drain_and_close_and_the_next_ones_are_recorded() -> None:
    timeline = Timeline()
    watcher = Watcher(timeline)
    bad, good = Result(RuntimeError("out of memory")), Result()
    bad.complete()
    good.complete()
    watch(watcher, bad, "actor.train", (0,), 0.0, step=4)
    watch(watcher, good, "good", (0,), 0.0, step=5)
    await_events(timeline, 1)
    for raises in (watcher.check, watcher.drain, watcher.close, watcher.close):
        with pytest.raises(RuntimeError, match="out of memory") as caught:
            raises()
        assert caught.value.__notes__ == ["This came up in call 'actor.train' of step 4."]
    assert [event.name for event in timeline.events()] == ["good"]


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    watcher = Watcher(Timeline())
    for device in range(3):
        result = Result()
        result.complete()
        watch(watcher, result, "a", (device,), 0.0)
    assert threading.active_count() == before + 3
    watcher.close()
    assert threading.active_count() == before


def test_nothing_is_kept_alive_once_it_has_completed() -> None:
    def watched() -> int:
        gc.collect()
        return sum(type(thing).__name__ == "_Watched" for thing in gc.get_objects())

    of_other_tests = watched()
    with contextlib.closing(Watcher(Timeline())) as watcher:
        references = []
        for step in range(5):
            result = Result()
            result.complete()
            references.append(weakref.ref(result))
            watch(watcher, result, "a", (step % 2, 2), 0.0, step=step)
            del result
        watcher.drain()
        gc.collect()
        assert [reference() for reference in references] == [None] * 5
        # Nor do the calls form a chain: only the latest one of each device is remembered.
        assert watched() <= of_other_tests + 2


@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_real_computations_are_timed_by_their_completion(devices: tuple[int, ...]) -> None:
    def slow(x: jax.Array) -> jax.Array:
        def nap(value: Any) -> Any:
            time.sleep(0.2)
            return value

        return jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), x)

    timeline = Timeline()
    with contextlib.closing(Watcher(timeline)) as watcher:
        dispatched = time.perf_counter()
        watch(watcher, jax.jit(slow)(1.0), "a", devices, dispatched)
        watch(watcher, jax.jit(slow)(2.0), "b", devices, dispatched)
    first, second = timeline.events()
    assert first.end - first.start >= 0.2
    assert second.start >= first.end
    assert second.end - dispatched >= 0.2


def test_a_real_failure_comes_back() -> None:
    def fail(value: Any) -> Any:
        raise ValueError("boom")

    failing = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(Exception, match="boom"), contextlib.closing(Watcher(Timeline())) as watcher:
        watch(watcher, failing(1.0), "a", (0,), 0.0)


def test_a_deleted_output_is_an_error_not_a_silent_gap() -> None:
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted or donated"), contextlib.closing(Watcher(Timeline())) as watcher:
        watch(watcher, array, "a", (0,), 0.0)


def test_summary_is_seconds_per_timer_of_one_step() -> None:
    timeline = Timeline()
    for event in (
        Event("actor.generate", "generate", (0,), 1, 10.0, 12.0),
        Event("actor.train", "train", (0,), 1, 12.0, 12.5),
        Event("actor.generate", "generate", (0,), 1, 14.0, 19.0, "evaluation"),
        # Four pieces: two that overlap, one within another, one apart.
        Event("critic.values", "infer", (0,), 1, 20.0, 22.0),
        Event("critic.values", "infer", (1,), 1, 21.0, 24.0),
        Event("critic.values", "infer", (2,), 1, 21.5, 21.75),
        Event("critic.values", "infer", (0,), 1, 30.0, 31.0),
        Event("actor.train", "train", (0,), 2, 40.0, 41.0),
    ):
        timeline.record(event)
    assert timings(timeline, 1) == {"timing_s/gen": 2.0, "timing_s/update_actor": 0.5, "timing_s/values": 5.0}
    assert timings(timeline, 2) == {"timing_s/update_actor": 1.0}
    assert timeline.summary(3) == {}


def test_a_step_waits_for_its_own_calls_and_not_for_those_of_an_evaluation_of_that_number() -> None:
    timeline = Timeline()
    trained, evaluated = Result(), Result()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watch(watcher, trained, "a.values", (0,), 0.0, step=3)
        watcher.watch(Event("a", "infer", (1,), 3, 0.0, 0.0, "evaluation"), [evaluated])
        trained.complete()
        watcher.drain(3)
        assert list(timings(timeline, 3)) == ["timing_s/values"]
        evaluated.complete()
        watcher.drain()
    assert [event.phase for event in timeline.events()] == ["step", "evaluation"]


def test_dropped_evaluations_do_not_count_as_dropped_steps() -> None:
    timeline = Timeline(max_events=1)
    timeline.record(Event("a", "infer", (0,), 9, 0.0, 1.0, "evaluation"))
    timeline.record(Event("a", "infer", (0,), 1, 1.0, 2.0))
    assert timings(timeline, 1) == {"timing_s/a": 1.0}


def test_host_work_is_recorded_with_its_own_times(clock: Clock) -> None:
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.host("verifier", kind="reward", step=2):
        clock.now = 103.0
        raise KeyError
    assert timeline.events() == [Event("verifier", "reward", (), 2, 100.0, 103.0)]


def test_waits_are_recorded_where_there_was_anything_to_wait_for(clock: Clock) -> None:
    timeline = Timeline()
    with timeline.host("nothing", kind="wait", step=2):
        clock.now += 1e-5
    with pytest.raises(KeyError), timeline.host("reward.scores", kind="wait", step=2, phase="evaluation"):
        clock.now = 103.0
        raise KeyError
    (event,) = timeline.events()
    assert event == Event("reward.scores", "wait", (), 2, 100.0 + 1e-5, 103.0, "evaluation")


def test_a_wait_is_no_timer_of_calls_but_has_its_seconds() -> None:
    timeline = Timeline()
    timeline.record(Event("results", "wait", (), 1, 0.0, 2.0))
    timeline.record(Event("reward.scores", "wait", (), 1, 3.0, 4.0))
    assert timings(timeline, 1) == {
        "timing_s/wait": 3.0,
        "timing_s/wait/results": 2.0,
        "timing_s/wait/reward.scores": 1.0,
    }


def test_bytes_of_a_call_are_those_of_its_event() -> None:
    timeline, result = Timeline(), Result()
    result.complete()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watcher.watch(Event("a", "reallocate", (0,), 1, 0.0, 0.0, bytes=1 << 40), [result])
    assert timeline.events()[0].bytes == 1 << 40


def test_a_step_s_summary_counts_the_calls_of_the_next_one_that_already_run(clock: Clock) -> None:
    timeline = Timeline(own_devices=(0, 1, 2))
    critic, generation, waiting = Result(), Result(), Result()
    with contextlib.closing(Watcher(timeline)) as watcher:
        watch(watcher, critic, "critic.train", (1,), 100.0, step=1)
        watch(watcher, generation, "actor.generate", (0,), 104.0, step=2)
        watch(watcher, waiting, "actor.train", (0,), 105.0, step=2)
        assert generation.awaited.wait(10)
        clock.now = 110.0
        critic.complete()
        watcher.drain(1)
        clock.now = 120.0
        summary = timeline.summary(1)
        # From 100 to 110: the generation ran for six seconds of it, the training behind it has not begun.
        assert summary["perf/busy_fraction/device_0"] == pytest.approx(0.6)
        assert summary["perf/busy_fraction/device_1"] == 1.0
        assert summary["perf/busy_fraction/device_2"] == 0.0
        assert summary["perf/overlap"] == pytest.approx(0.6)
        assert [event.name for event in timeline.events()] == ["critic.train"]
        generation.complete()
        waiting.complete()
    assert timeline.events(running=True) == timeline.events()


def test_memory_is_bounded_and_what_was_dropped_is_told(tmp_path: Path) -> None:
    timeline = Timeline(max_events=3)
    for step in range(5):
        timeline.record(Event("a", "infer", (0,), step, step, step + 1))
    assert [event.step for event in timeline.events()] == [2, 3, 4]
    assert timings(timeline, 2) == {"timing_s/a": 1.0}
    with pytest.raises(ValueError, match=r"Timeline of step 1: events up to step 1 .* Got max_events=3\. Raise it"):
        timeline.summary(1)
    write_chrome_trace(tmp_path / "timeline.json", [timeline.seen()])
    assert json.loads((tmp_path / "timeline.json").read_text())["metadata"]["dropped_events"] == 2


def test_chrome_trace_has_a_row_per_device_and_rows_for_the_host(tmp_path: Path, clock: Clock) -> None:
    timeline = Timeline()
    for event in (
        Event("train", "train", (3, 0), 7, 100.5, 101.0),
        Event("reward", "reward", (), 7, 101.0, 103.0),
        Event("reward", "reward", (), 7, 102.0, 104.0),
        Event("reward", "reward", (), 7, 103.0, 105.0),
    ):
        timeline.record(event)
    path = tmp_path / "timeline.json"
    write_chrome_trace(path, [timeline.seen()])
    trace = json.loads(path.read_text())
    assert trace["metadata"] == {"dropped_events": 0, "origin_unix_seconds": 1e9 + 100}
    name_of = {entry["tid"]: entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "thread_name"}
    assert [name_of[thread] for thread in sorted(name_of)] == ["device 0", "device 3", "host", "host"]
    assert 0 not in name_of and all(entry["pid"] == 1 for entry in trace["traceEvents"])
    spans = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    trained = [span for span in spans if span["name"] == "train"]
    assert sorted(name_of[span["tid"]] for span in trained) == ["device 0", "device 3"]
    for span in trained:
        assert (span["ts"], span["dur"]) == (500_000.0, 500_000.0)
        assert span["args"] == {"phase": "step", "step": 7, "kind": "train", "devices": "0,3", "bytes": 0}
    # Spans of one row must not overlap, or viewers misdraw them.
    rewarded = {span["ts"]: span["tid"] for span in spans if span["name"] == "reward"}
    assert rewarded[1e6] == rewarded[3e6] != rewarded[2e6]


def test_events_of_many_threads_all_arrive() -> None:
    timeline = Timeline(max_events=100)

    def work(thread: int) -> None:
        for step in range(500):
            timeline.record(Event(str(thread), "reward", (), step, 0.0, 1.0))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.events()) == 100
    assert timeline._num_dropped == 1900
