"""Pairs of completions in every form, their padding by hand, and every error of theirs."""

import gzip
import json
import re

import numpy as np
import pytest

from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import TokenizerConfig

MARKER = "\n\nAssistant:"
HELLO = "\n\nHuman: Hello" + MARKER
TWO_TURNS = HELLO + " Hi.\n\nHuman: How are you?" + MARKER
DIALOGUES = [
    {"chosen": HELLO + " Hi!", "rejected": HELLO + " Go away."},
    {"chosen": TWO_TURNS + " Well.", "rejected": TWO_TURNS},
]
"""In the format of HH-RLHF; the second rejected reply is empty."""


def load(tmp_path, *rows, **fields):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_prompts(DataConfig(path=str(path), **{"eval_rows": 0, **fields}), TokenizerConfig())


def text(table, tokens):
    return None if tokens is None else table.tokenizer.decode(tokens)


def pairs_of(table):
    """(prompt, completion, rejected) of every row."""
    parts = zip(table.prompts, table.completions, table.rejected, strict=True)
    return [(prompt, text(table, completion), text(table, rejected)) for prompt, completion, rejected in parts]


def test_a_prompt_with_two_completions(tmp_path):
    rows = [{"prompt": "a", "chosen": "x", "rejected": "yz"}, {"prompt": "bc", "completion": "v", "rejected": "w"}]
    table = load(tmp_path, *rows, {"prompt": "d", "chosen": "e"}, {"prompt": "f"})
    assert pairs_of(table) == [("a", "x", "yz"), ("bc", "v", "w"), ("d", "e", None), ("f", None, None)]
    assert table.columns(np.array([0]))["rejected"] == ["yz"]


def test_pairs_by_hand(tmp_path):
    rows = [{"prompt": "a", "chosen": "x", "rejected": "yz"}, {"prompt": "bc", "chosen": "", "rejected": "w", "by": 2}]
    pairs = load(tmp_path, *rows, margin_column="by").preferences(np.array([0, 1]), max_new_tokens=3)
    np.testing.assert_array_equal(pairs.chosen.tokens, [[256, 97, 120, 257, 256], [98, 99, 257, 256, 256]])
    np.testing.assert_array_equal(pairs.rejected.tokens, [[256, 97, 121, 122, 257], [98, 99, 119, 257, 256]])
    np.testing.assert_array_equal(pairs.chosen.response, [[1, 1, 0], [1, 0, 0]])
    np.testing.assert_array_equal(pairs.rejected.mask, [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(pairs.margin, [0.0, 2.0])
    assert pairs.margin.dtype == np.float32


def test_dialogues_have_in_common_what_goes_up_to_the_last_reply(tmp_path):
    table = load(tmp_path, *DIALOGUES, reply_marker=MARKER)
    assert pairs_of(table) == [(HELLO, " Hi!", " Go away."), (TWO_TURNS, " Well.", "")]
    assert load(tmp_path, {"chosen": HELLO + "Hi"}, reply_marker=MARKER).rejected == [None]


def test_files_that_gzip_packed(tmp_path):
    path = tmp_path / "pairs.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, DIALOGUES)).encode()))
    table = load_prompts(DataConfig(path=str(path), eval_rows=0, reply_marker=MARKER), TokenizerConfig())
    assert table.prompts == [HELLO, TWO_TURNS]
    assert table.sources == [f"{path}:1", f"{path}:2"]


def test_chats(tmp_path):
    ask, hi, no = ({"role": r, "content": c} for r, c in (("user", "Hello"), ("assistant", "Hi"), ("assistant", "No")))
    chat = {"chat": "messages", "chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    dialogues = load(tmp_path, {"prompt": "ignored", "chosen": [ask, hi], "rejected": [ask, no]}, **chat)
    replies = load(tmp_path, {"prompt": [ask], "chosen": [hi], "rejected": [no]}, **chat)
    texts = load(tmp_path, {"prompt": [ask], "chosen": "Hi", "rejected": "No"}, **chat)
    of_user = load(tmp_path, {"prompt": "Hello", "chosen": "Hi", "rejected": "No"}, **{**chat, "chat": "user"})
    for table in (dialogues, replies, texts, of_user):
        assert pairs_of(table) == [("<Hello>", "Hi", "No")]


MALFORMED = [
    (
        {"chosen": HELLO + "a", "rejected": "\n\nHuman: Bye" + MARKER + "b"},
        "chosen and rejected must be the same up to their last replies. Got two prompts.",
    ),
    (
        {"chosen": HELLO + "a", "rejected": "\n\nHuman: Hello"},
        f"rejected must have a reply, after {MARKER!r}. Got {chr(39)}\\n\\nHuman: Hello{chr(39)}.",
    ),
    (
        {"chosen": HELLO + "a", "rejected": HELLO + "a"},
        "a rejected completion must differ from the chosen one. Got 'a' twice.",
    ),
]


@pytest.mark.parametrize(("row", "message"), MALFORMED, ids=["two prompts", "no reply", "no difference"])
def test_malformed_dialogues_are_refused_or_counted(tmp_path, row, message):
    remedy = " Mend the row, or set data.malformed to 'drop'."
    with pytest.raises(ValueError, match=re.escape(f"pairs.jsonl:3: {message}{remedy}")):
        load(tmp_path, *DIALOGUES, row, reply_marker=MARKER)
    table = load(tmp_path, row, *DIALOGUES, reply_marker=MARKER, malformed="drop")
    assert (table.num_train, table.num_dropped, table.num_malformed) == (2, 0, 1)
    with pytest.raises(ValueError, match=r"data\.malformed: must leave rows for training\. Got 'drop', which drops"):
        load(tmp_path, row, reply_marker=MARKER, malformed="drop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen must be a string. Got 3. Write it in quotes."),
        (
            {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]},
            "rejected must be a string. Got [{'role': 'assistant', 'content': 'c'}]. Set data.chat to 'messages'.",
        ),
        (
            {"prompt": "a", "completion": "b", "chosen": "b"},
            "a completion is given once. Got one beside the column 'chosen'. Remove it, or set "
            "data.completion_column or data.chosen_column to ''.",
        ),
        ({"prompt": "a", "chosen": "b", "by": "much"}, "by must be a finite number. Got 'much'."),
        ({"prompt": "a", "chosen": "b", "by": True}, "by must be a finite number. Got True."),
    ],
)
def test_wrong_columns(tmp_path, row, message):
    with pytest.raises(ValueError, match=re.escape(f"pairs.jsonl:1: {message}")):
        load(tmp_path, row, {"prompt": "a", "by": 1.5}, margin_column="by", chat="none")


def test_dialogues_need_the_column_of_the_chosen_one(tmp_path):
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl:1: must have the column 'chosen'\. Got rejected\..* Set data\.c"
    ):
        load(tmp_path, {"rejected": HELLO + "b"}, reply_marker=MARKER)


def test_a_chat_ends_with_the_assistant_s_message(tmp_path):
    row = {"chosen": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(
        ValueError, match=r"chosen must end with the assistant's message\. Got the user's\. Mend the row"
    ):
        load(tmp_path, row, chat="messages", chat_template="{}")


def test_pairs_that_an_algorithm_cannot_use(tmp_path):
    rows = [{"prompt": "a", "chosen": "x", "rejected": "yz"}, {"prompt": "b", "chosen": "x"}, {"prompt": "c"}]
    table = load(tmp_path, *rows)
    np.testing.assert_array_equal(table.usable("preferences", 3), [0])
    np.testing.assert_array_equal(table.usable("preferences", 2), [])
    with pytest.raises(
        ValueError, match=r"jsonl:1: a rejected completion .* into max_new_tokens=2\. Got 3 tokens\. Raise"
    ):
        table.check("preferences", table.usable("prompts"), max_new_tokens=2)
    with pytest.raises(
        ValueError, match=r"jsonl:2: .* needs a rejected completion .* Set data\.rejected_column to .*'drop'"
    ):
        table.check("preferences", table.usable("prompts"), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"jsonl:3: .* needs a chosen completion in every row\. Got none\."):
        table.preferences(np.array([2]), max_new_tokens=3)


def test_the_digest_changes_with_a_pair(tmp_path):
    row = {"prompt": "a", "chosen": "x", "rejected": "y", "by": 1}
    digests = [
        load(tmp_path, row).digest(),
        load(tmp_path, row, rejected_column="").digest(),
        load(tmp_path, row, chosen_column="rejected", rejected_column="chosen").digest(),
        load(tmp_path, row, margin_column="by").digest(),
    ]
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"completion_column": "completion", "chosen_column": "completion"},
            "data.completion_column, data.chosen_column, data.rejected_column: must be different columns. Got "
            "'completion', 'completion'. Set the one that there is not to ''.",
        ),
        (
            {"reply_marker": ":", "chosen_column": ""},
            "data.chosen_column: must name the column of dialogues that data.reply_marker divides. Got ''.",
        ),
        (
            {"reply_marker": ":", "template": "{x}"},
            "data.reply_marker: dialogues that are text have no template. Got ':' with data.template='{x}' and "
            "data.chat='auto'. Leave those out.",
        ),
        (
            {"margin_column": "gap"},
            "data.margin_column: must name a column of the rows. Got 'gap'. Known: prompt, gaps. Did you mean 'gaps'?",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, {"prompt": "a", "gaps": 1}, **fields)


def test_a_broken_packed_file(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"x\.jsonl\.gz: must be a file that gzip packed\. Got Not a gzipped file"):
        load_prompts(DataConfig(path=str(path)), TokenizerConfig())
