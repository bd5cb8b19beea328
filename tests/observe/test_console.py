import math
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.shown import Shown

PLAN = [
    {
        "call": "actor.generate",
        "kind": "generate",
        "role": "actor",
        "needs": ["prompts"],
        "devices": "0-7",
        "strategy": {"data": 4, "tensor": 2},
        "rows": 512,
        "rows_per_device": 64,
        "mini_batch": None,
        "micro_batch": None,
        "offload": False,
        "seconds": 12.3456,
    },
    {
        "call": "actor.train",
        "kind": "train",
        "role": "actor",
        "needs": ["rollout", "reference.logprobs", "critic.values", "reward.scores"],
        "devices": "0-7",
        "strategy": {"fsdp": 8},
        "rows": 512,
        "rows_per_device": 64,
        "mini_batch": 128,
        "micro_batch": 16,
        "offload": True,
        "seconds": 123456.0,
    },
]


def test_a_table_shows_every_value_readably() -> None:
    shown = Shown(width=200)
    shown.console.table("Plan", [{**row, "needs": ["prompts"]} for row in PLAN])
    title, _, _, heading, _, first, second = shown.lines()
    assert title == "Plan"
    assert " ".join(heading.split()) == "call kind role needs devices strategy rows device batch batch offload seconds"
    assert " ".join(first.split()) == "actor.generate generate actor prompts 0-7 data=4, tensor=2 512 64 no 12.35"
    assert " ".join(second.split()) == "actor.train train actor prompts 0-7 fsdp=8 512 64 128 16 yes 123456"
    # Numbers stand right under one another.
    assert first.index("12.35") + len("12.35") == second.index("123456") + len("123456")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_wide_table_goes_on_below_and_breaks_no_word(width: int) -> None:
    shown = Shown(width=width)
    shown.console.table("Plan", PLAN)
    lines = shown.lines()
    assert max(map(cell_len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    for row in PLAN:
        expected = [row["call"], row["kind"], row["role"], *", ".join(row["needs"]).split(), row["devices"]]
        for word in [*expected, "data=4,", "tensor=2", "fsdp=8", "512", "64", "128", "16", "12.35", "123456"]:
            assert word in words
    for heading in ("call", "device", "micro", "mini", "batch", "seconds", "offload"):
        assert heading in words
    # Each further table tells again which call a row is about.
    tables = sum(line.startswith("call") for line in lines)
    assert words.count("actor.generate") == tables
    assert (tables > 1) == (width < 200)


def test_a_table_uses_the_width_before_it_splits() -> None:
    shown = Shown(width=80)
    shown.console.table(
        "Call graph",
        [
            {"call": "reference.logprobs", "kind": "generate", "role": "reference", "needs": "a b " * 12, "gives": "x"},
        ],
    )
    assert sum(line.startswith("call") for line in shown.lines()) == 1


def test_missing_values() -> None:
    shown = Shown()
    shown.console.table("T", [{"b": 2}, {"b": None, "c": 3.0}])
    title, heading, _, first, second = shown.lines()
    assert (title, heading.split(), first.split(), second.split()) == ("T", ["b", "c"], ["2"], ["3"])


def test_what_is_going_on_leaves_a_line_now_and_then_where_no_line_can_change() -> None:
    shown = Shown()
    with shown.console.status(every=5.0) as say:
        for number in range(12):
            say(f"program {number}\x1b[2J")
            shown.clock.now += 1.0
    assert shown.lines() == [f"program {number}\\x1b[2J" for number in (0, 5, 10)]
    quiet = Shown(quiet=True)
    with quiet.console.status() as say:
        say("program")
    assert quiet.text() == ""


def test_what_is_empty_says_so() -> None:
    shown = Shown()
    shown.console.table("T", [])
    shown.console.samples("S", [])
    assert shown.lines() == ["T", "(none)", "S", "(none)"]


def test_samples_are_escaped_cut_and_not_read_as_markup() -> None:
    shown = Shown()
    rows = [
        {
            "prompt": "[bold]2+2[/wrong]\n:smile:",
            "completion": "\x1b[31mred\t\u202e" + "long " * 100 + "END",
            "scores": {"math": 1.0, "length": -0.25, "broken": math.nan},
        }
    ]
    shown.console.samples("Samples", rows, max_chars=60)
    text = shown.text()
    squeezed = "".join(text.split())
    assert r"[bold]2+2[/wrong]\n:smile:" in squeezed
    assert r"\x1b[31mred\t\u202e" in squeezed and "\x1b" not in text and "\u202e" not in text
    assert "…" in text and "END" not in text
    assert "math 1" in text and "length -0.25" in text and "broken nan" in text
    assert max(map(cell_len, shown.lines())) <= 80


def test_samples_cut_at_the_limit_and_no_earlier() -> None:
    shown = Shown(width=200)
    shown.console.samples("S", [{"prompt": "p" * 20, "completion": "c" * 21, "scores": {}}], max_chars=20)
    assert "p" * 20 in shown.text()
    assert "c" * 19 + "…" in shown.text() and "c" * 20 not in shown.text()


def test_a_terminal_that_cannot_show_a_character_gets_its_escape() -> None:
    shown = Shown(encoding="ascii")
    shown.console.header("größe")
    shown.console.samples(
        "S", [{"prompt": "四", "completion": "x" * 50 + "\udce9", "scores": {"a": 1.0}}], max_chars=40
    )
    shown.console.curve("reward", [0.0, 1.0])
    shown.console.table("T", [{"a": "é"}])
    shown.console.error("é")
    text = shown.text()
    assert r"gr\xf6\xdfe" in text and r"\u56db" in text and "x" * 37 + "..." in "".join(text.split())
    assert "reward  0 -> 1" in text
    assert shown.errors() == "Error: \\xe9\n"


def test_an_evaluation_stands_beside_the_best_so_far() -> None:
    shown = Shown()
    evaluations: list[tuple[int, dict[str, float]]] = []
    for step, exact, length in ((0, 0.25, 9.0), (20, 0.75, 9.5), (40, 0.5, 9.75), (60, 0.75, 9.75)):
        evaluations.append((step, {"eval/exact": exact, "eval/response_length": length, "eval/exact/kind/a": 1.0}))
        shown.console.evaluation(evaluations, num_prompts=64)
    assert shown.lines() == [
        "evaluation after 0 steps on 64 held-out prompts: eval/exact 0.250, eval/response_length 9.000",
        "evaluation after 20 steps on 64 held-out prompts: eval/exact 0.750 (best so far), eval/response_length 9.500",
        "evaluation after 40 steps on 64 held-out prompts: eval/exact 0.500 (best 0.750 after 20), "
        "eval/response_length 9.750",
        "evaluation after 60 steps on 64 held-out prompts: eval/exact 0.750 (best 0.750 after 20), "
        "eval/response_length 9.750",
    ]


def test_where_curve_and_error_do_not_wrap() -> None:
    shown = Shown(width=40)
    long = Path("runs") / ("x" * 100)
    shown.console.where({"metrics": Path("m.jsonl"), "checkpoints": long})
    shown.console.curve("reward", [0.0, 0.5, 1.0])
    shown.console.curve("nothing", [math.nan])
    shown.console.error("a.yaml: [red]3[/red] " + "y" * 100 + "\nUse \x1b2.")
    assert shown.lines() == [
        "Written to",
        "  metrics      m.jsonl",
        f"  checkpoints  {long}",
        "reward  0 ▁▅█ 1",
        "nothing  (no values)",
    ]
    assert shown.errors() == "Error: a.yaml: [red]3[/red] " + "y" * 100 + "\nUse \\x1b2.\n"


def test_quiet_leaves_the_errors_only() -> None:
    shown = Shown(quiet=True)
    shown.console.header("h")
    shown.console.line("l")
    shown.console.table("Plan", PLAN)
    shown.console.samples("S", [{"prompt": "", "completion": "", "scores": {}}])
    with shown.console.progress(1) as progress:
        progress.update(1, {})
    shown.console.curve("c", [1.0])
    shown.console.where({"a": Path("b")})
    shown.console.error("bad")
    assert (shown.text(), shown.errors()) == ("", "Error: bad\n")


SCRIPT = """
import time
from jaxrlhf.observe.console import Console
console = Console()
console.header("Title")
console.table("T", [{"a": 1, "b": "x"}])
with console.progress(3, every=1) as progress:
    for step in (1, 2, 3):
        time.sleep(0.3)
        progress.update(step, {"reward": step}, {"actor.train": 0.25})
console.error("bad")
"""


def test_a_pipe_gets_no_escape_codes() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True)
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout
    assert done.stderr == "Error: bad\n"
    assert [line[:8] for line in done.stdout.splitlines()][-3:] == ["step 1/3", "step 2/3", "step 3/3"]


def test_a_terminal_gets_color_and_a_live_bar() -> None:
    master, slave = pty.openpty()
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    received = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other end is closed.
            break
        if not chunk:
            break
        received += chunk
    os.close(master)
    assert process.wait() == 0
    text = received.decode()
    assert "\x1b[1mTitle" in text
    assert "\x1b[1;31mError: bad" in text
    # A bar is drawn, and the cursor is hidden and shown again.
    assert "━" in text and text.index("\x1b[?25l") < text.index("\x1b[?25h")
    for step in (1, 2, 3):
        assert f"step {step}/3" in text
    assert text.index("the first step compiles") < text.index("step 1/3")
