import pytest

from jaxrlhf.observe.events import Event
from jaxrlhf.observe.utilization import step_span, utilization, utilization_line, utilization_metrics


def generate(step: int, start: float, end: float) -> Event:
    return Event("actor.generate", "generate", (0, 1), step, start, end)


def train(role: str, device: int, step: int, start: float, end: float) -> Event:
    return Event(f"{role}.train", "train", (device,), step, start, end)


# The actor lives on device 0, the critic on 1, and generation of the next step begins before the critic is done.
PIPELINED = [
    generate(1, 0.0, 4.0),
    train("actor", 0, 1, 4.0, 5.0),
    train("critic", 1, 1, 4.0, 10.0),
    Event("actor.generate", "generate", (0,), 2, 6.0, 12.0),
    train("actor", 0, 2, 12.0, 13.0),
    train("critic", 1, 2, 12.0, 18.0),
]


def test_a_step_s_span_begins_where_the_step_before_ended() -> None:
    assert step_span(PIPELINED, 1) == (0.0, 10.0)
    assert step_span(PIPELINED, 2) == (10.0, 18.0)
    assert step_span(PIPELINED, 3) is None


def test_evaluations_and_checkpoints_between_steps_belong_to_none() -> None:
    events = [
        generate(1, 0.0, 4.0),
        Event("actor.generate", "generate", (0,), 1, 5.0, 7.0, "evaluation"),
        Event("checkpoint", "wait", (), 1, 7.0, 8.0, "checkpoint"),
        generate(2, 9.0, 10.0),
        Event("actor.generate", "generate", (0,), 2, 11.0, 12.0, "evaluation"),
    ]
    assert step_span(events, 2) == (8.0, 10.0)
    assert step_span(events, 1) == (0.0, 4.0)


def test_waits_of_the_host_do_not_stretch_a_step() -> None:
    events = [
        generate(1, 0.0, 4.0),
        Event("results", "wait", (), 1, 1.0, 30.0),
        generate(2, 4.0, 5.0),
        Event("reward", "host", (), 2, 5.0, 6.0),
    ]
    assert step_span(events, 2) == (4.0, 6.0)


def test_a_step_that_ended_before_an_earlier_one_has_no_span() -> None:
    assert step_span([generate(1, 0.0, 4.0), generate(2, 1.0, 3.0)], 2) is None
    assert utilization_metrics([generate(1, 0.0, 4.0), generate(2, 1.0, 3.0)], 2, [0, 1]) == {}


def test_busy_fractions_are_of_whatever_ran_in_the_span() -> None:
    used = utilization(PIPELINED, (0.0, 10.0), [0, 1, 2])
    # Device 0: all of step 1, and 4 seconds of step 2's generation. Device 2 is idle.
    assert used.busy == {0: 0.9, 1: 1.0, 2: 0.0}
    assert used.busy_fraction == pytest.approx(19 / 30)
    assert used.overlap == 0.5


def test_all_spans_together_count_every_second_once() -> None:
    spans = [span for step in (1, 2) if (span := step_span(PIPELINED, step))]
    busy = [(b - a, utilization(PIPELINED, (a, b), [0, 1]).busy) for a, b in spans]
    assert sum(seconds * each[0] for seconds, each in busy) == 4 + 1 + 6 + 1
    assert sum(seconds * each[1] for seconds, each in busy) == 4 + 6 + 6


def test_one_call_in_two_processes_does_not_overlap_itself() -> None:
    events = [Event("a.train", "train", (0,), 1, 0.0, 2.0), Event("a.train", "train", (4,), 1, 0.0, 3.0)]
    used = utilization(events, (0.0, 4.0), [0, 4])
    assert used.overlap == 0.0
    assert used.busy == {0: 0.5, 4: 0.75}


def test_metrics_of_a_step() -> None:
    events = [
        Event("actor.reallocate", "reallocate", (0, 1), 1, 0.0, 1.0, bytes=100),
        Event("reference.offload", "offload", (1,), 1, 1.0, 2.0, bytes=50),
        Event("actor.train", "train", (0,), 1, 1.0, 4.0),
        Event("reward.scores", "host", (), 1, 0.0, 5.0),
        Event("actor.reallocate", "reallocate", (0,), 2, 4.0, 4.5, bytes=7),
    ]
    assert utilization_metrics(events, 1, [0, 1]) == pytest.approx(
        {
            "perf/busy_fraction": (4.5 + 2) / 10,
            "perf/busy_fraction/device_0": 4.5 / 5,
            "perf/busy_fraction/device_1": 2 / 5,
            "perf/overlap": 1 / 4.5,
            "perf/reallocation_share": (1 + 0.5 + 2) / 6.5,
            "perf/reallocated_bytes": 150.0,
        }
    )


@pytest.mark.parametrize(("num_devices", "num_metrics"), [(1, 0), (2, 2), (16, 16), (17, 0)])
def test_devices_are_told_apart_while_they_are_few(num_devices: int, num_metrics: int) -> None:
    metrics = utilization_metrics([Event("a.train", "train", (0,), 1, 0.0, 1.0)], 1, range(num_devices))
    assert metrics["perf/busy_fraction"] == pytest.approx(1 / num_devices)
    assert sum(name.startswith("perf/busy_fraction/device_") for name in metrics) == num_metrics


def test_where_nothing_ran_on_a_device_nothing_overlaps() -> None:
    metrics = utilization_metrics([Event("reward.scores", "host", (), 1, 0.0, 1.0)], 1, [0])
    assert metrics == {
        "perf/busy_fraction": 0.0,
        "perf/overlap": 0.0,
        "perf/reallocation_share": 0.0,
        "perf/reallocated_bytes": 0.0,
    }


def test_a_run_in_one_line() -> None:
    def record(seconds: float, busy: float, moved: float = 0.0) -> dict[str, float]:
        return {"timing_s/step": seconds, "perf/busy_fraction": busy, "perf/overlap": 0.5,
                "perf/reallocation_share": 0.25, "perf/reallocated_bytes": moved}  # fmt: skip

    assert utilization_line([]) == utilization_line([{"eval/x": 1.0}]) == ""
    assert utilization_line([record(1.0, 0.5)]) == (
        "Devices: busy 50% of the time; of that, two or more calls at once 50%, moving weights and data 25%."
    )
    # The first step compiles, and a long step counts for more than a short one.
    records = [record(100.0, 0.0), {"eval/x": 1.0}, record(3.0, 1.0, 1e9), record(1.0, 0.0, 2e9)]
    line = utilization_line(records)
    assert line.startswith("Devices: busy 75% of the time") and line.endswith("(1.5 GB a step).")
