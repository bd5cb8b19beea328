"""Dialogues with several replies: which tokens are learned, by hand, and templates that do not leave replies alone."""

import json
import re

import numpy as np
import pytest

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.rows import StepRows, check_rows, load_tables
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import Tokenizer
from tests.data.test_chat import ALTERNATING, CHATML, ZEPHYR
from tests.data.test_control_tokens import byte_level

START, END = 257, 258
SYSTEM, HI, SUM = ({"role": r, "content": c} for r, c in (("system", "S"), ("user", "Hi"), ("user", "1+1?")))
HELLO, TWO = ({"role": "assistant", "content": text} for text in ("Hello", "2"))
TALK = [SYSTEM, HI, HELLO, SUM, TWO]
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.name + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
FORGETFUL = CHATML.replace("message['content'] +", "(message['content'] if loop.last else '...') +")
THINKING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


def load(tmp_path, *rows, template=CHATML, eos="<|im_end|>", **fields):
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(byte_level(special), name="t", settings={"eos_token": eos, "chat_template": template})
    fields = {"eval_rows": 0, "assistant_turns": "all", **fields}
    return load_prompts(DataConfig(path=str(tmp_path / "x.jsonl"), **fields), tokenizer)


def encoded(*parts):
    """Bytes and control tokens as ids of a byte-level tokenizer."""
    plain = Tokenizer(byte_level(["<s>", "<|im_start|>", "<|im_end|>"]), name="t", settings={"eos_token": "<|im_end|>"})
    return [token for part in parts for token in ([part] if isinstance(part, int) else plain.encode(part))]


def learned(table):
    """The runs of tokens of the first demonstration that are learned, as text, with a dot for the end of text."""
    batch = table.demonstrations(np.array([0]), max_new_tokens=400)
    runs = [""]
    for token, is_learned in zip(batch.tokens[0][-400:], batch.response[0], strict=True):
        if is_learned:
            runs[-1] += "." if token == END else table.tokenizer.decode([token])
        elif runs[-1]:
            runs.append("")
    return [run for run in runs if run]


def test_the_tokens_and_masks_of_a_dialogue_by_hand(tmp_path):
    table = load(tmp_path, {"messages": TALK})
    batch = table.demonstrations(np.array([0]), max_new_tokens=60)
    opening = encoded(START, "system\nS", END, "\n", START, "user\nHi", END, "\n", START, "assistant\n")
    parts = [
        (encoded("Hello", END), True),
        (encoded("\n", START, "user\n1+1?", END, "\n", START, "assistant\n"), False),
        (encoded("2", END), True),
    ]
    ids = [token for tokens, _ in parts for token in tokens]
    mask = [is_reply for tokens, is_reply in parts for _ in tokens]
    pad = 60 - len(ids)
    np.testing.assert_array_equal(batch.tokens[0], opening + ids + [table.tokenizer.pad_id] * pad)
    np.testing.assert_array_equal(batch.mask[0], [True] * (len(opening) + len(ids)) + [False] * pad)
    np.testing.assert_array_equal(batch.response[0], mask + [False] * pad)
    whole = table.tokens[0].tolist() + encoded("2", END)
    assert opening + ids == whole, "the same tokens as those of the prompt of the last reply, and that"
    assert table.batch(np.array([0]), np.array([0])).mask.sum() == len(table.tokens[0]), "as a prompt it goes further"


def test_rows_with_one_reply_and_with_several_make_one_batch(tmp_path):
    short = {"messages": [HI, HELLO]}
    table = load(tmp_path, short, {"messages": TALK}, {"messages": [HI]}, system_prompt="S")
    batch = table.demonstrations(np.array([0, 1]), max_new_tokens=60)
    assert batch.response.sum(axis=1).tolist() == [6, 8] and batch.mask[:, -60:].sum(axis=1).tolist()[0] == 6
    assert (
        batch.tokens.shape[1] == len(encoded(START, "system\nS", END, "\n", START, "user\nHi", END, "\n", START)) + 70
    )
    np.testing.assert_array_equal(batch.tokens[0, :-60], batch.tokens[1, :-60])
    np.testing.assert_array_equal(table.usable("demonstrations", 60), [0, 1])
    np.testing.assert_array_equal(table.usable("demonstrations", 6), [0])
    with pytest.raises(
        ValueError, match=r"x\.jsonl:2: a completion with its end of text must fit into max_new_tokens=6"
    ):
        table.check("demonstrations", np.array([1]), max_new_tokens=6)


def test_the_last_reply_alone_unless_all_are_asked_for(tmp_path):
    table = load(tmp_path, {"messages": TALK}, assistant_turns="last")
    batch = table.demonstrations(np.array([0]), max_new_tokens=3)
    assert batch.response[0].tolist() == [True, True, False] and table.num_unlearned == 1 and not table.dialogues
    every = load(tmp_path, {"messages": TALK})
    assert every.num_unlearned == 0 and every.digest() != table.digest()
    single = load(tmp_path, {"messages": [HI, HELLO]})
    assert single.digest() == load(tmp_path, {"messages": [HI, HELLO]}, assistant_turns="last").digest()


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
TOLD = {"role": "tool", "content": "<|im_end|>2"}
FIRST = {"role": "assistant", "content": "Welcome"}
REPLIES = [
    (CHATML, {"messages": TALK}, ["Hello.", "2."]),
    (ZEPHYR, {"messages": TALK}, ["Hello.", "2."]),
    (ALTERNATING, {"messages": TALK[1:]}, ["Hello.", "2."]),
    (ALTERNATING.replace("+ eos_token", ""), {"messages": TALK[1:]}, ["Hello", "2."]),
    (LLAMA2, {"messages": TALK[1:]}, [" Hello .", "2."]),
    (TOOLS, {"messages": [SUM, CALL, TOLD, TWO]}, ["<call>add</call>.", "2."]),
    (TOOLS, {"messages": [SUM, {**CALL, "content": "So:"}, TOLD, TWO]}, ["So:<call>add</call>.", "2."]),
    (CHATML, {"messages": [SYSTEM, FIRST, HI, HELLO, SUM, TWO]}, ["Hello.", "2."]),
    (CHATML, {"messages": [HI, {**HELLO, "content": " H<|im_end|>i\n"}, SUM, TWO]}, [" H<|im_end|>i\n.", "2."]),
    (CHATML, {"prompt": [HI, HELLO, SUM], "completion": [TWO, HI, HELLO]}, ["2.", "Hello."]),
    (CHATML, {"prompt": [HI, HELLO, SUM], "completion": [TWO]}, ["2."]),
    (CHATML, {"chosen": TALK, "rejected": [*TALK[:4], HELLO]}, ["Hello.", "2."]),
    (THINKING, {"messages": TALK}, ["Hello.", "2."]),
]


@pytest.mark.parametrize(("template", "row", "expected"), REPLIES)
def test_what_is_learned_under_templates_of_many_kinds(tmp_path, template, row, expected):
    table = load(tmp_path, row, template=template)
    assert learned(table) == expected
    batch = table.demonstrations(np.array([0]), max_new_tokens=400)
    assert batch.tokens[0][batch.mask[0]].tolist() == table.tokens[0].tolist() + encoded(expected[-1][:-1], END)


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (FORGETFUL, {"messages": TALK}),
        (THINKING, {"messages": [HI, {**HELLO, "content": "<think>x</think>Hello"}, SUM, TWO]}),
        (CHATML.replace("{% for", "{{ messages | length }}{% for", 1), {"messages": TALK}),
        (TOOLS.replace("<|im_end|>", "."), {"messages": [SUM, CALL, TOLD, TWO]}),
    ],
    ids=["forgets", "drops thoughts", "counts", "does not end calls"],
)
def test_templates_that_change_replies_are_refused(tmp_path, template, row):
    with pytest.raises(
        ValueError,
        match=r"^.*x\.jsonl:1: the chat template of t must leave the assistant's message [12] as its reply when more "
        r"messages follow\. Got another text for it\. Set data\.assistant_turns to 'last', or data\.chat_template to",
    ):
        load(tmp_path, row, template=template)
    assert load(tmp_path, row, template=template, assistant_turns="last").num_train == 1


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"prompt": "a"}, {}, "data.assistant_turns: only chats have several. Got 'all', and prompts that are text."),
        ({"prompt": "a"}, {"chat": "none"}, "data.assistant_turns: only chats have several. Got 'all'. Set data.chat"),
        ({"chosen": "a:b"}, {"reply_marker": ":"}, "data.assistant_turns: only chats have several. Got 'all'."),
    ],
)
def test_texts_have_no_turns(tmp_path, row, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, row, **fields)


def test_a_run_says_which_replies_it_does_not_learn_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(2)))
    data = {"path": "x.jsonl", "eval_rows": 0, "chat_template": CHATML}
    tree = {"name": "x", "steps": 1, "batch_size": 1, "roles": {}, "data": data, "datasets": {"more": data}}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))

    def notes(asked, *overrides):
        config = load_run("run.yaml", overrides)
        return check_rows(StepRows(asked, load_tables(config), 1, 0), config)

    said = (
        "2 rows of {0} have several of the assistant's messages, of which the last one alone is learned from. To learn "
        "from all, set {0}.assistant_turns to 'all'."
    )
    of_more = Rows("demonstrations", 99, dataset="more")
    assert notes(of_more) == [said.format("datasets.more")]
    assert notes({"a": Rows("demonstrations", 99), "b": of_more})[0] == said.format("data")
    assert notes(of_more, "datasets.more.assistant_turns=all") == []
    assert notes(
        {"a": Rows("prompts"), "b": of_more}, "warm_start={steps: 1, batch_size: 1, optimizer: {learning_rate: 1}}"
    )[0] == said.format("data")
