"""The stream of rows: every row once per epoch, across epoch borders, as a function of seed and step alone."""

import json
import re

import numpy as np
import pytest

from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import load_prompts
from jaxrlhf.data.tokenizer import TokenizerConfig


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Seven training rows, "0" to "6", and four held-out ones, "7" to "10", whose completions are preferred to "-"."""
    folder = tmp_path_factory.mktemp("rows")
    for name, numbers in {"train": range(7), "eval": range(7, 11)}.items():
        lines = (json.dumps({"prompt": str(i), "completion": str(i), "rejected": "-"}) for i in numbers)
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    config = DataConfig(path=str(folder / "train.jsonl"), eval_path=str(folder / "eval.jsonl"))
    return load_prompts(config, TokenizerConfig())


def stream(loader, num_steps):
    return np.concatenate([loader.batch(step).row for step in range(num_steps)])


def test_every_epoch_is_its_own_permutation(table):
    rows = stream(PromptLoader(table, 3, seed=5), 7).reshape(3, 7)
    for epoch in range(3):
        np.testing.assert_array_equal(rows[epoch], np.random.default_rng((5, epoch)).permutation(7))
    assert len({tuple(row) for row in rows}) == 3


def test_a_batch_larger_than_an_epoch(table):
    small = stream(PromptLoader(table, 3, seed=5), 7)
    np.testing.assert_array_equal(PromptLoader(table, 21, seed=5).batch(0).row, small)


def test_batches_depend_on_seed_and_step_alone(table):
    loader = PromptLoader(table, 3, seed=0)
    late = loader.batch(4)
    np.testing.assert_array_equal(PromptLoader(table, 3, seed=0).batch(4).row, late.row)
    assert not np.array_equal(stream(loader, 7), stream(PromptLoader(table, 3, seed=1), 7))
    text = [table.tokenizer.decode(tokens[mask]) for tokens, mask in zip(late.tokens, late.mask, strict=True)]
    assert text == [str(row) for row in late.row]


def test_ids_run_on_and_wrap(table):
    loader = PromptLoader(table, 4, seed=0)
    np.testing.assert_array_equal(loader.batch(3).id, [12, 13, 14, 15])
    assert loader.batch(2**29).id[1] == 2**31 + 1
    np.testing.assert_array_equal(loader.batch(2**30).id, [0, 1, 2, 3])
    assert loader.batch(0).id.dtype == np.uint32


def test_eval_batches(table):
    batches = PromptLoader(table, 2, seed=3).eval_batches(4)
    assert [batch.row.tolist() for batch in batches] == [[7, 8], [9, 10]]
    assert [batch.id.tolist() for batch in batches] == [[0, 1], [2, 3]]
    np.testing.assert_array_equal(batches[1].tokens, [[256, ord("9")], [ord("1"), ord("0")]])
    assert PromptLoader(table, 2, seed=3).eval_batches(0) == []


def test_demonstrations_have_an_order_of_their_own(table):
    examples = PromptLoader(table, 7, seed=5).batch(0, "demonstrations", max_new_tokens=3)
    rows = np.random.default_rng((5, 0, 0x5F7)).permutation(7)
    assert not np.array_equal(rows, PromptLoader(table, 7, seed=5).batch(0).row)
    np.testing.assert_array_equal(examples.tokens, [[256, ord(str(row)), ord(str(row)), 257, 256] for row in rows])
    second = PromptLoader(table, 3, seed=5).batch(1, "demonstrations", max_new_tokens=3)
    np.testing.assert_array_equal(second.tokens, examples.tokens[3:6])


def test_preferences_have_an_order_of_their_own(table):
    pairs = PromptLoader(table, 7, seed=5).batch(0, "preferences", max_new_tokens=2)
    rows = np.random.default_rng((5, 0, 0xDB0)).permutation(7)
    np.testing.assert_array_equal(pairs.chosen.tokens, [[256, ord(str(row)), ord(str(row)), 257] for row in rows])
    np.testing.assert_array_equal(pairs.rejected.tokens, [[256, ord(str(row)), ord("-"), 257] for row in rows])
    second = PromptLoader(table, 3, seed=5).batch(1, "preferences", max_new_tokens=2)
    np.testing.assert_array_equal(second.chosen.tokens, pairs.chosen.tokens[3:6])
    np.testing.assert_array_equal(pairs.margin, np.zeros(7, np.float32))


def test_held_out_completions_and_pairs_that_fit(table):
    loader = PromptLoader(table, 1, seed=0)
    fitting = loader.eval_batches(3, "demonstrations", max_new_tokens=2)  # "10" and its end of text take three
    assert [chr(batch.tokens[0, 1]) for batch in fitting] == ["7", "8", "9"]
    pairs = loader.eval_batches(3, "preferences", max_new_tokens=2)
    assert [chr(pair.rejected.tokens[0, 2]) for pair in pairs] == ["-"] * 3
    assert len(loader.eval_batches(4, "preferences", max_new_tokens=3)) == 4
    for kind in ("demonstrations", "preferences"):
        with pytest.raises(ValueError, match=r"must ask for at most the 3 held-out rows\. Got 4\."):
            loader.eval_batches(4, kind, max_new_tokens=2)


@pytest.mark.parametrize(
    ("num", "message"),
    [
        (6, "Evaluation: must ask for at most the 4 held-out rows. Got 6. Ask for fewer, or hold out more"),
        (3, "Evaluation: the number of rows must be a multiple of the batch size 2. Got 3. Ask for 2."),
    ],
)
def test_eval_errors(table, num, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptLoader(table, 2, seed=0).eval_batches(num)


def test_setting_errors(table):
    with pytest.raises(ValueError, match=r"PromptLoader: batch_size must be at least 1\. Got 0\."):
        PromptLoader(table, 0, seed=0)
    with pytest.raises(ValueError, match=r"PromptLoader: seed must not be negative\. Got -1\."):
        PromptLoader(table, 1, seed=-1)
