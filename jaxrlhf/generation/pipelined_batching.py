"""Continuous batching over the stages of a pipeline, whose micro-batches go round and round in one program.

Letters: G stages and as many micro-batches, S slots of a micro-batch, N sequences of a row shard, n samples of each
prompt, g prompts of a group, P prompt columns, D hidden size, K key-value heads, h head size.

    tick        0    1    2    3    4    5
    stage 0    m0   m1   m2   m0   m1   m2
    stage 1     .   m0   m1   m2   m0   m1
    stage 2     .    .   m0   m1   m2   m0     draws a token, and sends its embedding to stage 0

At tick t stage i serves micro-batch (t - i) mod G, and hands one hidden state a row to the next stage. The last stage
draws a token and embeds it, so that all messages have one shape. G ticks are a token of every sequence.

Stage i has micro-batch m at place (m + i) mod G. So at tick t all stages use place t mod G: a constant of the program,
in which every cache is an array by itself and is updated where it lies.

The slots of a row shard are parted into G micro-batches. They are refilled while the ring stands still: a group for
each micro-batch goes through the stages, and every stage lays down the keys and values of its own layers. Then the ring
turns for `steps` tokens of every micro-batch, and empties: G - 1 ticks in which it is not full. Only the last stage
draws; at the end of the turns it tells the others which tokens are newest and which slots are free. So all stages
decide alike what enters next. Where all sequences enter at once, the ring turns until all have ended, or the cache is
to grow.

What decides the bits of a sequence is the number of slots of a micro-batch and the width of a group, as without stages.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.generation.continuous_batching import (
    BatchState,
    FreePlaces,
    Group,
    Outputs,
    Queue,
    SlotRows,
    draw_in_slots,
    enter,
    free_places,
    free_state,
    goes_on,
    next_group,
    noise_of_outputs,
    num_prompts,
    room_for_prompts,
    wanted_together,
)
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.rollout_settings import RolloutSettings, Until
from jaxrlhf.generation.sampling import History
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import KVCache
from jaxrlhf.models.layers import LayerWeights
from jaxrlhf.models.params import Params
from jaxrlhf.models.spans import spans_on_stage
from jaxrlhf.models.transformer import (
    KeysValues,
    chunk_layers,
    decode_layers,
    embed,
    empty_keys_values,
    normalize,
    run_layers,
)
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.stage_layers import layers_of_stages


def on_device(params: Params, settings: RolloutSettings) -> Params:
    """The weights of a stage, ready for use, from those that `ring_params` gives."""
    layers = jax.tree.map(lambda x: x.reshape(x.shape[1:]), params["layers"])  # without the axis of stages, here of one
    return prepare({**params, "layers": layers}, settings.config, settings.layout)


def begin(params: Params, queue: Queue, settings: RolloutSettings) -> BatchState:
    """The state of a stage of a row shard, as `continuous_batching.begin`."""
    state = free_state(queue, settings)
    return _admit(params, queue, state, settings) if settings.slots.at_once else state


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
        params: Of the stage, as `on_device` gives them.
        settings: With the slots of a micro-batch.
        until: Of all rows at once, its rounds alone count.
    """
    sampling, slots, config, layout = settings.sampling, settings.slots, settings.config, settings.layout
    G, stage, N, started = layout.strategy.pipeline, jax.lax.axis_index(PIPELINE), len(queue.id), state.rounds
    is_last, uniform_NR = stage == G - 1, noise_of_outputs(noise, queue, settings)

    def has_room(state: BatchState) -> jax.Array:
        waiting = num_prompts(queue, slots) - state.head
        wanted = jnp.minimum(waiting, G * wanted_together(settings))
        return _anywhere((waiting > 0) & (_room(_free(state, stage), settings).sum() >= wanted))

    def draw(x_SD: jax.Array, rows: SlotRows, outputs: Outputs) -> tuple[jax.Array, SlotRows, Outputs]:
        normed_SD = normalize(params, x_SD, config, layout)
        logits_SV = layout.activation(logits(params, normed_SD, config, layout), ("batch", "choices"))
        rows, outputs = draw_in_slots(rows, outputs, logits_SV, uniform_NR, temperature, sampling)
        return embed(params, rows.newest, config, layout), rows, outputs

    def turn(state: BatchState, tokens: Int[Array, ""] | int) -> BatchState:
        """So many tokens of every micro-batch, and as many ticks more as it takes for the ring to be empty."""
        newest_GS = _by_micro_batch([rows.newest for rows in state.rows], stage)
        first_GSD = [embed(params, newest_GS[m], config, layout) for m in range(G)]

        def once(carry: Any) -> Any:
            number, _, message_SD, caches, rows, outputs = carry
            caches, rows = list(caches), list(rows)
            for tick in range(G):
                since = number * G + tick - stage
                serves = (since >= 0) & (since < tokens * G)
                x_SD = jnp.where((stage == 0) & (number == 0), first_GSD[tick], message_SD)
                x_SD, caches[tick] = _decode_on_stage(params, x_SD, caches[tick], serves, stage, config, layout)
                x_SD, rows[tick], outputs = jax.lax.cond(
                    serves & is_last, draw, lambda *given: given, x_SD, rows[tick], outputs
                )
                message_SD = send_on(x_SD, G)
            running = jnp.stack([each.sequence < N for each in rows]).any() & is_last if slots.at_once else True
            return number + 1, running, message_SD, caches, rows, outputs

        none = jnp.int32(0), jnp.bool(True), jnp.zeros_like(first_GSD[0])
        carry = (*none, state.caches, state.rows, state.outputs)
        if slots.at_once:
            carry = jax.lax.while_loop(lambda carry: (carry[0] <= tokens) & _anywhere(carry[1], PIPELINE), once, carry)
        else:
            carry = jax.lax.fori_loop(0, slots.steps + 1, lambda _, carry: once(carry), carry)
        number, _, _, caches, rows, outputs = carry
        known = [each.replace(history=History(None, None)) for each in rows]
        told = _by_place(_from_last(_by_micro_batch(known, stage), is_last), stage, G)
        rows = [new.replace(history=each.history) for new, each in zip(told, rows, strict=True)]
        caches = [cache.free(each.sequence == N) for cache, each in zip(caches, rows, strict=True)]
        turned = jnp.minimum(number, tokens) if slots.at_once else 1
        return state.replace(caches=caches, rows=rows, outputs=outputs, rounds=state.rounds + turned)

    if slots.at_once:
        with jax.named_scope("decode"):
            assert until.rounds is not None
            return turn(state, until.rounds)

    def one_round(state: BatchState) -> BatchState:
        with jax.named_scope("prefill"):
            state = jax.lax.while_loop(has_room, lambda state: _admit(params, queue, state, settings), state)
        with jax.named_scope("decode"):
            return turn(state, slots.steps)

    def another(state: BatchState) -> jax.Array:
        return _anywhere(goes_on(state, queue, settings, until, started=started))

    return jax.lax.while_loop(another, one_round, state)


def _free(state: BatchState, stage: jax.Array) -> FreePlaces:
    """The free places of every micro-batch, [G, ...]."""
    return _by_micro_batch([free_places(state, place) for place in range(len(state.rows))], stage)


def _room(free: FreePlaces, settings: RolloutSettings) -> Int[Array, " G"]:
    return jax.vmap(lambda each: room_for_prompts(each, settings))(free)


def _admit(params: Params, queue: Queue, state: BatchState, settings: RolloutSettings) -> BatchState:
    """Prefills a group for each micro-batch, one after the other in the queue, as far as there is room."""
    layout, stage = settings.layout, jax.lax.axis_index(PIPELINE)
    G, free = layout.strategy.pipeline, _free(state, stage)
    room_G, last = _room(free, settings), num_prompts(queue, settings.slots)
    first_G = jnp.minimum(state.head + jnp.cumsum(room_G) - room_G, last)
    entering_G = jnp.minimum(room_G, last - first_G)
    groups: Group = jax.vmap(functools.partial(next_group, queue, settings))(free, first_G, entering_G)
    with jax.named_scope("prefill"):
        keys_values = _prefill(params, groups, stage, settings)
    caches, rows = [], []
    for place, group in enumerate(_by_place(groups, stage, G)):
        own = [(k[place], v[place]) for k, v in keys_values]
        caches.append(state.caches[place].enter(group.slot, group.entry, own, group.length - 1, layout))
        rows.append(enter(state.rows[place], group, queue, settings))
    head = state.head + entering_G.sum()
    return state.replace(caches=caches, rows=rows, head=head, groups=state.groups + G)


def _prefill(params: Params, groups: Group, stage: jax.Array, settings: RolloutSettings) -> KeysValues:
    """Runs a group for each micro-batch, [G, g, P], through the stages, one after the other, each in as many chunks of
    columns as `transformer.prefill_in_chunks` makes. Keys and values are those of the stage's layers, [places, g, P',
    K, h]."""
    config, layout = settings.config, settings.layout
    G, g, P = groups.tokens.shape
    size = min(settings.slots.prefill_tokens or P, P)
    chunks = math.ceil(P / size)
    tokens_GgP = jnp.pad(groups.tokens, ((0, 0), (0, 0), (0, chunks * size - P)))
    mask_GgP = jax.vmap(lambda group: group.mask)(groups)
    empty = empty_keys_values((G, g), chunks * size, len(params["layers"]), config, layout)
    spans = spans_on_stage(config, G, stage)

    def run(layers: Any, x_gCD: jax.Array, before: KeysValues, first: jax.Array, m: jax.Array, *, these: slice) -> Any:
        if chunks == 1:
            return run_layers(layers, x_gCD, mask_GgP[m], config, layout, spans=spans[these])
        return chunk_layers(layers, x_gCD, before, first, config, layout, spans=spans[these])

    def skip(_: Any, x_gCD: jax.Array, before: KeysValues, *__: jax.Array) -> Any:
        return x_gCD, before

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
            these = slice(len(new), len(new) + len(layers))
            before = [(k[place], v[place]) for k, v in stored[these]]
            x_gCD, after = jax.lax.cond(
                runs, functools.partial(run, these=these), skip, layers, x_gCD, before, first, m
            )
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


def _anywhere(condition: Bool[Array, ""], *axes: str) -> Bool[Array, ""]:
    """Whether it is so in any row shard, or along further axes. Row shards take part in each other's messages between
    stages, so they go on together."""
    with jax.named_scope("is_running"):
        return jax.lax.psum(condition.astype(jnp.int32), (*BATCH_AXES, *axes)) > 0


def _decode_on_stage(
    params: Params,
    x_ND: jax.Array,
    cache: KVCache,
    serves: jax.Array,
    stage: jax.Array,
    config: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, KVCache]:
    """One more token of a micro-batch through the layers of a stage.

    Where a stage does not serve it, waiting for its first message or after its last, what it computes leaves the cache
    unchanged: the column that it writes stays free, and is overwritten.
    """
    advanced, spans = cache.advance(), spans_on_stage(config, layout.strategy.pipeline, stage)
    keys, values = [], []
    for layers, has_them in layers_on_stage(params, stage, config, layout):
        these = slice(len(keys), len(keys) + len(layers))
        part = advanced.of_layers(these)
        x_ND, part = decode_layers(layers, x_ND, part, config, layout, spans=spans[these], only_if=has_them)
        keys, values = [*keys, *part.keys], [*values, *part.values]
    length = jnp.where(serves, advanced.length, cache.length)
    return x_ND, cache.replace(keys=tuple(keys), values=tuple(values), length=length)


def layers_on_stage(
    params: Params, stage: jax.Array, config: ModelConfig, layout: Layout
) -> list[tuple[list[LayerWeights], jax.Array | None]]:
    """Pairs of layers and a condition: the layers that all stages have, with None, and, if the numbers differ, the one
    layer that only the first stages have, with True on these stages."""
    numbers = [len(layers) for layers in layers_of_stages(config.num_layers, layout.strategy.pipeline)]
    fewest, layers = min(numbers), params["layers"]
    every: list[tuple[list[LayerWeights], jax.Array | None]] = [(layers[:fewest], None)]
    return every if max(numbers) == fewest else [*every, (layers[fewest:], stage < numbers.count(max(numbers)))]


@jax.named_scope("send")
def send_on(x: jax.Array, num_stages: int) -> jax.Array:
    """Sends an array to the next stage; from the last to the first."""
    return jax.lax.ppermute(x, PIPELINE, [(i, (i + 1) % num_stages) for i in range(num_stages)])
