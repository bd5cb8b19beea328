"""Migration of sequences between generations: from the row shards of some layouts to those of another one.

Letters: M sequences, D row shards, G stages, P prompt columns, R the most new tokens.

    leaving = leave(state, prompts, sequence_DM, position_DM, settings, with_cache=True)   # in each layout
    leaving = reallocate(leaving, migration_shardings(leaving, tail))
    prompts, position_DM, state = arrive([leaving, ...], params, settings)                 # in that of the tail

A sequence moves with its keys and values, or as tokens alone, whose keys and values are computed anew where it goes on.
Either way it keeps its tokens, log-probabilities and noise, and the tokens to come differ by rounding alone.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, section 4.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxrlhf.experience import Prompts
from jaxrlhf.generation.continuous_batching import BatchState, Outputs
from jaxrlhf.generation.generate import over_row_shards, samples_of
from jaxrlhf.generation.moved_rows import MovedRows, resume_rows, take_rows
from jaxrlhf.generation.rollout_settings import RolloutSettings
from jaxrlhf.models.architecture import computed
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.models.params import Params
from jaxrlhf.models.transformer import embed, run_layers
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE, TENSOR
from jaxrlhf.sharding.layout import Layout


class Leaving(struct.PyTreeNode):
    """Sequences on their way, one a row."""

    prompts: Prompts
    """Of each sequence, with the id of the sequence."""
    position: Int[Array, " M"]
    """Its place among all sequences of the call."""
    moved: MovedRows
    """[M, ...]; with a cache over stages [M, G, ...]. The cache is None for sequences that move as tokens."""


def leave(
    state: BatchState,
    prompts: Prompts,
    sequence_DM: Int[Array, "D M"],
    position_DM: Int[Array, "D M"],
    settings: RolloutSettings,
    *,
    with_cache: bool,
) -> Leaving:
    """Takes sequences out of a state in slots, in which no prompt waits, with each key-value head once. `sequence_DM`:
    as for `take_rows`."""
    _, moved = take_rows(state, sequence_DM)
    moved = moved.replace(cache=_on_heads(lambda x: x[..., :: _times(settings), :, :], moved.cache))
    over_stages = settings.layout.is_pipelined
    if not with_cache:
        moved = moved.replace(cache=None)
        moved = jax.tree.map(lambda x: x[:, -1], moved) if over_stages else moved  # the last stage draws
    elif over_stages:
        moved = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), moved)
    samples, D = samples_of(prompts, settings.sampling, settings.layout), len(sequence_DM)
    by_shard = jax.tree.map(lambda x: x.reshape(D, -1, *x.shape[1:]), samples.replace(expected_tokens=None))
    own = jax.tree.map(lambda x: jax.vmap(lambda x_N, i_M: x_N[i_M])(x, sequence_DM), by_shard)
    every = Leaving(own, position_DM, moved)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), every)


def migration_shardings(leaving: Any, layout: Layout) -> Any:
    """The shardings of `Leaving` in a layout: rows over row shards and heads over `tensor` if they divide, caches over
    stages too. `leaving`: arrays or their shapes."""
    M = leaving.position.shape[0]
    rows = BATCH_AXES if M % layout.strategy.num_row_shards == 0 else None
    over_stages = layout.is_pipelined and leaving.moved.cache is not None

    def of(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(layout.mesh, spec)

    lead = PartitionSpec(rows, PIPELINE) if over_stages else PartitionSpec(rows)

    def of_cache(x: Any) -> NamedSharding:
        has_heads = len(x.shape) - len(lead) > 1
        divides = has_heads and x.shape[len(lead)] % layout.strategy.tensor == 0
        return of(PartitionSpec(*lead, TENSOR)) if divides else of(lead)

    shardings = jax.tree.map(lambda _: of(PartitionSpec(rows)), leaving)
    moved = jax.tree.map(lambda _: of(lead), leaving.moved)
    return shardings.replace(moved=moved.replace(cache=jax.tree.map(of_cache, leaving.moved.cache)))


def arrive(
    leaving: list[Leaving], params: Params, settings: RolloutSettings
) -> tuple[Prompts, Int[Array, "D M"], BatchState]:
    """The prompts, places and state of sequences that go on in the slots of a layout, as many on each row shard.

    Args:
        leaving: Of each layout that they left; together a multiple of the row shards. With caches, of layouts with as
            many stages.
        params: As `prepare` gives them.
        settings: One sample of each prompt, and slots for all of them.
    """
    every: Leaving = jax.tree.map(lambda *x: jnp.concatenate(x), *leaving)
    layout, D = settings.layout, settings.layout.strategy.num_row_shards
    prompts, moved = layout.constrain_rows(every.prompts), every.moved
    by_shard = jax.tree.map(lambda x: x.reshape(D, -1, *x.shape[1:]), moved)
    repeated = functools.partial(jnp.repeat, repeats=_times(settings), axis=-3)
    by_shard = by_shard.replace(cache=_on_heads(repeated, by_shard.cache))
    if moved.cache is None:
        prefilled = over_row_shards(functools.partial(_prefilled, settings=settings), settings)
        cache = prefilled(params, (prompts, moved.outputs))
        by_shard = by_shard.replace(cache=cache)
    elif layout.is_pipelined:
        by_shard = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), by_shard)
    return prompts, every.position.reshape(D, -1), resume_rows(by_shard, settings)


def _times(settings: RolloutSettings) -> int:
    """Copies of each key-value head in the caches of a layout."""
    config = settings.config
    return computed(config, settings.layout.strategy.tensor).num_kv_heads // config.num_kv_heads


def _on_heads(function: Callable[[jax.Array], jax.Array], cache: KVCache | None) -> KVCache | None:
    """A function over the keys and values of a cache and its prompts, whose third last dim is heads."""
    if cache is None:
        return None

    def over(tree: Any) -> Any:
        return jax.tree.map(function, tree)

    prompts = cache.prompts
    if prompts is not None:
        prompts = prompts.replace(keys=over(prompts.keys), values=over(prompts.values))
    return cache.replace(keys=over(cache.keys), values=over(cache.values), prompts=prompts)


def _prefilled(params: Params, given: tuple[Prompts, Outputs], settings: RolloutSettings) -> KVCache:
    """The cache of a row shard whose rows are those of prompts with their responses so far, but the newest token."""
    (prompts, outputs), config = given, settings.config
    layout, g = settings.layout.inside_gathered_row_shards(), settings.slots.prefill_rows
    (M, P), R = prompts.tokens.shape, settings.sampling.max_new_tokens
    length_M = prompts.mask.sum(axis=1).astype(jnp.int32)
    column_T = jnp.arange(P + R - 1)
    from_left = jnp.minimum(P - length_M[:, None] + column_T[None, :], P - 1)
    of_response = jnp.clip(column_T[None, :] - length_M[:, None], 0, R - 1)
    tokens_MT = jnp.where(
        column_T[None, :] < length_M[:, None],
        jnp.take_along_axis(prompts.tokens, from_left, axis=1),
        jnp.take_along_axis(outputs.words[..., 0], of_response, axis=1),
    )
    used_M = length_M + outputs.lengths - 1
    groups = -(-M // g)
    tokens_MT = jnp.pad(tokens_MT, ((0, groups * g - M), (0, 0)))
    padded_M = jnp.pad(used_M, (0, groups * g - M), constant_values=1)

    def group(number: Int[Array, ""], cache: KVCache) -> KVCache:
        rows_g = number * g + jnp.arange(g)
        tokens_gT, used_g = tokens_MT[rows_g], padded_M[rows_g]
        x_gTD = embed(params, tokens_gT, config, layout)
        mask_gT = column_T[None, :] < jnp.maximum(used_g, 1)[:, None]
        _, keys_values = run_layers(params["layers"], x_gTD, mask_gT, config, layout, wanted=P + R - 2)
        return cache.enter(rows_g, jnp.zeros(g, jnp.int32), keys_values, used_g, layout)

    return jax.lax.fori_loop(0, groups, group, KVCache.empty(M, P + R - 1, config, layout))
