"""An output of a notebook that changes in place."""

from typing import Any

from jaxrlhf.observe.notebook_line import NotebookLine, publisher
from tests.shown import Shown


class Notebook:
    """Keeps what was shown, and has a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []
        self.seconds = 0.0

    def publish(self, **shown: Any) -> None:
        self.shown.append(shown)

    def clock(self) -> float:
        return self.seconds


def test_changes_are_shown_in_place_and_not_too_often():
    notebook = Notebook()
    line = NotebookLine(notebook.publish, clock=notebook.clock)
    for seconds, text in ((0.0, "first"), (0.1, "too soon"), (0.3, "second")):
        notebook.seconds = seconds
        line.show([text, "<b>"], done=0.5)
    line.show(["last"], is_last=True)
    assert [shown["data"]["text/plain"] for shown in notebook.shown] == ["first\n<b>", "second\n<b>", "last"]
    assert [shown["update"] for shown in notebook.shown] == [False, True, True]
    assert len({shown["transient"]["display_id"] for shown in notebook.shown}) == 1
    html = notebook.shown[0]["data"]["text/html"]
    assert '<progress value="0.5000" max="1"' in html and "first<br>&lt;b&gt;" in html
    assert "<progress" not in notebook.shown[-1]["data"]["text/html"]


def test_two_lines_are_two_outputs():
    notebook = Notebook()
    for _ in range(2):
        NotebookLine(notebook.publish).show(["x"])
    assert len({shown["transient"]["display_id"] for shown in notebook.shown}) == 2


def test_outside_of_a_notebook_there_is_none():
    assert publisher() is None
    with Shown().console.progress(3) as progress:
        progress.update(1, {"reward": 0.5})
    assert progress.fraction == 1 / 3 and progress.lines()[0].startswith("step 1/3  reward 0.5")


def test_the_console_of_a_notebook(monkeypatch, capsys):
    from jaxrlhf.observe import console

    notebook = Notebook()
    monkeypatch.setattr(console, "publisher", lambda: notebook.publish)
    shown = console.Console(clock=notebook.clock)
    with shown.progress(2) as progress:
        progress.update(1, {"reward": 0.25})
        progress.update(2, {"reward": 0.5})
    texts = [each["data"]["text/plain"] for each in notebook.shown]
    assert texts[0] == "the first step compiles" and texts[-1].startswith("step 2/2  reward 0.5")
    assert len(texts) == 2, "changes at the same moment are one"
    with shown.status() as say:
        say("looking")
    assert [each["data"]["text/plain"] for each in notebook.shown[2:]] == ["looking", ""]
    shown.line("a line")
    assert capsys.readouterr().out == "a line\n"
    assert not console.Console(quiet=True)._publish
