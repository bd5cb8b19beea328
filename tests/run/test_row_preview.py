"""The rows of a run as `--preview` prints them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxrlhf.config.schema import load_run
from jaxrlhf.run.row_preview import preview
from jaxrlhf.train import main
from tests.shown import Shown

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MODEL = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Writes rows.jsonl, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *rows: Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def shown(base: str, *overrides: str, count: int = 9) -> list[str]:
    """The lines of a preview."""
    config = {"base": base, "data": {"task": "", "path": "rows.jsonl", "eval_rows": 0}, "evaluation": None}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    console = Shown(width=200)
    preview(load_run("run.yaml", overrides), count, console.console)
    return console.lines()


def of_row(lines: list[str], source: str) -> list[str]:
    """The lines of one row."""
    first = next(i for i, line in enumerate(lines) if line.startswith("row ") and line.endswith(source))
    rest = lines[first + 1 :]
    end = next((i for i, line in enumerate(rest) if " | " not in line), len(rest))
    return [line.strip() for line in rest[:end]]


def test_prompts_come_with_the_chat_template_and_the_columns_of_rewards(rows):
    messages = [{"role": "user", "content": "2+2?"}]
    rows({"messages": messages, "answer": "4"}, {"messages": [{"role": "user", "content": "10+10?"}], "answer": "20"})
    lines = shown("ppo_arithmetic", "warm_start=null", f"data.chat_template={json.dumps(TEMPLATE)}")
    assert "step: prompts, the first 2 of 2 training rows" in lines
    (prompt, last, columns, counts) = of_row(lines, "rows.jsonl:1")
    assert (prompt, last) == (r"prompt | [user]2+2?\n", "| [assistant]")
    assert columns.startswith("columns | messages=") and columns.endswith("answer='4'")
    assert counts == "| 22 prompt tokens of at most 24, 2 of padding; up to 10 tokens are generated"


def test_a_dialogue_shows_what_is_learned_and_what_is_only_read(rows):
    replies = ["b", "d"]
    messages = [{"role": role, "content": text} for role, text in
                [("user", "a"), ("assistant", replies[0]), ("user", "c"), ("assistant", replies[1])]]  # fmt: skip
    rows({"messages": messages})
    given = ("sft_arithmetic", "settings.max_new_tokens=30", f"data.chat_template={json.dumps(TEMPLATE)}")
    assert of_row(shown(*given, "data.assistant_turns=all"), "rows.jsonl:1") == [
        r"prompt | [user]a\n", "| [assistant]", "learned | b<|endoftext|>",
        r"read | \n", r"| [user]c\n", "| [assistant]",
        "learned | d<|endoftext|>",
        "| 19 prompt tokens + 24 completion tokens, 4 of them with a loss = 43 of at most 19 + 30, 6 of padding",
    ]  # fmt: skip
    last = of_row(shown(*given), "rows.jsonl:1")
    assert last[-2:] == [
        "learned | d<|endoftext|>",
        "| 41 prompt tokens + 2 completion tokens, 2 of them with a loss = 43 of at most 41 + 30, 28 of padding",
    ]
    assert not any(line.startswith("read") for line in last)


def test_pairs_show_both_replies_after_their_prompt(rows):
    rows({"prompt": "a", "chosen": "yes", "rejected": "no", "margin": 2})
    lines = shown("dpo_arithmetic", "warm_start=null", "data.margin_column=margin", "settings.max_new_tokens=8")
    assert of_row(lines, "rows.jsonl:1") == [
        "prompt | a",
        "chosen | yes<|endoftext|>",
        "| 1 prompt tokens + 4 chosen tokens = 5 of at most 1 + 8, 4 of padding",
        "rejected | no<|endoftext|>",
        "| 1 prompt tokens + 3 rejected tokens = 4 of at most 1 + 8, 5 of padding",
        "| margin 2",
    ]


def test_a_warm_start_and_several_kinds_of_rows_are_shown_each(rows):
    rows(*({"prompt": f"{i}+1=", "completion": f"{i + 1}", "answer": f"{i + 1}"} for i in range(4)))
    titles = [line for line in shown("ppo_ptx_arithmetic") if ": " in line and "training rows" in line]
    assert [title.partition(",")[0] for title in titles[:1]] == ["warm start: demonstrations"]
    assert {title.partition(":")[0] for title in titles[1:]} == {"step, prompts", "step, pretraining"}


def test_rows_that_are_left_out_are_named_with_the_reason(rows):
    rows(
        {"prompt": "much too long", "completion": "x"},
        {"prompt": "a", "completion": "too long as well"},
        {"prompt": "b"},
        {"prompt": "c", "completion": "y"},
    )
    lines = shown("sft_arithmetic", "data.overlong=drop", "data.max_prompt_tokens=4", "settings.max_new_tokens=4")
    assert "step: demonstrations, the first 1 of 1 training rows" in lines
    assert [line.strip() for line in lines[lines.index("3 rows are left out:") + 1 :][:3]] == [
        "rows.jsonl:1: its prompt of 13 tokens is over 4 (data.overlong: drop)",
        "rows.jsonl:2: its completion of 17 tokens is over 4 (data.overlong: drop)",
        "rows.jsonl:3: no completion (data.overlong: drop)",
    ]


def test_malformed_pairs_are_named(rows):
    rows({"prompt": "a", "chosen": "same", "rejected": "same"}, {"prompt": "a", "chosen": "yes", "rejected": "no"})
    lines = shown("reward_model_arithmetic", "data.malformed=drop", "settings.max_new_tokens=8")
    assert "  rows.jsonl:1: it holds no two different replies to one prompt (data.malformed: drop)" in lines


def test_rows_are_the_first_that_the_run_trains_on(rows):
    rows(*({"prompt": f"{i}", "completion": "x"} for i in range(20)))
    sources = [re.findall(r"row \d+, (\S+)", "\n".join(shown("sft_arithmetic", f"batch_size={n}", count=6)))
               for n in (4, 8)]  # fmt: skip
    assert sources[0] == sources[1] and len(set(sources[0])) == 6


def test_the_command_needs_no_device(rows):
    rows({"prompt": "a", "completion": "b"})
    Path("run.yaml").write_text(yaml.safe_dump({
        "base": "sft_arithmetic", "data": {"task": "", "path": "rows.jsonl", "eval_rows": 0}, "evaluation": None,
    }))  # fmt: skip
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "jaxrlhf.train", "--config", "run.yaml", "--preview", "1"],
        env={**os.environ, "JAX_PLATFORMS": "none_such", "PYTHONPATH": root},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "learned | b<|endoftext|>" in done.stdout and "\x1b" not in done.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["rows.jsonl", "run.yaml"]


def test_colours_are_for_terminals(rows, monkeypatch, capsys):
    rows({"prompt": "a", "completion": "b"})
    shown("sft_arithmetic")  # writes run.yaml
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    given = ["--config", "run.yaml", "--preview", "1"]
    assert main(given) == 0 and "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(given) == 0
    assert "\x1b[32mb\x1b[0m\x1b[7;32m<|endoftext|>\x1b[0m" in capsys.readouterr().out, "green, and reversed"
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(given) == 0
    assert "\x1b[32m" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("--preview", "0"), "--preview: must be at least 1. Got 0."),
        (("--preview", "1", "--set", "settings.max_new_tokens=1"), "must fit into max_new_tokens=1. Got 2 tokens"),
        (("--preview", "1", "--set", "data.path=none.jsonl"), "data.path: must be"),
    ],
)
def test_errors_are_those_of_a_run(rows, capsys, overrides, error):
    rows({"prompt": "a", "completion": "b"})
    shown("sft_arithmetic")
    assert main(["--config", "run.yaml", *overrides]) == 1
    assert error in capsys.readouterr().err
