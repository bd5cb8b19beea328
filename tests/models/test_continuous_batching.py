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

from jaxrlhf.experience import LENGTH, RUNNING, STOP, Prompts, Rollout, Sampling
from jaxrlhf.models.continuous_batching import (
    Slots,
    advance,
    begin,
    drawn,
    generate_in_slots,
    make_queue,
)
from jaxrlhf.models.generate import finish, generate, prepare, samples_of
from jaxrlhf.models.kv_cache import COLUMNS
from jaxrlhf.planner.compiled.hlo import parse
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.described_gpus.programs import written_in_decoding
from tests.models.test_generate import CONFIG, LAYOUT, MANY, NOISE, V, params

B, P, R, S, g = 16, 6, 9, 5, 4
SLOTS = Slots(S, prefill_rows=g)
SAMPLING = Sampling(max_new_tokens=R, min_new_tokens=1, stop_ids=tuple(range(0, V, 7)))
STATIC = ("sampling", "slots", "config", "layout")
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


@functools.partial(jax.jit, static_argnames=STATIC)
def in_slots(given: Any, prompts: Prompts, sampling: Sampling, slots: Slots, config: Any, layout: Layout) -> Rollout:
    return generate_in_slots(given, prompts, NOISES, TEMPERATURE, sampling, slots, config, layout)


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


def by_id(rollout: Rollout) -> dict[int, list[bytes]]:
    """Sequence -> the bits of all that it has, without its place."""
    leaves = jax.tree.leaves(dataclasses.replace(rollout, row=None, tokens=rollout.tokens[:, P:], mask=None))
    return {int(each): [leaf[i].tobytes() for leaf in leaves] for i, each in enumerate(rollout.id)}


@pytest.mark.parametrize("num_samples", [1, 3])
def test_tokens_are_those_of_the_plain_loop(num_samples):
    sampling = dataclasses.replace(SAMPLING, num_samples=num_samples)
    plain, slotted = plainly(sampling), rollout(sampling=sampling)
    assert {STOP, LENGTH} == set(plain.finish.tolist()), "some stop and some reach the limit"
    for name in ("tokens", "mask", "response", "finish", "row", "id"):
        np.testing.assert_array_equal(getattr(slotted, name), getattr(plain, name), name)
    for name in ("logprobs", "sampled_logprobs"):
        np.testing.assert_allclose(getattr(slotted, name), getattr(plain, name), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [Strategy(data=2), Strategy(data=2, fsdp=2)], ids=str)
def test_row_shards_with_as_many_slots_give_the_same_bits(strategy, dtype):
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    assert by_id(rollout(layout=layout, dtype=dtype)) == by_id(rollout(dtype=dtype))


def test_over_tensor_tokens_are_the_same():
    split = rollout(layout=Layout.over((0, 1, 2, 3), Strategy(data=2, tensor=2)))
    np.testing.assert_array_equal(split.tokens, plainly().tokens)
    np.testing.assert_allclose(split.logprobs, plainly().logprobs, rtol=1e-5, atol=1e-5)


CHUNKED = dataclasses.replace(SLOTS, prefill_tokens=4)
TIMES = [SLOTS, dataclasses.replace(SLOTS, steps=1, admit=1), dataclasses.replace(SLOTS, steps=32, admit=2)]


@pytest.mark.parametrize(("dtype", "prefill_tokens"), [("float32", 4), ("bfloat16", 0)])
@settings(max_examples=12)
@given(data=st.data())
def test_no_order_and_no_time_of_admission_changes_a_bit(dtype, prefill_tokens, data):
    """Any prompts, in any order, with any number of steps between two admissions and prompts that enter together."""
    lengths = data.draw(st.lists(st.integers(1, P), min_size=B, max_size=B), "lengths")
    ids = data.draw(st.lists(st.integers(0, 2**20), min_size=B, max_size=B, unique=True), "ids")
    order = data.draw(st.permutations(range(B)), "order")
    every = [dataclasses.replace(slots, prefill_tokens=prefill_tokens) for slots in TIMES]
    slots = data.draw(st.sampled_from(every), "slots")
    first = rollout(prompts_of(lengths, ids), slots=every[0], dtype=dtype)
    second = rollout(prompts_of(np.array(lengths)[order], np.array(ids)[order]), slots=slots, dtype=dtype)
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
    queue = make_queue(PROMPTS.replace(expected_tokens=expected), sampling, SLOTS)
    np.testing.assert_array_equal(queue.sequence[::2] // 2, np.argsort(-np.asarray(expected)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_after_any_number_of_rounds_it_goes_on_with_the_same_bits(dtype):
    config, slots = dataclasses.replace(CONFIG, dtype=dtype), dataclasses.replace(SLOTS, steps=2)
    ready = jax.jit(prepare, static_argnums=(1, 2))(params(), config, LAYOUT)
    go_on = jax.jit(advance, static_argnames=STATIC, donate_argnames=("state",))
    queue = make_queue(PROMPTS, SAMPLING, slots)

    def run(num_rounds: int) -> tuple[dict, int]:
        state, times = begin(queue, SAMPLING, slots, config, LAYOUT), 0
        while (np.asarray(state.finish) == RUNNING).any():
            rounds = jnp.int32(num_rounds)
            state = go_on(ready, queue, state, NOISES, rounds, TEMPERATURE, SAMPLING, slots, config, LAYOUT)
            times += 1
        assert int(state.head) == B
        return by_id(jax.device_get(finish(samples_of(PROMPTS, SAMPLING, LAYOUT), drawn(state), LAYOUT))), times

    at_once, once = run(MANY)
    assert once == 1
    for num_rounds in (1, 2, 3):
        in_pieces, times = run(num_rounds)
        assert times >= 3 and in_pieces == at_once


def test_steps_are_nearly_the_fewest():
    """With eight steps a round, against a simulation that admits after every step."""
    prompts = prompts_of(np.full(64, P), np.arange(64))
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=64, stop_ids=(0, 1))
    slots = Slots(8, prefill_rows=2)
    queue = make_queue(prompts, sampling, slots)
    ready = prepare(params(), CONFIG, LAYOUT)
    state = begin(queue, sampling, slots, CONFIG, LAYOUT)
    go_on = jax.jit(advance, static_argnames=STATIC)
    done = go_on(ready, queue, state, NOISES, None, TEMPERATURE, sampling, slots, CONFIG, LAYOUT)
    ends = [0] * slots.slots
    for length in np.asarray(done.lengths):
        ends[ends.index(min(ends))] += int(length)
    assert np.asarray(done.lengths).mean() > 20
    assert int(done.rounds) * slots.steps <= 1.15 * max(ends)
    assert int(done.groups) <= 64, "every prompt is prefilled once"


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
    "one new token": (SLOTS, dataclasses.replace(SAMPLING, max_new_tokens=1)),
}


@pytest.mark.parametrize("name", STRESS)
def test_nothing_is_lost_and_nothing_is_there_twice(name):
    slots, sampling = STRESS[name]
    slotted, plain = rollout(slots=slots, sampling=sampling), plainly(sampling)
    np.testing.assert_array_equal(slotted.tokens, plain.tokens)
    np.testing.assert_array_equal(slotted.finish, plain.finish)
    np.testing.assert_allclose(slotted.logprobs, plain.logprobs, rtol=1e-5, atol=1e-5)


def test_long_prompts_in_chunks_take_less_memory():
    prompts = prompts_of(np.full(8, 256), np.arange(8), columns=256)
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=8)

    def temporaries(prefill_tokens: int) -> int:
        slots = Slots(8, prefill_rows=8, prefill_tokens=prefill_tokens)
        program: Any = in_slots.lower(params(), prompts, sampling, slots, CONFIG, LAYOUT).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 0.6 * temporaries(0)


def test_fewer_slots_than_samples_of_a_prompt_are_refused():
    with pytest.raises(ValueError, match=r"slots: must be at least num_samples=3. Got 2"):
        rollout(slots=Slots(2), sampling=dataclasses.replace(SAMPLING, num_samples=3))


def test_one_prompt():
    one = jax.tree.map(lambda x: x[:1], PROMPTS)
    np.testing.assert_array_equal(rollout(one).tokens, plainly().tokens[:1])


def test_a_nan_of_one_row_changes_no_bit_of_the_others():
    """Neither beside it nor after it in its slot."""
    spoiled = V - 1
    tokens = np.where(np.asarray(PROMPTS.tokens) == spoiled, 1, np.asarray(PROMPTS.tokens))
    clean = PROMPTS.replace(tokens=jnp.asarray(tokens))
    tokens = tokens.copy()
    tokens[2, -1] = spoiled
    table = params() | {"embedding": params()["embedding"].at[spoiled].set(jnp.nan)}
    sampling = dataclasses.replace(SAMPLING, stop_ids=(*SAMPLING.stop_ids, spoiled))

    def run(prompts: Prompts) -> Rollout:
        return jax.device_get(in_slots(table, prompts, sampling, SLOTS, CONFIG, LAYOUT))

    with_nan, without = by_id(run(clean.replace(tokens=jnp.asarray(tokens)))), by_id(run(clean))
    nan = int(PROMPTS.id[2])
    assert with_nan.pop(nan) != without.pop(nan)
    assert with_nan == without


def test_a_step_writes_no_cache_anew_and_nothing_goes_to_the_host():
    given, slots = jax.device_put((params(), PROMPTS)), Slots(24, prefill_rows=g)
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=2 * COLUMNS)  # a cache in several parts
    program: Any = in_slots.lower(*given, sampling, slots, CONFIG, LAYOUT).compile()
    part = slots.slots * CONFIG.num_kv_heads * COLUMNS * CONFIG.head_size
    assert written_in_decoding(parse(program.as_text()), part, loops_of=("decode", "prefill")) == []
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(program(*given))
