import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.reshard.balance import balanced_order, dealt, token_imbalance

CUTS = [(1, 1), (4, 1), (1, 4), (2, 3), (4, 2), (8, 2)]


def parts_by_hand(num_rows, num_shards, micro_batches):
    """(shard, micro-batch) -> its places, as devices and programs cut them."""
    places = np.arange(num_rows)
    return {
        (shard, micro_batch): block[micro_batch::micro_batches]
        for shard, block in enumerate(np.split(places, num_shards))
        for micro_batch in range(micro_batches)
    }


@pytest.mark.parametrize(("num_shards", "micro_batches"), CUTS)
def test_rows_are_dealt_like_cards(num_shards, micro_batches):
    num_rows = 4 * num_shards * micro_batches
    ranks = dealt(num_rows, num_shards, micro_batches)
    assert sorted(ranks) == list(range(num_rows))
    for (shard, micro_batch), places in parts_by_hand(num_rows, num_shards, micro_batches).items():
        for round_, rank in enumerate(sorted(ranks[places])):
            turn = micro_batch if round_ % 2 == 0 else micro_batches - 1 - micro_batch
            deal = round_ * micro_batches + turn
            seat = shard if deal % 2 == 0 else num_shards - 1 - shard
            assert rank == deal * num_shards + seat


@pytest.mark.parametrize(("num_shards", "micro_batches"), CUTS)
def test_the_order_can_be_undone_in_a_program(num_shards, micro_batches):
    tokens_B = np.random.default_rng(0).integers(1, 100, 48)
    order = jax.jit(lambda x: balanced_order(x, num_shards=num_shards, micro_batches=micro_batches))
    places, back = map(np.asarray, order(jnp.asarray(tokens_B)))
    assert sorted(places) == list(range(48))
    np.testing.assert_array_equal(tokens_B[places][back], tokens_B)
    on_host = np.argsort(-tokens_B, kind="stable")[dealt(48, num_shards, micro_batches)]
    np.testing.assert_array_equal(places, on_host)


def longest_first(tokens, num_parts):
    """The most tokens of a part when each row, the longest first, goes to the part with the fewest tokens and a seat
    left: the usual search on the host."""
    seats = len(tokens) // num_parts
    parts, full = [(0, part, 0) for part in range(num_parts)], []
    for row in sorted(tokens, reverse=True):
        total, part, taken = heapq.heappop(parts)
        entry = (total + row, part, taken + 1)
        full.append(entry[0]) if taken + 1 == seats else heapq.heappush(parts, entry)
    return max(full)


@pytest.mark.parametrize(
    ("kind", "near"), [("uniform", 0.02), ("mostly cut off", 0.02), ("many short and few long", 0.15)]
)
@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_dealing_is_close_to_searching(kind, near, num_shards):
    """In a heavy tail, one row alone may have more tokens than a round of the deal can even out."""
    random, excess = np.random.default_rng(1), []
    for _ in range(50):
        tokens_B = {
            "uniform": random.integers(1, 1024, 128),
            "mostly cut off": np.where(random.random(128) < 0.7, 1024, random.integers(1, 1024, 128)),
            "many short and few long": np.minimum(random.geometric(0.01, 128), 1024),
        }[kind]
        came, even = token_imbalance(tokens_B, num_shards=num_shards, micro_batches=1)
        searched = longest_first(tokens_B.tolist(), num_shards) / (tokens_B.sum() / num_shards)
        excess.append((came - 1, even - 1, searched - 1))
    came, even, searched = np.mean(excess, axis=0)
    assert even - searched < near and even < came / 3


@pytest.mark.parametrize(("num_shards", "micro_batches"), CUTS)
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_imbalance_is_that_of_the_parts_that_run_together(num_shards, micro_batches, mini_batches):
    num_rows = 96
    tokens_B = np.random.default_rng(2).integers(1, 100, num_rows)
    expected = []
    for is_dealt in (False, True):
        longest = mean = 0.0
        for rows in np.split(tokens_B, mini_batches):
            if is_dealt:
                rows = rows[np.argsort(-rows, kind="stable")[dealt(len(rows), num_shards, micro_batches)]]
            parts = parts_by_hand(len(rows), num_shards, micro_batches)
            for micro_batch in range(micro_batches):
                sums = [rows[parts[shard, micro_batch]].sum() for shard in range(num_shards)]
                longest, mean = longest + max(sums), mean + np.mean(sums)
        expected.append(longest / mean)
    got = token_imbalance(tokens_B, num_shards=num_shards, micro_batches=micro_batches, mini_batches=mini_batches)
    np.testing.assert_allclose(got, expected)


def test_no_tokens_at_all_are_even():
    np.testing.assert_array_equal(token_imbalance(np.zeros(8, int), num_shards=2, micro_batches=2), [0, 0])
