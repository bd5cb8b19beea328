"""Generation over the devices of a layout: to the end in one program, or as a state that goes on later.

Letters: B prompts, P prompt columns, R the most new tokens, D row shards, N sequences of a row shard, H hidden size.

    rollout = generate(params, prompts, noise, temperature, sampling, config, layout)

    state = begin_rollout(params, prompts, settings)
    state = continue_rollout(params, prompts, state, noise, temperature, settings, Until(left=8))
    rollout, metrics = rollout_so_far(prompts, state, settings)          # `RUNNING` where a sequence has not ended

All of these are to be compiled, with `settings` static and the state donated. A state is the `BatchState` of every row
shard along a leading axis, and over stages of every stage along a second one. Each row shard stops by itself, without
asking the others; over stages they stop when the last one would.

Without slots all rows are decoded at once. A step reads the whole cache, also the columns that are still empty, so the
cache starts small and grows on the way (`decoding_stages`): each size is a loop of its own.

A state goes on where it stopped with the same bits:

- later, given the same prompts;
- on other devices: `jax.device_put(state, state_shardings(state, layout))`, for a layout with as many row shards,
  stages and tensor shards;
- in other slots (`moved_rows`);
- with other weights: tokens so far, and their keys and values, stay as they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation import continuous_batching, pipelined_batching
from jaxrlhf.generation.continuous_batching import BatchState, make_queue, with_room
from jaxrlhf.generation.decoding_weights import prepare
from jaxrlhf.generation.rollout_settings import ALL_AT_ONCE, RolloutSettings, Slots, Until, rollout_stages
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import copies
from jaxrlhf.models.params import Params
from jaxrlhf.sharding.axes import BATCH_AXES, PIPELINE, TENSOR
from jaxrlhf.sharding.layout import Layout

_ROWS, _WHOLE = PartitionSpec(BATCH_AXES), PartitionSpec()


def generate(
    params: Params,
    prompts: Prompts,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
    config: ModelConfig,
    layout: Layout,
    slots: Slots = ALL_AT_ONCE,
) -> Rollout:
    """Responds to every prompt `num_samples` times.

    Args:
        params: In a pipelined layout, from `ring_params`.
        prompts: Without slots, their number is a multiple of the row shards times the stages.
        noise: Seed, step and call: with a sequence's id, all that its noise depends on.
        temperature: It stands for the one in `sampling`.
        slots: Of a row shard, whose stages work on as many each. Each has a queue of its own.

    Raises:
        ValueError: Slots do not divide by the stages, or are fewer than there are samples of a prompt.
    """
    settings = RolloutSettings(sampling, slots, config, layout)

    def to_the_end(params: Params, prompts: Prompts, noise: Any, temperature: Any) -> BatchState:
        own = of_row_shard(settings, len(prompts.tokens))
        loop, queue = _loop_of(layout), make_queue(prompts, own)
        params = loop.on_device(params, own)
        state = loop.begin(params, queue, own)
        for tokens, rounds in rollout_stages(settings, prompts.tokens.shape[1]):
            state = with_room(state, tokens, own)
            state = loop.advance(params, queue, state, noise, temperature, own, Until(rounds=rounds))
        return state

    ready = params if layout.is_pipelined else prepare(params, config, layout)
    state = over_row_shards(to_the_end, settings)(ready, prompts, noise, temperature)
    return rollout_so_far(prompts, state, settings)[0]


def begin_rollout(params: Params, prompts: Prompts, settings: RolloutSettings) -> BatchState:
    """The state before the first decoding step: all slots are free, or without slots all prompts prefilled. Arguments
    are those of `continue_rollout`, errors those of `generate`."""

    def begin(params: Params, prompts: Prompts) -> BatchState:
        own, loop = of_row_shard(settings, len(prompts.tokens)), _loop_of(settings.layout)
        return loop.begin(loop.on_device(params, own), make_queue(prompts, own), own)

    run = over_row_shards(begin, settings)
    return placed(run(params, prompts), settings.layout)


def continue_rollout(
    params: Params,
    prompts: Prompts,
    state: BatchState,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    settings: RolloutSettings,
    until: Until,
    *,
    tokens: int = 0,
) -> BatchState:
    """The state after some more rounds, or when all sequences have finished.

    Args:
        params: As `prepare` gives them; over stages, each of which prepares its own, from `ring_params`.
        until: For every row shard. Without slots, of `rollout_stages`: a round is a decoding step.
        tokens: Without slots, those of a row for which the cache is to have room.
    """

    def on_shard(params: Params, prompts: Prompts, *given: Any) -> BatchState:
        noise, temperature, until, state = given
        own, loop = of_row_shard(settings, len(prompts.tokens)), _loop_of(settings.layout)
        queue, params = make_queue(prompts, own), loop.on_device(params, own)
        state = with_room(jax.tree.map(lambda x: x.reshape(x.shape[len(spec) :]), state), tokens, own)
        return loop.advance(params, queue, state, noise, temperature, own, until)

    spec = _of_state(settings.layout)
    run = over_row_shards(on_shard, settings)
    return placed(run(params, prompts, noise, temperature, until, state), settings.layout)


def rollout_so_far(
    prompts: Prompts, state: BatchState, settings: RolloutSettings
) -> tuple[Rollout, dict[str, Int[Array, " D"]]]:
    """The responses; and, of each row shard, the rounds, the groups of prompts that were prefilled, and the prompts
    that have entered: the others wait."""
    sampling, layout = settings.sampling, settings.layout
    told = {"outputs": state.outputs, "rounds": state.rounds, "groups": state.groups, "entered": state.head}
    if layout.is_pipelined:
        with jax.named_scope("share_responses"):
            told = jax.tree.map(lambda x: x.at[:, :-1].set(0).sum(axis=1), told)  # of the last stage, by one all-reduce
    outputs: Any = told.pop("outputs")
    words_BR3, num_new_B, finish_B = (
        layout.constrain_rows(x.reshape(-1, *x.shape[2:])) for x in (outputs.words, outputs.lengths, outputs.finish)
    )
    logprobs_BR2 = jax.lax.bitcast_convert_type(words_BR3[..., 1:], jnp.float32)
    response_BR = jnp.arange(sampling.max_new_tokens)[None, :] < num_new_B[:, None]
    of_samples = samples_of(prompts, sampling, layout)
    rollout = Rollout(
        tokens=jnp.concatenate([of_samples.tokens, words_BR3[..., 0]], axis=1),
        mask=jnp.concatenate([of_samples.mask, response_BR], axis=1),
        response=response_BR,
        logprobs=logprobs_BR2[..., 0],
        sampled_logprobs=logprobs_BR2[..., 1],
        finish=finish_B,
        row=of_samples.row,
        id=of_samples.id,
    )
    return layout.constrain_rows(rollout), told


def samples_of(prompts: Prompts, sampling: Sampling, layout: Layout) -> Prompts:
    """A row for each sample: the same prompt `num_samples` times, each time with an id of its own."""
    if sampling.num_samples == 1:
        return prompts
    repeated: Prompts = jax.tree.map(lambda x: copies(x, sampling.num_samples), prompts)
    number_B = jnp.arange(repeated.id.shape[0]) % sampling.num_samples
    id_B = repeated.id * jnp.uint32(sampling.num_samples) + number_B.astype(jnp.uint32)
    return layout.constrain_rows(repeated.replace(id=id_B))


def state_shardings(state: BatchState, layout: Layout) -> Any:
    """The shardings of a state in a layout: leading axes over row shards and stages, heads over `tensor`. `state`: a
    state, or its shapes."""
    spec = _of_state(layout)
    whole, of_heads = (NamedSharding(layout.mesh, each) for each in (spec, PartitionSpec(*spec, None, TENSOR)))

    def of_cache(x: Any) -> NamedSharding:
        return of_heads if len(x.shape) - len(spec) > 1 else whole  # keys and values, or numbers of rows

    shardings = jax.tree.map(lambda _: whole, state)
    return shardings.replace(caches=jax.tree.map(of_cache, state.caches))


def of_row_shard(settings: RolloutSettings, num_prompts: int) -> RolloutSettings:
    """The settings of the program of a row shard, or of a stage of it, where slots are those of a micro-batch.
    `num_prompts`: of the row shard."""
    stages, n, slots = settings.layout.strategy.pipeline, settings.sampling.num_samples, settings.slots
    if slots.at_once:
        assert num_prompts % stages == 0, (num_prompts, stages)
        slots = dataclasses.replace(slots, slots=num_prompts * n, prefill_rows=num_prompts // stages, steps=1)
    slots.require_room(n, stages)
    each = {name: getattr(slots, name) // stages for name in ("slots", "shared_prompts")}
    slots = dataclasses.replace(slots, **each)
    return dataclasses.replace(settings, slots=slots, layout=settings.layout.inside_gathered_row_shards())


def _loop_of(layout: Layout) -> Any:
    """The module with the program of a row shard."""
    return pipelined_batching if layout.is_pipelined else continuous_batching


def over_row_shards(function: Callable[..., Any], settings: RolloutSettings) -> Callable[..., Any]:
    """A function of params, of prompts or other arrays with rows, and of others or a state, which every row shard and
    stage runs. What it gives has leading axes over row shards, and over stages, as a state has."""
    layout, spec = settings.layout, _of_state(settings.layout)

    def run(params: Params, prompts: Any, *given: Any) -> Any:
        of_params = {**dict.fromkeys(params, _WHOLE), "layers": PartitionSpec(PIPELINE)}
        others = (spec if isinstance(x, BatchState) else _WHOLE for x in given)
        specs = (of_params if layout.is_pipelined else _WHOLE, _ROWS, *others)
        return layout.over_row_shards(lambda *each: _lead(function(*each), spec), specs, spec)(params, prompts, *given)

    return run


def _of_state(layout: Layout) -> PartitionSpec:
    """How the leading axes of a state are split."""
    return PartitionSpec(BATCH_AXES, PIPELINE) if layout.is_pipelined else _ROWS


def _lead(tree: Any, spec: PartitionSpec) -> Any:
    """Arrays with these axes before their own, of one row shard and one stage."""
    return jax.tree.map(lambda x: x.reshape((1,) * len(spec) + x.shape), tree)


def placed(state: Any, layout: Layout) -> Any:
    """A state that lies as it is to lie whenever it goes on."""
    return jax.lax.with_sharding_constraint(state, state_shardings(state, layout))
