"""Continuous batching over stages: the slots of `continuous_batching`, in the ring of `pipelined_generation`.

Letters: G stages and as many micro-batches, S slots of a micro-batch, N sequences of a row shard, n samples of each
prompt, g prompts of a group, P prompt columns, D hidden size.

The slots of a row shard are parted into G micro-batches. They are refilled while the ring stands still: a group for
each micro-batch goes through the stages, and every stage lays down the keys and values of its own layers. Then the ring
turns for `steps` tokens of every micro-batch, and empties: G - 1 ticks in which it is not full. Only the last stage
draws; at the end of the turns it tells the others which tokens are newest and which slots are free. So all stages
decide alike what enters next.

Micro-batch m is at place (m + i) mod G of stage i, as in `pipelined_generation`. What decides the bits of a sequence is
the number of slots of a micro-batch and the width of a group, as without stages.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from jaxrlhf.experience import Prompts
from jaxrlhf.generation.continuous_batching import (
    BatchState,
    FreePlaces,
    Group,
    Outputs,
    Queue,
    RolloutSettings,
    SlotRows,
    Until,
    draw_in_slots,
    enter,
    free_places,
    goes_on,
    next_group,
    num_prompts,
    room_for_prompts,
    wanted_together,
)
from jaxrlhf.generation.generate import prepare
from jaxrlhf.generation.pipelined_generation import decode_on_stage, layers_on_stage, prefill_by_stages, send_on
from jaxrlhf.generation.sampling import History
from jaxrlhf.models.heads import logits
from jaxrlhf.models.params import Params
from jaxrlhf.models.transformer import KeysValues, chunk_layers, embed, empty_keys_values, normalize
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE


def advance(
    params: Params,
    queue: Queue,
    state: BatchState,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    settings: RolloutSettings,
    until: Until,
) -> BatchState:
    """The program of a stage of a row shard, as `continuous_batching.advance`. Row shards go on together, until the
    last of them stops.

    Args:
        params: Of the stage, as `ring_params` gives them.
        settings: With the slots of a micro-batch.
    """
    sampling, slots, config, layout = settings.sampling, settings.slots, settings.config, settings.layout
    G, stage = layout.strategy.pipeline, jax.lax.axis_index(PIPELINE)
    is_last = stage == G - 1
    layers = jax.tree.map(lambda x: x.reshape(x.shape[1:]), params["layers"])  # without the axis of stages, here of one
    params = prepare({**params, "layers": layers}, config, layout)
    N, size, started = len(queue.id), slots.prefill_tokens, state.rounds

    def free(state: BatchState) -> FreePlaces:
        return _by_micro_batch([free_places(state, place) for place in range(G)], stage)

    def another(state: BatchState) -> jax.Array:
        return _any_shard(goes_on(state, queue, settings, until, started=started))

    def room(state: BatchState) -> jax.Array:
        return jax.vmap(lambda each: room_for_prompts(each, settings))(free(state))

    def has_room(state: BatchState) -> jax.Array:
        waiting = num_prompts(queue, slots) - state.head
        wanted = jnp.minimum(waiting, G * wanted_together(settings))
        return _any_shard((waiting > 0) & (room(state).sum() >= wanted))

    def prefill(groups: Group) -> KeysValues:
        if 0 < size < queue.tokens.shape[1]:
            return _prefill_in_chunks(params, groups, size, stage, settings)
        mask_GgP = jax.vmap(lambda group: group.mask)(groups)
        none = jnp.zeros(mask_GgP.shape[:2], jnp.int32)
        given = Prompts(tokens=groups.tokens, mask=mask_GgP, row=none, id=none.astype(jnp.uint32))
        return prefill_by_stages(params, given, stage, config, layout)[0]

    def admit(state: BatchState) -> BatchState:
        """A group for each micro-batch, one after the other in the queue, as far as there is room."""
        room_G, last = room(state), num_prompts(queue, slots)
        first_G = jnp.minimum(state.head + jnp.cumsum(room_G) - room_G, last)
        entering_G = jnp.minimum(room_G, last - first_G)
        groups: Group = jax.vmap(functools.partial(next_group, queue, settings))(free(state), first_G, entering_G)
        keys_values = prefill(groups)
        caches, rows = [], []
        for place, group in enumerate(_by_place(groups, stage, G)):
            own = [(k[place], v[place]) for k, v in keys_values]
            caches.append(state.caches[place].enter(group.slot, group.entry, own, group.length - 1, layout))
            rows.append(enter(state.rows[place], group, queue, settings))
        head = state.head + entering_G.sum()
        return state.replace(caches=caches, rows=rows, head=head, groups=state.groups + G)

    def draw(x_SD: jax.Array, rows: SlotRows, outputs: Outputs) -> tuple[jax.Array, SlotRows, Outputs]:
        normed_SD = normalize(params, x_SD, config, layout)
        logits_SV = layout.activation(logits(params, normed_SD, config, layout), ("batch", "choices"))
        rows, outputs = draw_in_slots(rows, outputs, logits_SV, noise, temperature, sampling)
        return embed(params, rows.newest, config, layout), rows, outputs

    def turn(state: BatchState) -> BatchState:
        """`slots.steps` tokens of every micro-batch, and as many ticks more as it takes for the ring to be empty."""
        newest_GS = _by_micro_batch([rows.newest for rows in state.rows], stage)
        first_GSD = [embed(params, newest_GS[m], config, layout) for m in range(G)]

        def once(number: jax.Array, carry: Any) -> Any:
            message_SD, caches, rows, outputs = carry
            caches, rows = list(caches), list(rows)
            for tick in range(G):
                since = number * G + tick - stage
                serves = (since >= 0) & (since < slots.steps * G)
                x_SD = jnp.where((stage == 0) & (number == 0), first_GSD[tick], message_SD)
                x_SD, caches[tick] = decode_on_stage(params, x_SD, caches[tick], serves, stage, config, layout)
                x_SD, rows[tick], outputs = jax.lax.cond(
                    serves & is_last, draw, lambda *given: given, x_SD, rows[tick], outputs
                )
                message_SD = send_on(x_SD, G)
            return message_SD, caches, rows, outputs

        carry = (jnp.zeros_like(first_GSD[0]), state.caches, state.rows, state.outputs)
        _, caches, rows, outputs = jax.lax.fori_loop(0, slots.steps + 1, once, carry)
        known = [each.replace(history=History(None, None)) for each in rows]
        told = _by_place(_from_last(_by_micro_batch(known, stage), is_last), stage, G)
        rows = [new.replace(history=each.history) for new, each in zip(told, rows, strict=True)]
        caches = [cache.free(each.sequence == N) for cache, each in zip(caches, rows, strict=True)]
        return state.replace(caches=caches, rows=rows, outputs=outputs, rounds=state.rounds + 1)

    def one_round(state: BatchState) -> BatchState:
        with jax.named_scope("prefill"):
            state = jax.lax.while_loop(has_room, admit, state)
        with jax.named_scope("decode"):
            return turn(state)

    return jax.lax.while_loop(another, one_round, state)


def _prefill_in_chunks(
    params: Params, groups: Group, size: int, stage: jax.Array, settings: RolloutSettings
) -> KeysValues:
    """`transformer.prefill_in_chunks` of a group for each micro-batch, whose chunks follow one another through the
    stages. Keys and values are those of the stage's layers, [places, g, P', K, h]."""
    config, layout = settings.config, settings.layout
    G, g, P = groups.tokens.shape
    chunks = math.ceil(P / size)
    tokens_GgP = jnp.pad(groups.tokens, ((0, 0), (0, 0), (0, chunks * size - P)))
    empty = empty_keys_values((G, g), chunks * size, len(params["layers"]), config, layout)

    def run(layers: Any, x_gCD: jax.Array, before: KeysValues, first: jax.Array) -> tuple[jax.Array, KeysValues]:
        return chunk_layers(layers, x_gCD, before, first, config, layout)

    def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
        message_gCD, stored = carry
        number = jnp.clip(t - stage, 0, G * chunks - 1)
        m, first = number // chunks, number % chunks * size
        serves = (number == t - stage) & (first < groups.length[m].max())
        tokens_gC = jax.lax.dynamic_slice(tokens_GgP, (m, 0, first), (1, g, size))[0]
        x_gCD = jax.lax.cond(
            stage == 0, lambda x, tokens: embed(params, tokens, config, layout), lambda x, _: x, message_gCD, tokens_gC
        )
        place, new = (m + stage) % G, []
        for layers, has_them in layers_on_stage(params, stage, config, layout):
            runs = serves if has_them is None else serves & has_them
            before = [(k[place], v[place]) for k, v in stored[len(new) : len(new) + len(layers)]]
            x_gCD, after = jax.lax.cond(runs, run, lambda _, x, before, __: (x, before), layers, x_gCD, before, first)
            new += after
        stored = jax.tree.map(lambda s, x: s.at[place].set(x), stored, new)
        return (send_on(x_gCD, G), stored), None

    message_gCD = layout.activation(
        jnp.zeros((g, size, config.hidden_size), config.compute_dtype), ("batch", "length", "embed")
    )
    (_, stored), _ = jax.lax.scan(tick, (message_gCD, empty), jnp.arange(G * chunks + G - 1))
    return stored


def _by_micro_batch(every_place: Any, stage: jax.Array) -> Any:
    """What a stage has at each place -> the same in the order of micro-batches, stacked."""
    G = len(every_place)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *every_place)
    return jax.tree.map(lambda x: x[(jnp.arange(G) + stage) % G], stacked)


def _by_place(every_micro_batch: Any, stage: jax.Array, num_stages: int) -> list[Any]:
    """The inverse of `_by_micro_batch`."""
    places = range(num_stages)
    return [jax.tree.map(lambda x, m=(place - stage) % num_stages: x[m], every_micro_batch) for place in places]


def _from_last(tree: Any, is_last: jax.Array) -> Any:
    """What the last stage has, on all of them."""
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), PIPELINE), tree)


def _any_shard(condition: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether it is so in any row shard. All take part in each other's messages between stages, so they go on
    together."""
    with jax.named_scope("is_running"):
        return jax.lax.psum(condition.astype(jnp.int32), BATCH_AXES) > 0
