"""Rows as TRL, OpenRLHF and verl write them are read without a mapping; what could mean two things is refused."""

import json
import re

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.rows import load_tables
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import TokenizerConfig

TEMPLATE = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"
SYSTEM, ASK, MORE = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "user", "content": "R"},
)
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


def load(tmp_path, *rows, **fields):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(DataConfig(path=str(path), **{"eval_rows": 0, **fields}), TokenizerConfig())


def texts(table):
    """(prompt, completion, rejected) of the first row."""
    replies = (table.completions[0], table.rejected[0])
    return table.prompts[0], *(None if reply is None else table.tokenizer.decode(reply) for reply in replies)


TEXT = [
    # TRL: dataset_formats
    ({"prompt": "a"}, ("a", None, None), "prompt from 'prompt' (text)"),
    ({"prompt": "a", "completion": "b"}, ("a", "b", None), "prompt from 'prompt' (text), completion from 'completion'"),
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        ("a", "b", "c"),
        "prompt from 'prompt' (text), chosen from 'chosen' (text), rejected from 'rejected' (text)",
    ),
    # OpenRLHF: --input_key, --output_key, --label_key
    ({"input": "a", "output": "b"}, ("a", "b", None), "prompt from 'input' (text), completion from 'output' (text)"),
    ({"input": "a", "label": "4"}, ("a", None, None), "prompt from 'input' (text), answer from 'label'"),
    # GSM8K, MATH
    ({"question": "a", "answer": "4"}, ("a", None, None), "prompt from 'question' (text), answer from 'answer'"),
    ({"problem": "a", "solution": "4"}, ("a", None, None), "prompt from 'problem' (text), answer from 'solution'"),
    # beside a preferred response, another one is no completion
    ({"prompt": "a", "response": "x", "chosen": "b", "rejected": "c"}, ("a", "b", "c"), "prompt from 'prompt'"),
    # an answer that no reward could be compared with
    ({"prompt": "a", "completion": "b", "label": True}, ("a", "b", None), "prompt from 'prompt' (text), completion"),
    ({"prompt": "a", "output": {"b": 1}}, ("a", None, None), "prompt from 'prompt' (text)"),
]


@pytest.mark.parametrize(("row", "expected", "reads"), TEXT)
def test_rows_of_text(tmp_path, row, expected, reads):
    table = load(tmp_path, row)
    assert texts(table) == expected and table.reads.startswith(reads)
    assert table.config.chat == "none"
    if "answer from" in reads:
        assert table.columns(np.array([0]))["answer"] == ["4"]
    else:
        assert "answer" not in table.other and "answer" not in table.reads


CHATS = [
    # TRL: dataset_formats, conversational
    ({"messages": [ASK, GOOD]}, ("<user:Q>", "good", None), "prompt from 'messages' (lists of messages), as chats"),
    ({"prompt": [SYSTEM, ASK]}, ("<system:S><user:Q>", None, None), "prompt from 'prompt' (lists of messages)"),
    (
        {"prompt": [ASK], "completion": [GOOD]},
        ("<user:Q>", "good", None),
        "prompt from 'prompt' (lists of messages), c",
    ),
    ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, ("<user:Q>", "good", "bad"), "prompt from 'prompt' (list"),
    ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, ("<user:Q>", "good", "bad"), "chosen from 'chosen' (lists of m"),
    # UltraFeedback: a prompt as text beside whole dialogues
    (
        {"prompt": "Q", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        ("<user:Q>", "good", "bad"),
        "prompt from 'prompt",
    ),
    # OpenRLHF: text and a reply as messages; the rest of a dialogue after a prompt
    (
        {"input": "Q", "output": [GOOD]},
        ("<user:Q>", "good", None),
        "prompt from 'input' (text), completion from 'outpu",
    ),
    (
        {"prompt": [ASK], "chosen": [GOOD, MORE, GOOD], "rejected": [GOOD, MORE, BAD]},
        ("<user:Q><assistant:good><user:R>", "good", "bad"),
        "prompt from 'prompt' (lists of messages), chosen from",
    ),
    (
        {"prompt": [ASK], "completion": [GOOD, MORE, BAD]},
        ("<user:Q><assistant:good><user:R>", "bad", None),
        "prompt from 'prompt' (lists of messages), completion from 'completion' (lists of messages), as chats",
    ),
    # ShareGPT
    (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]},
        ("<user:Q>", "good", None),
        "prompt from 'conversations' (lists of messages), as chats",
    ),
    # verl: prepare_data
    (
        {
            "data_source": "openai/gsm8k",
            "prompt": [ASK],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"split": "train", "index": 0},
        },
        ("<user:Q>", None, None),
        "prompt from 'prompt' (lists of messages), answer from 'reward_model.ground_truth', as chats",
    ),
]


@pytest.mark.parametrize(("row", "expected", "reads"), CHATS)
def test_rows_of_messages(tmp_path, row, expected, reads):
    table = load(tmp_path, row, chat_template=TEMPLATE)
    assert texts(table) == expected and table.reads.startswith(reads)
    assert table.config.chat == ("user" if isinstance(row.get("prompt", row.get("input")), str) else "messages")


def test_the_answer_of_verl_reaches_rewards_as_answer_from_parquet_too(tmp_path):
    row = CHATS[-1][0]
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "train.parquet")
    config = DataConfig(path=str(tmp_path / "train.parquet"), eval_rows=0, chat_template=TEMPLATE)
    table = load_prompts(config, TokenizerConfig())
    assert table.prompts == ["<user:Q>"] * 2
    columns = table.columns(np.array([1]))
    assert columns == {**{name: [value] for name, value in row.items()}, "answer": ["4"]}


def test_a_mapping_in_the_config_says_what_is_what(tmp_path):
    row = {"prompt": "p", "q": "a", "answer": 1, "extra": {"right": 2}, "say": "b", "extra.dotted": "c"}
    mapping = {"prompt_column": "q", "completion_column": "say", "answer_column": "extra.right"}
    table = load(tmp_path, row, **mapping)
    assert texts(table) == ("a", "b", None)
    assert table.columns(np.array([0]))["answer"] == [2] and table.reads.endswith("answer from 'extra.right'")
    assert load(tmp_path, row, prompt_column="extra.dotted").prompts == ["c"]
    nested = load(tmp_path, {"extra": {"question": "a"}}, prompt_column="extra.question")
    assert nested.prompts == ["a"] and list(nested.other) == ["extra"]
    without = load(tmp_path, {"prompt": "a", "solution": 3}, answer_column="")
    assert "answer" not in without.other and without.other["solution"] == [3]


def test_a_column_that_is_named_for_one_thing_is_not_recognized_as_another(tmp_path):
    table = load(tmp_path, {"prompt": "a", "completion": "b"}, chosen_column="completion")
    assert texts(table) == ("a", "b", None) and table.config.completion_column == ""
    table = load(tmp_path, {"question": "a", "answer": "b"}, completion_column="answer")
    assert texts(table) == ("a", "b", None) and table.other["answer"] == ["b"]


def test_the_name_of_here_is_taken_before_those_of_elsewhere(tmp_path):
    table = load(tmp_path, {"prompt": "a", "question": "b", "input": "c", "answer": 1, "solution": "x"})
    assert table.prompts == ["a"] and table.other["answer"] == [1]


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"prompt": "a", "messages": [ASK]},
            {},
            "data.prompt_column: the rows must have one column for the prompt. Got prompt and messages, each of which "
            "may be it. Set data.prompt_column to prompt, say, or fill data.template from several.",
        ),
        ({"input": "a", "instruction": "b"}, {}, "Got input and instruction, each of which may be it."),
        (
            {"prompt": "a", "output": "b", "response": "c"},
            {},
            "data.completion_column: the rows must have one column for the completion. Got output and response, each "
            "of which may be it. Set data.completion_column to output, say.",
        ),
        (
            {"prompt": "a", "solution": "b", "reward_model": {"ground_truth": "c"}},
            {},
            "data.answer_column: the rows must have one column for the answer. Got solution and "
            "reward_model.ground_truth, each of which may be it. Set data.answer_column to solution, say, or to '' if "
            "no reward needs it.",
        ),
        (
            {"prompt": "a", "reward_model": {"truth": 1}},
            {"answer_column": "reward_model.truht"},
            "data.answer_column: must name a column of the rows. Got 'reward_model.truht'. Known: prompt, "
            "reward_model.",
        ),
        (
            {"prompt": "a"},
            {"chat_template": "{{ messages }}"},
            "data.chat_template: only chats have one. Got '{{ messages }}', and prompts that are text. Set data.chat "
            "to 'user' to make users' messages of them, or leave it out.",
        ),
        ({"prompt": "a"}, {"system_prompt": "b"}, "data.system_prompt: only chats have one. Got 'b', and prompts that"),
        (
            {"prompt": [ASK], "completion": [GOOD, MORE]},
            {"chat_template": TEMPLATE},
            "rows.jsonl:1: completion must end with the assistant's message. Got the user's. Mend the row, or set "
            "data.completion_column to ''.",
        ),
        (
            {"prompt": [ASK, GOOD], "completion": [GOOD]},
            {"chat_template": TEMPLATE},
            "rows.jsonl:1: a completion is given once. Got an assistant's last message and the column 'completion'.",
        ),
        ({"prompt": "a", "completion": [GOOD]}, {"chat": "none"}, "completion must be a string. Got [{'role': 'assi"),
        ({"body": "a"}, {}, "rows.jsonl:1: must have the column 'prompt'. Got body."),
    ],
)
def test_what_could_mean_two_things_or_nothing(tmp_path, row, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, row, **fields)


def test_a_template_and_a_marker_need_no_prompt_column(tmp_path):
    row = {"instruction": "a", "input": "b", "output": "c"}
    table = load(tmp_path, row, template="{instruction} {input}")
    assert texts(table) == ("a b", "c", None)
    assert table.reads == "prompt by the template, completion from 'output' (text)"
    pair = {"chosen": "H: a A: b", "rejected": "H: a A: c", "messages": [ASK], "prompt": "x"}
    assert texts(load(tmp_path, pair, reply_marker=" A:")) == ("H: a A:", " b", " c")


def test_a_run_says_what_it_reads_of_each_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": 1}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "p", "completion": "c"}')
    data = {"path": "a.jsonl", "eval_rows": 0}
    tree = {"name": "x", "steps": 1, "batch_size": 1, "roles": {}, "data": data}
    (tmp_path / "run.yaml").write_text(json.dumps({**tree, "datasets": {"more": {**data, "path": "b.jsonl"}}}))
    assert load_tables(load_run("run.yaml")).columns_read() == [
        "data: prompt from 'question' (text), answer from 'answer'",
        "datasets.more: prompt from 'prompt' (text), completion from 'completion' (text)",
    ]
    (tmp_path / "run.yaml").write_text(json.dumps({**tree, "data": {"task": "arithmetic"}}))
    assert load_tables(load_run("run.yaml")).columns_read() == []


def test_chats_of_users_may_hold_messages_too(tmp_path):
    rows = [{"prompt": "Q", "answer": 1}, {"prompt": [SYSTEM, ASK], "answer": 1}]
    assert load(tmp_path, *rows, chat="user", chat_template=TEMPLATE).prompts == ["<user:Q>", "<system:S><user:Q>"]
