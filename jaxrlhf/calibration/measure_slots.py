"""Seconds of a rollout in slots, measured: of a decoding step by the columns of the cache that it reads, and of a group
of prompts that enters.

One program decodes some rounds. Its arguments say what every slot holds at first, so that differences between its runs
are steps that read few columns, steps that read as many as halfway through a full-length response, and the prefill of
as many prompts as there is room for.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrlhf.calibration.timing import Timing
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.generation.continuous_batching import advance, begin, make_queue
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import of_row_shard
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until
from jaxrlhf.models.kv_cache import columns_read
from jaxrlhf.models.params import Params
from jaxrlhf.planner.costs.work import SLOT_PHASES, SlotPhase
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.programs.ahead_of_time import CallProgram, call_program
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.sharding.layout import Layout

MOST_ROUNDS = 7
"""The most rounds of a longer run: all of them read only the first part of a cache."""


class Run(NamedTuple):
    """A run of the program: the state that it starts from, and its length."""

    tokens: int
    """Tokens in the cache of every slot at the start; 0 if all slots are free and prompts wait for them."""
    rounds: int


def num_rounds(call: ModelCall) -> int:
    """The rounds of the longer runs, in which no response may reach its limit. Below 2 nothing can be measured."""
    return min(MOST_ROUNDS, (call.response - 1) // Slots.steps)


def runs(call: ModelCall) -> list[Run]:
    """The runs from whose times `of_phases` tells the phases apart: steps that read few columns, one round and some;
    the same of steps that read more; and a round before which prompts enter.

    The latter read the columns in use halfway through a full-length response, not all of them: the time per column
    rises where the KV cache no longer fits the CPU's last-level cache.
    """
    first, _, more = _columns(call, on_gpu=False)
    long, tokens = num_rounds(call), 1 + max(more - first, 0)
    return [Run(1, 1), Run(1, long), Run(tokens, 1), Run(tokens, long), Run(0, 1)]


def _columns(call: ModelCall, *, on_gpu: bool) -> list[int]:
    """The columns that steps read with one token in each slot, with a prompt, and halfway through a full-length
    response; the last are more than the first if the cache has more."""
    tokens, first = call.columns - 1, columns_read(np.array([1]), call.columns - 1, on_gpu=on_gpu)[0]
    halfway = min(max(call.prompt + call.response // 2, first + 1), tokens)
    return columns_read(np.array([1, call.prompt, halfway]), tokens, on_gpu=on_gpu).tolist()


def of_phases(timings: Sequence[Timing], call: ModelCall, slots: Slots, *, on_gpu: bool) -> dict[SlotPhase, float]:
    """Seconds of each phase, from the times of `runs`."""
    few, few_more, many, many_more, entering = (timing.seconds for timing in timings)
    apart = (num_rounds(call) - 1) * slots.steps
    least, prompt, most = _columns(call, on_gpu=on_gpu)
    of_few, of_many = max(few_more - few, 0.0) / apart, max(many_more - many, 0.0) / apart
    column = max(of_many - of_few, 0.0) / (most - least) if most > least else 0.0
    step = max(of_few - least * column, 0.0)
    before = few + slots.steps * (prompt - least) * column  # the same round, had its prompts been there
    prompts = slots.slots // call.num_samples
    prefill = max(entering - before, 0.0) / math.ceil(prompts / min(slots.prefill_rows, prompts))
    return dict(zip(SLOT_PHASES, (prefill, step, column), strict=True))


def slot_program(call: ModelCall, layout: Layout, depth: int) -> CallProgram:
    """The program of `runs`, which takes an array of the tokens and rounds of a run after its other arguments.

    The layout's strategy has slots. `depth` is the layers of the model.
    """
    described, slots, shards = call.require_described(), slots_of(layout.strategy), layout.strategy.num_row_shards
    program = call_program(described, layout, num_layers=depth, rows=slots.slots // call.num_samples * shards)
    model = described.role.model.shallow(depth)
    params, noise, temperature, arrays = program.arguments
    sampling = next(x for x in described.args if isinstance(x, Sampling))
    sampling = dataclasses.replace(sampling, min_new_tokens=sampling.max_new_tokens)  # none ends early
    settings = of_row_shard(RolloutSettings(sampling, slots, model, layout), slots.slots // sampling.num_samples)

    def on_shard(params: Params, prompts: Prompts, noise: jax.Array, temperature: jax.Array, run: jax.Array) -> Any:
        tokens, rounds = run
        queue = make_queue(prompts, settings)
        state = begin(params, queue, settings)
        waits, number = tokens == 0, jnp.arange(slots.slots)
        state = state.replace(
            head=jnp.where(waits, 0, len(prompts.tokens)),
            rows=[state.rows[0].replace(sequence=jnp.where(waits | (number >= len(queue.id)), len(queue.id), number))],
            caches=[state.caches[0].replace(length=jnp.full_like(state.caches[0].length, tokens))],
        )
        state = advance(params, queue, state, noise, temperature, settings, Until(rounds))
        return state.rows[0].newest, state.outputs.words.sum(axis=(1, 2))

    def whole(params: Params, noise: jax.Array, temperature: jax.Array, arrays: Any, run: jax.Array) -> Any:
        ready, prompts = prepare(params, model, layout), Prompts(*arrays)
        rows, replicated = layout.rows.spec, PartitionSpec()
        given = layout.over_row_shards(on_shard, (replicated, rows, replicated, replicated, replicated), rows)
        return given(ready, prompts, noise, temperature, run)

    return CallProgram(jax.jit(whole), (params, noise, temperature, arrays))
