"""Reading rows, their numbering and padding by hand, and every error of the data."""

import json
import re

import numpy as np
import pytest

from jaxrlhf.data.arithmetic import ArithmeticConfig
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import TokenizerConfig

BYTES = TokenizerConfig()


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(tmp_path, *rows, tokenizer=BYTES, **fields):
    """The table of a training file with these rows, and of one held-out row unless `fields` say otherwise."""
    fields.setdefault("eval_rows", 0)
    return load_prompts(DataConfig(path=write(tmp_path / "train.jsonl", *rows), **fields), tokenizer)


def test_rows_are_numbered_through_both_splits(tmp_path):
    eval_path = write(tmp_path / "eval.jsonl", {"prompt": "held", "answer": 9})
    table = load(tmp_path, {"prompt": "a", "answer": 1}, "", {"prompt": "bc", "level": "x"}, eval_path=eval_path)
    assert (table.num_train, table.num_eval, table.num_dropped, table.prompt_length) == (2, 1, 0, 4)
    assert [table.prompts[row] for row in range(3)] == ["a", "bc", "held"]
    assert table.columns(np.array([2, 0, 1])) == {"answer": [9, 1, None], "level": [None, None, "x"]}
    assert table.tokenizer.name == "bytes"


def test_batch_is_padded_on_the_left(tmp_path):
    table = load(tmp_path, {"prompt": "a"}, {"prompt": "bcd"})
    batch = table.batch(np.array([1, 0]), np.array([7, 8]))
    np.testing.assert_array_equal(batch.tokens, [[98, 99, 100], [256, 256, 97]])
    np.testing.assert_array_equal(batch.mask, [[True, True, True], [False, False, True]])
    np.testing.assert_array_equal(batch.row, [1, 0])
    np.testing.assert_array_equal(batch.id, [7, 8])
    dtypes = [leaf.dtype for leaf in (batch.tokens, batch.mask, batch.row, batch.id)]
    assert dtypes == [np.int32, bool, np.int32, np.uint32]


def test_a_longer_limit_pads_more(tmp_path):
    table = load(tmp_path, {"prompt": "ab"}, max_prompt_tokens=4)
    np.testing.assert_array_equal(table.batch(np.array([0]), np.array([0])).tokens, [[256, 256, 97, 98]])


def test_demonstrations_by_hand(tmp_path):
    table = load(tmp_path, {"prompt": "a", "completion": "xy"}, {"prompt": "bc", "completion": ""})
    examples = table.demonstrations(np.array([0, 1]), max_new_tokens=4)
    np.testing.assert_array_equal(examples.tokens, [[256, 97, 120, 121, 257, 256], [98, 99, 257, 256, 256, 256]])
    np.testing.assert_array_equal(examples.mask, [[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(examples.response, [[1, 1, 1, 0], [1, 0, 0, 0]])
    assert examples.tokens.dtype == np.int32 and examples.mask.dtype == examples.response.dtype == bool


def test_demonstration_errors(tmp_path):
    table = load(tmp_path, {"prompt": "a", "completion": "xyz"}, {"prompt": "b"})
    assert table.demonstrations(np.array([0]), max_new_tokens=4).response.all()
    with pytest.raises(ValueError, match=r"train\.jsonl:1: a completion .* max_new_tokens=3\. Got 4 tokens\. Raise it"):
        table.demonstrations(np.array([0]), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"train\.jsonl:2: supervised training needs a completion .* Got none\. Set"):
        table.check("demonstrations", table.usable("prompts"), max_new_tokens=4)


def test_template_and_completion_column(tmp_path):
    table = load(
        tmp_path,
        {"question": "1+1?", "answer": "2", "n": 3},
        template="{question} ({n})\nA: ",
        completion_column="answer",
    )
    assert table.prompts[0] == "1+1? (3)\nA: "
    assert table.columns(np.array([0])) == {"question": ["1+1?"], "answer": ["2"], "n": [3]}
    assert table.demonstrations(np.array([0]), max_new_tokens=2).tokens[0, -2:].tolist() == [50, 257]


def test_the_digest_changes_with_whatever_a_run_sees(tmp_path):
    rows = [{"prompt": "ab", "completion": "x", "answer": 1}, {"prompt": "c"}]
    digest = load(tmp_path, *rows).digest()
    assert digest == load(tmp_path, "", *rows).digest() and len(digest) == 64
    other_rows = [
        [{**rows[0], "answer": 2}, rows[1]],
        [{**rows[0], "completion": "y"}, rows[1]],
        [{**rows[0], "prompt": "a"}, {"prompt": "bc"}],
        [rows[1], rows[0]],
        [*rows, rows[1]],
    ]
    others = [load(tmp_path, *other).digest() for other in other_rows]
    others += [load(tmp_path, *rows, eval_rows=1).digest(), load(tmp_path, *rows, max_prompt_tokens=5).digest()]
    assert len({digest, *others}) == len(others) + 1


def test_columns_of_names_that_reward_functions_know_are_withheld_from_them(tmp_path):
    row = {"prompts": "ab", "completions": "x", "num_tokens": 3, "answer": 1}
    table = load(tmp_path, row, prompt_column="prompts", completion_column="completions")
    assert table.prompts == ["ab"] and table.completions[0] is not None
    assert table.completions[0].tolist() == [*b"x", 257]
    assert table.withheld == ("completions", "num_tokens")
    assert table.columns(np.array([0])) == {"answer": [1]}


def test_shards_make_one_table(tmp_path):
    for name, rows in {"a": [{"prompt": "a", "x": 1}], "b": [{"prompt": "b"}, {"prompt": "c"}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    table = load_prompts(DataConfig(path=paths, eval_rows=1), BYTES)
    assert sorted(table.prompts) == ["a", "b", "c"] and (table.num_train, table.num_eval) == (2, 1)
    assert table.notes == (f"data.path: 2 files in this order: {paths[0]}, {paths[1]}.",)
    folder = load_prompts(DataConfig(path=str(tmp_path), eval_rows=1), BYTES)
    assert folder.digest() == table.digest()
    assert load_prompts(DataConfig(path=paths[::-1], eval_rows=1), BYTES).digest() != table.digest()
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n{"prompt": "d"}')
    assert load_prompts(DataConfig(path=str(tmp_path), eval_rows=1), BYTES).digest() != table.digest()


def test_arithmetic_task():
    table = load_prompts(DataConfig(task="arithmetic", arithmetic=ArithmeticConfig(digits=1)), BYTES)
    assert table.num_train + table.num_eval == 81 and table.num_eval > 0 and table.prompt_length == 4
    row = next(row for row in range(81) if table.prompts[row] == "7+8=")
    assert table.columns(np.array([row])) == {"completion": ["15>15"], "answer": ["15"], "rejected": ["19>19"]}


def test_holding_out_rows_of_the_training_file(tmp_path):
    rows = [{"prompt": f"p{i:02}"} for i in range(20)]
    table = load(tmp_path, *rows, eval_rows=5)
    assert (table.num_train, table.num_eval) == (15, 5)
    prompts = [table.prompts[row] for row in range(20)]
    assert sorted(prompts) == [row["prompt"] for row in rows]
    assert prompts[:15] == sorted(prompts[:15])
    assert prompts[15:] == [f"p{i:02}" for i in np.random.default_rng(0).permutation(20)[15:]]


def test_overlong_prompts_are_dropped_and_counted(tmp_path):
    eval_path = write(tmp_path / "eval.jsonl", {"prompt": "too long"}, {"prompt": "ok", "k": 2})
    table = load(
        tmp_path,
        {"prompt": "aaaa"},
        {"prompt": "abc", "k": 1},
        eval_path=eval_path,
        max_prompt_tokens=3,
        overlong="drop",
    )
    assert (table.num_train, table.num_eval, table.num_dropped, table.prompt_length) == (1, 1, 2, 3)
    assert [table.prompts[0], table.prompts[1]] == ["abc", "ok"]
    assert table.columns(np.array([0, 1])) == {"k": [1, 2]}


def test_tokenizer_learns_from_training_rows_alone(tmp_path):
    eval_path = write(tmp_path / "eval.jsonl", *[{"prompt": "zzzzzzzz"}] * 50)
    trained = TokenizerConfig(kind="train", vocab_size=262)
    rows = [{"prompt": "p", "completion": "ccccccccc", "note": "nnnnnnnn", "number": 5}] * 9
    tokenizer = load(tmp_path, *rows, eval_path=eval_path, tokenizer=trained).tokenizer
    assert len(tokenizer.encode("cccccccc")) < 8 and len(tokenizer.encode("nnnnnnnn")) < 8
    assert len(tokenizer.encode("zzzzzzzz")) == 8


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, r"data\.path: must hold at least one row\. Got the empty file '.*train\.jsonl'\."),
        ([{"prompt": "a"}, "{oops"], {}, r"train\.jsonl:2: must be JSON in UTF-8\. Got '\{oops': Expecting"),
        (
            [{"promt": "a", "b": 1}],
            {},
            r"train\.jsonl:1: must have the column 'prompt'\. Got promt, b\. "
            r"Did you mean 'promt'\? Set data\.prompt_column or data\.template\.",
        ),
        ([{"prompt": None}], {}, r"train\.jsonl:1: must have the column 'prompt'\. Got prompt\. Set data"),
        ([{}], {}, r"train\.jsonl:1: must have the column 'prompt'\. Got nothing\."),
        ([{"prompt": "a"}, {"prompt": 3}], {}, r"train\.jsonl:2: prompt must be a string\. Got 3\."),
        ([{"prompt": "a"}, "", {"prompt": ""}], {}, r"train\.jsonl:3: prompt must not be empty\. Got ''\."),
        ([{"q": ""}], {"template": "{q}"}, r"train\.jsonl:1: the filled template must not be empty"),
        ([{"prompt": "\ud800"}], {}, r"train\.jsonl:1: prompt must be valid Unicode\. Got '\\ud800'"),
        ([{"prompt": "a", "completion": 3}], {}, r"train\.jsonl:1: completion must be a string\. Got 3\."),
        (
            [{"question": "a"}],
            {"template": "{qestion}"},
            r"data\.template: must name columns of the rows\. Got 'qestion' .*Known: question\. Did you mean "
            r"'question'\?",
        ),
        ([{"q": "a"}, {"r": "a"}], {"template": "{q}"}, r"train\.jsonl:2: must have the column 'q'\. Got r\.$"),
        (
            [{"q": "a"}],
            {"template": "{q:d}"},
            r"train\.jsonl:1: the template must fit .* Got '\{q:d\}': Unknown format",
        ),
        (
            [{"prompt": "ab"}, {"prompt": "abcd"}, {"prompt": "abcde"}],
            {"max_prompt_tokens": 3},
            r"train\.jsonl:2: a prompt must fit into data\.max_prompt_tokens=3\. Got 4 tokens; 2 of 3 rows are too "
            r"long\. Raise it to 5, or set data\.overlong to 'drop'\.",
        ),
        (
            [{"prompt": "abcd"}, {"prompt": "abc"}],
            {"max_prompt_tokens": 1, "overlong": "drop"},
            r"data\.max_prompt_tokens: must leave rows for training\. Got 1, which drops all 2\. Raise it to at least "
            r"3\.",
        ),
        (
            [{"prompt": "a"}],
            {"eval_rows": 1},
            r"data\.eval_rows: must leave rows for training out of the 1 of .*\. Got 1\. Hold out fewer",
        ),
    ],
)
def test_row_errors(tmp_path, rows, fields, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, *rows, **fields)


def test_a_missing_file_of_held_out_rows(tmp_path):
    with pytest.raises(ValueError, match=r"data\.eval_path: must be an existing file, .* Got '/nowhere/y\.jsonl'\."):
        load(tmp_path, {"prompt": "a"}, eval_path="/nowhere/y.jsonl")


def test_a_prompt_without_tokens(tmp_path):
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0}, unk_token="</s>"))
    backend.normalizer = tokenizers.normalizers.Strip()  # pyright: ignore[reportAttributeAccessIssue]
    backend.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"train\.jsonl:1: a prompt must have at least one token\. Got none\."):
        load(tmp_path, {"prompt": "  "}, tokenizer=TokenizerConfig(kind="file", path=str(tmp_path / "t.json")))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {},
            "data: exactly one of task and path must be set. Got task='' and path=''. Set data.task to a built-in task",
        ),
        ({"task": "arithmetic", "path": "x"}, "Got task='arithmetic' and path='x'."),
        (
            {"task": "arithmetics"},
            "data.task: must be a built-in task. Got 'arithmetics'. Known: arithmetic. Did you mean 'arithmetic'?",
        ),
        ({"task": "arithmetic", "eval_path": "x"}, "data.eval_path: a built-in task holds out its own rows. Got 'x'"),
        ({"path": "x", "eval_rows": -1}, "data.eval_rows: must not be negative. Got -1."),
        ({"path": "x", "max_prompt_tokens": -1}, "data.max_prompt_tokens: must be positive and below"),
        ({"path": "x", "template": "{q"}, "data.template: must be a Python format string. Got '{q': "),
        ({"path": "x", "template": "{}"}, "data.template: must name columns, as in '{question}'. Got '{}'."),
        (
            {"path": "x", "chat": "none", "chat_template": "y"},
            "data.chat_template: only chats have one. Got 'y' with data.chat='none'.",
        ),
        ({"path": "x", "chat": "none", "system_prompt": "y"}, "data.system_prompt: only chats have one. Got 'y'"),
        ({"path": "x", "chat": "messages", "template": "{q}"}, "data.template: a list of messages has none. Got '{q}'"),
        ({"path": "x", "chat_date": "today"}, "data.chat_date: must be a date such as '2024-07-26'. Got 'today'."),
        ({"path": "x", "template": "fixed"}, "data.template: must name columns, as in '{question}'. Got 'fixed'."),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(**fields)
