"""Sends that no computation hides, beside the events of the schedules."""

import pytest

from jaxrlhf.schedules.exposed_sends import exposed_in_inference, exposed_in_training
from jaxrlhf.schedules.instructions import Schedule, spans
from jaxrlhf.schedules.schedule import forward_only, gpipe, interleaved_1f1b, makespan

MICRO_BATCHES = (1, 2, 3, 4, 5, 7, 8, 16, 17)
SENDS = (0.0, 0.01, 0.1, 0.3, 0.7, 1.5)


def exposed(schedule: Schedule, send: float) -> float:
    return makespan(schedule, send=send) - makespan(schedule)


def test_what_is_sent_arrives_later_one_thing_at_a_time():
    """Two stages of one second: the second send waits for the first to have arrived."""
    times = {(x.micro_batch, x.stage): span for x, span in spans(forward_only(2, 1, 2), send=3).items()}
    assert times == {(0, 0): (0, 1), (1, 0): (1, 2), (0, 1): (4, 5), (1, 1): (7, 8)}
    alone = gpipe(1, 3)
    assert spans(alone, send=3) == spans(alone)  # nothing leaves a worker


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_inference_waits_for_the_sends_that_its_schedule_does_not_hide(stages, send):
    for count in MICRO_BATCHES:
        for chunks in (1, 2, 4):
            schedule = forward_only(stages, chunks, count, forward=1 / chunks)
            got = exposed_in_inference(stages, chunks, count, forward=1 / chunks, send=send)
            assert got == pytest.approx(exposed(schedule, send)), (count, chunks)


@pytest.mark.parametrize("send", SENDS)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_training_waits_for_the_sends_that_its_schedule_does_not_hide(stages, send):
    """Sends that take several forwards are met to 5 % of the whole."""
    for count in MICRO_BATCHES:
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2)):
            each = dict(forward=1 / 3 / chunks, backward=2 / 3 / chunks)
            schedule = gpipe(stages, count, **each) if name == "gpipe" else (
                interleaved_1f1b(stages, chunks, count, **each)
            )  # fmt: skip
            got = exposed_in_training(name, stages, chunks, count, **each, send=send)
            off = (got - exposed(schedule, send)) / makespan(schedule, send=send)
            assert off == pytest.approx(0, abs=1e-9 if send <= 0.3 else 0.05), (count, name, chunks)
