"""The messages in docs/troubleshooting.md are those of the program: printed anew, or held beside its source."""

import ast
import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import tokenizers

from jaxrlhf.plan import main as plan
from jaxrlhf.train import main as train
from tests.small_run import write_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^<!-- (from|plan|in|in jax): (.*?) -->\n\n```text\n(.*?)^```", PAGE, re.M | re.S)
PRINTED = [(how, options, message) for how, options, message in MESSAGES if how in ("from", "plan")]
IN_SOURCE = [(how, path, message) for how, path, message in MESSAGES if how.startswith("in")]
LEAST_LITERAL = 15
"""Characters that a string of the source must have for itself, lest "{a}{b}" match any message."""


def as_pattern(message: str) -> str:
    """A regular expression of a message in which `<...>` stands for anything."""
    parts = re.split(r"<[^<>]*>", " ".join(message.split()))
    return ".*".join(map(re.escape, parts))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The small run, and what the options on the page name."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    Path("no_column.jsonl").write_text(Path("rows.jsonl").read_text() + '\n{"promt": "a"}')
    Path("folder").mkdir()
    Path("my_reward.py").write_text("def score(completion):\n    return 1.0\n")
    words = {f"word{i}": i for i in range(500)} | {"</s>": 500}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0")).save("words.json")


def test_every_message_says_where_it_is_from():
    assert len(MESSAGES) == PAGE.count("```text") > 40


@pytest.mark.parametrize(("how", "options", "message"), PRINTED, ids=lambda x: x if x.startswith("--") else "")
def test_a_message_is_what_the_command_prints(how, options, message, folder, capsys):
    main, config = (train, "run.yaml") if how == "from" else (plan, "ppo_arithmetic")
    assert main(["--config", config, *shlex.split(options)]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert re.match(as_pattern(message), printed), printed


@functools.cache
def patterns_of(path: Path) -> list[str]:
    """The strings of a source file as regular expressions, in which a formatted value stands for anything."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        literal = [x.value if isinstance(x, ast.Constant) and isinstance(x.value, str) else None for x in values]
        if any(x is not None for x in literal) and len("".join(x or "" for x in literal)) >= LEAST_LITERAL:
            found.append("".join(".*" if x is None else re.escape(" ".join(x.split("\n"))) for x in literal))
    return found


@pytest.mark.parametrize(("how", "path", "message"), IN_SOURCE, ids=lambda x: x[:30] if x.endswith(".py") else "")
def test_a_message_is_in_the_source(how, path, message):
    spec = importlib.util.find_spec("jax")
    assert spec is not None and spec.origin is not None
    source = ROOT / path if how == "in" else Path(spec.origin).parent / path
    text = " ".join(message.split())
    assert any(re.fullmatch(pattern, text) for pattern in patterns_of(source)), text
