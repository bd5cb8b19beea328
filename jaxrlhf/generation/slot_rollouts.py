"""Rollouts in slots over the devices of a layout: to the end in one program, or as a state that goes on later.

Letters: D row shards, S slots, N sequences of a row shard, M rows that move.

    rollout = generate_in_slots(params, prompts, noise, temperature, sampling, slots, config, layout)

    state = begin_rollout(prompts, settings)
    state = continue_rollout(params, prompts, state, noise, temperature, settings, Until(left=8))
    rollout, metrics = rollout_so_far(prompts, state, settings)          # `RUNNING` where a sequence has not ended

All of these are to be compiled, with `settings` static and the state donated. A state is the `BatchState` of every row
shard along a leading axis, and over stages of every stage along a second one. Each row shard stops by itself, without
asking the others; over stages they stop when the last one would. A state goes on where it stopped with the same bits:

- later, given the same prompts;
- on other devices: `jax.device_put(state, state_shardings(state, layout))`, for a layout with as many row shards,
  stages and tensor shards;
- in other slots, as many to a row shard: `take_rows` out of a state, part or join them along their axes, `resume_rows`;
- with other weights: tokens so far, and their keys and values, stay as they are.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation import continuous_batching, pipelined_slots
from jaxrlhf.generation.continuous_batching import (
    BatchState,
    Outputs,
    RolloutSettings,
    SlotRows,
    Slots,
    Until,
    make_queue,
)
from jaxrlhf.generation.generate import finish, prepare, samples_of
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params
from jaxrlhf.models.slot_cache import SlotCache
from jaxrlhf.require import require
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE, TENSOR
from jaxrlhf.sharding.layout import Layout

_ROWS, _WHOLE = PartitionSpec(BATCH_AXES), PartitionSpec()


class MovedRows(struct.PyTreeNode):
    """Sequences on their way to other slots."""

    cache: SlotCache
    """[D, M, ...]; over stages this and all others have a second axis, of the stages."""
    rows: SlotRows
    outputs: Outputs
    is_running: Bool[Array, "D M"]
    """In slots. The others need none."""


def generate_in_slots(
    params: Params,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    slots: Slots,
    config: ModelConfig,
    layout: Layout,
) -> Rollout:
    """Responds to every prompt `num_samples` times. Each row shard has its own slots and queue.

    Args:
        params: In a pipelined layout, from `ring_params`.
        slots: Of a row shard, whose stages work on as many each.

    Raises:
        ValueError: They do not divide by the stages, or are fewer than there are samples of a prompt.
    """
    settings = RolloutSettings(sampling, slots, config, layout)
    state = begin_rollout(prompts, settings)
    state = continue_rollout(params, prompts, state, noise, temperature, settings, Until())
    return rollout_so_far(prompts, state, settings)[0]


def begin_rollout(prompts: Prompts, settings: RolloutSettings) -> BatchState:
    """The state before the first round.

    Raises:
        ValueError: As `generate_in_slots`.
    """
    own, layout = of_row_shard(settings), settings.layout
    spec = _of_state(layout)
    begin = layout.over_row_shards(
        lambda prompts: _lead(continuous_batching.begin(make_queue(prompts, own), own), spec), (_ROWS,), spec
    )
    return _placed(begin(prompts), layout)


def continue_rollout(
    params: Params,
    prompts: Prompts,
    state: BatchState,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    settings: RolloutSettings,
    until: Until,
    *,
    prepared: bool = False,
) -> BatchState:
    """The state after some more rounds, or when all sequences have finished.

    Args:
        params, prompts: As for `generate_in_slots`.
        until: For every row shard.
        prepared: The params are as `prepare` gives them. Not over stages, each of which prepares its own.
    """
    own, layout = of_row_shard(settings), settings.layout
    spec, of_params = _of_state(layout), _WHOLE
    if layout.is_pipelined:  # each stage prepares its own
        loop, of_params = pipelined_slots, {**dict.fromkeys(params, _WHOLE), "layers": PartitionSpec(PIPELINE)}
    else:
        loop, params = continuous_batching, params if prepared else prepare(params, settings.config, layout)

    def on_shard(params: Params, prompts: Prompts, state: BatchState, *given: Any) -> BatchState:
        state = jax.tree.map(lambda x: x.reshape(x.shape[len(spec) :]), state)
        noise, temperature, until = given
        return _lead(loop.advance(params, make_queue(prompts, own), state, noise, temperature, own, until), spec)

    run = layout.over_row_shards(on_shard, (of_params, _ROWS, spec, _WHOLE, _WHOLE, _WHOLE), spec)
    return _placed(run(params, prompts, state, noise, temperature, until), layout)


def rollout_so_far(
    prompts: Prompts, state: BatchState, settings: RolloutSettings
) -> tuple[Rollout, dict[str, Int[Array, " D"]]]:
    """The responses; and, of each row shard, the rounds, the groups of prompts that were prefilled, and the prompts
    that have entered: the others wait."""
    told = {"outputs": state.outputs, "rounds": state.rounds, "groups": state.groups, "entered": state.head}
    if settings.layout.is_pipelined:
        with jax.named_scope("share_responses"):
            told = jax.tree.map(lambda x: x.at[:, :-1].set(0).sum(axis=1), told)  # of the last stage, by one all-reduce
    outputs: Any = told.pop("outputs")
    drawn = settings.layout.constrain_rows(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs.drawn()))
    return finish(samples_of(prompts, settings.sampling, settings.layout), drawn, settings.layout), told


def state_shardings(state: BatchState, layout: Layout) -> Any:
    """The shardings of a state in a layout: leading axes over row shards and stages, heads over `tensor`.

    Args:
        state: A state, or its shapes.
    """
    spec = _of_state(layout)
    whole, of_heads = (NamedSharding(layout.mesh, each) for each in (spec, PartitionSpec(*spec, None, TENSOR)))

    def of_cache(x: Any) -> NamedSharding:
        return of_heads if len(x.shape) - len(spec) > 1 else whole  # keys and values, or numbers of rows

    shardings = jax.tree.map(lambda _: whole, state)
    return shardings.replace(caches=jax.tree.map(of_cache, state.caches))


def take_rows(state: BatchState, sequence_DM: Int[Array, "D M"]) -> tuple[BatchState, MovedRows]:
    """Frees the slots of some sequences, which are to go on elsewhere.

    Args:
        sequence_DM: The places of the sequences among those of their row shard, different ones. One that waits for a
            slot goes on waiting in the state that it is in; what is taken of it has no tokens and stays `RUNNING`.
    """
    take = _take_from_stage if len(state.caches) == 1 else jax.vmap(_take_from_stage, in_axes=(0, None))
    return jax.vmap(take)(state, sequence_DM)


def _take_from_stage(state: BatchState, sequence_M: Int[Array, " M"]) -> tuple[BatchState, MovedRows]:
    N, caches, rows, found, is_running_M = len(state.outputs.lengths), [], [], None, jnp.zeros(sequence_M.shape, bool)
    for cache, of_slots in zip(state.caches, state.rows, strict=True):  # without stages there is one
        S = len(of_slots.sequence)
        slot_M = jnp.full(N, S).at[of_slots.sequence].set(jnp.arange(S), mode="drop")[sequence_M]
        left_S = jnp.zeros(S, bool).at[slot_M].set(True, mode="drop")
        caches.append(cache.free(left_S))
        rows.append(of_slots.replace(sequence=jnp.where(left_S, N, of_slots.sequence)))
        here = cache.of_rows(slot_M), jax.tree.map(lambda x, slot_M=slot_M: x[slot_M], of_slots)
        is_here_M = slot_M < S
        found = here if found is None else jax.tree.map(functools.partial(_choose, is_here_M), here, found)
        is_running_M |= is_here_M
    assert found is not None
    outputs = jax.tree.map(lambda x: x[sequence_M], state.outputs)
    moved = MovedRows(cache=found[0], rows=found[1], outputs=outputs, is_running=is_running_M)
    return state.replace(caches=caches, rows=rows), moved


def _choose(first_M: Bool[Array, " M"], one: jax.Array, other: jax.Array) -> jax.Array:
    """Some rows of one array, and the rest of another."""
    return jnp.where(first_M.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def resume_rows(moved: MovedRows, settings: RolloutSettings) -> BatchState:
    """A state in which the rows of each row shard are in slots, and no prompt waits. Its prompts are those of the rows,
    as `samples_of` gives them, and it samples once from each.

    Args:
        moved: Over stages, of as many as the layout has.

    Raises:
        ValueError: There are fewer slots than rows, or `num_samples` is not 1.
    """
    S, M, G = settings.slots.slots, moved.is_running.shape[-1], settings.layout.strategy.pipeline
    require(S >= M, "slots", "must be at least the rows that move to each row shard", S, f"Use {M} or more.")
    n = settings.sampling.num_samples
    require(n == 1, "num_samples", "must be 1 for rows that move, each of which is a sample", n)

    def on_stage(moved: MovedRows, stage: jax.Array) -> BatchState:
        """The rows of micro-batch m are at place m + stage, as in `pipelined_slots`."""
        every = jax.tree.map(
            lambda x: jnp.pad(x, ((0, S - M), *((0, 0),) * (x.ndim - 1))), (moved.cache, moved.rows, moved.is_running)
        )
        every, caches, rows = (*every, jnp.arange(S, dtype=jnp.int32)), [], []
        for place in range(G):
            first = (place - stage) % G * (S // G)
            cache, of_slots, is_running, number = jax.tree.map(
                lambda x, first=first: jax.lax.dynamic_slice_in_dim(x, first, S // G), every
            )
            caches.append(cache.joined().free(~is_running))
            rows.append(of_slots.replace(sequence=jnp.where(is_running, number, M)))
        none = jnp.zeros((), jnp.int32)
        return BatchState(caches, rows, moved.outputs, head=jnp.full((), M, jnp.int32), rounds=none, groups=none)

    if G == 1:
        return _placed(jax.vmap(lambda moved: on_stage(moved, jnp.int32(0)))(moved), settings.layout)
    each = jax.vmap(lambda moved: jax.vmap(on_stage)(moved, jnp.arange(G)))
    return _placed(each(moved), settings.layout)


def of_row_shard(settings: RolloutSettings) -> RolloutSettings:
    """The settings of the program of a row shard, or of a stage of it, where slots are those of a micro-batch."""
    stages = settings.layout.strategy.pipeline
    settings.slots.require_room(settings.sampling.num_samples, stages)
    each = {name: getattr(settings.slots, name) // stages for name in ("slots", "shared_prompts")}
    slots = dataclasses.replace(settings.slots, **each)
    return dataclasses.replace(settings, slots=slots, layout=settings.layout.inside_gathered_row_shards())


def _of_state(layout: Layout) -> PartitionSpec:
    """How the leading axes of a state are split."""
    return PartitionSpec(BATCH_AXES, PIPELINE) if layout.is_pipelined else _ROWS


def _lead(tree: Any, spec: PartitionSpec) -> Any:
    """Arrays with these axes before their own, of one row shard and one stage."""
    return jax.tree.map(lambda x: x.reshape((1,) * len(spec) + x.shape), tree)


def _placed(state: Any, layout: Layout) -> Any:
    """A state that lies as it is to lie whenever it goes on."""
    return jax.lax.with_sharding_constraint(state, state_shardings(state, layout))
