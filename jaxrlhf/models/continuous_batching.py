"""Continuous batching on the device: sequences that finish leave a slot of the decode batch, waiting prompts enter it.

Letters: S slots, Q prompts in the queue, n samples of each, N = Q n sequences, P prompt columns, R the most new tokens,
g prompts that are prefilled together.

    queue = make_queue(prompts, sampling)
    state = begin(queue, sampling, slots, config, layout)           # all slots are free
    state = advance(params, queue, state, num_rounds, ...)          # go on for so many rounds, or until all is done
    rollout = finish(samples_of(prompts, ...), drawn(state), layout)

All shapes are fixed, so this is one program. It holds that the bits of a sequence do not depend on when it is admitted,
on who is in the other slots, on how many steps there are between two admissions, or on where `advance` was interrupted:

- a row of the cache holds the token at position t in column t (`SlotCache`), so the order of sums does not depend on
  the moment of admission;
- prompts are prefilled in groups of a fixed width, padded where fewer enter;
- prefill draws nothing. A sequence enters as if its last prompt token had been drawn last, and the next step of all
  slots draws the first token of its response like any other;
- noise depends on the sequence's id and the position alone.

Another number of slots or another width of groups is another program, whose sums may be rounded differently.

Reference:
    Yu et al. 2022 (Orca), OSDI: iteration-level scheduling, there by a host.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.experience import RUNNING, Prompts, Rollout, Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.generate import Drawn, finish, finish_reason, prepare, samples_of, uniform
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import SlotCache, copies
from jaxrlhf.models.params import Params
from jaxrlhf.models.sampling import draw_token
from jaxrlhf.models.transformer import decode_step, embed, prefill_in_chunks, run_layers
from jaxrlhf.require import require, require_at_least_one, require_fields, require_not_negative
from jaxrlhf.sharding.axes import BATCH_AXES
from jaxrlhf.sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode batch of a row shard, and how prompts enter it."""

    slots: int
    """Sequences that are decoded at a time."""
    prefill_rows: int = 8
    """Prompts that are prefilled together. Part of what decides the bits."""
    prefill_tokens: int = 0
    """Columns of these prompts that go through the layers together, which bounds what that takes; 0 means all. Part of
    what decides the bits."""
    admit: int = 0
    """Prompts for which slots must be free before a group enters; 0 means `prefill_rows`. At the end of the queue, as
    many as wait."""
    steps: int = 8
    """Decoding steps between two admissions: the inner loop, whose trip count the compiler knows."""

    def __post_init__(self) -> None:
        require_fields(self, require_at_least_one, "slots", "prefill_rows", "steps")
        require_fields(self, require_not_negative, "prefill_tokens", "admit")


class Queue(struct.PyTreeNode):
    """The prompts of a row shard, in the order of admission, padded on the right, and a group of padding after them."""

    tokens: Int[Array, "Q+g P"]
    length: Int[Array, "Q+g"]
    id: UInt[Array, " N"]
    """Of each sequence: n consecutive ones of each prompt."""
    sequence: Int[Array, " N"]
    """Its place among the outputs, which are in the order of the prompts that were given."""


class BatchState(struct.PyTreeNode):
    """Everything that decoding needs to go on."""

    cache: SlotCache
    newest: Int[Array, " S"]
    """The token of each slot that was drawn last, or the last of its prompt: not yet in the cache."""
    sequence: Int[Array, " S"]
    """The sequence in each slot, by its place among the outputs; N in free slots."""
    id: UInt[Array, " S"]
    num_new: Int[Array, " S"]
    """New tokens so far of the sequence in each slot."""
    words: Int[Array, "N R 3"]
    """Of each new token: itself, and the bits of its log-probabilities under the policy and as it was drawn. One array,
    so that a step writes once."""
    lengths: Int[Array, " N"]
    """New tokens of each sequence."""
    finish: Int[Array, " N"]
    head: Int[Array, ""]
    """The next prompt to enter."""
    rounds: Int[Array, ""]
    groups: Int[Array, ""]
    """Groups that were prefilled so far."""


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
    """Responds to every prompt `num_samples` times. Each row shard has its own slots and queue, and ends by itself."""
    params = prepare(params, config, layout)
    is_split = layout.strategy.num_row_shards > 1
    within = layout.inside_gathered_row_shards() if is_split else layout

    def on_shard(params: Params, prompts: Prompts, noise: jax.Array, temperature: jax.Array) -> Drawn:
        queue = make_queue(prompts, sampling, slots)
        state = begin(queue, sampling, slots, config, within)
        return drawn(advance(params, queue, state, noise, None, temperature, sampling, slots, config, within))

    if is_split:
        rows, whole = PartitionSpec(BATCH_AXES), PartitionSpec()
        on_shard = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=(whole, rows, whole, whole),
            out_specs=rows,
            axis_names=within.manual_axes,
            check_vma=False,
        )
    responses = on_shard(params, prompts, noise, temperature)
    return finish(samples_of(prompts, sampling, layout), responses, layout)


def make_queue(prompts: Prompts, sampling: Sampling, slots: Slots) -> Queue:
    """A queue of prompts, which are padded on the left, in their order; or, if they say how many tokens their responses
    are expected to have, those of the longest responses first."""
    n, (Q, P) = sampling.num_samples, prompts.tokens.shape
    order_Q = jnp.arange(Q)
    if prompts.expected_tokens is not None:
        order_Q = jnp.argsort(prompts.expected_tokens, stable=True, descending=True)
        prompts = jax.tree.map(lambda x: x[order_Q], prompts)
    length = prompts.mask.sum(axis=1).astype(jnp.int32)
    from_left = (jnp.arange(P)[None, :] - length[:, None]) % P
    id_QN = prompts.id[:, None] * jnp.uint32(n) + jnp.arange(n, dtype=jnp.uint32)[None, :]
    return Queue(
        tokens=jnp.pad(jnp.take_along_axis(prompts.tokens, from_left, axis=1), ((0, slots.prefill_rows), (0, 0))),
        length=jnp.pad(length, (0, slots.prefill_rows), constant_values=1),
        id=id_QN.reshape(-1),
        sequence=(order_Q[:, None] * n + jnp.arange(n)[None, :]).reshape(-1),
    )


def begin(queue: Queue, sampling: Sampling, slots: Slots, config: ModelConfig, layout: Layout) -> BatchState:
    """A state in which all slots are free.

    Raises:
        ValueError: There are fewer slots than samples of a prompt, which enter together.
    """
    n = sampling.num_samples
    require(slots.slots >= n, "slots", f"must be at least num_samples={n}", slots.slots)
    S, N, R = slots.slots, len(queue.id), sampling.max_new_tokens
    tokens = queue.tokens.shape[1] + R - 1  # the last token that is drawn does not enter the cache
    return BatchState(
        cache=SlotCache.empty(S, tokens, config, layout),
        newest=jnp.zeros(S, jnp.int32),
        sequence=jnp.full(S, N, jnp.int32),
        id=jnp.zeros(S, jnp.uint32),
        num_new=jnp.zeros(S, jnp.int32),
        words=jnp.zeros((N, R, 3), jnp.int32),
        lengths=jnp.zeros(N, jnp.int32),
        finish=jnp.full(N, RUNNING, jnp.int32),
        head=jnp.zeros((), jnp.int32),
        rounds=jnp.zeros((), jnp.int32),
        groups=jnp.zeros((), jnp.int32),
    )


def advance(
    params: Params,
    queue: Queue,
    state: BatchState,
    noise: UInt[Array, "3"],
    num_rounds: Int[Array, ""] | None,
    temperature: Float[Array, ""],
    sampling: Sampling,
    slots: Slots,
    config: ModelConfig,
    layout: Layout,
) -> BatchState:
    """Goes on for some rounds, or until all sequences have finished. A round is as many admissions as there is room
    for, and `slots.steps` decoding steps. Under `jit`, donate the state: its cache is then updated in place.

    Args:
        params: As `prepare` gives them.
        num_rounds: None means until all have finished.
    """
    last = None if num_rounds is None else state.rounds + num_rounds

    def goes_on(state: BatchState) -> jax.Array:
        works = (state.head < _num_prompts(queue, slots)) | (state.sequence < len(queue.id)).any()
        return works if last is None else works & (state.rounds < last)

    def step(_: jax.Array, state: BatchState) -> BatchState:
        hidden_SD, cache = decode_step(params, state.newest, state.cache, config, layout)
        logits_SV = layout.activation(logits(params, hidden_SD, config, layout), ("batch", "choices"))
        return _draw(state.replace(cache=cache), queue, logits_SV, noise, temperature, sampling)

    def one_round(state: BatchState) -> BatchState:
        with jax.named_scope("prefill"):  # a branch that left the state as it is would copy the cache
            state = jax.lax.while_loop(
                lambda state: _has_room(state, queue, sampling, slots),
                lambda state: _admit(params, queue, state, sampling, slots, config, layout),
                state,
            )
        with jax.named_scope("decode"):
            state = jax.lax.fori_loop(0, slots.steps, step, state)
        return state.replace(rounds=state.rounds + 1)

    return jax.lax.while_loop(goes_on, one_round, state)


def drawn(state: BatchState) -> Drawn:
    """The tokens that were drawn, by sequence."""
    floats = jax.lax.bitcast_convert_type(state.words, jnp.float32)
    return Drawn(
        tokens=state.words[..., 0],
        logprobs=floats[..., 1],
        sampled_logprobs=floats[..., 2],
        num_new=state.lengths,
        finish=state.finish,
    )


def _num_prompts(queue: Queue, slots: Slots) -> int:
    return len(queue.length) - slots.prefill_rows


def _has_room(state: BatchState, queue: Queue, sampling: Sampling, slots: Slots) -> Bool[Array, ""]:
    """Whether prompts wait, and slots are free for as many of them as are to enter together."""
    waiting = _num_prompts(queue, slots) - state.head
    wanted = jnp.minimum(waiting, min(slots.admit or slots.prefill_rows, _most_at_once(sampling, slots)))
    return (waiting > 0) & ((state.sequence == len(queue.id)).sum() >= wanted * sampling.num_samples)


def _most_at_once(sampling: Sampling, slots: Slots) -> int:
    """Prompts that enter together at most."""
    return min(slots.prefill_rows, slots.slots // sampling.num_samples)


def _admit(
    params: Params,
    queue: Queue,
    state: BatchState,
    sampling: Sampling,
    slots: Slots,
    config: ModelConfig,
    layout: Layout,
) -> BatchState:
    """Prefills the next group of prompts, and lets those enter for which slots are free, with all of their samples."""
    n, g, N = sampling.num_samples, slots.prefill_rows, len(queue.id)
    tokens_gP, length_g = (jax.lax.dynamic_slice_in_dim(x, state.head, g) for x in (queue.tokens, queue.length))
    if 0 < slots.prefill_tokens < tokens_gP.shape[1]:
        keys_values = prefill_in_chunks(params, tokens_gP, length_g, slots.prefill_tokens, config, layout)
    else:
        mask_gP = jnp.arange(tokens_gP.shape[1])[None, :] < length_g[:, None]
        x_gPD = embed(params, tokens_gP, config, layout)
        _, keys_values = run_layers(params["layers"], x_gPD, mask_gP, config, layout, wanted=tokens_gP.shape[1] - 1)

    is_free_S = state.sequence == N
    entering = jnp.minimum(is_free_S.sum() // n, jnp.minimum(_num_prompts(queue, slots) - state.head, g))
    number = jnp.arange(g * n)  # of each sample of the group, in the order of the queue
    enters = number < entering * n
    free = jnp.nonzero(is_free_S, size=g * n, fill_value=slots.slots)[0]
    row = jnp.where(enters, free, slots.slots)  # rows beyond the last are dropped
    place = jnp.minimum(state.head * n + number, N - 1)
    last_g = jnp.take_along_axis(tokens_gP, length_g[:, None] - 1, axis=1)[:, 0]

    def put(x_S: jax.Array, new: jax.Array) -> jax.Array:
        return x_S.at[row].set(new.astype(x_S.dtype), mode="drop")

    samples = [(copies(k, n), copies(v, n)) for k, v in keys_values]
    return state.replace(
        cache=state.cache.enter(row, samples, copies(length_g, n) - 1, layout),
        newest=put(state.newest, copies(last_g, n)),
        sequence=put(state.sequence, queue.sequence[place]),
        id=put(state.id, queue.id[place]),
        num_new=put(state.num_new, jnp.zeros_like(number)),
        head=state.head + entering,
        groups=state.groups + 1,
    )


@jax.named_scope("draw")
def _draw(
    state: BatchState,
    queue: Queue,
    logits_SV: Float[Array, "S V"],
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
) -> BatchState:
    """Draws and records the next token of the sequence in every slot. Those that end leave their slots."""
    N, drawn_S = len(queue.id), state.sequence
    uniform_S = jax.vmap(uniform, in_axes=(None, 0, 0))(noise, state.id, state.num_new)
    may_stop_S = state.num_new >= sampling.min_new_tokens
    token_S, sampled_S, policy_S = draw_token(logits_SV, uniform_S, may_stop_S, temperature, sampling)
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in (policy_S, sampled_S)]
    num_new_S = state.num_new + 1
    reason_S = finish_reason(token_S, num_new_S, may_stop_S, sampling)
    sequence_S = jnp.where(reason_S == RUNNING, drawn_S, N)
    cache = state.cache.replace(length=jnp.where(sequence_S == N, 0, state.cache.length))  # so that less is read
    return state.replace(  # what is written for free slots, whose sequence is N, is dropped
        newest=token_S,
        num_new=num_new_S,
        words=state.words.at[drawn_S, state.num_new].set(jnp.stack([token_S, *bits], axis=1), mode="drop"),
        lengths=state.lengths.at[drawn_S].set(num_new_S, mode="drop"),
        finish=state.finish.at[drawn_S].set(reason_S, mode="drop"),
        sequence=sequence_S,
        cache=cache,
    )
