"""Lengths of responses, and the steps of rollouts that follow from them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.experience import Sampling
from jaxrlhf.generation.continuous_batching import advance, begin, make_queue
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until, decoding_stages, mean_columns
from jaxrlhf.planner.costs.response_lengths import length_cdf, median_length
from jaxrlhf.planner.costs.rollout_steps import simulate_slots, slot_choices, steps_at_once, steps_in_slots
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.test_continuous_batching import NOISES, P, prompts_of
from tests.generation.test_generate import CONFIG, LAYOUT, params
from tests.planner.described_step import ppo

TAILED = ResponseLengths(mean=33, p99=150)


def mean_of(cdf: np.ndarray) -> float:
    return float((np.diff(cdf, prepend=0.0) * np.arange(1, len(cdf) + 1)).sum())


@pytest.mark.parametrize(
    ("mean", "p99", "most"),
    [(33, 150, 256), (100, 256, 256), (600, 4000, 16384), (2, 3, 8), (1.5, 2, 64), (240, 256, 256)],
)
def test_lengths_have_the_mean_and_the_percentile_that_were_given(mean, p99, most):
    cdf = length_cdf(ResponseLengths(mean=mean, p99=p99), most)
    assert len(cdf) == most and cdf[-1] == 1 and (np.diff(cdf) >= 0).all()
    assert mean_of(cdf) == pytest.approx(mean, rel=1e-3)
    assert cdf[p99 - 1] >= 0.99 > cdf[p99 - 2]
    assert median_length(cdf) <= p99


def test_lengths_without_spread_are_those_of_full_responses():
    for lengths in (None, ResponseLengths(mean=8, p99=8)):
        np.testing.assert_array_equal(length_cdf(lengths, 8), [0] * 7 + [1])
        assert steps_at_once(lengths, 64, 8, rows=512).steps == 8
        assert steps_at_once(lengths, 64, 200, rows=1).columns == pytest.approx(
            mean_columns(64, 200) if lengths is None else decoding_stages(64, 200)[0][0]
        )


@pytest.mark.parametrize(
    ("mean", "p99", "message"),
    [
        (300, 400, "mean: must be at most max_new_tokens=256, which cuts responses off. Got 300. Lower it, or raise"),
        (30, 257, "p99: must be at most max_new_tokens=256, which cuts responses off. Got 257. Lower it, or raise"),
        (5, 256, "mean: must be at least 11.5 where 99 % of the responses have at most 256 tokens and none more than"),
    ],
)
def test_lengths_that_cannot_be_are_refused(mean, p99, message):
    with pytest.raises(ValueError) as caught:
        length_cdf(ResponseLengths(mean=mean, p99=p99), 256)
    assert str(caught.value).startswith(message)


def test_all_rows_at_once_go_on_until_the_longest_has_ended():
    drawn = 1 + np.searchsorted(length_cdf(TAILED, 256), np.random.default_rng(0).random((4000, 64)))
    assert steps_at_once(TAILED, 64, 256, 64).steps == pytest.approx(drawn.max(axis=1).mean(), rel=0.02)


def test_slots_are_filled_again_when_a_round_has_ended():
    one = Slots(2, prefill_rows=1, steps=1)
    found = simulate_slots([3, 1, 1, 1], 1, one)
    assert (found.rounds, found.groups, found.entered.tolist()) == (3, 4, [0, 0, 1, 2])
    assert found.ages(1).tolist() == [0, 1, 2]  # of the first sequence
    two = simulate_slots([3, 1, 1, 1], 1, dataclasses.replace(one, steps=2))
    assert (two.rounds, two.entered.tolist(), two.left.tolist()) == (3, [0, 0, 1, 2], [2, 1, 2, 3])
    assert two.ages(2).tolist() == [0, 1, 2, 3, 0, 1]


def test_samples_of_a_prompt_enter_together_and_the_last_ones_do_not_wait_for_a_full_group():
    found = simulate_slots([2, 2, 4, 4, 1, 1], 2, Slots(4, prefill_rows=2, steps=1))
    assert (found.rounds, found.groups, found.entered.tolist()) == (4, 2, [0, 0, 0, 0, 2, 2])
    waiting = simulate_slots([1, 4, 4, 4, 4, 4], 1, Slots(4, prefill_rows=2, steps=1))
    assert waiting.entered.tolist() == [0, 0, 0, 0, 4, 4]  # one slot is free after a round, and two would enter


def test_a_shared_prompt_stays_until_its_last_sample_has_ended():
    lengths, slots = [3, 1, 2, 1, 1, 1], Slots(6, prefill_rows=3, steps=1)
    assert simulate_slots(lengths, 2, slots).entered.tolist() == [0] * 6
    found = simulate_slots(lengths, 2, dataclasses.replace(slots, shared_prompts=2))
    assert (found.rounds, found.groups, found.entered.tolist()) == (3, 2, [0, 0, 0, 0, 2, 2])


def test_columns_are_those_of_the_longest_row():
    equal = steps_in_slots(None, 64, 256, 512, 1, 1, Slots(128), on_gpu=False)
    assert (equal.steps, equal.groups, equal.columns) == (4 * 256, 64, (128 + 192 + 256 + 320) / 4 - 1)
    assert steps_in_slots(None, 64, 256, 512, 1, 1, Slots(128), on_gpu=True).columns == 320
    assert steps_in_slots(TAILED, 64, 256, 512, 1, 1, Slots(128), on_gpu=False).columns < 320
    sharing = Slots(128, shared_prompts=32)  # 64 columns of 32 prompts for 128 rows
    assert steps_in_slots(None, 65, 256, 64, 8, 1, sharing, on_gpu=True).columns == 256 + 64 * 32 / 128


def test_of_several_shards_the_slowest_counts():
    one, eight = (steps_in_slots(TAILED, 64, 256, 64, 1, n, Slots(16, prefill_rows=2), False).steps for n in (1, 8))
    assert one < eight < 1.5 * one


DRAWN = {
    "long-tailed": (Sampling(max_new_tokens=64, stop_ids=tuple(range(9))), 1),
    "nearly equal": (Sampling(max_new_tokens=48, min_new_tokens=24, stop_ids=tuple(range(40))), 1),
    "some cut off, three samples": (Sampling(max_new_tokens=32, stop_ids=tuple(range(5)), num_samples=3), 3),
    "shared prompts": (Sampling(max_new_tokens=32, stop_ids=tuple(range(9)), num_samples=3), 3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_steps_are_those_of_a_rollout(name):
    sampling, n = DRAWN[name]
    prompts, slots = prompts_of(np.full(96 // n, P), np.arange(96 // n)), Slots(12, prefill_rows=2)
    slots = dataclasses.replace(slots, shared_prompts=5 if name == "shared prompts" else 0)
    settings = RolloutSettings(sampling, slots, CONFIG, LAYOUT)
    queue = make_queue(prompts, settings)
    ready = jax.jit(prepare, static_argnums=(1, 2))(params(), CONFIG, LAYOUT)
    run: Any = jax.jit(advance, static_argnames="settings")
    done = run(ready, queue, begin(ready, queue, settings), NOISES, jnp.float32(1.0), settings, Until())
    lengths = np.asarray(done.outputs.lengths)
    simulated = simulate_slots(lengths, n, slots)
    assert (simulated.rounds, simulated.groups) == (int(done.rounds), int(done.groups))
    p99 = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
    drawn = ResponseLengths(mean=float(lengths.mean()), p99=p99)
    expected = steps_in_slots(drawn, P, sampling.max_new_tokens, len(prompts.id), n, 1, slots, False)
    assert expected.steps == pytest.approx(int(done.rounds) * slots.steps, rel=0.15)
    assert expected.groups == pytest.approx(int(done.groups), rel=0.25)


def test_slots_are_looked_at_where_lengths_are_known():
    call = ppo(rows=512, response=32).workload.call("actor.generate")
    assert slot_choices(call, Strategy()) == []
    known = dataclasses.replace(call, lengths=ResponseLengths(mean=8, p99=32))
    found = slot_choices(known, Strategy(data=2))
    assert [(s.slots, s.prefill_rows, s.data) for s in found] == [(16, 2, 2), (32, 4, 2), (64, 8, 2), (128, 8, 2)]
    assert slot_choices(known, Strategy(pipeline=2)) == slot_choices(known, Strategy(micro_batches=2)) == []
    several = dataclasses.replace(known, num_samples=4, prompt=65, lengths=ResponseLengths(mean=31, p99=32))
    shared = [(s.slots, s.shared_prompts) for s in slot_choices(several, Strategy(data=16))]
    assert shared == [(16, 0), (16, 5), (32, 0), (32, 9), (64, 0), (64, 17)]
    many = dataclasses.replace(known, rows=65536, num_samples=24)
    sizes = [s.slots for s in slot_choices(many, Strategy())]
    assert sizes[0] >= 24 and sizes[-1] < 65536 * 24 and len(sizes) == 6
