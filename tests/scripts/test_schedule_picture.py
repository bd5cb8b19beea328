"""Pictures of schedules are written, and say what they cannot draw."""

import builtins

import pytest

pytest.importorskip("matplotlib")
from jaxrlhf.schedules.instructions import ScheduleError
from jaxrlhf.schedules.schedule import forward_only, interleaved_1f1b
from jaxrlhf.schedules.schedule_bounds import serial_peak
from scripts.fused_models import TrainedModel, fused_pipes, greedy_schedule
from scripts.schedule_picture import draw_schedule


def test_a_picture_shows_every_instruction_and_both_models(tmp_path):
    pipes = fused_pipes(TrainedModel(1, 4, 1, 4, 1, 2, 1), TrainedModel(2, 2, 1, 2, 1, 2, 1))
    path = tmp_path / "fused.svg"
    draw_schedule(greedy_schedule(pipes), path, names=("actor", "critic"), serial_peak=serial_peak(pipes), title="both")
    drawn = path.read_text()
    for words in ("actor, forward", "critic, backward", "peak of serial 1F1B", "both", "of the time in bubbles"):
        assert words in drawn
    # one number for each instruction, of micro-batches 0 to 3, beside those of the axes
    numbers = [drawn.count(f"<!-- {number} -->") for number in range(4)]
    assert numbers[0] >= 2 * (4 + 2 * 2) and numbers[2] >= 2 * 4


def test_other_schedules_can_be_drawn_too(tmp_path):
    for index, schedule in enumerate((interleaved_1f1b(1, 1, 1), forward_only(2, 2, 4), interleaved_1f1b(40, 1, 2))):
        path = tmp_path / f"{index}.png"
        draw_schedule(schedule, path)
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_format_that_is_none_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"must end in the name of a picture's format. Got 'a.nothing'. .*png"):
        draw_schedule(interleaved_1f1b(2, 1, 2), tmp_path / "a.nothing")


def test_without_matplotlib_it_says_so(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *rest, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ScheduleError, match=r"needs matplotlib. Got none that can be imported .*pip install jaxrlhf"):
        draw_schedule(interleaved_1f1b(2, 1, 2), tmp_path / "a.png")
