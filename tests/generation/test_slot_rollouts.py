"""Rollouts in slots that are interrupted: they go on with the same bits, later, elsewhere, and in other slots."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxrlhf.experience import RUNNING, Prompts, Rollout, Sampling
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import (
    begin_rollout,
    continue_rollout,
    generate,
    rollout_so_far,
    samples_of,
    state_shardings,
)
from jaxrlhf.generation.moved_rows import resume_rows, take_rows
from jaxrlhf.generation.rollout_settings import ALL_AT_ONCE, RolloutSettings, Slots, Until, decoding_stages
from jaxrlhf.models.params import param_shardings
from jaxrlhf.planner.compiled.hlo import parse
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.described_gpus.programs import written_in_decoding
from tests.generation import pipelined_cases
from tests.generation.steered import steered
from tests.generation.test_generate import take
from tests.random_weights import params_of

B, P, R, V = pipelined_cases.B, pipelined_cases.P, 9, pipelined_cases.V
MODEL = pipelined_cases.model(2)
STEERED = steered(V, max_new_tokens=R, stop_ids=tuple(range(0, V, 9)))
PLAIN = Sampling(max_new_tokens=R, min_new_tokens=1, stop_ids=tuple(range(0, V, 8)))
NOISE, TEMPERATURE = np.array([1, 2, 3], np.uint32), np.float32(0.8)


class Case(NamedTuple):
    strategy: Strategy
    slots: Slots
    sampling: Sampling
    dtype: str = "float32"

    def settings(self, first: int = 0) -> RolloutSettings:
        """On devices from the first one on."""
        layout = Layout.over(tuple(range(first, first + self.strategy.num_devices)), self.strategy)
        return RolloutSettings(self.sampling, self.slots, dataclasses.replace(MODEL, dtype=self.dtype), layout)


CASES = {
    "one device, steered, in chunks": Case(Strategy(), Slots(3, 2, prefill_tokens=3, steps=2), STEERED),
    "one device, bfloat16": Case(Strategy(), Slots(3, prefill_rows=2, steps=1), PLAIN, "bfloat16"),
    "row shards": Case(Strategy(data=2, tensor=2), Slots(2, prefill_rows=2, steps=1), STEERED),
    "row shards, shared prompts": Case(Strategy(data=2), Slots(2, 2, steps=1, shared_prompts=2), STEERED),
    "stages": Case(Strategy(pipeline=2, data=2), Slots(2, 1, steps=1), STEERED),
    "stages, in chunks": Case(
        Strategy(pipeline=2, data=2),
        Slots(4, 1, prefill_tokens=2, steps=1, shared_prompts=2),
        dataclasses.replace(STEERED, num_samples=2),
    ),
}
PROMPTS = jax.device_get(pipelined_cases.make_prompts())
BEGIN, SO_FAR = (jax.jit(f, static_argnames="settings") for f in (begin_rollout, rollout_so_far))
CONTINUE = jax.jit(continue_rollout, static_argnames=("settings", "tokens"), donate_argnames="state")
TAKE = jax.jit(take_rows, donate_argnames="state")
RESUME = jax.jit(resume_rows, static_argnames="settings")


@functools.cache
def weights(settings: RolloutSettings, scale: float = 1.0) -> Any:
    """Random ones, in the form that a layout reads."""
    config, layout = settings.config, settings.layout
    if layout.is_pipelined:
        return pipelined_cases.pipelined(config, layout)
    given = params_of(config)
    given = jax.device_put(given | {"lm_head": scale * given["lm_head"]}, param_shardings(config, layout))
    return jax.jit(prepare, static_argnums=(1, 2))(given, config, layout)


def go_on(state: Any, settings: RolloutSettings, until: Until, prompts: Prompts = PROMPTS, scale: float = 1.0) -> Any:
    given = jax.device_put(prompts, settings.layout.rows)
    return CONTINUE(weights(settings, scale), given, state, NOISE, TEMPERATURE, settings, until)


def so_far(state: Any, settings: RolloutSettings, prompts: Prompts = PROMPTS) -> tuple[Rollout, Any]:
    return jax.device_get(SO_FAR(jax.device_put(prompts, settings.layout.rows), state, settings))


def begun(settings: RolloutSettings) -> Any:
    return BEGIN(weights(settings), jax.device_put(PROMPTS, settings.layout.rows), settings)


@functools.cache
def at_once(name: str) -> Rollout:
    """Without an interruption; over stages, by `generate`."""
    settings = CASES[name].settings()
    if not settings.layout.is_pipelined:
        return so_far(go_on(begun(settings), settings, Until()), settings)[0]
    run = jax.jit(generate, static_argnums=(4, 5, 6, 7), out_shardings=settings.layout.replicated)
    given = weights(settings), jax.device_put(PROMPTS, settings.layout.rows), NOISE, TEMPERATURE
    return jax.device_get(run(*given, settings.sampling, settings.config, settings.layout, settings.slots))


def by_id(rollout: Rollout) -> dict[int, list[bytes]]:
    """Sequence -> the bits of its response, of those that have finished."""
    leaves = [rollout.tokens, rollout.logprobs, rollout.sampled_logprobs, rollout.finish]
    ended = np.flatnonzero(rollout.finish != RUNNING)
    return {int(rollout.id[i]): [leaf[i].tobytes() for leaf in leaves] for i in ended}


@pytest.mark.parametrize("name", [name for name in CASES if name != "stages"])
def test_interrupted_after_any_number_of_rounds_it_goes_on_with_the_same_bits(name):
    settings, expected = CASES[name].settings(), at_once(name)
    for rounds in (1, 2, 3):
        state, times, before = begun(settings), 0, {}
        while len(before) < len(expected.id):
            state = go_on(state, settings, Until(rounds=rounds))
            rollout, metrics = so_far(state, settings)
            times, ended = times + 1, by_id(rollout)
            assert before.items() <= ended.items(), "what has finished stays as it is"
            before = ended
            assert rollout.lengths.sum() > 0 and metrics["rounds"].max() <= times * rounds
        assert before == by_id(expected) and times >= 3
        assert (metrics["groups"] > 1).all() and metrics["rounds"].max() > (times - 1) * rounds


def test_on_other_devices_it_goes_on_with_the_same_bits():
    """Rows that were split over `data` are split over `fsdp` then."""
    name = "stages, in chunks"
    settings, elsewhere = CASES[name].settings(), CASES[name].settings(first=4)
    strategy = dataclasses.replace(elsewhere.layout.strategy, data=1, fsdp=2)
    elsewhere = dataclasses.replace(elsewhere, layout=Layout.over((7, 5, 6, 4), strategy))
    state = go_on(begun(settings), settings, Until(rounds=3))
    assert 0 < len(by_id(so_far(state, settings)[0])) < len(at_once(name).id)
    state = jax.device_put(state, state_shardings(state, elsewhere.layout))
    state = go_on(state, elsewhere, Until())
    assert by_id(so_far(state, elsewhere)[0]) == by_id(at_once(name))


@pytest.mark.parametrize("name", ["one device, steered, in chunks", "row shards"])
def test_it_stops_when_enough_have_finished(name):
    """After the first round in which it is so, on each row shard by itself."""
    settings = CASES[name].settings()
    shards = settings.layout.strategy.num_row_shards
    left = B // shards - 2
    state = go_on(begun(settings), settings, Until(left=left))
    rollout, metrics = so_far(state, settings)
    ended = (rollout.finish != RUNNING).reshape(shards, -1).sum(axis=1)
    assert (ended >= 2).all() and ended.sum() < B
    for shard, rounds in enumerate(metrics["rounds"]):
        earlier, _ = so_far(go_on(begun(settings), settings, Until(rounds=int(rounds) - 1)), settings)
        assert (earlier.finish != RUNNING).reshape(shards, -1)[shard].sum() < 2


@pytest.mark.parametrize("name", ["row shards", "row shards, shared prompts", "stages"])
def test_rows_go_on_in_other_slots(name):
    """One of each row shard: they join in the slots of one shard, on other devices, while the others go on."""
    settings = CASES[name].settings()
    tail = Case(dataclasses.replace(settings.layout.strategy, data=1), CASES[name].slots, STEERED).settings(first=5)
    state = go_on(begun(settings), settings, Until(rounds=1))
    before, metrics = so_far(state, settings)
    running_DN = ((before.finish == RUNNING) & (before.lengths > 0)).reshape(2, -1)
    assert (running_DN.sum(axis=1) == 2).all() and (metrics["entered"] < B // 2).any(), "two in slots, some wait"
    place_D1 = np.argmax(running_DN, axis=1)[:, None]
    state, moved = TAKE(state, place_D1)
    stay, metrics = so_far(go_on(state, settings, Until()), settings)
    assert (metrics["entered"] == B // 2).all()

    rows = (place_D1 + B // 2 * np.arange(2)[:, None]).reshape(-1)
    prompts = take(jax.device_get(samples_of(PROMPTS, STEERED, settings.layout)), rows)
    by_shard = 2 if settings.layout.is_pipelined else 1  # the axis of rows
    joined = jax.tree.map(lambda x: np.concatenate(np.asarray(x), axis=by_shard - 1)[None], moved)
    state = RESUME(jax.device_put(joined, tail.layout.replicated), tail)
    np.testing.assert_array_equal(so_far(state, tail, prompts)[0].tokens, before.tokens[rows])
    leave, _ = so_far(go_on(state, tail, Until(), prompts), tail, prompts)
    assert by_id(stay) | by_id(leave) == by_id(at_once(name))
    assert len(by_id(stay)) == B - 2 and len(by_id(leave)) == 2


def test_rows_that_find_no_slot_are_refused():
    settings = CASES["one device, steered, in chunks"].settings()
    given = weights(settings)
    state = jax.eval_shape(lambda: begin_rollout(given, PROMPTS, settings))
    _, moved = jax.eval_shape(take_rows, state, np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match=r"slots: must be at least the rows that move to each row shard. Got 3. Use 4"):
        jax.eval_shape(lambda moved: resume_rows(moved, settings), moved)
    several = dataclasses.replace(settings, sampling=dataclasses.replace(STEERED, num_samples=3))
    with pytest.raises(
        ValueError, match=r"num_samples: must be 1 for rows that move, each of which is a sample. Got 3"
    ):
        jax.eval_shape(
            lambda moved: resume_rows(moved, several), jax.eval_shape(take_rows, state, np.zeros((1, 3), np.int32))[1]
        )


def test_with_other_weights_it_goes_on_as_the_plain_loop_does():
    """Those that are in slots keep their tokens, and see their keys and values; the others are as if they began now."""
    name, scale = "one device, steered, in chunks", -1.0
    settings = CASES[name].settings()
    state = go_on(begun(settings), settings, Until(rounds=1))
    before, _ = so_far(state, settings)
    rollout, _ = so_far(go_on(state, settings, Until(), scale=scale), settings)

    plainly, ((tokens, _),) = dataclasses.replace(settings, slots=ALL_AT_ONCE), decoding_stages(P, R)

    def plain(state: Any, rounds: int, by: float) -> Any:
        given = weights(settings, by), PROMPTS, state, NOISE, TEMPERATURE, plainly, Until(rounds=rounds)
        return CONTINUE(*given, tokens=tokens)

    first, done = {}, {}
    for kind, by in (("changed", 1.0), ("new", scale)):
        state = plain(BEGIN(weights(settings, by), PROMPTS, plainly), 2, by)
        first[kind], done[kind] = so_far(state, plainly)[0], so_far(plain(state, R, scale), plainly)[0]
    in_slots, waited = np.flatnonzero(before.lengths > 0), np.flatnonzero(before.lengths == 0)
    assert len(in_slots) >= 2 and len(waited) >= 2
    np.testing.assert_array_equal(before.tokens[in_slots], first["changed"].tokens[in_slots])
    for rows, kind in ((in_slots, "changed"), (waited, "new")):
        pipelined_cases.assert_same(take(rollout, rows), take(done[kind], rows))
    unchanged = at_once(name)
    assert (rollout.lengths[in_slots] > 2).any() and (rollout.tokens[in_slots] != unchanged.tokens[in_slots]).any()


def test_going_on_copies_no_cache():
    """The state is updated where it lies."""
    for name in ("row shards", "stages, in chunks"):  # these share prompts
        settings = CASES[name].settings()
        state = begun(settings)
        given = weights(settings), jax.device_put(PROMPTS, settings.layout.rows), state, NOISE, TEMPERATURE, settings
        program: Any = CONTINUE.lower(*given, Until()).compile()
        size = state.caches[0].keys[0][0].addressable_shards[0].data.size
        assert written_in_decoding(parse(program.as_text()), size, loops_of=("decode",)) == []
        caches = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state) if x.ndim >= 5)
        assert program.memory_analysis().alias_size_in_bytes >= caches
