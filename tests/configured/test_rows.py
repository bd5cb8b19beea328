"""What a step is given of which table, what is left out and said, and how the tables of a run go together."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.length_means import LengthMeans
from jaxrlhf.configured.rows import StepRows, check_rows, load_tables

RUN = """
name: rows
steps: 1
batch_size: 2
data: {path: main.jsonl, eval_rows: 2}
datasets: {texts: {path: texts.jsonl, eval_path: texts.jsonl}}
roles: {}
"""
MAIN = [{"prompt": f"p{i}", "completion": f"c{i}", "rejected": f"r{i}"} for i in range(6)]
TEXTS = [{"prompt": f"t{i}", "completion": "x" * i} for i in range(4)]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """The config and the rows that a step asks for under it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    for name, rows in {"main": MAIN, "texts": TEXTS}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def rows_of(asked, *overrides):
        config = load_run("run.yaml", overrides)
        return config, StepRows(asked, load_tables(config), config.batch_size, config.seed)

    return rows_of


def text(rows, tokens):
    return rows.tables.main.tokenizer.decode(tokens)


def test_a_step_of_one_kind_is_given_a_batch(load):
    _, prompts = load(Rows("prompts", count=3))
    assert prompts(0).tokens.shape == (3, 2) and prompts.epoch(4) == 3.0
    _, demonstrations = load(Rows("demonstrations", 4))
    assert demonstrations(1).tokens.shape == (2, 6)
    _, preferences = load(Rows("preferences", 4))
    assert (prompts.in_words(), demonstrations.in_words()) == ("3 prompts", "2 demonstrations")
    assert preferences.in_words() == "2 pairs"
    pairs = preferences(0)
    for chosen, rejected in zip(pairs.chosen.tokens, pairs.rejected.tokens, strict=True):
        prompt, number = text(preferences, chosen)[:2], text(preferences, chosen)[1]
        assert (text(preferences, chosen), text(preferences, rejected)) == (f"{prompt}c{number}", f"{prompt}r{number}")


def test_a_step_of_several_kinds_is_given_a_dict(load):
    asked = {"prompts": Rows("prompts"), "texts": Rows("demonstrations", 4, count=4, dataset="texts")}
    config, rows = load(asked)
    assert check_rows(rows, config) == []
    given = rows(0)
    assert list(given) == ["prompts", "texts"] and given["prompts"].tokens.shape == (2, 2)
    assert sorted(text(rows, tokens) for tokens in given["texts"].tokens) == ["t0", "t1x", "t2xx", "t3xxx"]
    (held_out,) = rows.held_out(2, batch_size=2)
    assert [text(rows, tokens) for tokens in held_out["texts"].tokens] == ["t0", "t1x"]
    assert held_out["prompts"].row.tolist() == [4, 5]


def test_a_name_that_is_not_there_means_the_main_rows(load):
    config, rows = load(Rows("demonstrations", 4, dataset="pretraining"), "datasets={}")
    assert check_rows(rows, config) == []
    assert text(rows, rows(0).tokens[0]).startswith("p")


def test_held_out_batches(load):
    _, rows = load(Rows("preferences", 4))
    batches = rows.held_out(2, batch_size=1)
    assert [pairs.chosen.tokens.shape for pairs in batches] == [(1, 6), (1, 6)]
    with pytest.raises(ValueError, match=r"Evaluation: must ask for at most the 2 held-out rows\. Got 4\."):
        rows.held_out(4, batch_size=1)


def test_rows_that_do_not_fit_are_refused_or_left_out_and_counted(load):
    config, rows = load({"texts": Rows("demonstrations", 3, dataset="texts"), "main": Rows("preferences", 3)})
    with pytest.raises(
        ValueError, match=r"texts\.jsonl:4: a completion with its end of text must fit .* set data\.overlong"
    ):
        check_rows(rows, config)
    config, rows = load(rows.asked, "datasets.texts.overlong=drop")
    assert check_rows(rows, config) == [
        "1 of 4 rows of datasets.texts have no demonstrations that fit into 3 tokens and are left out."
    ]
    assert rows.epoch(3) == 2.0, "of the rows that are left"
    config, rows = load(Rows("preferences", 1, dataset="texts"), "datasets.texts.overlong=drop")
    with pytest.raises(
        ValueError, match=r"texts\.jsonl:1: training on preferences needs a rejected completion in every row"
    ):
        check_rows(rows, config)


@pytest.mark.parametrize("bad", [{"rejected": None}, {"rejected": "far too long"}, {}])
def test_held_out_pairs_obey_the_same_rule(load, tmp_path, bad):
    rows = [{"prompt": "q", "completion": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", **bad}]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = ("data.eval_path=held.jsonl", "data.eval_rows=0", "datasets={}")
    config, rows = load(Rows("preferences", 4), *overrides)
    assert check_rows(rows, config) == [], "nobody asks for held-out rows"
    message = (
        "a rejected completion with its end" if bad.get("rejected") else "training on preferences needs a rejected"
    )
    with pytest.raises(ValueError, match=rf"held\.jsonl:2: {message}"):
        check_rows(rows, config, held_out=True)
    config, rows = load(Rows("preferences", 4), *overrides, "data.overlong=drop")
    assert check_rows(rows, config, held_out=True) == [
        "1 of 2 held-out rows of data have no preferences that fit into 4 tokens and are left out."
    ]


def test_held_out_demonstrations_obey_the_same_rule(load, tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "q"}\n{"prompt": "q", "completion": "a"}')
    overrides = ("datasets.texts.eval_path=held.jsonl",)
    config, rows = load(Rows("demonstrations", 4, dataset="texts"), *overrides)
    with pytest.raises(ValueError, match=r"held\.jsonl:1: supervised training needs a completion in every row\. Got"):
        check_rows(rows, config, held_out=True)
    config, rows = load(rows.asked, *overrides, "datasets.texts.overlong=drop")
    assert check_rows(rows, config, held_out=True) == [
        "1 of 2 held-out rows of datasets.texts have no demonstrations that fit into 4 tokens and are left out."
    ]


def test_dropped_rows_are_counted_for_each_table(load):
    config, rows = load(
        Rows("demonstrations", 4, dataset="texts"),
        "data.max_prompt_tokens=2",
        "datasets.texts={path: main.jsonl, overlong: drop, malformed: drop, eval_rows: 0, max_prompt_tokens: 1, "
        "template: '{prompt:.1}'}",
    )
    assert check_rows(rows, config) == []
    table = dataclasses.replace(rows.tables.more["texts"], num_dropped=3, num_malformed=2)
    rows = dataclasses.replace(rows, tables=dataclasses.replace(rows.tables, more={"texts": table}))
    assert check_rows(rows, config) == [
        "3 rows of datasets.texts have a prompt over 1 tokens and were dropped.",
        "2 rows of datasets.texts hold no two different replies to one prompt and were dropped.",
    ]


def test_a_table_that_nobody_asks_for(load):
    config, rows = load({"a": Rows("demonstrations", 4, dataset="text")})
    message = "datasets.texts: the algorithm ppo asks for no rows of this name. It asks for: text. Did you mean 'text'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rows(rows, config)
    config, rows = load(Rows("prompts"))
    with pytest.raises(ValueError, match=r"datasets\.texts: .* It asks for: none but those of data\."):
        check_rows(rows, config)


def test_an_error_in_a_table_names_it(load):
    with pytest.raises(ValueError, match=r"^datasets\.texts: .*must have the column 'question'"):
        load(Rows("prompts"), "datasets.texts.prompt_column=question")


def test_the_digest_covers_all_tables_and_one_tokenizer_serves_them(load):
    _, rows = load(Rows("prompts"))
    _, alone = load(Rows("prompts"), "datasets={}")
    _, other = load(Rows("prompts"), "datasets.texts.eval_path=''", "datasets.texts.eval_rows=1")
    assert alone.tables.digest() == alone.tables.main.digest()
    assert len({x.tables.digest() for x in (rows, alone, other)}) == 3
    _, trained = load(Rows("prompts"), "tokenizer={kind: train, vocab_size: 262}")
    assert trained.tables.more["texts"].tokenizer is trained.tables.main.tokenizer
    np.testing.assert_array_equal(trained.tables.of(Rows("demonstrations", 1, dataset="texts")).prompts[0], "t0")


def test_what_is_said_of_files_and_columns(load):
    asked = {"prompts": Rows("prompts"), "texts": Rows("demonstrations", 4, dataset="texts")}
    more = {"prompt": "q", "completion": "x", "num_tokens": 1}
    Path("more.jsonl").write_text(json.dumps(more))
    files = ["data.path=[more.jsonl, main.jsonl]", "datasets.texts.path=[texts.jsonl, more.jsonl]"]
    config, rows = load(asked, *files)
    said = [
        "data.path: 2 files in this order: more.jsonl, main.jsonl.",
        "datasets.texts: data.path: 2 files in this order: texts.jsonl, more.jsonl.",
    ]
    assert check_rows(rows, config) == said
    config, rows = load(asked, *files, "roles.reward={function: exact_match}")
    withheld = (
        "Reward functions do not get the columns num_tokens: by these names they get what was sampled. To give them "
        "one, rename it."
    )
    assert check_rows(rows, config) == [withheld, *said]


def test_prompts_of_the_main_table_say_how_long_their_responses_may_get(load):
    _, rows = load({"both": Rows("prompts"), "texts": Rows("demonstrations", 4, dataset="texts")})
    means = LengthMeans(len(rows.tables.main.prompts))
    told = dataclasses.replace(rows, length_means=means)
    means.add(rows(0)["both"].row, np.array([7, 3]))
    assert rows(0)["both"].expected_tokens is None
    np.testing.assert_array_equal(told(0)["both"].expected_tokens, [7, 3])
    np.testing.assert_array_equal(told(1)["both"].expected_tokens, [5, 5])
    assert not hasattr(told(0)["texts"], "expected_tokens")
