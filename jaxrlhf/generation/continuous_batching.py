"""Continuous batching on the device: sequences that finish leave a slot of the decode batch, waiting prompts enter it.

Letters: S slots, Q prompts in the queue, n samples of each, N = Q n sequences, P prompt columns, R the most new tokens,
g prompts that are prefilled together.

    queue = make_queue(prompts, settings)
    state = begin(queue, settings)                                  # all slots are free
    state = advance(params, queue, state, ..., settings, until)     # some rounds, or until all have finished
    drawn = state.outputs.drawn()

This is the program of a row shard; `generate` has those of a layout. All shapes are fixed. It holds that the bits
of a sequence do not depend on when it is admitted, on who is in the other slots, on how many steps there are between
two admissions, on where `advance` was interrupted, or on a move to other slots:

- a row of the cache holds the token at position t in column t (`KVCache`), so the order of sums does not depend on
  the moment of admission;
- prompts are prefilled in groups of a fixed width, padded where fewer enter;
- prefill draws nothing. A sequence enters as if its last prompt token had been drawn last, and the next step of all
  slots draws the first token of its response like any other;
- noise depends on the sequence's id and the position alone.

Another number of slots or another width of groups is another program, whose sums may be rounded differently.

Reference:
    Yu et al. 2022 (Orca), OSDI: iteration-level scheduling, there by a host.
"""

import contextlib
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxrlhf.experience import RUNNING, Prompts, Sampling
from jaxrlhf.generation.rollout_settings import RolloutSettings, Slots, Until, decoding_stages
from jaxrlhf.generation.sampling import History, next_token
from jaxrlhf.models.heads import logits
from jaxrlhf.models.kv_cache import KVCache, SharedPrompts, copies
from jaxrlhf.models.params import Params
from jaxrlhf.models.transformer import decode_step, embed, prefill_in_chunks, run_layers
from jaxrlhf.sharding.stage_layers import layers_of_stages


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
    num_new: Int[Array, " S"]
    """Its new tokens so far."""
    history: History

    @classmethod
    def empty(cls, num_sequences: int, settings: RolloutSettings) -> "SlotRows":
        """Free slots."""
        num_slots, vocab_size = settings.slots.slots, settings.config.vocab_size
        return cls(
            newest=jnp.zeros(num_slots, jnp.int32),
            sequence=jnp.full(num_slots, num_sequences, jnp.int32),
            num_new=jnp.zeros(num_slots, jnp.int32),
            history=History.of_rows(num_slots, vocab_size, settings.sampling, settings.layout),
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


class BatchState(struct.PyTreeNode):
    """Everything that decoding needs to go on: of a row shard, or of a stage of one."""

    caches: list[KVCache]
    """One, or over stages one for each place of the ring, of the stage's layers."""
    rows: list[SlotRows]
    """As many. Over stages, the last one alone has their histories."""
    outputs: Outputs
    """Over stages, the last one has them."""
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
    entry: Int[Array, " g"]
    """The shared entry of each prompt; E, which is no entry, for those that do not enter. Unused if prompts are not
    shared."""
    place: Int[Array, " g*n"]
    """The place of each sample in the queue."""

    @property
    def mask(self) -> Bool[Array, "g P"]:
        return jnp.arange(self.tokens.shape[1])[None, :] < self.length[:, None]


def make_queue(prompts: Prompts, settings: RolloutSettings) -> Queue:
    """A queue of prompts, which are padded on the left, in their order; or, if they say how many tokens their responses
    are expected to have, those of the longest responses first."""
    n, g, (Q, P) = settings.sampling.num_samples, settings.slots.prefill_rows, prompts.tokens.shape
    order_Q = jnp.arange(Q)
    if prompts.expected_tokens is not None:
        order_Q = jnp.argsort(prompts.expected_tokens, stable=True, descending=True)
        prompts = jax.tree.map(lambda x: x[order_Q], prompts)
    length = prompts.mask.sum(axis=1).astype(jnp.int32)
    from_left = (jnp.arange(P)[None, :] - length[:, None]) % P
    id_QN = prompts.id[:, None] * jnp.uint32(n) + jnp.arange(n, dtype=jnp.uint32)[None, :]
    return Queue(
        tokens=jnp.pad(jnp.take_along_axis(prompts.tokens, from_left, axis=1), ((0, g), (0, 0))),
        length=jnp.pad(length, (0, g), constant_values=1),
        id=id_QN.reshape(-1),
        sequence=(order_Q[:, None] * n + jnp.arange(n)[None, :]).reshape(-1),
    )


def on_device(params: Params, settings: RolloutSettings) -> Params:
    """The weights of a row shard: those of the layout."""
    return params


def begin(params: Params, queue: Queue, settings: RolloutSettings) -> BatchState:
    """A state in which all slots are free, or hold the first tokens of all prompts at once. `params`: as `prepare`
    gives them."""
    state = free_state(queue, settings)
    return _admit(params, queue, state, settings) if settings.slots.at_once else state


def free_state(queue: Queue, settings: RolloutSettings) -> BatchState:
    """A state in which all slots are free, of a row shard, or of a stage of it."""
    sampling, slots, layout = settings.sampling, settings.slots, settings.layout
    stages, N, R, P = layout.strategy.pipeline, len(queue.id), sampling.max_new_tokens, queue.tokens.shape[1]
    num_layers = len(layers_of_stages(settings.config.num_layers, stages)[0])
    config = dataclasses.replace(settings.config, num_layers=num_layers)

    def cache() -> KVCache:
        prompts, tokens = None, P + R - 1  # the last token that is drawn does not enter the cache
        if E := slots.shared_prompts:
            prompts, tokens = SharedPrompts.empty(E, sampling.num_samples, slots.slots, P - 1, config, layout), R
        if slots.at_once:
            tokens = decoding_stages(P, R)[0][0]
        return KVCache.empty(slots.slots, tokens, config, layout, prompts=prompts, grows=slots.at_once)

    return BatchState(
        caches=[cache() for _ in range(stages)],
        rows=[SlotRows.empty(N, settings) for _ in range(stages)],
        outputs=Outputs.empty(N, R),
        **{name: jnp.zeros((), jnp.int32) for name in ("head", "rounds", "groups")},
    )


def with_room(state: BatchState, tokens: int, settings: RolloutSettings) -> BatchState:
    """A state of all rows at once, whose cache has grown to so many tokens. In slots it stays as it is."""
    if not settings.slots.at_once:
        return state
    return state.replace(caches=[cache.grow(tokens, settings.layout) for cache in state.caches])


def advance(
    params: Params,
    queue: Queue,
    state: BatchState,
    noise: UInt[Array, "3"],
    temperature: Float[Array, ""],
    settings: RolloutSettings,
    until: Until,
) -> BatchState:
    """Goes on, round by round. A round is as many admissions as there is room for, and `slots.steps` decoding steps; of
    all rows at once, a step. Under `jit`, donate the state: its cache is then updated in place. `params`: as `prepare`
    gives them."""
    config, layout, N, started = settings.config, settings.layout, len(queue.id), state.rounds
    uniform_NR = noise_of_outputs(noise, queue, settings)

    def step(_: jax.Array, state: BatchState) -> BatchState:
        (cache,), (rows,) = state.caches, state.rows
        hidden_SD, cache = decode_step(params, rows.newest, cache, config, layout)
        logits_SV = layout.activation(logits(params, hidden_SD, config, layout), ("batch", "choices"))
        rows, outputs = draw_in_slots(rows, state.outputs, logits_SV, uniform_NR, temperature, settings.sampling)
        cache = cache.free(rows.sequence == N)
        return state.replace(caches=[cache], rows=[rows], outputs=outputs)

    def one_round(state: BatchState) -> BatchState:
        if settings.slots.at_once:
            state = step(state.rounds, state)
        else:
            with jax.named_scope("prefill"):  # a branch that left the state as it is would copy the cache
                state = jax.lax.while_loop(
                    lambda state: _has_room(state, queue, settings),
                    lambda state: _admit(params, queue, state, settings),
                    state,
                )
            with jax.named_scope("decode"):
                state = jax.lax.fori_loop(0, settings.slots.steps, step, state)
        return state.replace(rounds=state.rounds + 1)

    def another(state: BatchState) -> jax.Array:
        return goes_on(state, queue, settings, until, started=started)

    with jax.named_scope("decode") if settings.slots.at_once else contextlib.nullcontext():
        return jax.lax.while_loop(another, one_round, state)


def goes_on(
    state: BatchState, queue: Queue, settings: RolloutSettings, until: Until, *, started: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether to run another round. `started` is the round from which `until` counts."""
    waiting, N = num_prompts(queue, settings.slots) - state.head, len(queue.id)
    if settings.together == 1:
        in_slots = jnp.stack([rows.sequence < N for rows in state.rows]).sum()
    else:
        running = jnp.zeros(N // settings.together, bool)
        for rows in state.rows:
            running = running.at[rows.sequence // settings.together].set(True, mode="drop")
        in_slots = running.sum() * settings.together
    more = (waiting * settings.sampling.num_samples + in_slots > until.left) | (until.none_waits & (waiting > 0))
    return more if until.rounds is None else more & (state.rounds - started < until.rounds)


def num_prompts(queue: Queue, slots: Slots) -> int:
    """Of the whole queue, without the padding after them."""
    return len(queue.length) - slots.prefill_rows


def _has_room(state: BatchState, queue: Queue, settings: RolloutSettings) -> Bool[Array, ""]:
    """Whether prompts wait, and slots are free for as many of them as are to enter together."""
    waiting = num_prompts(queue, settings.slots) - state.head
    wanted = jnp.minimum(waiting, wanted_together(settings))
    return (waiting > 0) & (room_for_prompts(free_places(state, 0), settings) >= wanted)


def wanted_together(settings: RolloutSettings) -> int:
    """Prompts for which slots are to be free before a group enters."""
    sampling, slots = settings.sampling, settings.slots
    most = min(slots.prefill_rows, slots.slots // sampling.num_samples, slots.shared_prompts or slots.prefill_rows)
    return min(slots.admit or most, most)


class FreePlaces(NamedTuple):
    """Masks of the free slots and of the free entries for shared prompts."""

    slots: Bool[Array, " S"]
    entries: Bool[Array, " E"] | None
    """None if prompts are not shared."""


def free_places(state: BatchState, place: int) -> FreePlaces:
    """The free places of one micro-batch, by its place in the ring. Without stages the only place is 0."""
    N, prompts = len(state.outputs.lengths), state.caches[place].prompts
    return FreePlaces(state.rows[place].sequence == N, None if prompts is None else prompts.is_free())


def room_for_prompts(free: FreePlaces, settings: RolloutSettings) -> Int[Array, ""]:
    """Prompts that may enter together, with all of their samples."""
    room = jnp.minimum(free.slots.sum() // settings.sampling.num_samples, settings.slots.prefill_rows)
    return room if free.entries is None else jnp.minimum(room, free.entries.sum())


def next_group(
    queue: Queue,
    settings: RolloutSettings,
    free: FreePlaces,
    first: Int[Array, ""],
    entering: Int[Array, ""],
) -> Group:
    """A group of prompts of the queue from `first` on, of which so many enter, each with all of its samples."""
    n, g, N = settings.sampling.num_samples, settings.slots.prefill_rows, len(queue.id)

    def enters(is_free: jax.Array, samples: int) -> jax.Array:
        beyond = len(is_free)
        places = jnp.nonzero(is_free, size=g * samples, fill_value=beyond)[0]
        return jnp.where(jnp.arange(g * samples) < entering * samples, places, beyond).astype(jnp.int32)

    tokens_gP, length_g = (jax.lax.dynamic_slice_in_dim(x, first, g) for x in (queue.tokens, queue.length))
    number = jnp.arange(g * n)  # of each sample of the group, in the order of the queue
    return Group(
        tokens=tokens_gP,
        length=length_g,
        slot=enters(free.slots, n),
        entry=jnp.zeros(g, jnp.int32) if free.entries is None else enters(free.entries, 1),
        place=jnp.minimum(first * n + number, N - 1).astype(jnp.int32),
    )


def enter(rows: SlotRows, group: Group, queue: Queue, settings: RolloutSettings) -> SlotRows:
    """The rows after the samples of a group have entered."""
    sampling, n = settings.sampling, settings.sampling.num_samples
    last_g = jnp.take_along_axis(group.tokens, group.length[:, None] - 1, axis=1)[:, 0]
    history = History.of_prompts(group.tokens, group.mask, settings.config.vocab_size, sampling, settings.layout)

    def put(x_S: jax.Array, new: jax.Array) -> jax.Array:
        return x_S.at[group.slot].set(new.astype(x_S.dtype), mode="drop")

    return SlotRows(
        newest=put(rows.newest, copies(last_g, n)),
        sequence=put(rows.sequence, queue.sequence[group.place]),
        num_new=put(rows.num_new, jnp.zeros_like(group.slot)),
        history=jax.tree.map(lambda x_S, new_g: put(x_S, copies(new_g, n)), rows.history, history),
    )


def _admit(params: Params, queue: Queue, state: BatchState, settings: RolloutSettings) -> BatchState:
    """Prefills the next group of prompts, and lets those enter for which slots are free."""
    (cache,), (rows,), columns = state.caches, state.rows, queue.tokens.shape[1]
    config, layout, size = settings.config, settings.layout, settings.slots.prefill_tokens
    free = free_places(state, 0)
    entering = jnp.minimum(room_for_prompts(free, settings), num_prompts(queue, settings.slots) - state.head)
    group = next_group(queue, settings, free, state.head, entering)
    with jax.named_scope("prefill"):
        if 0 < size < columns:
            keys_values = prefill_in_chunks(params, group.tokens, group.length, size, config, layout)
        else:
            x_gPD = embed(params, group.tokens, config, layout)
            _, keys_values = run_layers(params["layers"], x_gPD, group.mask, config, layout, wanted=columns - 1)
    return state.replace(
        caches=[cache.enter(group.slot, group.entry, keys_values, group.length - 1, layout)],
        rows=[enter(rows, group, queue, settings)],
        head=state.head + entering,
        groups=state.groups + 1,
    )


@jax.named_scope("draw")
def draw_in_slots(
    rows: SlotRows,
    outputs: Outputs,
    logits_SV: Float[Array, "S V"],
    uniform_NR: Float[Array, "N R"],
    temperature: Float[Array, ""],
    sampling: Sampling,
) -> tuple[SlotRows, Outputs]:
    """Draws and records the next token of the sequence in every slot. Those that end leave their slots. `uniform_NR`:
    from `noise_of_outputs`."""
    uniform_S = uniform_NR.at[rows.sequence, rows.num_new].get(mode="clip")
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


def noise_of_outputs(noise: UInt[Array, "3"], queue: Queue, settings: RolloutSettings) -> Float[Array, "N R"]:
    """The noise of every position of the sequences of a queue, in the order of the outputs."""
    uniform_NR = uniforms(noise, queue.id, settings.sampling.max_new_tokens)
    return jnp.zeros_like(uniform_NR).at[queue.sequence].set(uniform_NR)


def uniforms(noise: UInt[Array, "3"], id_N: UInt[Array, " N"], num_positions: int) -> Float[Array, "N R"]:
    """The noise of every position of some sequences, by their ids: numbers in [0, 1)."""

    def uniform(number: jax.Array, position: jax.Array) -> jax.Array:
        given = (noise[1], noise[2], number, position)
        return jax.random.uniform(functools.reduce(jax.random.fold_in, given, jax.random.key(noise[0])))

    return jax.vmap(lambda number: jax.vmap(lambda t: uniform(number, t))(jnp.arange(num_positions)))(id_N)
