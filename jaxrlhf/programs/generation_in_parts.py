"""A generate call as several programs, one after another: its prefill, and its decoding steps in parts.

The responses are those of `call_programs.generate_program`. After each part the host learns how far they are. It
decides nothing by that: there are as many parts as full-length responses take, and those after the last response has
ended return at once. So on GPUs all are dispatched without waiting, and devices do not pause between them. On CPUs each
is waited for before the next, since too many programs in flight can block one another.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrlhf.experience import RUNNING, Prompts
from jaxrlhf.generation.continuous_batching import BatchState
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import begin_rollout, continue_rollout, rollout_so_far
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until, decoding_stages
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Noise, Rebuild
from jaxrlhf.programs.pipeline import settle
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout


class Progress(NamedTuple):
    """A part that was dispatched."""

    name: str
    progress: Int[Array, "D 4"]
    """Of each row shard, how far its responses are after the part: those that have ended, tokens drawn so far; and in
    slots, rounds of decoding steps, and groups of prompts that were prefilled."""


OnPart = Callable[[Progress], None]
"""Is told of each part when it is dispatched."""


class GenerationInParts:
    """`(params, noise, temperature, arrays, on_part) -> leaves of a Rollout`, as several programs.

    Args:
        part_tokens: Decoding steps of a part.
        compiler_options: XLA's options.
    """

    def __init__(
        self,
        role: ModelRole,
        rebuild: Rebuild,
        layout: Layout,
        part_tokens: int,
        slots: Slots,
        compiler_options: Any,
    ) -> None:
        self._role, self._rebuild, self._layout, self._slots = role, rebuild, layout, slots
        self._part_tokens = part_tokens
        jit = functools.partial(jax.jit, static_argnames="settings", compiler_options=compiler_options)
        self._begin, self._finish = jit(_begin), jit(_finish, out_shardings=layout.rows)
        self._go_on = jit(_go_on, static_argnames=("settings", "tokens"), donate_argnames="state")

    def __call__(
        self,
        params: Params,
        noise: Noise,
        temperature: Float[Array, ""],
        arrays: Arrays,
        on_part: OnPart = lambda part: None,
    ) -> Arrays:
        prompts, sampling = self._rebuild(arrays)
        settings = RolloutSettings(sampling, self._slots, self._role.model, self._layout)
        ready, state, progress = self._begin(params, prompts, settings=settings)
        ready = params if ready is None else ready
        if self._slots.at_once:
            on_part(Progress("prefill", progress))
            settle(progress)
        name = "decode" if self._slots.at_once else "prefill and decode"
        for tokens, rounds in self._parts(prompts, settings):
            given = (ready, prompts, state, noise, temperature, rounds)
            state, progress = self._go_on(*given, settings=settings, tokens=tokens)
            on_part(Progress(name, progress))
            settle(progress)
        return self._finish(prompts, state, settings=settings)

    def _parts(self, prompts: Prompts, settings: RolloutSettings) -> Iterator[tuple[int, int]]:
        """The tokens for which the cache is to have room, and the rounds, of every part."""
        slots, sampling, (num_prompts, columns) = settings.slots, settings.sampling, prompts.tokens.shape
        if slots.at_once:
            for tokens, num_steps in decoding_stages(columns, sampling.max_new_tokens):
                for first in range(0, num_steps, self._part_tokens):
                    yield tokens, min(self._part_tokens, num_steps - first)
            return
        sequences = num_prompts * sampling.num_samples // self._layout.strategy.num_row_shards
        rounds = math.ceil(self._part_tokens / slots.steps)
        most = math.ceil(sequences / slots.slots) * math.ceil(sampling.max_new_tokens / slots.steps)
        num_parts = math.ceil(most / rounds)
        for part in range(num_parts):
            yield 0, rounds if part + 1 < num_parts else most * slots.slots  # the last one goes on to the end


def _begin(
    params: Params, prompts: Prompts, settings: RolloutSettings
) -> tuple[Params | None, BatchState, Int[Array, "D 4"]]:
    """Params that are prepared, or None over stages, each of which prepares its own in every part; and a state."""
    config, layout = settings.config, settings.layout
    ready = None if layout.is_pipelined else prepare(params, config, layout)
    state = begin_rollout(params if ready is None else ready, prompts, settings)
    return ready, state, progress_of(state, settings)


def _go_on(
    params: Params,
    prompts: Prompts,
    state: BatchState,
    noise: Noise,
    temperature: Float[Array, ""],
    rounds: Int[Array, ""],
    settings: RolloutSettings,
    tokens: int,
) -> tuple[BatchState, Int[Array, "D 4"]]:
    given = (params, prompts, state, noise, temperature, settings, Until(rounds=rounds))
    state = continue_rollout(*given, tokens=tokens)
    return state, progress_of(state, settings)


def _finish(prompts: Prompts, state: BatchState, settings: RolloutSettings) -> Arrays:
    return jax.tree.leaves(rollout_so_far(prompts, state, settings)[0])


def progress_of(state: BatchState, settings: RolloutSettings) -> Int[Array, "D 4"]:
    """`Progress.progress`."""
    told = state.outputs.finish, state.outputs.lengths, state.rounds, state.groups
    finish, lengths, rounds, groups = (x[:, -1] if settings.layout.is_pipelined else x for x in told)
    counts = (rounds, groups) if not settings.slots.at_once else (jnp.zeros_like(rounds),) * 2
    progress_D4 = jnp.stack([(finish != RUNNING).sum(axis=1), lengths.sum(axis=1), *counts], axis=1)
    return settings.layout.constrain_rows(progress_D4)
