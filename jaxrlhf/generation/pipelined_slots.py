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

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.continuous_batching import (
    Group,
    Outputs,
    SlotRows,
    Slots,
    draw_in_slots,
    enter,
    make_queue,
    next_group,
    num_prompts,
    room_for_prompts,
    wanted_together,
)
from jaxrlhf.generation.generate import Drawn, finish, prepare, samples_of
from jaxrlhf.generation.pipelined_generation import decode_on_stage, prefill_by_stages, send_on
from jaxrlhf.generation.sampling import History
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import SlotCache, copies
from jaxrlhf.models.params import Params
from jaxrlhf.models.transformer import embed, normalize
from jaxrlhf.require import require
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE
from jaxrlhf.sharding.layout import Layout


class RingState(struct.PyTreeNode):
    """What a stage needs to go on."""

    caches: list[SlotCache]
    """[place] Of the stage's layers."""
    rows: list[SlotRows]
    """[place] While the ring turns, only those of the last stage follow."""
    outputs: Outputs
    """Of the last stage."""
    head: Int[Array, ""]
    """The next prompt to enter."""


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
    """The rollout of `continuous_batching.generate_in_slots`, over the stages of a pipelined layout.

    Args:
        params: From `ring_params`.
        slots: Of a row shard. They divide by the number of stages.

    Raises:
        ValueError: They do not, or a micro-batch has fewer slots than there are samples of a prompt.
    """
    G, n = layout.strategy.pipeline, sampling.num_samples
    assert layout.is_pipelined and layout.strategy.chunks == 1
    require(slots.slots % G == 0, "slots", f"must be a multiple of the {G} stages", slots.slots)
    require(slots.slots // G >= n, "slots", f"must be at least num_samples={n} for each of {G} stages", slots.slots)
    require(not slots.prefill_tokens, "prefill_tokens", "must be 0 over stages", slots.prefill_tokens)
    within = layout.inside_gathered_row_shards()
    rows, whole, of_stages = PartitionSpec(BATCH_AXES), PartitionSpec(), PartitionSpec(PIPELINE)
    ring = jax.shard_map(
        functools.partial(
            _ring,
            sampling=sampling,
            slots=dataclasses.replace(slots, slots=slots.slots // G),
            config=config,
            layout=within,
        ),
        mesh=layout.mesh,
        in_specs=({**dict.fromkeys(params, whole), "layers": of_stages}, rows, whole, whole),
        out_specs=rows,
        axis_names=within.manual_axes,
        check_vma=False,
    )
    responses = ring(params, prompts, noise, temperature)
    return finish(samples_of(prompts, sampling, layout), responses, layout)


def _ring(
    params: Params,
    prompts: Prompts,
    noise: jax.Array,
    temperature: jax.Array,
    *,
    sampling: Sampling,
    slots: Slots,
    config: ModelConfig,
    layout: Layout,
) -> Drawn:
    """The program of a stage of a row shard. `slots`: of a micro-batch."""
    G, stage = layout.strategy.pipeline, jax.lax.axis_index(PIPELINE)
    is_last = stage == G - 1
    layers = jax.tree.map(lambda x: x.reshape(x.shape[1:]), params["layers"])  # without the axis of stages, here of one
    params = prepare({**params, "layers": layers}, config, layout)
    queue = make_queue(prompts, sampling, slots)
    N, columns = len(queue.id), queue.tokens.shape[1] + sampling.max_new_tokens - 1
    of_stage = dataclasses.replace(config, num_layers=len(layers))

    def sequences(state: RingState) -> jax.Array:
        return _by_micro_batch([rows.sequence for rows in state.rows], stage)

    def goes_on(state: RingState) -> jax.Array:
        return _any_shard((state.head < num_prompts(queue, slots)) | (sequences(state) < N).any())

    def room(state: RingState) -> jax.Array:
        return jax.vmap(lambda each: room_for_prompts(each, N, sampling, slots))(sequences(state))

    def has_room(state: RingState) -> jax.Array:
        waiting = num_prompts(queue, slots) - state.head
        wanted = jnp.minimum(waiting, G * wanted_together(sampling, slots))
        return _any_shard((waiting > 0) & (room(state).sum() >= wanted))

    def admit(state: RingState) -> RingState:
        """A group for each micro-batch, one after the other in the queue, as far as there is room."""
        room_G, last = room(state), num_prompts(queue, slots)
        first_G = jnp.minimum(state.head + jnp.cumsum(room_G) - room_G, last)
        entering_G = jnp.minimum(room_G, last - first_G)
        pick = functools.partial(next_group, queue, sampling=sampling, slots=slots)
        groups: Group = jax.vmap(pick)(sequences(state), first_G, entering_G)
        mask_GgP = jax.vmap(lambda group: group.mask)(groups)
        none = jnp.zeros(mask_GgP.shape[:2], jnp.int32)
        given = Prompts(tokens=groups.tokens, mask=mask_GgP, row=none, id=none.astype(jnp.uint32))
        keys_values, _ = prefill_by_stages(params, given, stage, config, layout)
        caches, rows = [], []
        for place, group in enumerate(_by_place(groups, stage, G)):
            n = sampling.num_samples
            samples = [(copies(k[place], n), copies(v[place], n)) for k, v in keys_values]
            length = copies(group.length, n) - 1
            caches.append(state.caches[place].enter(group.slot, samples, length, layout))
            rows.append(enter(state.rows[place], group, queue, sampling, config, layout))
        return state.replace(caches=caches, rows=rows, head=state.head + entering_G.sum())

    def draw(x_SD: jax.Array, rows: SlotRows, outputs: Outputs) -> tuple[jax.Array, SlotRows, Outputs]:
        normed_SD = normalize(params, x_SD, config, layout)
        logits_SV = layout.activation(logits(params, normed_SD, config, layout), ("batch", "choices"))
        rows, outputs = draw_in_slots(rows, outputs, logits_SV, noise, temperature, sampling)
        return embed(params, rows.newest, config, layout), rows, outputs

    def turn(state: RingState) -> RingState:
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
        caches = [
            cache.replace(length=jnp.where(each.sequence == N, 0, cache.length))
            for cache, each in zip(caches, rows, strict=True)
        ]
        return state.replace(caches=caches, rows=rows, outputs=outputs)

    def one_round(state: RingState) -> RingState:
        with jax.named_scope("prefill"):
            state = jax.lax.while_loop(has_room, admit, state)
        with jax.named_scope("decode"):
            return turn(state)

    state = RingState(
        caches=[SlotCache.empty(slots.slots, columns, of_stage, layout) for _ in range(G)],
        rows=[SlotRows.empty(slots.slots, N, sampling, config, layout) for _ in range(G)],
        outputs=Outputs.empty(N, sampling.max_new_tokens),
        head=jnp.zeros((), jnp.int32),
    )
    outputs = jax.lax.while_loop(goes_on, one_round, state).outputs
    with jax.named_scope("share_responses"):
        return _from_last(outputs, is_last).drawn()


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
