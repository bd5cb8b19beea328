"""Continuous batching: the same bits in any order, at any time; the tokens of the plain loop; nothing lost or twice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.experience import LENGTH, STOP, Prompts, Rollout, Sampling
from jaxrlhf.generation.continuous_batching import advance, begin, make_queue
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until
from jaxrlhf.models.kv_cache import COLUMNS
from jaxrlhf.planner.compiled.hlo import parse
from jaxrlhf.planner.costs.response_lengths import length_cdf
from jaxrlhf.planner.costs.rollout_steps import simulate_slots
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.described_gpus.programs import written_in_decoding
from tests.generation.flips import assert_same_but_for_flips, before, drawn
from tests.generation.steered import steered
from tests.generation.test_generate import CONFIG, LAYOUT, NOISE, V, params
from tests.subprocesses import run_processes

B, P, R, S, g = 16, 6, 9, 5, 4
SLOTS = Slots(S, prefill_rows=g)
SAMPLING = Sampling(max_new_tokens=R, min_new_tokens=1, stop_ids=tuple(range(0, V, 7)))
STEERED = steered(V, max_new_tokens=R)
NOISES, TEMPERATURE = jnp.array(NOISE, jnp.uint32), jnp.float32(0.9)


def prompts_of(lengths: Any, ids: Any, columns: int = P) -> Prompts:
    """Prompts of some lengths, whose tokens depend on their ids, padded on the left."""
    tokens = np.zeros((len(lengths), columns), np.int32)
    for row, length, number in zip(tokens, lengths, ids, strict=True):
        row[columns - length :] = np.random.default_rng(int(number)).integers(0, V, length)
    return Prompts(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(np.arange(columns)[None] >= columns - np.asarray(lengths)[:, None]),
        row=jnp.arange(len(lengths), dtype=jnp.int32),
        id=jnp.asarray(ids, jnp.uint32),
    )


PROMPTS = prompts_of(np.random.default_rng(0).integers(1, P + 1, B), np.arange(B) + 40)


@functools.partial(jax.jit, static_argnames=("sampling", "slots", "config", "layout"))
def in_slots(given: Any, prompts: Prompts, sampling: Sampling, slots: Slots, config: Any, layout: Layout) -> Rollout:
    return generate(given, prompts, NOISES, TEMPERATURE, sampling, config, layout, slots)


def rollout(
    prompts: Prompts = PROMPTS, sampling: Sampling = SAMPLING, slots: Slots = SLOTS, layout: Layout = LAYOUT,
    dtype: str = "float32",
) -> Rollout:  # fmt: skip
    config = dataclasses.replace(CONFIG, dtype=dtype)
    return jax.device_get(in_slots(params(), prompts, sampling, slots, config, layout))


@functools.cache
def plainly(sampling: Sampling = SAMPLING) -> Rollout:
    """PROMPTS in the plain loop over all rows."""
    run = jax.jit(lambda given: generate(given, PROMPTS, NOISES, TEMPERATURE, sampling, CONFIG, LAYOUT))
    return jax.device_get(run(params()))


def assert_as_in_the_plain_loop(slotted: Rollout, sampling: Sampling) -> None:
    assert_same_but_for_flips(slotted, plainly(sampling), params(), NOISES, TEMPERATURE, sampling, CONFIG)


def by_id(rollout: Rollout) -> dict[int, list[bytes]]:
    """Sequence -> the bits of all that it has, without its place."""
    leaves = jax.tree.leaves(dataclasses.replace(rollout, row=None, tokens=rollout.tokens[:, P:], mask=None))
    return {int(each): [leaf[i].tobytes() for leaf in leaves] for i, each in enumerate(rollout.id)}


@pytest.mark.parametrize("sampling", [SAMPLING, STEERED], ids=["plain", "steered"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_tokens_are_those_of_the_plain_loop(num_samples, sampling):
    sampling = dataclasses.replace(sampling, num_samples=num_samples)
    assert {STOP, LENGTH} == set(plainly(sampling).finish.tolist()), "some stop and some reach the limit"
    assert_as_in_the_plain_loop(rollout(sampling=sampling), sampling)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [Strategy(data=2), Strategy(data=2, fsdp=2)], ids=str)
def test_row_shards_with_as_many_slots_give_the_same_bits(strategy, dtype):
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    assert by_id(rollout(layout=layout, dtype=dtype)) == by_id(rollout(dtype=dtype))


def test_row_shards_with_shared_prompts_give_the_same_bits():
    over = Layout.over((0, 1), Strategy(data=2))
    given = {"sampling": PAIRS, "slots": SHARED, "dtype": "bfloat16"}
    assert by_id(rollout(layout=over, **given)) == by_id(rollout(**given))


def test_over_tensor_tokens_are_the_same():
    split = rollout(layout=Layout.over((0, 1, 2, 3), Strategy(data=2, tensor=2)))
    assert_as_in_the_plain_loop(split, SAMPLING)


CHUNKED = dataclasses.replace(SLOTS, prefill_tokens=4)
PAIRS = dataclasses.replace(SAMPLING, num_samples=2)
SHARED = dataclasses.replace(SLOTS, shared_prompts=2)
DRAWN = pytest.mark.parametrize(
    ("dtype", "sampling", "given_slots"),
    [
        ("float32", STEERED, {"prefill_tokens": 4}),
        ("bfloat16", SAMPLING, {}),
        ("float32", PAIRS, {"shared_prompts": 2}),
        ("bfloat16", PAIRS, {"shared_prompts": 2}),
    ],
    ids=["float32, steered, in chunks", "bfloat16", "shared prompts", "bfloat16, shared prompts"],
)
TIMES = [SLOTS, dataclasses.replace(SLOTS, steps=1, admit=1), dataclasses.replace(SLOTS, steps=32, admit=2)]


@DRAWN
@settings(max_examples=12)
@given(data=st.data())
def test_no_order_and_no_time_of_admission_changes_a_bit(dtype, sampling, given_slots, data):
    """Any prompts, in any order, with any number of steps between two admissions and prompts that enter together."""
    lengths = data.draw(st.lists(st.integers(1, P), min_size=B, max_size=B), "lengths")
    ids = data.draw(st.lists(st.integers(0, 2**20), min_size=B, max_size=B, unique=True), "ids")
    order = data.draw(st.permutations(range(B)), "order")
    every = [dataclasses.replace(slots, **given_slots) for slots in TIMES]
    slots = data.draw(st.sampled_from(every), "slots")
    first = rollout(prompts_of(lengths, ids), sampling, every[0], dtype=dtype)
    second = rollout(prompts_of(np.array(lengths)[order], np.array(ids)[order]), sampling, slots, dtype=dtype)
    assert by_id(second) == by_id(first)


def test_the_longest_first_changes_no_bit():
    """Neither with a prompt's prefill in one piece nor in chunks, and with several samples of it."""
    sampling = dataclasses.replace(SAMPLING, num_samples=2)
    expected = jnp.asarray(np.random.default_rng(3).permutation(B), jnp.float32)
    for slots in (SLOTS, CHUNKED):
        in_order = rollout(sampling=sampling, slots=slots)
        longest_first = rollout(PROMPTS.replace(expected_tokens=expected), sampling, slots)
        np.testing.assert_array_equal(longest_first.id, in_order.id)
        assert by_id(longest_first) == by_id(in_order)
    queue = make_queue(PROMPTS.replace(expected_tokens=expected), RolloutSettings(sampling, SLOTS, CONFIG, LAYOUT))
    np.testing.assert_array_equal(queue.sequence[::2] // 2, np.argsort(-np.asarray(expected)))


def test_steps_are_nearly_the_fewest():
    """With eight steps a round and eight prompts a group, against a simulation in which a slot is taken as soon as it
    is free: within 10 % at a mean of 33 new tokens, within 2 % of eight times as many. Every prompt is prefilled once.
    """
    slots, prompts = Slots(64, prefill_rows=8), prompts_of(np.full(256, P), np.arange(256))
    tailed = dataclasses.replace(SAMPLING, max_new_tokens=256, min_new_tokens=0, stop_ids=(0, 1, 2))
    settings = RolloutSettings(tailed, slots, CONFIG, LAYOUT)
    queue = make_queue(prompts, settings)
    ready = jax.jit(prepare, static_argnums=(1, 2))(params(), CONFIG, LAYOUT)
    go_on = jax.jit(advance, static_argnames="settings", donate_argnames="state")
    done = go_on(ready, queue, begin(ready, queue, settings), NOISES, jnp.float32(4.0), settings, Until())
    lengths = np.asarray(done.outputs.lengths)
    assert 32 < lengths.mean() < 35 and lengths.max() > 6 * lengths.mean()
    simulated = simulate_slots(lengths, 1, slots)
    assert (simulated.rounds, simulated.groups) == (int(done.rounds), int(done.groups))
    assert simulated.rounds * 8 <= 1.1 * fewest_steps(lengths, 64)
    assert simulated.groups == 256 // 8

    cdf, rng = length_cdf(ResponseLengths(mean=33 * 8, p99=150 * 8), 256 * 8), np.random.default_rng(0)
    every = 1 + np.searchsorted(cdf, rng.random((5, 512)))
    found = sum(simulate_slots(lengths, 1, Slots(128, prefill_rows=8)).rounds * 8 for lengths in every)
    assert found <= 1.02 * sum(fewest_steps(lengths, 128) for lengths in every)


def fewest_steps(lengths: np.ndarray, num_slots: int) -> int:
    """Steps of a rollout in which every prompt enters as soon as a slot is free."""
    return simulate_slots(lengths, 1, Slots(num_slots, prefill_rows=1, steps=1)).rounds


STRESS = {
    "all stop at the first token": (SLOTS, dataclasses.replace(SAMPLING, min_new_tokens=0, stop_ids=tuple(range(V)))),
    "none stops": (SLOTS, dataclasses.replace(SAMPLING, stop_ids=())),
    "one slot": (Slots(1, prefill_rows=g), SAMPLING),
    "more slots than prompts": (Slots(3 * B, prefill_rows=g), SAMPLING),
    "groups wider than the slots": (Slots(3, prefill_rows=8), SAMPLING),
    "prefill in chunks": (CHUNKED, SAMPLING),
    "chunks of one token": (dataclasses.replace(SLOTS, prefill_tokens=1), SAMPLING),
    "a group of all prompts": (Slots(S, prefill_rows=2 * B), SAMPLING),
    "a cache in parts": (Slots(S, prefill_rows=g), dataclasses.replace(SAMPLING, max_new_tokens=150, stop_ids=(1, 2))),
    "shared prompts": (SHARED, PAIRS),
    "one shared prompt": (dataclasses.replace(CHUNKED, shared_prompts=1), PAIRS),
    "more shared prompts than there are": (dataclasses.replace(SLOTS, shared_prompts=2 * B), PAIRS),
    "shared prompts, a cache in parts": (SHARED, dataclasses.replace(PAIRS, max_new_tokens=150, stop_ids=(1, 2))),
    "one new token": (SLOTS, dataclasses.replace(SAMPLING, max_new_tokens=1)),
}


@pytest.mark.parametrize("name", STRESS)
def test_nothing_is_lost_and_nothing_is_there_twice(name):
    slots, sampling = STRESS[name]
    assert_as_in_the_plain_loop(rollout(slots=slots, sampling=sampling), sampling)


def test_long_prompts_in_chunks_take_less_memory():
    prompts = prompts_of(np.full(8, 256), np.arange(8), columns=256)
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=8)

    def temporaries(prefill_tokens: int) -> int:
        slots = Slots(8, prefill_rows=8, prefill_tokens=prefill_tokens)
        program: Any = in_slots.lower(params(), prompts, sampling, slots, CONFIG, LAYOUT).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 0.6 * temporaries(0)


def test_fewer_slots_than_samples_of_a_prompt_are_refused():
    with pytest.raises(
        ValueError, match=r"slots: must be at least num_samples=3, since the samples of a prompt enter together. Got 2"
    ):
        rollout(slots=Slots(2), sampling=dataclasses.replace(SAMPLING, num_samples=3))


def test_one_prompt():
    one = jax.tree.map(lambda x: x[:1], PROMPTS)
    np.testing.assert_array_equal(rollout(one).tokens, plainly().tokens[:1])


@pytest.mark.parametrize("slots", [SLOTS, dataclasses.replace(SHARED, shared_prompts=4)], ids=["own", "shared"])
def test_a_nan_of_one_row_changes_no_bit_of_the_others(slots):
    """Neither beside it nor after it in its slot, or in the place of its prompt."""
    spoiled = V - 1
    tokens = np.where(np.asarray(PROMPTS.tokens) == spoiled, 1, np.asarray(PROMPTS.tokens))
    clean = PROMPTS.replace(tokens=jnp.asarray(tokens))
    tokens = tokens.copy()
    tokens[2, -2:] = spoiled  # the last token is not among the prompt's keys that are shared
    table = params() | {"embedding": params()["embedding"].at[spoiled].set(jnp.nan)}
    sampling = dataclasses.replace(SAMPLING, stop_ids=(*SAMPLING.stop_ids, spoiled))

    def run(prompts: Prompts) -> Rollout:
        return jax.device_get(in_slots(table, prompts, sampling, slots, CONFIG, LAYOUT))

    with_nan, without = by_id(run(clean.replace(tokens=jnp.asarray(tokens)))), by_id(run(clean))
    nan = int(PROMPTS.id[2])
    assert with_nan.pop(nan) != without.pop(nan)
    assert with_nan == without


@pytest.mark.parametrize("shared_prompts", [0, 16])
def test_a_step_writes_no_cache_anew_and_nothing_goes_to_the_host(shared_prompts):
    given = jax.device_put((params(), PROMPTS))
    slots = Slots(24, prefill_rows=g, shared_prompts=shared_prompts)
    sampling = dataclasses.replace(PAIRS, max_new_tokens=2 * COLUMNS)  # a cache in several parts
    program: Any = in_slots.lower(*given, sampling, slots, CONFIG, LAYOUT).compile()
    part = slots.slots * CONFIG.num_kv_heads * COLUMNS * CONFIG.head_size
    assert written_in_decoding(parse(program.as_text()), part, loops_of=("decode", "prefill")) == []
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(program(*given))


def test_a_flip_is_one_next_to_a_boundary_of_the_distribution():
    """A token that another number would have drawn is a flip where that number is near, and not where it is far."""
    plain, at, low, high = plainly(), 1, 0.0, 1.0
    logits_V, seen = before(plain.tokens[0], plain.mask[0], P, at, params(), SAMPLING, CONFIG)

    def draw(*numbers: float) -> list[int]:
        return drawn(list(numbers), logits_V, seen, at, TEMPERATURE, SAMPLING)

    last = draw(1.0, 1.0, 1.0)[0]
    for _ in range(30):  # the boundary below the last token
        middle = (low + high) / 2
        low, high = (low, middle) if draw(middle, low, high)[0] == last else (middle, high)
    one, other = (plain.replace(tokens=plain.tokens.copy()) for _ in range(2))
    one.tokens[0, P + at], other.tokens[0, P + at] = draw(low, low, low)[0], last

    def flips(u: float) -> int:
        given = params(), NOISES, TEMPERATURE, SAMPLING, CONFIG
        return assert_same_but_for_flips(one, other, *given, uniform_of=lambda *_: u)

    assert plain.response[0, at] and flips(low + 5e-7) == flips(low - 5e-7) == 1
    for far in (low + 5e-6, low - 5e-6):
        with pytest.raises(AssertionError, match="no boundary lies within 1e-06 of "):
            flips(far)


def test_fully_optimized_programs_have_the_same_bits_too():
    """How much of the cache is read depends on the schedule, and each kernel may add up in an order of its own."""
    run_processes("tests.generation.run_fully_optimized", 1, XLA_FLAGS="")
