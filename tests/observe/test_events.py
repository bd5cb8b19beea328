import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxrlhf.observe.chrome_trace import TraceError, read_rows, write_chrome_trace
from jaxrlhf.observe.events import Event, ProcessEvents, on_one_clock
from jaxrlhf.observe.timeline_recorder import Timeline

# Process 1 was started half a second later; both work on actor.train, each on its own two devices.
FIRST = ProcessEvents(
    (
        Event("actor.train", "train", (0, 1), 1, 2.0, 3.0),
        Event("actor.reallocate", "reallocate", (1,), 1, 3.0, 3.25, bytes=512),
        Event("reward.scores", "host", (), 1, 0.5, 1.0),
        Event("reward.scores", "wait", (), 1, 0.75, 1.0),
    ),
    1000.0,
    (0, 1),
    num_dropped=3,
)
SECOND = ProcessEvents(
    (
        Event("actor.train", "train", (2, 3), 1, 1.5, 2.75),
        Event("reward.scores", "wait", (), 1, 0.0, 0.5),
    ),
    1000.5,
    (2, 3),
    num_dropped=4,
)


def test_clocks_are_lined_up_by_unix_time() -> None:
    first, second = on_one_clock([FIRST, SECOND])
    assert first == FIRST
    assert [(event.start, event.end) for event in second.events] == [(2.0, 3.25), (0.5, 1.0)]
    assert second.origin_unix_seconds == 1000.0
    assert on_one_clock([]) == []


def written(path: Path, *processes: ProcessEvents) -> dict[str, Any]:
    write_chrome_trace(path, processes)
    return json.loads(path.read_text())


def test_several_processes_make_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert written(path, FIRST, SECOND)["metadata"] == {"dropped_events": 7, "origin_unix_seconds": 1000.0}
    rows = read_rows(path)
    assert [(label, [(event.name, event.start, event.end) for event in row]) for label, row in rows] == [
        ("device 0", [("actor.train", 2.0, 3.0)]),
        ("device 1", [("actor.train", 2.0, 3.0), ("actor.reallocate", 3.0, 3.25)]),
        ("device 2", [("actor.train", 2.0, 3.25)]),
        ("device 3", [("actor.train", 2.0, 3.25)]),
        ("host 0", [("reward.scores", 0.5, 1.0)]),
        ("host 0 waits", [("reward.scores", 0.75, 1.0)]),
        ("host 1 waits", [("reward.scores", 0.5, 1.0)]),
    ]
    assert [event.devices for event in rows[1][1]] == [(1,), (1,)]
    assert [event.bytes for event in rows[1][1]] == [0, 512]


def test_what_a_bar_of_a_trace_tells(tmp_path: Path) -> None:
    all_entries = written(tmp_path / "timeline.json", FIRST)["traceEvents"]
    entries = {(entry["name"], entry["cat"]): entry for entry in all_entries if "cat" in entry}
    common = {"phase": "step", "step": 1}
    train, moved = entries["actor.train", "train"], entries["actor.reallocate", "reallocate"]
    waited = entries["reward.scores", "wait"]
    assert train["args"] == {**common, "kind": "train", "devices": "0-1", "bytes": 0}
    assert moved["args"] == {**common, "kind": "reallocate", "devices": "1", "bytes": 512}
    assert waited["args"] == {**common, "kind": "wait", "waited_for": "reward.scores"}
    assert "cname" not in train and moved["cname"] == waited["cname"] == "grey"


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"a": 1}', '{"traceEvents": 3}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"must be a timeline that jaxrlhf wrote\. Got something else"):
        read_rows(path)


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Got no file that can be read .* Name the folder of a run"):
        read_rows(tmp_path / "timeline.json")


def test_a_summary_has_what_other_processes_saw() -> None:
    timeline = Timeline(own_devices=(0, 1))
    here = timeline.seen()
    timeline.record(Event("actor.train", "train", (0, 1), 1, timeline._origin + 2.0, timeline._origin + 3.0))
    alone = timeline.summary(1)
    assert alone["perf/busy_fraction"] == 1.0 and "perf/busy_fraction/device_2" not in alone
    later = ProcessEvents((Event("actor.train", "train", (2, 3), 1, 1.0, 3.0),), here.origin_unix_seconds + 1.0, (2, 3))
    together = timeline.summary(1, [later])
    assert together["timing_s/update_actor"] == pytest.approx(2.0, abs=1e-5)
    assert together["perf/busy_fraction/device_0"] == pytest.approx(0.5, abs=1e-5)
    assert together["perf/busy_fraction/device_2"] == pytest.approx(1.0, abs=1e-5)
    assert together["perf/overlap"] == 0.0


def test_what_was_seen_of_some_steps() -> None:
    timeline = Timeline()
    for step in (1, 2, 3):
        timeline.record(Event("a", "infer", (0,), step, timeline._origin + step, timeline._origin + step + 1))
    with timeline.running(Event("b", "infer", (0,), 3, timeline._origin, math.inf)):
        seen = timeline.seen(steps=range(2, 4))
        assert [(event.name, event.step) for event in seen.events] == [("a", 2), ("a", 3), ("b", 3)]
        assert all(event.end < math.inf for event in seen.events)
        assert [event.name for event in timeline.seen().events] == ["a", "a", "a"]
    (event,) = timeline.seen(steps=range(3, 4)).events
    assert (event.start, event.end) == (pytest.approx(3), pytest.approx(4))
