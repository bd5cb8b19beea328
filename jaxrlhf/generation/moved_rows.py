"""Sequences that leave the slots of a state and go on in those of another, as many to a row shard.

Letters: D row shards, M rows that move, S slots, N sequences of a row shard.

    state, moved = take_rows(state, sequences)      # moved may be parted and joined along its axes, and put elsewhere
    other = resume_rows(moved, settings)

Tokens and log-probabilities have the bits that they would have had in the first state.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxrlhf.generation.continuous_batching import BatchState, Outputs, SlotRows
from jaxrlhf.generation.generate import placed
from jaxrlhf.generation.rollout_settings import RolloutSettings
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.require import require


class MovedRows(struct.PyTreeNode):
    """Sequences on their way to other slots."""

    cache: KVCache | None
    """[D, M, ...]; over stages this and all others have a second axis, of the stages. None on the way of sequences that
    move as tokens (`migration`)."""
    rows: SlotRows
    outputs: Outputs
    is_running: Bool[Array, "D M"]
    """In slots. The others need none."""


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
    as `samples_of` gives them, and it samples once from each. `moved`: from a state in slots; over stages, of as many
    as the layout has. Raises ValueError if there are fewer slots than rows, or `num_samples` is not 1."""
    S, M, G = settings.slots.slots, moved.is_running.shape[-1], settings.layout.strategy.pipeline
    require(S >= M, "slots", "must be at least the rows that move to each row shard", S, f"Use {M} or more.")
    n = settings.sampling.num_samples
    require(n == 1, "num_samples", "must be 1 for rows that move, each of which is a sample", n)

    def on_stage(moved: MovedRows, stage: jax.Array) -> BatchState:
        """The rows of micro-batch m are at place m + stage, as in `pipelined_batching`."""
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
        return placed(jax.vmap(lambda moved: on_stage(moved, jnp.int32(0)))(moved), settings.layout)
    each = jax.vmap(lambda moved: jax.vmap(on_stage)(moved, jnp.arange(G)))
    return placed(each(moved), settings.layout)
