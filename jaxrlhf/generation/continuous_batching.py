"""Continuous batching on the device: sequences that finish leave a slot of the decode batch, waiting prompts enter it.

Letters: S slots, Q prompts in the queue, n samples of each, N = Q n sequences, P prompt columns, R the most new tokens,
g prompts that are prefilled together.

    queue = make_queue(prompts, sampling)
    state = begin(queue, sampling, slots, config, layout)           # all slots are free
    state = advance(params, queue, state, num_rounds, ...)          # go on for so many rounds, or until all is done
    rollout = finish(samples_of(prompts, ...), state.outputs.drawn(), layout)

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
from jaxrlhf.generation.generate import Drawn, finish, prepare, samples_of, uniform
from jaxrlhf.generation.sampling import History, next_token
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import SlotCache, copies
from jaxrlhf.models.params import Params
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
    """The id of each sequence. The n sequences of a prompt are consecutive."""
    sequence: Int[Array, " N"]
    """Its place among the outputs, which are in the order of the prompts that were given."""


class SlotRows(struct.PyTreeNode):
    """The sequence in each slot."""

    newest: Int[Array, " S"]
    """The token that was drawn last, or the last of its prompt: not yet in the cache."""
    sequence: Int[Array, " S"]
    """Its place among the outputs; N in free slots."""
    id: UInt[Array, " S"]
    num_new: Int[Array, " S"]
    """Its new tokens so far."""
    history: History

    @classmethod
    def empty(
        cls, num_slots: int, num_sequences: int, sampling: Sampling, config: ModelConfig, layout: Layout
    ) -> "SlotRows":
        """Free slots."""
        return cls(
            newest=jnp.zeros(num_slots, jnp.int32),
            sequence=jnp.full(num_slots, num_sequences, jnp.int32),
            id=jnp.zeros(num_slots, jnp.uint32),
            num_new=jnp.zeros(num_slots, jnp.int32),
            history=History.of_rows(num_slots, config.vocab_size, sampling, layout),
        )


class Outputs(struct.PyTreeNode):
    """The responses so far: a row for each sequence."""

    words: Int[Array, "N R 3"]
    """Each new token, and the bits of its two log-probabilities: under the policy, and under the distribution that it
    was drawn from. One array, so that a step writes once."""
    lengths: Int[Array, " N"]
    finish: Int[Array, " N"]

    @classmethod
    def empty(cls, num_sequences: int, max_new_tokens: int) -> "Outputs":
        """Nothing yet."""
        return cls(
            words=jnp.zeros((num_sequences, max_new_tokens, 3), jnp.int32),
            lengths=jnp.zeros(num_sequences, jnp.int32),
            finish=jnp.full(num_sequences, RUNNING, jnp.int32),
        )

    def drawn(self) -> Drawn:
        """Tokens and log-probabilities, each in an array of its own."""
        floats = jax.lax.bitcast_convert_type(self.words, jnp.float32)
        return Drawn(
            tokens=self.words[..., 0],
            logprobs=floats[..., 1],
            sampled_logprobs=floats[..., 2],
            num_new=self.lengths,
            finish=self.finish,
        )


class BatchState(struct.PyTreeNode):
    """Everything that decoding needs to go on."""

    cache: SlotCache
    rows: SlotRows
    outputs: Outputs
    head: Int[Array, ""]
    """The next prompt to enter."""
    rounds: Int[Array, ""]
    groups: Int[Array, ""]
    """Groups that were prefilled so far."""


class Group(struct.PyTreeNode):
    """Prompts that are prefilled together, and where their n samples enter."""

    tokens: Int[Array, "g P"]
    length: Int[Array, " g"]
    slot: Int[Array, " g*n"]
    """The slot that each sample enters; S, which is no slot, for those that do not enter."""
    place: Int[Array, " g*n"]
    """The place of each sample in the queue."""

    @property
    def mask(self) -> Bool[Array, "g P"]:
        return jnp.arange(self.tokens.shape[1])[None, :] < self.length[:, None]


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
        state = advance(params, queue, state, noise, None, temperature, sampling, slots, config, within)
        return state.outputs.drawn()

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
    N, R = len(queue.id), sampling.max_new_tokens
    tokens = queue.tokens.shape[1] + R - 1  # the last token that is drawn does not enter the cache
    return BatchState(
        cache=SlotCache.empty(slots.slots, tokens, config, layout),
        rows=SlotRows.empty(slots.slots, N, sampling, config, layout),
        outputs=Outputs.empty(N, R),
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
        works = (state.head < num_prompts(queue, slots)) | (state.rows.sequence < len(queue.id)).any()
        return works if last is None else works & (state.rounds < last)

    def step(_: jax.Array, state: BatchState) -> BatchState:
        hidden_SD, cache = decode_step(params, state.rows.newest, state.cache, config, layout)
        logits_SV = layout.activation(logits(params, hidden_SD, config, layout), ("batch", "choices"))
        rows, outputs = draw_in_slots(state.rows, state.outputs, logits_SV, noise, temperature, sampling)
        is_free_S = rows.sequence == len(queue.id)
        cache = cache.replace(length=jnp.where(is_free_S, 0, cache.length))  # so that less is read
        return state.replace(cache=cache, rows=rows, outputs=outputs)

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


def num_prompts(queue: Queue, slots: Slots) -> int:
    """Of the whole queue, without the padding after them."""
    return len(queue.length) - slots.prefill_rows


def _has_room(state: BatchState, queue: Queue, sampling: Sampling, slots: Slots) -> Bool[Array, ""]:
    """Whether prompts wait, and slots are free for as many of them as are to enter together."""
    waiting = num_prompts(queue, slots) - state.head
    wanted = jnp.minimum(waiting, wanted_together(sampling, slots))
    return (waiting > 0) & (room_for_prompts(state.rows.sequence, len(queue.id), sampling, slots) >= wanted)


def wanted_together(sampling: Sampling, slots: Slots) -> int:
    """Prompts for which slots are to be free before a group enters."""
    return min(slots.admit or slots.prefill_rows, slots.prefill_rows, slots.slots // sampling.num_samples)


def room_for_prompts(
    sequence_S: Int[Array, " S"], num_sequences: int, sampling: Sampling, slots: Slots
) -> Int[Array, ""]:
    """Prompts that may enter together, with all of their samples."""
    return jnp.minimum((sequence_S == num_sequences).sum() // sampling.num_samples, slots.prefill_rows)


def next_group(
    queue: Queue,
    sequence_S: Int[Array, " S"],
    first: Int[Array, ""],
    entering: Int[Array, ""],
    sampling: Sampling,
    slots: Slots,
) -> Group:
    """A group of prompts of the queue from `first` on, of which so many enter, each with all of its samples."""
    n, g, N = sampling.num_samples, slots.prefill_rows, len(queue.id)
    tokens_gP, length_g = (jax.lax.dynamic_slice_in_dim(x, first, g) for x in (queue.tokens, queue.length))
    number = jnp.arange(g * n)  # of each sample of the group, in the order of the queue
    free = jnp.nonzero(sequence_S == N, size=g * n, fill_value=slots.slots)[0]
    return Group(
        tokens=tokens_gP,
        length=length_g,
        slot=jnp.where(number < entering * n, free, slots.slots).astype(jnp.int32),
        place=jnp.minimum(first * n + number, N - 1).astype(jnp.int32),
    )


def enter(
    rows: SlotRows, group: Group, queue: Queue, sampling: Sampling, config: ModelConfig, layout: Layout
) -> SlotRows:
    """The rows after the samples of a group have entered."""
    n = sampling.num_samples
    last_g = jnp.take_along_axis(group.tokens, group.length[:, None] - 1, axis=1)[:, 0]
    history = History.of_prompts(group.tokens, group.mask, config.vocab_size, sampling, layout)

    def put(x_S: jax.Array, new: jax.Array) -> jax.Array:
        return x_S.at[group.slot].set(new.astype(x_S.dtype), mode="drop")

    return SlotRows(
        newest=put(rows.newest, copies(last_g, n)),
        sequence=put(rows.sequence, queue.sequence[group.place]),
        id=put(rows.id, queue.id[group.place]),
        num_new=put(rows.num_new, jnp.zeros_like(group.slot)),
        history=jax.tree.map(lambda x_S, new_g: put(x_S, copies(new_g, n)), rows.history, history),
    )


def _admit(
    params: Params,
    queue: Queue,
    state: BatchState,
    sampling: Sampling,
    slots: Slots,
    config: ModelConfig,
    layout: Layout,
) -> BatchState:
    """Prefills the next group of prompts, and lets those enter for which slots are free."""
    n, columns = sampling.num_samples, queue.tokens.shape[1]
    room = room_for_prompts(state.rows.sequence, len(queue.id), sampling, slots)
    entering = jnp.minimum(room, num_prompts(queue, slots) - state.head)
    group = next_group(queue, state.rows.sequence, state.head, entering, sampling, slots)
    if 0 < slots.prefill_tokens < columns:
        keys_values = prefill_in_chunks(params, group.tokens, group.length, slots.prefill_tokens, config, layout)
    else:
        x_gPD = embed(params, group.tokens, config, layout)
        _, keys_values = run_layers(params["layers"], x_gPD, group.mask, config, layout, wanted=columns - 1)
    samples = [(copies(k, n), copies(v, n)) for k, v in keys_values]
    return state.replace(
        cache=state.cache.enter(group.slot, samples, copies(group.length, n) - 1, layout),
        rows=enter(state.rows, group, queue, sampling, config, layout),
        head=state.head + entering,
        groups=state.groups + 1,
    )


@jax.named_scope("draw")
def draw_in_slots(
    rows: SlotRows,
    outputs: Outputs,
    logits_SV: Float[Array, "S V"],
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    sampling: Sampling,
) -> tuple[SlotRows, Outputs]:
    """Draws and records the next token of the sequence in every slot. Those that end leave their slots."""
    uniform_S = jax.vmap(uniform, in_axes=(None, 0, 0))(noise, rows.id, rows.num_new)
    drawn = next_token(logits_SV, uniform_S, rows.num_new, rows.history, temperature, sampling)
    both = (drawn.logprob, drawn.sampled_logprob)
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in both]
    word_S3, num_new_S, into = jnp.stack([drawn.token, *bits], axis=1), rows.num_new + 1, rows.sequence
    outputs = Outputs(  # what is written for free slots, whose sequence is N, is dropped
        words=outputs.words.at[into, rows.num_new].set(word_S3, mode="drop"),
        lengths=outputs.lengths.at[into].set(num_new_S, mode="drop"),
        finish=outputs.finish.at[into].set(drawn.finish, mode="drop"),
    )
    sequence_S = jnp.where(drawn.finish == RUNNING, into, len(outputs.lengths))
    return rows.replace(newest=drawn.token, num_new=num_new_S, history=drawn.history, sequence=sequence_S), outputs
