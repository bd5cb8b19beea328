"""Pipelined generation: as many micro-batches as stages go round and round in one program.

Letters: B sequences, G stages and as many micro-batches, N rows of a micro-batch, P prompt columns, R new tokens at
most, D hidden size, K key-value heads, h head size.

    tick        0    1    2    3    4    5
    stage 0    m0   m1   m2   m0   m1   m2
    stage 1     .   m0   m1   m2   m0   m1
    stage 2     .    .   m0   m1   m2   m0     draws a token, and sends its embedding to stage 0

At tick t stage i serves micro-batch (t - i) mod G, and hands one hidden state a row to the next stage. The last stage
draws a token and embeds it, so that all messages have one shape. G ticks are a round: one token of every sequence.

Stage i has the cache of micro-batch m at place (m + i) mod G. So at tick t of any round all stages use place t: a
constant of the program, in which every cache is an array by itself and is updated where it lies.

In a pipelined layout a weight rests on the devices of its stage. The program is one over all of them, so it reads
arrays that span them: slot j has, along a leading axis that is split over `pipeline`, the j-th layer of each stage.
If a stage has one layer less, its part of the last slot is zeros. The embedding, the final norm and the language-model
head are whole on every stage, since a tied embedding is read on the first and on the last.

    {"embedding": [V, D], "final_norm": [D], "lm_head": [D, V], "layers": [{"query": [stages, D, H], ...}, ...]}
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from jaxrlhf.experience import RUNNING, Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import (
    Responses,
    before_first_token,
    cache_sizes,
    draw_next,
    finish,
    prepare,
    samples_of,
)
from jaxrlhf.generation.sampling import History
from jaxrlhf.models.architecture import Declared, Weight, declare, declare_layer, map_weights, with_leading_axis
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import cache_prefill
from jaxrlhf.models.layers import LayerWeights
from jaxrlhf.models.params import Params, Shardings, abstract_of
from jaxrlhf.models.stage_weights import whole_of
from jaxrlhf.models.transformer import Cache, KeysValues, decode_layers, embed, normalize, run_layers
from jaxrlhf.sharding.axes import PIPELINE
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here
from jaxrlhf.sharding.stage_layers import layers_of_stages


def declare_ring(config: ModelConfig, num_stages: int) -> Declared:
    """The weights in the form that the program reads, as declarations. A value head is not among them."""
    slot = with_leading_axis(declare_layer(config), num_stages, "stages")
    others = {name: w for name, w in declare(config).items() if name not in ("layers", "value_head")}
    return {**others, "layers": [slot for _ in layers_of_stages(config.num_layers, num_stages)[0]]}


def ring_shardings(config: ModelConfig, layout: Layout) -> Shardings:
    """The shardings of `declare_ring`."""
    return map_weights(lambda w: layout.weight(w.axes), declare_ring(config, layout.strategy.pipeline))


def ring_params(params: Params, config: ModelConfig, layout: Layout, *, move: Callable[[Any, Any], Any]) -> Params:
    """Converts weights that rest by stages to the form that pipelined generation reads.

    A layer is copied on the devices that have it. All processes that own a device of the layout call this.

    Args:
        params: In the compute precision, each on the devices of its stage, layers as a list.
        move: `(tree, shardings) -> tree`, which brings arrays from some devices to others.
    """
    shardings = ring_shardings(config, layout)
    layers, others = shardings.pop("layers"), shardings
    moved = move({name: params[name] for name in others}, others)
    every_stage = [_slots_of(stage, params, config, layout) for stage in range(layout.strategy.pipeline)]
    joined = [
        {name: whole_of([slots[j][name] for slots in every_stage], sharding) for name, sharding in slot.items()}
        for j, slot in enumerate(layers)
    ]
    return {**moved, "layers": joined}


def _slots_of(stage: int, params: Params, config: ModelConfig, layout: Layout) -> list[LayerWeights]:
    """One stage's part of every slot, `[1, ...]` on its devices: its layers, and zeros where it has one less."""
    own = layout.stage(stage)
    numbers = layers_of_stages(config.num_layers, layout.strategy.pipeline)
    slots, shardings = _declared_slots(config, len(numbers[0]), own)
    if not is_here(own.mesh):
        return absent(abstract_of(slots, config.compute_dtype), shardings)
    return _slots_program(config, own, len(numbers[0]))([params["layers"][number] for number in numbers[stage]])


@functools.lru_cache(maxsize=128)
def _slots_program(config: ModelConfig, stage: Layout, num_slots: int) -> Callable[[Any], Any]:
    """`layers -> slots`, on the devices of a stage."""
    slots, shardings = _declared_slots(config, num_slots, stage)

    def program(layers: list[LayerWeights]) -> list[LayerWeights]:
        missing = map_weights(lambda w: jnp.zeros(w.shape, config.compute_dtype), slots[len(layers) :])
        return [*jax.tree.map(lambda x: x[None], layers), *missing]

    return jax.jit(program, out_shardings=shardings)


def _declared_slots(config: ModelConfig, num_slots: int, stage: Layout) -> tuple[list[dict[str, Weight]], Any]:
    """One stage's part of every slot, as declarations, and their shardings."""
    slots = [with_leading_axis(declare_layer(config), 1, "stages") for _ in range(num_slots)]
    return slots, map_weights(lambda w: stage.weight(w.axes), slots)


def generate(
    params: Params,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
) -> tuple[Rollout, Int[Array, ""]]:
    """The rollout of `generate.generate`, over the stages of a pipelined layout, and the number of rounds: at most the
    tokens of the longest response.

    Args:
        params: From `ring_params`.
        prompts: Their number is a multiple of G. A micro-batch has every G-th, so that no row leaves its device.
    """
    G = layout.strategy.pipeline
    assert layout.is_pipelined and layout.strategy.chunks == 1 and prompts.tokens.shape[0] % G == 0
    by_micro_batch = jax.tree.map(lambda x: x.reshape(-1, G, *x.shape[1:]).swapaxes(0, 1), prompts)
    whole, of_stages = PartitionSpec(), PartitionSpec(PIPELINE)
    ring = jax.shard_map(
        functools.partial(_ring, sampling=sampling, config=config, layout=layout.inside_stages()),
        mesh=layout.mesh,
        in_specs=({**dict.fromkeys(params, whole), "layers": of_stages}, whole, whole, whole),
        out_specs=whole,
        axis_names={PIPELINE},
        check_vma=False,
    )
    responses, num_rounds = ring(params, by_micro_batch, noise, temperature)

    def in_order(x: jax.Array) -> jax.Array:
        by_prompt = x.reshape(G, -1, sampling.num_samples, *x.shape[2:]).swapaxes(0, 1)
        return by_prompt.reshape(-1, *x.shape[2:])

    responses = layout.constrain_rows(jax.tree.map(in_order, responses))
    return finish(samples_of(prompts, sampling, layout), responses, layout), num_rounds


def _ring(
    params: Params,
    prompts: Prompts,
    noise: jax.Array,
    temperature: jax.Array,
    *,
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
) -> tuple[Responses, jax.Array]:
    """The program of every stage. Arrays are those of one stage, and whole over the other mesh axes.

    Args:
        prompts: [G, N, ...]

    Returns:
        The responses, [G, N x num_samples, ...], and the number of rounds.
    """
    G, P = layout.strategy.pipeline, prompts.tokens.shape[2]
    stage = jax.lax.axis_index(PIPELINE)
    layers = jax.tree.map(lambda x: x.reshape(x.shape[1:]), params["layers"])  # without the axis of stages, here of one
    params = prepare({**params, "layers": layers}, config, layout)
    with jax.named_scope("prefill"):
        keys_values, last_hidden = prefill_by_stages(params, prompts, stage, config, layout)

    sizes = cache_sizes(sampling.max_new_tokens)
    caches, hidden, responses = [], [], []
    for place in range(G):
        own = jax.tree.map(lambda x, m=(place - stage) % G: x[m], prompts)
        prefilled = [(k[place], v[place]) for k, v in keys_values]
        cache = cache_prefill(prefilled, own.mask.sum(axis=1), P + sizes[0], layout)
        last_ND, state = before_first_token(last_hidden[place], cache, own, noise, sampling, config, layout)
        hidden, caches, responses = [*hidden, last_ND], [*caches, state.cache], [*responses, state.responses]

    def next_token(x_ND: jax.Array, responses: Responses) -> tuple[jax.Array, Responses]:
        """On the last stage: draws the next token of a micro-batch and embeds it, for the first stage."""

        def draw(x_ND: jax.Array, responses: Responses) -> tuple[jax.Array, Responses]:
            normed_ND = normalize(params, x_ND, config, layout)
            drawn = draw_next(responses, logits(params, normed_ND, config, layout), temperature, sampling, layout)
            return embed(params, drawn.newest, config, layout), drawn

        return jax.lax.cond(stage == G - 1, draw, lambda x_ND, responses: (x_ND, responses), x_ND, responses)

    def one_round(carry: Any) -> Any:
        number, _, message_ND, caches, responses = carry
        caches, responses = list(caches), list(responses)
        for tick in range(G):
            has_arrived = (number > 0) | (tick >= stage)
            x_ND, caches[tick] = decode_on_stage(params, message_ND, caches[tick], has_arrived, stage, config, layout)
            if tick < G - 1:  # in the first round the last stage draws from the prefill's outputs
                x_ND = jnp.where(has_arrived | (stage < G - 1), x_ND, hidden[tick])
            x_ND, responses[tick] = next_token(x_ND, responses[tick])
            message_ND = send_on(x_ND, G)
        any_running = jnp.stack([(each.finish == RUNNING).any() for each in responses]).any()
        running = (any_running & (stage == G - 1)).astype(jnp.int32)
        with jax.named_scope("is_running"):
            goes_on = jax.lax.psum(running, PIPELINE) > 0
        return number + 1, goes_on, message_ND, caches, responses

    message_ND, responses[-1] = next_token(hidden[-1], responses[-1])
    carry = (jnp.int32(0), jnp.bool(True), send_on(message_ND, G), caches, responses)
    with jax.named_scope("decode"):
        for size in sizes:
            grown = [cache.grow(P + size, layout) for cache in carry[3]]
            carry = jax.lax.while_loop(
                lambda carry, most=size: carry[1] & (carry[0] < most), one_round, (*carry[:3], grown, carry[4])
            )
    num_rounds, _, _, _, responses = carry
    by_micro_batch = [responses[(m - 1) % G] for m in range(G)]  # where the last stage has them
    by_micro_batch = [each.replace(history=History(None, None)) for each in by_micro_batch]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *by_micro_batch)
    with jax.named_scope("share_responses"):
        shared = jax.tree.map(lambda x: jax.lax.psum(jnp.where(stage == G - 1, x, 0), PIPELINE), stacked)
    return shared, num_rounds


def prefill_by_stages(
    params: Params, prompts: Prompts, stage: jax.Array, config: ModelConfig, layout: Layout
) -> tuple[KeysValues, list[jax.Array]]:
    """Runs the prompts through the stages, one micro-batch after the other.

    Returns:
        Keys and values of the stage's layers, [places, N, P, K, h]; and, of every place, the outputs at the prompts'
        last column, [N, D], used on the last stage only.
    """
    G, N, P = prompts.tokens.shape
    axes = ("batch", "length", "kv_heads", "head_dim")
    shape, dtype = (N, P, config.num_kv_heads, config.head_size), config.compute_dtype

    def run_if(condition: jax.Array, layers: list[LayerWeights], x_NPD: jax.Array, mask_NP: jax.Array) -> Any:
        def skip(x_NPD: jax.Array, _: jax.Array) -> tuple[jax.Array, KeysValues]:
            zeros = layout.activation(jnp.zeros(shape, dtype), axes)
            return x_NPD, [(zeros, zeros) for _ in layers]

        def run(x_NPD: jax.Array, mask_NP: jax.Array) -> tuple[jax.Array, KeysValues]:
            return run_layers(layers, x_NPD, mask_NP, config, layout)

        return jax.lax.cond(condition, run, skip, x_NPD, mask_NP)

    def tick(carry: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        message_NPD, stored = carry
        serves = (t >= stage) & (t < stage + G)
        own = jax.tree.map(lambda x: x[(t - stage) % G], prompts)
        x_NPD = jax.lax.cond(
            stage == 0, lambda x, tokens: embed(params, tokens, config, layout), lambda x, _: x, message_NPD, own.tokens
        )
        new = []
        for layers, has_them in layers_on_stage(params, stage, config, layout):
            runs = serves if has_them is None else serves & has_them
            x_NPD, keys_values = run_if(runs, layers, x_NPD, own.mask)
            new += keys_values
        stored = jax.tree.map(lambda s, x: s.at[t % G].set(jnp.where(serves, x, s[t % G])), stored, new)
        return (send_on(x_NPD, G), stored), x_NPD[:, -1]

    zeros = layout.activation(jnp.zeros((G, *shape), dtype), (None, *axes))
    message_NPD = layout.activation(jnp.zeros((N, P, config.hidden_size), dtype), ("batch", "length", "embed"))
    carry = (message_NPD, [(zeros, zeros) for _ in params["layers"]])
    (_, stored), last_tND = jax.lax.scan(tick, carry, jnp.arange(2 * G - 1))
    # the last stage serves its last place at tick G - 1, and the others after it
    return stored, [last_tND[place + G if place < G - 1 else place] for place in range(G)]


def decode_on_stage(
    params: Params,
    x_ND: jax.Array,
    cache: Cache,
    has_arrived: jax.Array,
    stage: jax.Array,
    config: ModelConfig,
    layout: Layout,
) -> tuple[jax.Array, Cache]:
    """One more token of a micro-batch through the layers of a stage.

    In the first round a stage waits for its first message. What it computes before leaves the cache unchanged: the
    place that it writes stays free, and is overwritten.
    """
    advanced = cache.advance()
    keys, values = [], []
    for layers, has_them in layers_on_stage(params, stage, config, layout):
        these = slice(len(keys), len(keys) + len(layers))
        part = advanced.of_layers(these)
        x_ND, part = decode_layers(layers, x_ND, part, config, layout, only_if=has_them)
        keys, values = [*keys, *part.keys], [*values, *part.values]
    kept = {name: jnp.where(has_arrived, getattr(advanced, name), getattr(cache, name)) for name in cache.COUNTS}
    return x_ND, cache.replace(keys=tuple(keys), values=tuple(values), **kept)


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
