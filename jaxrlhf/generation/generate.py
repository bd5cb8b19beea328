"""Generation: prefill, then decoding as a step that can be interrupted and resumed.

Letters: B sequences, P prompt columns, R the most new tokens.

    state = start(params, prompts, noise, ...)           # prefill, and the first token
    state = decode(params, state, num_steps, ...)        # decode so many more, or until all have finished
    rollout = finish(prompts, state.responses)

`decode` takes a state and gives one, so the sequences of a state may be parted, joined or moved to other devices
between two calls of it. A sequence draws the same tokens in any of these cases: its noise depends on the seed, the
step, the call, its id and the position alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt

from jaxrlhf.experience import RUNNING, Prompts, Rollout, Sampling
from jaxrlhf.generation.sampling import History, next_token
from jaxrlhf.models.architecture import declare
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import KVCache, cache_prefill, copies
from jaxrlhf.models.params import Params, use, use_layer, with_layers
from jaxrlhf.models.transformer import decode_step, prefill
from jaxrlhf.sharding.layout import Layout

_MIN_GROWTH, _MAX_STAGES = 32, 4
"""The fewest slots by which the cache of `generate` grows, and its most sizes: decoding is compiled for each."""


class Drawn(struct.PyTreeNode):
    """The tokens drawn so far, and zeros after them."""

    tokens: Int[Array, "B R"]
    logprobs: Float[Array, "B R"]
    sampled_logprobs: Float[Array, "B R"]
    num_new: Int[Array, " B"]
    finish: Int[Array, " B"]


class Responses(Drawn):
    """The tokens drawn so far, and the noise of those to come."""

    newest: Int[Array, " B"]
    """The token drawn last: part of the response, not yet in the cache."""
    uniforms: Float[Array, "B R"]
    """The noise of every position, drawn in advance."""
    history: History


class DecodeState(struct.PyTreeNode):
    """Everything that decoding needs to go on."""

    responses: Responses
    cache: KVCache


def prepare(params: Params, config: ModelConfig, layout: Layout) -> Params:
    """Weights as decoding uses them: gathered, in the compute precision, one dict a layer, joined where possible."""
    declared = declare(config)
    others = {name: w for name, w in params.items() if name != "layers"}
    ready = use(others, {name: declared[name] for name in others}, layout, config.compute_dtype)
    unstacked = with_layers(params, stacked=False)["layers"]
    return {**ready, "layers": [use_layer(weights, config, layout) for weights in unstacked]}


def start(
    params: Params,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
    *,
    num_slots: int | None = None,
) -> DecodeState:
    """Prefill the prompts and draw the first token of each response.

    A prompt is prefilled once, however many samples of it there are; the state has a row for each sample.

    Args:
        params: As `prepare` gives them.
        noise: Seed, step and call: with a sequence's id, all that its noise depends on.
        num_slots: Of the cache: P columns, and one for each decoding step to come before it grows. None is all.
    """
    num_slots = prompts.tokens.shape[1] + sampling.max_new_tokens if num_slots is None else num_slots
    with jax.named_scope("prefill"):
        hidden_BD, keys_values = prefill(params, prompts.tokens, prompts.mask, config, layout)
        cache = cache_prefill(keys_values, prompts.mask.sum(axis=1), num_slots, layout)
    hidden_BD, state = before_first_token(hidden_BD, cache, prompts, noise, sampling, config, layout)
    logits_BV = logits(params, hidden_BD, config, layout)
    return state.replace(responses=draw_next(state.responses, logits_BV, temperature, sampling, layout))


def before_first_token(
    hidden_BD: Float[Array, "B D"],
    cache: KVCache,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
) -> tuple[Float[Array, "N D"], DecodeState]:
    """The hidden states from which first tokens are drawn, and the state: a row for each sample of each prompt.

    Args:
        hidden_BD: Of each prompt's last column.
        cache: With the prompts laid down.
    """
    n, B, R = sampling.num_samples, prompts.tokens.shape[0] * sampling.num_samples, sampling.max_new_tokens
    rows = samples_of(prompts, sampling, layout)
    responses = Responses(
        newest=jnp.zeros(B, jnp.int32),
        tokens=jnp.zeros((B, R), jnp.int32),
        logprobs=jnp.zeros((B, R), jnp.float32),
        sampled_logprobs=jnp.zeros((B, R), jnp.float32),
        num_new=jnp.zeros(B, jnp.int32),
        finish=jnp.full(B, RUNNING, jnp.int32),
        uniforms=_uniforms(noise, rows.id, R),
        history=History.of_prompts(rows.tokens, rows.mask, config.vocab_size, sampling, layout),
    )
    return layout.constrain_rows(copies(hidden_BD, n)), DecodeState(responses, cache.repeat(n, layout))


def decode(
    params: Params,
    state: DecodeState,
    num_steps: Int[Array, ""],
    temperature: Float[Array, ""],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
) -> DecodeState:
    """Decodes `num_steps` steps, or until all sequences have finished. Under `jit`, donate the state: its cache is then
    updated in place."""

    def goes_on(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        done, state = carry
        return ((state.responses.finish == RUNNING).sum() > 0) & (done < num_steps)

    def step(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        done, state = carry
        hidden_BD, cache = decode_step(params, state.responses.newest, state.cache, config, layout)
        logits_BV = logits(params, hidden_BD, config, layout)
        return done + 1, DecodeState(draw_next(state.responses, logits_BV, temperature, sampling, layout), cache)

    with jax.named_scope("decode"):
        return jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]


def samples_of(prompts: Prompts, sampling: Sampling, layout: Layout) -> Prompts:
    """A row for each sample: the same prompt `num_samples` times, each time with an id of its own."""
    if sampling.num_samples == 1:
        return prompts
    repeated: Prompts = jax.tree.map(lambda x: copies(x, sampling.num_samples), prompts)
    number_B = jnp.arange(repeated.id.shape[0]) % sampling.num_samples
    id_B = repeated.id * jnp.uint32(sampling.num_samples) + number_B.astype(jnp.uint32)
    return layout.constrain_rows(repeated.replace(id=id_B))


def finish(prompts: Prompts, responses: Drawn, layout: Layout) -> Rollout:
    """Prompts and responses side by side.

    Args:
        prompts: A row for each response, as `samples_of` gives them.
    """
    R = responses.tokens.shape[1]
    response_BR = jnp.arange(R)[None, :] < responses.num_new[:, None]
    rollout = Rollout(
        tokens=jnp.concatenate([prompts.tokens, responses.tokens], axis=1),
        mask=jnp.concatenate([prompts.mask, response_BR], axis=1),
        response=response_BR,
        logprobs=responses.logprobs,
        sampled_logprobs=responses.sampled_logprobs,
        finish=responses.finish,
        row=prompts.row,
        id=prompts.id,
    )
    return layout.constrain_rows(rollout)


def generate(
    params: Params,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
) -> Rollout:
    """Respond to every prompt `num_samples` times: start, run until all have finished, finish.

    A step reads the whole cache, also the slots that are still empty. So the cache starts small and grows on the way.
    """
    P, R = prompts.tokens.shape[1], sampling.max_new_tokens
    params = prepare(params, config, layout)
    state = start(params, prompts, noise, temperature, sampling, config, layout, num_slots=P + cache_sizes(R)[0])
    for num_new_slots, num_steps in decoding_stages(R):
        state = state.replace(cache=state.cache.grow(P + num_new_slots, layout))
        state = decode(params, state, jnp.int32(num_steps), temperature, sampling, config, layout)
    return finish(samples_of(prompts, sampling, layout), state.responses, layout)


def cache_sizes(num_new_tokens: int) -> list[int]:
    """Slots of the cache beside those of the prompts, from stage to stage."""
    size = max(_MIN_GROWTH, math.ceil(num_new_tokens / _MAX_STAGES))
    return [*range(size, num_new_tokens, size), num_new_tokens]


def decoding_stages(num_new_tokens: int) -> list[tuple[int, int]]:
    """Slots of the cache beside those of the prompts, and the decoding steps until it grows again.

    The last token that is drawn does not enter the cache.

    >>> decoding_stages(256)
    [(64, 64), (128, 64), (192, 64), (256, 63)]
    """
    sizes = cache_sizes(num_new_tokens)
    done = [0, *sizes[:-1]]
    return [(size, min(size, num_new_tokens - 1) - before) for before, size in zip(done, sizes, strict=True)]


def slots_read(prompt_columns: int, num_new_tokens: int) -> float:
    """Slots of a sequence that a decoding step reads, on average over the steps of full-length responses.

    >>> round(slots_read(1024, 1024))  # with five eighths of the response, where half of it is filled
    1664
    """
    stages = decoding_stages(num_new_tokens)
    num_steps = sum(steps for _, steps in stages)
    if not num_steps:
        return float(prompt_columns + stages[-1][0])
    return prompt_columns + sum(slots * steps for slots, steps in stages) / num_steps


@jax.named_scope("draw")
def draw_next(
    responses: Responses,
    logits_BV: Float[Array, "B V"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    layout: Layout,
) -> Responses:
    """The responses with the next token of every running sequence drawn and recorded."""
    R = responses.tokens.shape[1]
    logits_BV = layout.activation(logits_BV, ("batch", "choices"))
    at_B1 = jnp.minimum(responses.num_new, R - 1)[:, None]
    uniform_B = jnp.take_along_axis(responses.uniforms, at_B1, axis=1)[:, 0]
    drawn = next_token(logits_BV, uniform_B, responses.num_new, responses.history, temperature, sampling)

    running_B = responses.finish == RUNNING
    writes_BR = running_B[:, None] & (jnp.arange(R)[None, :] == at_B1)
    return responses.replace(
        newest=jnp.where(running_B, drawn.token, responses.newest),
        tokens=jnp.where(writes_BR, drawn.token[:, None], responses.tokens),
        logprobs=jnp.where(writes_BR, drawn.logprob[:, None], responses.logprobs),
        sampled_logprobs=jnp.where(writes_BR, drawn.sampled_logprob[:, None], responses.sampled_logprobs),
        num_new=responses.num_new + running_B,
        finish=jnp.where(running_B, drawn.finish, responses.finish),
        history=drawn.history,
    )


def _uniforms(noise: jax.Array, id_B: jax.Array, num_positions: int) -> jax.Array:
    """One number in [0, 1) for each sequence and position."""
    position = jnp.arange(num_positions)
    return jax.vmap(lambda sequence: jax.vmap(lambda t: uniform(noise, sequence, t))(position))(id_B)


def uniform(noise: UInt[Array, "3"], sequence: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
    """The noise of one position of a sequence, by its id: a number in [0, 1)."""
    key = functools.reduce(jax.random.fold_in, (noise[1], noise[2], sequence, position), jax.random.key(noise[0]))
    return jax.random.uniform(key)
