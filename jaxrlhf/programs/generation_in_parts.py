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

from jaxrlhf.experience import RUNNING, Prompts, Sampling
from jaxrlhf.generation.continuous_batching import RolloutSettings, Slots, Until
from jaxrlhf.generation.generate import (
    DecodeState,
    cache_sizes,
    decode,
    decoding_stages,
    finish,
    prepare,
    samples_of,
    start,
)
from jaxrlhf.generation.slot_rollouts import begin_rollout, continue_rollout, rollout_so_far
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Noise, Rebuild
from jaxrlhf.programs.pipeline import settle
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout


class PartProgress(NamedTuple):
    """How far the responses of a row shard are after a part."""

    finished: int
    tokens: int
    """Drawn so far."""
    rounds: int = 0
    """Of slots, as `groups`: rounds of decoding steps, and groups of prompts that were prefilled."""
    groups: int = 0


class Part(NamedTuple):
    """A part that was dispatched."""

    name: str
    progress: Int[Array, "D 4"]
    """A `PartProgress` for each row shard, or for all together."""


OnPart = Callable[[Part], None]
"""Is told of each part when it is dispatched."""


def ignore(part: Part) -> None:
    """An `OnPart` that does nothing."""


class GenerationInParts:
    """`(params, noise, temperature, arrays, on_part) -> leaves of a Rollout`, as several programs.

    Args:
        part_tokens: Decoding steps of a part.
        slots: None means all rows at once.
        compiler_options: XLA's options.
    """

    def __init__(
        self,
        role: ModelRole,
        rebuild: Rebuild,
        layout: Layout,
        part_tokens: int,
        slots: Slots | None,
        compiler_options: Any,
    ) -> None:
        self._role, self._rebuild, self._layout, self._slots = role, rebuild, layout, slots
        self._part_tokens = part_tokens
        jit = functools.partial(jax.jit, static_argnames="settings", compiler_options=compiler_options)
        self._prefill, self._begin = jit(_prefill), jit(_begin)
        self._decode = jit(_decode, static_argnames=("settings", "num_slots"), donate_argnames="state")
        self._go_on = jit(_go_on, donate_argnames="state")
        self._finish, self._finish_slots = (jit(each, out_shardings=layout.rows) for each in (_finish, _finish_slots))

    def __call__(
        self, params: Params, noise: Noise, temperature: Float[Array, ""], arrays: Arrays, on_part: OnPart = ignore
    ) -> Arrays:
        prompts, sampling = self._rebuild(arrays)
        settings = RolloutSettings(sampling, self._slots or Slots(1), self._role.model, self._layout)
        run = self._all_at_once if self._slots is None else self._in_slots
        return run(params, prompts, noise, temperature, settings, on_part)

    def _all_at_once(
        self,
        params: Params,
        prompts: Prompts,
        noise: Noise,
        temperature: Any,
        settings: RolloutSettings,
        on_part: OnPart,
    ) -> Arrays:
        P = prompts.tokens.shape[1]
        ready, state, progress = self._prefill(params, prompts, noise, temperature, settings=settings)
        _dispatched("prefill", progress, on_part)
        for num_new_slots, num_steps in self._decoding(settings.sampling):
            state, progress = self._decode(
                ready, state, num_steps, temperature, settings=settings, num_slots=P + num_new_slots
            )
            _dispatched("decode", progress, on_part)
        return self._finish(prompts, state.responses, settings=settings)

    def _in_slots(
        self,
        params: Params,
        prompts: Prompts,
        noise: Noise,
        temperature: Any,
        settings: RolloutSettings,
        on_part: OnPart,
    ) -> Arrays:
        slots, sampling = settings.slots, settings.sampling
        ready, state = self._begin(params, prompts, settings=settings)
        ready = params if ready is None else ready
        sequences = len(prompts.tokens) * sampling.num_samples // self._layout.strategy.num_row_shards
        rounds = math.ceil(self._part_tokens / slots.steps)
        most = math.ceil(sequences / slots.slots) * math.ceil(sampling.max_new_tokens / slots.steps)
        num_parts = math.ceil(most / rounds)
        for part in range(num_parts):
            limit = rounds if part + 1 < num_parts else most * slots.slots  # the last one goes on to the end
            state, progress = self._go_on(ready, prompts, state, noise, temperature, limit, settings=settings)
            _dispatched("prefill and decode", progress, on_part)
        return self._finish_slots(prompts, state, settings=settings)

    def _decoding(self, sampling: Sampling) -> Iterator[tuple[int, int]]:
        """Slots of the cache beside those of the prompts, and steps, of every part."""
        for num_new_slots, num_steps in decoding_stages(sampling.max_new_tokens):
            for first in range(0, num_steps, self._part_tokens):
                yield num_new_slots, min(self._part_tokens, num_steps - first)


def _dispatched(name: str, progress: jax.Array, on_part: OnPart) -> None:
    on_part(Part(name, progress))
    settle(progress)


def _prefill(
    params: Params, prompts: Prompts, noise: Noise, temperature: Float[Array, ""], settings: RolloutSettings
) -> tuple[Params, DecodeState, jax.Array]:
    sampling, _, config, layout = _parts_of(settings)
    ready, slots = prepare(params, config, layout), prompts.tokens.shape[1] + cache_sizes(sampling.max_new_tokens)[0]
    state = start(ready, prompts, noise, temperature, sampling, config, layout, num_slots=slots)
    return ready, state, _progress(state.responses.finish, state.responses.num_new)


def _decode(
    params: Params,
    state: DecodeState,
    num_steps: Int[Array, ""],
    temperature: Float[Array, ""],
    settings: RolloutSettings,
    num_slots: int,
) -> tuple[DecodeState, jax.Array]:
    sampling, _, config, layout = _parts_of(settings)
    state = state.replace(cache=state.cache.grow(num_slots, layout))
    state = decode(params, state, num_steps, temperature, sampling, config, layout)
    return state, _progress(state.responses.finish, state.responses.num_new)


def _finish(prompts: Prompts, responses: Any, settings: RolloutSettings) -> Arrays:
    return jax.tree.leaves(finish(samples_of(prompts, settings.sampling, settings.layout), responses, settings.layout))


def _begin(params: Params, prompts: Prompts, settings: RolloutSettings) -> tuple[Params | None, Any]:
    """Params that are prepared, or None over stages, each of which prepares its own in every part; and a state."""
    config, layout = settings.config, settings.layout
    return None if layout.is_pipelined else prepare(params, config, layout), begin_rollout(prompts, settings)


def _go_on(
    params: Params,
    prompts: Prompts,
    state: Any,
    noise: Noise,
    temperature: Float[Array, ""],
    rounds: Int[Array, ""],
    settings: RolloutSettings,
) -> tuple[Any, jax.Array]:
    is_pipelined, until = settings.layout.is_pipelined, Until(rounds=rounds)
    state = continue_rollout(params, prompts, state, noise, temperature, settings, until, prepared=not is_pipelined)
    told = state.outputs.finish, state.outputs.lengths, state.rounds, state.groups
    each = zip(*(x[:, -1] if is_pipelined else x for x in told), strict=True)  # the last stage has the outputs
    return state, jnp.concatenate([_progress(*of_shard) for of_shard in each])


def _finish_slots(prompts: Prompts, state: Any, settings: RolloutSettings) -> Arrays:
    return jax.tree.leaves(rollout_so_far(prompts, state, settings)[0])


def _progress(finish: jax.Array, num_new: jax.Array, *counts: jax.Array) -> jax.Array:
    """A `PartProgress` as an array, [1, 4]."""
    values = [(finish != RUNNING).sum(), num_new.sum(), *counts]
    return jnp.stack([*(x.astype(jnp.int32) for x in values), *[jnp.int32(0)] * (4 - len(values))])[None]


def _parts_of(settings: RolloutSettings) -> tuple[Sampling, Slots, ModelConfig, Layout]:
    return settings.sampling, settings.slots, settings.config, settings.layout
