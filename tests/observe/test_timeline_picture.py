import sys
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import pytest

from jaxrlhf.observe.chrome_trace import Rows, trace_rows, write_chrome_trace
from jaxrlhf.observe.events import Event, ProcessEvents
from jaxrlhf.observe.timeline_picture import draw_timeline
from jaxrlhf.observe.timeline_view import PictureError, choose_steps, colors_of_events, joined
from jaxrlhf.timeline import main


def run_of(num_steps: int, num_devices: int = 2) -> ProcessEvents:
    """Generation on all devices, then training of the actor on the first half beside the critic on the others."""
    devices = tuple(range(num_devices))
    half = num_devices // 2
    events = [Event("actor.generate", "generate", devices, 0, -1.0, 0.0, "evaluation")]
    for step in range(1, num_steps + 1):
        start = 10.0 * step
        events += [
            Event("actor.reallocate", "reallocate", devices, step, start - 10, start - 9),
            Event("actor.generate", "generate", devices, step, start - 9, start - 5),
            Event("reward.scores", "host", (), step, start - 5, start - 4),
            Event("reward.scores", "wait", (), step, start - 5, start - 4),
            Event("actor.train", "train", devices[:half], step, start - 4, start),
            Event("critic.train", "train", devices[half:], step, start - 4, start - 1),
        ]
    return ProcessEvents(tuple(events), 0.0)


def rows_of(num_steps: int, num_devices: int = 2) -> Rows:
    return trace_rows([run_of(num_steps, num_devices)])


def test_the_picture_has_the_calls_where_and_as_long_as_they_ran(tmp_path: Path) -> None:
    rows = rows_of(1)
    draw_timeline(rows, tmp_path / "a.png", steps=(1, 1), title="a run")
    picture = matplotlib.image.imread(tmp_path / "a.png")[..., :3]
    colors = colors_of_events([event for _, row in rows for event in row])

    def columns(name: str) -> int:
        """In how many columns of pixels a call's color is, of those above the legend."""
        color = matplotlib.colors.to_rgb(colors[name])
        found = (abs(picture - color).max(axis=-1) < 0.01)[: int(0.7 * len(picture))]
        return int(found.any(axis=0).sum())

    second = columns("actor.generate") / 4
    assert 50 < second < 110
    assert columns("actor.train") == pytest.approx(4 * second, abs=4)
    assert columns("critic.train") == pytest.approx(3 * second, abs=4)
    assert columns("reward.scores") == pytest.approx(second, abs=4)


def test_a_role_has_a_hue_and_its_calls_have_shades_whatever_is_drawn() -> None:
    events = [
        Event(name, kind, (0,), 1, 0.0, 1.0)
        for name, kind in (
            ("judge.scores", "infer"), ("actor.train", "train"), ("actor.generate", "generate"),
            ("actor.generate#2", "generate"), ("cost.scores", "infer"), ("ppo_batch", "compute"),
            ("actor.reallocate", "reallocate"), ("results", "wait"),
        )
    ]  # fmt: skip
    colors = colors_of_events(events)
    assert list(colors) == ["actor.generate", "actor.train", "cost.scores", "judge.scores", "ppo_batch"]
    assert len(set(colors.values())) == 5
    assert colors_of_events(events[::-1]) == colors
    shades = [matplotlib.colors.to_hex(matplotlib.colormaps["tab20c"](i)) for i in (0, 1)]
    assert [colors["actor.generate"], colors["actor.train"]] == shades


def test_the_last_steps_are_drawn_unless_others_are_asked_for() -> None:
    rows = rows_of(9)
    assert choose_steps(rows, None) == (7, 9)
    assert choose_steps(rows_of(2), None) == (1, 2)
    assert choose_steps(rows, "4") == (4, 4)
    assert choose_steps(rows, "4-6") == (4, 6)
    assert choose_steps(rows, "8-20") == (8, 9)


@pytest.mark.parametrize("text", ["10", "0", "6-4", "a", "", "4-", "-4", "1e3"])
def test_steps_that_are_not_there_are_refused(text: str) -> None:
    with pytest.raises(PictureError, match=r"--steps: must be a step, .* of those that the timeline has: 1-9\. Got"):
        choose_steps(rows_of(9), text)


def test_a_timeline_without_steps_is_refused() -> None:
    with pytest.raises(PictureError, match=r"needs a step of training\. Got a timeline without any"):
        choose_steps(trace_rows([ProcessEvents(run_of(0).events, 0.0)]), None)


def test_many_devices_that_do_the_same_share_a_row() -> None:
    shown = joined(rows_of(2, num_devices=40))
    assert [label for label, _ in shown] == ["devices 0-19", "devices 20-39", "host", "host waits"]
    few = rows_of(2, num_devices=32)
    assert joined(few) == few


def test_the_command_draws_a_run_s_folder_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chrome_trace(tmp_path / "timeline.json", [run_of(4), run_of(4)])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Drawn to {tmp_path / 'timeline.png'}\n"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    picture = tmp_path / "other.svg"
    assert main([str(tmp_path / "timeline.json"), "--steps", "2-3", "--out", str(picture)]) == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "9"], r"--steps: must be a step"),
        (["--out", "a.xyz"], r"--out: must end in the name of a picture's format\. Got 'a\.xyz'\. Format 'xyz' is not"),
        (["--out", "nowhere/a.png"], r"No such file or directory"),
    ],
)
def test_what_the_command_cannot_draw_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write_chrome_trace(tmp_path / "timeline.json", [run_of(4)])
    assert main([str(tmp_path), *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(printed.err)


def test_without_matplotlib_the_command_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_chrome_trace(tmp_path / "timeline.json", [run_of(1)])
    assert main([str(tmp_path)]) == 1
    assert "needs matplotlib. Got none that can be imported" in capsys.readouterr().err
    assert not (tmp_path / "timeline.png").exists()
