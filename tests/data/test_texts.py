"""Rows of text that is learned from as a whole."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml
from tokenizers import processors

from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import PromptTable, load_prompts
from jaxrlhf.data.tokenizer import Tokenizer, byte_tokenizer
from jaxrlhf.train import main

END = byte_tokenizer().end_id


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(*rows: dict[str, Any], tokenizer: Tokenizer | None = None, **settings: Any) -> PromptTable:
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(DataConfig(path="rows.jsonl", eval_rows=0, **settings), tokenizer or byte_tokenizer())


def with_beginning() -> Tokenizer:
    """A tokenizer of words that puts <s> before a text."""
    words = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", "one", "two"))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, name="words", end_token="</s>")


def whole(read: PromptTable, row: int = 0) -> tuple[list[int], list[int]]:
    """The tokens of a row in a batch of demonstrations, and those with a loss."""
    batch = read.demonstrations([row], max_new_tokens=8)  # pyright: ignore[reportArgumentType]
    tokens, mask, R = batch.tokens[0], batch.mask[0], batch.response.shape[1]
    return tokens[mask].tolist(), tokens[-R:][batch.response[0]].tolist()


def test_all_tokens_have_a_loss_but_the_first():
    read = table({"text": "abc"}, {"text": "de"})
    assert read.reads == "texts from 'text'"
    assert whole(read) == ([*b"abc", END], [*b"bc", END])
    assert whole(read, 1) == ([*b"de", END], [*b"e", END])


def test_the_beginning_is_what_the_tokenizer_puts_there():
    words = with_beginning()
    assert words.beginning == [1] and byte_tokenizer().beginning == []
    read = table({"text": "one two"}, tokenizer=words)
    assert whole(read) == ([1, 3, 4, 2], [3, 4, 2])
    rendered = table({"text": "<s> one two </s>"}, tokenizer=words, control_tokens="allow")
    assert whole(rendered) == ([1, 3, 4, 2], [3, 4, 2]), "neither is there twice"


@pytest.mark.parametrize(
    "row",
    [
        {"text": "abc", "prompt": "p", "completion": "c"},
        {"text": "abc", "question": "p", "output": "c"},
        {"text": "abc", "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]},
    ],
)
def test_text_beside_something_else_to_learn_from_is_a_column(row):
    template: dict[str, Any] = {"chat_template": "{{ messages[0].content }}"} if "messages" in row else {}
    read = table(row, **template)
    assert read.config.text_column == "" and read.prompts == ["p"] and read.other["text"] == ["abc"]
    assert whole(read) == ([*b"pc", END], [*b"c", END])


def test_a_named_column_is_read_whatever_stands_beside_it():
    read = table({"body": {"story": "ab"}, "prompt": "p", "completion": "c"}, text_column="body.story")
    assert whole(read) == ([*b"ab", END], [*b"b", END])
    assert table({"text": "ab"}, prompt_column="text").prompts == ["ab"], "a prompt"


@pytest.mark.parametrize(
    ("rows", "settings", "error"),
    [
        (({"text": "a"}, {"other": "b"}), {}, "rows.jsonl:2: must have the column 'text'. Got other."),
        (({"text": "a"}, {"text": ""}), {}, "rows.jsonl:2: text must not be empty"),
        (({"text": "a"}, {"text": 3}), {}, "rows.jsonl:2: text must be a string. Got 3"),
        (({"text": "a"},), {"text_column": ""}, "must have the column 'prompt'"),
        (({"text": "a"},), {"prompt_column": "question"}, "must have the column 'question'"),
        (({"text": "a"},), {"text_column": "text", "template": "{text}"},
         "data.text_column: rows of text have neither a prompt nor turns. Got 'text' with data.template='{text}'."),
        (({"text": "a"},), {"system_prompt": "x"}, "data.system_prompt: only chats have one"),
    ],
)  # fmt: skip
def test_errors(rows, settings, error):
    with pytest.raises(ValueError, match=re.escape(error)):
        table(*rows, **settings)


def run(base: str, *overrides: str) -> int:
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": f"{i} and {i}"}) for i in range(10, 30)))
    data = {"task": "", "path": "rows.jsonl", "eval_rows": 4}
    config = {
        "base": base,
        "warm_start": None,
        "evaluation": None,
        "data": data,
        "compilation_cache": "",
        "devices": "cpu:8",
    }
    if base == "sft_arithmetic":
        model = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4}
        roles = {"actor": {"model": model, "optimizer": {}}}
        config = {
            "algorithm": "sft",
            "steps": 2,
            "batch_size": 4,
            "data": data,
            "roles": roles,
            "compilation_cache": "",
        }
        config |= {"name": "texts", "plan": {"default": {"data": 1}}, "output": {"tensorboard": False}}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    return main(["--config", "run.yaml", *(x for override in overrides for x in ("--set", override))])


def test_supervised_training_learns_from_them(capsys):
    evaluation = "evaluation={num_prompts: 4, scorers: []}"
    assert run("sft_arithmetic", "settings.max_new_tokens=10", evaluation) == 0, capsys.readouterr().err
    assert "data: texts from 'text'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("base", "overrides", "error"),
    [
        ("grpo_arithmetic", (), "data.text_column: the algorithm grpo needs prompts. Got rows of text alone, in the"),
        ("dpo_arithmetic", (), "data.text_column: the algorithm dpo needs pairs of completions. Got rows of text"),
        ("sft_arithmetic", ("evaluation={num_prompts: 4, scorers: [reward]}", "roles.reward={function: exact_answer}"),
         "data.text_column: an evaluation with the scorers reward needs prompts. Got rows of text alone"),
    ],
)  # fmt: skip
def test_what_needs_prompts_refuses_them(capsys, base, overrides, error):
    assert run(base, "settings.max_new_tokens=10" if base != "grpo_arithmetic" else "steps=1", *overrides) == 1
    assert error in capsys.readouterr().err
