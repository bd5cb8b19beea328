"""The files that `jaxrlhf init` writes: they run as they are, whatever they were written for."""

import json
from pathlib import Path

import pytest
import yaml

from jaxrlhf import importing
from jaxrlhf.commands import init
from jaxrlhf.commands.first_config import ALGORITHMS, OFFLINE
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.train import main as train
from tests.random_weights import params_of

QUESTIONS = [{"question": f"What is {i} + {i}?", "solution": f"#### {2 * i}"} for i in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]} for i in range(40)
]
PAIRS = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "7"} for i in range(100, 140)]
RESPONSES = [{"instruction": f"{i}+{i}=", "output": str(2 * i)} for i in range(40)]


@pytest.fixture
def started(tmp_path, monkeypatch, capsys):
    """`jaxrlhf init` in an empty folder, on rows."""
    monkeypatch.chdir(tmp_path)

    def start(*arguments: str, rows: list | None = None) -> tuple[int, str, str]:
        if rows is not None:
            Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
            arguments = (*arguments, "--data", "rows.jsonl")
        status = init.main(["my", *arguments])
        return (status, *capsys.readouterr())

    return start


def dry_run(*more: str) -> int:
    return train(["--config", "my/run.yaml", "--set", "compilation_cache=''", *more, "--dry-run"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("own_rows", [False, True], ids=["arithmetic", "rows"])
def test_what_is_written_runs(algorithm, own_rows, started, capsys):
    rows = {"sft": RESPONSES, "dpo": PAIRS, "reward_model": PAIRS}.get(algorithm, QUESTIONS) if own_rows else None
    status, out, err = started("--algorithm", algorithm, "--devices", "cpu:8", rows=rows)
    assert (status, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "    jaxrlhf train --config my/run.yaml --dry-run",
        "    jaxrlhf train --config my/run.yaml --preview 3",
        "    jaxrlhf train --config my/run.yaml",
    ]
    assert dry_run() == 0, capsys.readouterr().err
    assert Path("my/reward.py").exists() == (algorithm != "reward_model")
    tree = yaml.safe_load(Path("my/run.yaml").read_text())
    assert tree["name"] == "my" and tree["algorithm"] == algorithm
    assert max(map(len, Path("my/run.yaml").read_text().splitlines())) <= 120


@pytest.mark.parametrize(
    ("algorithm", "rows", "columns"),
    [
        ("grpo", QUESTIONS, "prompt from 'question' (text), answer from 'solution'"),
        ("sft", CHATS, "prompt from 'messages' (lists of messages), as chats"),
        ("sft", [{"text": f"The number {i}."} for i in range(40)], "texts from 'text'"),
        ("ppo", [{"prompt": "x" * 600}, *({"prompt": str(i)} for i in range(40))], "prompt from 'prompt' (text)"),
        ("grpo", CHATS, "prompt from 'messages' (lists of messages), as chats"),
        ("dapo", QUESTIONS[:1], "prompt from 'question' (text), answer from 'solution'"),
        ("ppo", QUESTIONS[:3], "prompt from 'question' (text), answer from 'solution'"),
        ("grpo", QUESTIONS * 20, "prompt from 'question' (text), answer from 'solution'"),
        ("ppo", RESPONSES, "prompt from 'instruction' (text), completion from 'output' (text)"),
    ],
)
def test_columns_are_recognized(algorithm, rows, columns, started, capsys):
    status, out, err = started("--algorithm", algorithm, "--devices", "cpu:8", rows=rows)
    assert (status, err) == (0, "") and out.splitlines()[0] == columns
    assert dry_run() == 0, capsys.readouterr().err


def test_a_folder_of_a_model_with_a_chat_template(started, capsys):
    config = ModelConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1
    )
    save_params(params_of(config), config, Path("model"), dtype="float32")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    Path("model/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    for algorithm, rows in (("grpo", QUESTIONS), ("ppo", QUESTIONS), ("reward_model", PAIRS), ("dpo", PAIRS)):
        status, _, err = started(
            "--algorithm", algorithm, "--model", "model", "--force", "--devices", "cpu:8", rows=rows
        )
        assert (status, err) == (0, "")
        tree = yaml.safe_load(Path("my/run.yaml").read_text())
        assert tree["model"] == "model" and tree["data"]["chat"] == "user" and tree["plan"] == "auto"
        bytes_ = ("--set", "tokenizer.kind=bytes", "--set", f"data.chat_template={json.dumps(template)}")
        assert dry_run(*bytes_) == 0, capsys.readouterr().err


def test_a_run_with_the_reward_function_on_rows_of_ones_own(started, capsys):
    assert started("--algorithm", "grpo", "--devices", "cpu:8", rows=QUESTIONS)[0] == 0
    small = ("steps=2", "batch_size=8", "settings.sampling={max_new_tokens: 4, num_samples: 2}", "output.export=[]",
             "roles.actor.model={preset: tiny, hidden_size: 32, num_layers: 1}")  # fmt: skip
    assert train(["--config", "my/run.yaml", *(x for text in small for x in ("--set", text))]) == 0, capsys.readouterr()
    steps = [row for row in read_metrics(Path("runs/latest/metrics.jsonl")) if "actor/pg_loss" in row]
    assert [row["step"] for row in steps] == [1, 2] and all("critic/score/mean" in row for row in steps)


def test_the_reward_function_compares_numbers_or_looks_for_the_text(started):
    assert started(rows=QUESTIONS)[0] == 0
    score = importing.find_function("my/reward.py:score", what="Reward")
    texts = ["so 3 and 1,204", "1204.", "12041", "it is PARIS!", "London", "1204"]
    answers = ["#### 1204", 1204, "1204", "Paris", "Paris", "1204"]
    finished = [True] * 5 + [False]
    assert score(texts, answers, finished) == [1, 1, 0, 1, 0, 0]


def test_nothing_is_replaced_unless_one_says_so(started):
    assert started()[0] == 0
    Path("my/reward.py").write_text("mine")
    Path("my/run.yaml").unlink()
    status, _, err = started()
    assert (status, Path("my/reward.py").read_text(), Path("my/run.yaml").exists()) == (1, "mine", False)
    assert err == "Error: my/reward.py: must be new. Got a file that is there. Name another FOLDER, or add --force.\n"
    assert started("--force")[0] == 0 and "def score" in Path("my/reward.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "rows", "error"),
    [
        (["--algorithm", "grp"], None, "--algorithm: must be one of ppo, grpo, "),
        (["--algorithm", "safe_rlhf"], None, "Got 'safe_rlhf'. Others start from a shipped config: `base: NAME`"),
        (["--model", "tny"], None, "--model: must be a folder with a config.json, or one of tiny, small, "),
        (["--devices", "gpu"], None, "init: devices: must be auto or cpu:<number>"),
        (["--columns", "prompt=x"], None, "--columns: are those of --data. Got prompt=x without it."),
        (["--columns", "promt=x"], QUESTIONS, "--columns: must be MEANING=COLUMN, with a meaning of prompt, chosen"),
        (
            ["--algorithm", "dpo"],
            QUESTIONS,
            "--data: dpo needs rows with chosen and rejected. Got the columns question, ",
        ),
        (
            [],
            [{"a": "x"}],
            "--data: grpo needs rows with prompt. Got the columns a. Say which is which, as in --columns",
        ),
        ([], [{"text": "x"}], "--data: grpo needs rows with prompt. Got the columns text."),
        ([], [{"input": "x", "query": "y"}], "Got input and query, each of which may be it. Set data.prompt_column"),
    ],
)
def test_errors_are_one_line_and_write_nothing(arguments, rows, error, started):
    status, _, err = started(*arguments, rows=rows)
    assert status == 1 and err.startswith("Error: ") and error in err and err.count("\n") == 1
    assert not Path("my").exists()


def test_columns_can_be_named(started, capsys):
    rows = [{"a": f"{i}?", "b": i} for i in range(40)]
    assert started("--columns", "prompt=a", "answer=b", "--devices", "cpu:8", rows=rows)[0] == 0
    assert dry_run() == 0, capsys.readouterr().err


def test_it_asks_on_a_terminal_without_options(started, monkeypatch):
    asked = []
    answers = {"Algorithm": "rloo", "Model: a": "small", "Data: a f": ""}

    def answer(question, **settings):
        asked.append(settings["default"])
        return next(value for start, value in answers.items() if question.startswith(start))

    monkeypatch.setattr(init.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr(init.Prompt, "ask", answer)
    assert started()[0] == 0 and asked == ["grpo", "tiny", ""]
    tree = yaml.safe_load(Path("my/run.yaml").read_text())
    assert (tree["algorithm"], tree["roles"]["actor"]["model"]) == ("rloo", "small")
    assert started("--force", "--algorithm", "sft")[0] == 0 and len(asked) == 3, "an option is given"


def test_those_that_learn_from_rows_alone_are_known():
    assert set(OFFLINE) < set(ALGORITHMS)
