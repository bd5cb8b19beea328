"""Slots over stages: the tokens of generation on one device, and the same bits whenever a sequence enters."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.experience import Rollout
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.flips import assert_same_but_for_flips
from tests.generation.pipelined_cases import (
    NOISE,
    B,
    R,
    V,
    given,
    in_slots,
    model,
    on_one_device,
    over,
    pipelined,
    sampling,
)
from tests.generation.steered import steered
from tests.random_weights import params_of

CASES = {
    "two stages": (
        Strategy(pipeline=2, data=2, tensor=2),
        Slots(2, prefill_rows=1, steps=2),
        model(6, tie_embeddings=True),
        sampling(top_p=0.9),
    ),
    "stages of two and one layer, several samples": (
        Strategy(pipeline=4),
        Slots(8, prefill_rows=2, steps=3, prefill_tokens=3, shared_prompts=8),
        model(7),
        steered(V, num_samples=2, top_k=40, min_new_tokens=2, max_new_tokens=R),
    ),
    "split weights, one slot for each stage": (
        Strategy(pipeline=2, fsdp=2),
        Slots(2, prefill_rows=3),
        model(4),
        sampling(max_new_tokens=1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_responses_are_those_of_one_device(case):
    strategy, slots, config, drawn = CASES[case]
    rollout = jax.device_get(in_slots(config, drawn, over(strategy), slots))
    noise, temperature = np.array(NOISE, np.uint32), np.float32(0.8)
    expected = on_one_device(config, drawn, 0.8)
    assert_same_but_for_flips(rollout, expected, params_of(config), noise, temperature, drawn, config)


def test_no_order_and_no_time_of_admission_changes_a_bit():
    layout, config, drawn = over(Strategy(pipeline=2)), model(5), sampling()
    prompts, order = jax.device_get(given(layout, 0.8)[0]), np.random.default_rng(0).permutation(8)
    slots = Slots(4, prefill_rows=2, steps=2, prefill_tokens=2)

    def by_id(rollout: Rollout) -> dict[int, list[bytes]]:
        rollout = jax.device_get(rollout)
        leaves = [rollout.tokens, rollout.logprobs, rollout.sampled_logprobs, rollout.finish]
        return {int(each): [leaf[i].tobytes() for leaf in leaves] for i, each in enumerate(rollout.id)}

    first = by_id(in_slots(config, drawn, layout, slots))
    later = dataclasses.replace(slots, steps=5, admit=1)
    assert by_id(in_slots(config, drawn, layout, later, jax.tree.map(lambda x: x[order], prompts))) == first


def test_long_prompts_in_chunks_take_less_memory():
    layout, config, drawn = over(Strategy(pipeline=2)), model(2), sampling()
    columns = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given(layout, 0.8))
    prompts = columns[0].replace(**{
        name: jax.ShapeDtypeStruct((B, 256), getattr(columns[0], name).dtype) for name in ("tokens", "mask")
    })  # fmt: skip

    def temporaries(prefill_tokens: int) -> int:
        slots = Slots(4, prefill_rows=8, prefill_tokens=prefill_tokens)
        run = jax.jit(generate, static_argnums=(4, 5, 6, 7))
        lowered: Any = run.lower(pipelined(config, layout), prompts, *columns[1:], drawn, config, layout, slots)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32) < 0.7 * temporaries(0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (Slots(3), r"slots: must be a multiple of the 2 stages, each of which works on as many. Got 3. Use 4"),
        (Slots(4, shared_prompts=3), r"shared_prompts: must be a multiple of the 2 stages, .* Got 3. Use 4"),
        (Slots(2), r"slots: must be at least num_samples=2 for each of 2 stages, since .* Got 2. Use 4"),
    ],
)
def test_slots_that_do_not_fit_stages_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        in_slots(model(5), sampling(num_samples=2), over(Strategy(pipeline=2)), slots)
