"""Pipelined generation gives what generation on one device gives."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.experience import LENGTH, STOP, Prompts, Rollout
from jaxrlhf.generation import rollout_settings
from jaxrlhf.generation.decoding_weights import ring_shardings
from jaxrlhf.generation.generate import begin_rollout, continue_rollout, rollout_so_far
from jaxrlhf.generation.rollout_settings import ALL_AT_ONCE, RolloutSettings, Until, decoding_stages, rollout_stages
from jaxrlhf.planner.compiled.hlo import parse
from jaxrlhf.planner.compiled.hlo_counts import count
from jaxrlhf.planner.compiled.program_counts import Counts
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Strategy
from tests.described_gpus.programs import written_in_decoding
from tests.generation.pipelined_cases import (
    B,
    P,
    R,
    V,
    abstract_ring,
    assert_same,
    given,
    model,
    on_one_device,
    on_stages,
    over,
    pipelined,
    sampling,
)
from tests.generation.steered import steered
from tests.random_weights import params_of
from tests.subprocesses import run_processes

CASES = {
    "two stages": (Strategy(pipeline=2, data=2, tensor=2), model(3, tie_embeddings=True), sampling(top_p=0.9), 1.0),
    "four stages, several samples": (
        Strategy(pipeline=4, tensor=2),
        model(5),
        steered(V, num_samples=2, top_k=40, min_new_tokens=2, max_new_tokens=R),
        0.8,
    ),
    "one token, greedy, two heads": (
        Strategy(pipeline=2, fsdp=2),
        model(2, head="both"),
        sampling(max_new_tokens=1),
        0.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_responses_are_those_of_one_device(case):
    strategy, config, drawn, temperature = CASES[case]
    assert_same(on_stages(config, drawn, temperature, over(strategy)), on_one_device(config, drawn, temperature))


def test_what_is_compared_is_worth_comparing():
    _, *case = CASES["two stages"]
    rollout = on_one_device(*case)
    assert set(rollout.finish.tolist()) == {STOP, LENGTH}
    assert len(set(rollout.lengths.tolist())) > 2
    assert len(np.unique(rollout.tokens[:, P:][rollout.response])) > 20


LONG = sampling(max_new_tokens=32, min_new_tokens=15, stop_ids=tuple(range(0, V, 3)))
LONG_MODEL = model(5)


def in_stages(params: Any, prompts: Prompts, noise: jax.Array, temperature: jax.Array, layout: Layout) -> Any:
    """The rollout, and the rounds of each row shard."""
    settings = RolloutSettings(LONG, ALL_AT_ONCE, LONG_MODEL, layout)
    state = begin_rollout(params, prompts, settings)
    for tokens, rounds in rollout_stages(settings, P):
        until = Until(rounds=rounds)
        state = continue_rollout(params, prompts, state, noise, temperature, settings, until, tokens=tokens)
    rollout, metrics = rollout_so_far(prompts, state, settings)
    return rollout, metrics["rounds"]


@functools.cache
def long_rollout() -> tuple[Rollout, int, str]:
    """A rollout for which the cache grows, the number of rounds that they took, and the program."""
    layout = over(Strategy(pipeline=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_settings, "_MIN_GROWTH", 8)
        assert decoding_stages(P, 32) == [(16, 12), (24, 8), (32, 8), (40, 4)]
        args = pipelined(LONG_MODEL, layout), *given(layout, 0.8)
        program = jax.jit(in_stages, static_argnums=4).lower(*args, layout).compile()
    rollout, num_rounds = program(*args)
    return jax.device_get(rollout), int(num_rounds[0]), program.as_text() or ""


def test_a_growing_cache_changes_nothing():
    rollout, _, _ = long_rollout()
    assert_same(rollout, on_one_device(LONG_MODEL, LONG, 0.8))
    assert rollout.lengths.max() > 13  # of the cache that has grown


def test_it_ends_when_all_have_finished():
    """A round gives every sequence a token, and those of the first micro-batch begin one ahead of the others."""
    rollout, num_rounds, _ = long_rollout()
    first, second = rollout.lengths[: B // 2].max(), rollout.lengths[B // 2 :].max()
    assert num_rounds == max(first, second + 1) < 32


def test_every_tick_sends_once():
    """As the cost model counts: one tick less than two rounds for prompts, and in decoding a round for each token."""
    _, _, program = long_rollout()
    once = count(program).by_label(rounds=1)

    def sends(label: str) -> float:
        of_label = once.get(label, Counts()).collectives
        return sum(times for collective, times in of_label.items() if collective.kind == "collective-permute")

    assert (sends("prefill"), sends("rest"), sends("decode")) == (3, 0, 4 * 2)  # four loops, of caches of four sizes


def test_no_step_copies_a_cache():
    _, _, program = long_rollout()
    size = B // 2 * LONG_MODEL.num_kv_heads * 16 * LONG_MODEL.head_size
    assert written_in_decoding(parse(program), size, loops_of=("decode",)) == []


def test_in_bfloat16_the_program_runs_and_draws_likely_tokens():
    """Rounding differs between programs, so the tokens need not be the same."""
    config = model(2, dtype="bfloat16")
    rollout = jax.device_get(on_stages(config, sampling(), 0.0, over(Strategy(pipeline=2))))
    expected = on_one_device(config, sampling(), 0.0)
    np.testing.assert_array_equal(rollout.mask[:, :P], expected.mask[:, :P])
    first = rollout.tokens[:, P] == expected.tokens[:, P]
    assert first.sum() >= B - 1
    np.testing.assert_allclose(rollout.logprobs[first, 0], expected.logprobs[first, 0], atol=0.05)


# Weights


@pytest.mark.parametrize("strategy", [Strategy(pipeline=2, fsdp=2), Strategy(pipeline=4, tensor=2)], ids=str)
def test_the_form_of_the_weights(strategy):
    layout, config = over(strategy), model(5, head="both")
    given_, params = params_of(config), pipelined(config, layout)
    assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params) == abstract_ring(config, layout)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, params, ring_shardings(config, layout))))
    assert params.keys() == {"embedding", "layers", "final_norm", "lm_head"}
    for stage, layers in enumerate(layers_of_stages(5, strategy.pipeline)):
        for j, slot in enumerate(params["layers"]):
            for name, weight in slot.items():
                expected = given_["layers"][layers[j]][name] if j < len(layers) else 0
                np.testing.assert_array_equal(np.asarray(weight)[stage], expected)
    for name in ("embedding", "final_norm", "lm_head"):
        np.testing.assert_array_equal(params[name], given_[name])


def test_in_two_processes():
    run_processes("tests.generation.run_pipelined_generation", 2)
