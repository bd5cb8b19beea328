"""A generation on one placement that hands on its sequences in blocks, in the order in which they finish.

    rollout.begin(params, prompts, sampling, first_sequence=0)
    block, _ = rollout.hand_on(8, noise, temperature)       # goes on until 8 sequences of each row shard have finished
    block, _ = rollout.hand_on(8, noise, temperature)       # 8 others
    leaving = rollout.leave("cache", noise, temperature)    # all others, which go on elsewhere:
    tail.arrive(params, [leaving], sampling)

A block may be of complete groups alone: `begin(..., together=4)` hands on the 4 samples of a prompt when all of them
have finished. All shapes are fixed, and no process decides anything. Each `hand_on` is one dispatch of a program, which
stops by itself; the noise of a sequence is its own, so that tokens do not depend on parts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.config.plan_config import Migration
from jaxrlhf.experience import RUNNING, Prompts, Sampling
from jaxrlhf.generation.continuous_batching import BatchState
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.generate import begin_rollout, continue_rollout, rollout_so_far
from jaxrlhf.generation.migration import Leaving, arrive, leave, migration_shardings
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until
from jaxrlhf.models.params import Params
from jaxrlhf.programs.arrays import Arrays, Noise
from jaxrlhf.programs.generation_in_parts import progress_of
from jaxrlhf.programs.pipeline import settle
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here


class Rolling(struct.PyTreeNode):
    """A rollout that has begun. Letters: D row shards, N sequences of each."""

    state: BatchState
    handed_on: Bool[Array, "D N"]
    position: Int[Array, "D N"]
    """The place of each sequence among all of the call."""
    drawn_before: Int[Array, " D"]
    """Tokens that its sequences came with."""


class RolloutInParts:
    """One share of a generation, or its tail. It keeps the rollout from call to call. In a process that owns none of
    its devices it only knows shapes.

    Args:
        slots: None means that all sequences are in slots at once.
        compiler_options: XLA's options.
    """

    def __init__(self, role: ModelRole, layout: Layout, slots: Slots | None, compiler_options: Any) -> None:
        self.layout, self._model, self._slots = layout, role.model, slots
        jit = functools.partial(jax.jit, compiler_options=compiler_options)
        self._begin = jit(_begin, static_argnames="settings")
        self._arrive = jit(_arrive, static_argnames="settings")
        self._go_on = jit(_go_on, static_argnames="settings", donate_argnames="rolling")
        self._take = jit(_take, static_argnames=("settings", "count"), out_shardings=(None, layout.rows))
        self._leave: dict[Any, Any] = {}
        self._params: Params = {}
        self._prompts: Any = None
        self._rolling: Any = None
        self._settings: Any = None
        self.num_left = 0
        """Sequences of each row shard that have not been handed on."""

    def begin(
        self, params: Params, prompts: Prompts, sampling: Sampling, first_sequence: int, together: int = 1
    ) -> None:
        """Starts anew.

        Args:
            first_sequence: The place of the first one among all of the call.
            together: Neighboring sequences that are handed on together.
        """
        rows = prompts.tokens.shape[0] // self.layout.strategy.num_row_shards
        n, stages = sampling.num_samples, self.layout.strategy.pipeline
        slots = self._slots or Slots(rows * n, prefill_rows=rows // stages)
        self._settings = RolloutSettings(sampling, slots, self._model, self.layout, together)
        self.num_left, self._prompts = rows * n, prompts
        begun = self._run(self._begin, params, prompts, np.int32(first_sequence), settings=self._settings)
        self._params, self._rolling = params if begun[0] is None else begun[0], begun[1]

    def arrive(self, params: Params, leaving: list[Leaving], sampling: Sampling, together: int = 1) -> None:
        """Starts with the sequences that left other placements. All processes call it that own devices of either.
        `together`: as for `begin`."""
        rows = sum(len(each.position) for each in leaving) // self.layout.strategy.num_row_shards
        sampling = dataclasses.replace(sampling, num_samples=1)
        self._settings = RolloutSettings(sampling, Slots(rows), self._model, self.layout, together)
        leaving = [reallocate(each, migration_shardings(each, self.layout)) for each in leaving]
        self.num_left = rows
        arrived = self._run(self._arrive, params, leaving, settings=self._settings)
        self._params, self._prompts, self._rolling = arrived
        self._params = params if self._params is None else self._params

    def hand_on(self, count: int, noise: Noise, temperature: Float[Array, ""]) -> tuple[Arrays | None, Any]:
        """Goes on until `count` sequences more of each row shard have finished. Returns the leaves of their `Rollout`
        and their places, or None in a process without devices; and `generation_in_parts.Progress.progress`."""
        self.num_left -= count
        if not is_here(self.layout.mesh):
            return None, None
        progress = self._advance(noise, temperature, none_waits=False)
        handed_on, leaves = self._take(self._prompts, self._rolling, settings=self._settings, count=count)
        self._rolling = self._rolling.replace(handed_on=handed_on)
        if not self.num_left:
            self.end()
        return leaves, progress

    def leave(self, migrate: Migration, noise: Noise, temperature: Float[Array, ""]) -> Leaving:
        """Takes out the sequences that have not been handed on, once no more than these have not finished and none of
        them waits for a slot. The rollout ends here."""
        here, given = is_here(self.layout.mesh), (self._prompts, self._rolling)
        if here:
            self._advance(noise, temperature, none_waits=True)
            given = self._prompts, self._rolling
        key = self._settings, self.num_left, migrate
        static = dict(settings=self._settings, count=self.num_left, with_cache=migrate == "cache")
        shapes = jax.eval_shape(functools.partial(_leave, **static), *given)
        shardings = migration_shardings(shapes, self.layout)
        if here and key not in self._leave:
            self._leave[key] = jax.jit(functools.partial(_leave, **static), out_shardings=shardings)
        leaving = self._leave[key](*given) if here else jax.tree.map(absent, shapes, shardings)
        self.end()
        return leaving

    def end(self) -> None:
        """Lets go of everything."""
        self._params, self._prompts, self._rolling = {}, None, None

    def _advance(self, noise: Noise, temperature: Float[Array, ""], *, none_waits: bool) -> Any:
        """Goes on until so many have not finished as have not been asked for."""
        until = Until(left=jnp.int32(self.num_left), none_waits=jnp.bool_(none_waits))
        given = (self._params, self._prompts, self._rolling, noise, temperature, until)
        self._rolling, progress = self._go_on(*given, settings=self._settings)
        settle(progress)
        return progress

    def _run(self, program: Any, *given: Any, settings: RolloutSettings) -> Any:
        """The outputs of a program, or their shapes."""
        if is_here(self.layout.mesh):
            return program(*given, settings=settings)
        return jax.eval_shape(functools.partial(program, settings=settings), *given)


def _begin(
    params: Params, prompts: Prompts, first_sequence: Int[Array, ""], settings: RolloutSettings
) -> tuple[Params | None, Rolling]:
    """Params that are prepared, or None over stages, each of which prepares its own in every part; and a rollout."""
    ready = _prepared(params, settings)
    state, D = begin_rollout(params if ready is None else ready, prompts, settings), _num_shards(settings)
    N = len(prompts.tokens) * settings.sampling.num_samples // D
    position_DN = first_sequence + jnp.arange(D * N, dtype=jnp.int32).reshape(D, N)
    return ready, Rolling(state, jnp.zeros((D, N), bool), position_DN, jnp.zeros(D, jnp.int32))


def _arrive(
    params: Params, leaving: list[Leaving], settings: RolloutSettings
) -> tuple[Params | None, Prompts, Rolling]:
    ready = _prepared(params, settings)
    prompts, position_DN, state = arrive(leaving, params if ready is None else ready, settings)
    drawn_before = progress_of(state, settings)[:, 1]
    return ready, prompts, Rolling(state, jnp.zeros(position_DN.shape, bool), position_DN, drawn_before)


def _prepared(params: Params, settings: RolloutSettings) -> Params | None:
    return None if settings.layout.is_pipelined else prepare(params, settings.config, settings.layout)


def _num_shards(settings: RolloutSettings) -> int:
    return settings.layout.strategy.num_row_shards


def _go_on(
    params: Params,
    prompts: Prompts,
    rolling: Rolling,
    noise: Noise,
    temperature: Float[Array, ""],
    until: Until,
    settings: RolloutSettings,
) -> tuple[Rolling, Int[Array, "D 4"]]:
    state = continue_rollout(params, prompts, rolling.state, noise, temperature, settings, until)
    progress = progress_of(state, settings)
    return rolling.replace(state=state), progress.at[:, 1].add(-rolling.drawn_before)


def _take(
    prompts: Prompts, rolling: Rolling, settings: RolloutSettings, count: int
) -> tuple[Bool[Array, "D N"], Arrays]:
    """The first finished sequences of each row shard that have not been handed on, and their places."""
    rollout, _ = rollout_so_far(prompts, rolling.state, settings)
    D, N = rolling.position.shape
    by_shard = jax.tree.map(lambda x: x.reshape(D, N, *x.shape[1:]), rollout), rolling.position
    ready_DN, u = (by_shard[0].finish != RUNNING) & ~rolling.handed_on, settings.together
    ready_DG = ready_DN.reshape(D, N // u, u).all(axis=2)
    group_DC = jax.vmap(lambda ready_G: jnp.nonzero(ready_G, size=count // u)[0])(ready_DG)
    sequence_DC = (group_DC[..., None] * u + jnp.arange(u)[None, None]).reshape(D, count)
    handed_on = jax.vmap(lambda done_N, i_C: done_N.at[i_C].set(True))(rolling.handed_on, sequence_DC)
    taken = jax.tree.map(lambda x: jax.vmap(lambda x_N, i_C: x_N[i_C])(x, sequence_DC), by_shard)
    return handed_on, jax.tree.leaves(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), taken))


def _leave(prompts: Prompts, rolling: Rolling, settings: RolloutSettings, count: int, with_cache: bool) -> Leaving:
    """The sequences of each row shard that have not been handed on."""
    sequence_DM = jax.vmap(lambda done_N: jnp.nonzero(~done_N, size=count)[0])(rolling.handed_on)
    position_DM = jnp.take_along_axis(rolling.position, sequence_DM, axis=1)
    return leave(rolling.state, prompts, sequence_DM, position_DM, settings, with_cache=with_cache)
