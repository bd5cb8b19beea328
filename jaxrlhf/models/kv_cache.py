"""The cache of keys and values: a ring of slots in which all sequences write at one common slot.

Letters: B sequences, T slots, K key-value heads, h head size.

Every decoding step writes one slot, the same for all sequences, however long each of them is: a sequence of n tokens
occupies the n most recent slots. So one `dynamic_update_slice` serves a ragged batch, no padding mask is kept, and a
sequence that joins later, or comes from another device, only has to be laid down with its last token at the present
slot.
Keys are rotated by their own positions before they are stored, so the order of slots does not matter to attention.
They lie with the slots in the last axis, since a processor multiplies them by queries so in two thirds of the time.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.layout import Axes, Layout

SLOTS_ON_GPU = 8
"""On GPUs the number of slots is a multiple of this: otherwise cuBLAS would copy every cache in every step, to one that
is. On other devices it is as requested."""
COLUMNS = 64
"""The number of columns of a longer `SlotCache` is a multiple of this."""
_MAX_PARTS = 8
"""Parts of the columns of a `SlotCache`: attention is compiled for each number of them that is in use."""
PromptKeysValues = list[tuple[Float[Array, "B P K h"], Float[Array, "B P K h"]]]
_PROMPT: Axes = ("batch", "length", "kv_heads", "head_dim")
_KEYS: Axes = ("batch", "kv_heads", "head_dim", "length")
_VALUES: Axes = ("batch", "kv_heads", "length", "head_dim")


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer."""

    keys: tuple[Float[Array, "B K h T"], ...]
    """One array a layer: separate arrays can be updated in place, slices of a stacked one are copied."""
    values: tuple[Float[Array, "B K T h"], ...]
    newest: Int[Array, ""]
    """The slot that was written last."""
    length: Int[Array, " B"]
    """Tokens of each sequence in the cache."""

    @property
    def num_slots(self) -> int:
        return self.values[0].shape[2]

    def occupied(self) -> Bool[Array, "B T"]:
        """True at the slots that hold a token of the sequence: those at most `length - 1` steps old."""
        age_T = (self.newest - jnp.arange(self.num_slots)) % self.num_slots
        return age_T[None, :] < self.length[:, None]

    def advance(self) -> "KVCache":
        """Make room for one more token of every sequence, to be written by `write`."""
        return self.replace(
            newest=(self.newest + 1) % self.num_slots, length=jnp.minimum(self.length + 1, self.num_slots)
        )

    def grow(self, num_slots: int, layout: Layout) -> "KVCache":
        """The same cache with `num_slots` slots, or, on GPUs, up to `SLOTS_ON_GPU` - 1 more. Must come before the ring
        has gone round, while its tokens are in order."""
        if layout.is_on_gpu:
            num_slots = math.ceil(num_slots / SLOTS_ON_GPU) * SLOTS_ON_GPU
        assert num_slots >= self.num_slots
        if num_slots == self.num_slots:
            return self

        def pad(x: jax.Array, axes: Axes) -> jax.Array:
            more = num_slots - self.num_slots
            return layout.activation(jnp.pad(x, [(0, more if axis == "length" else 0) for axis in axes]), axes)

        keys, values = tuple(pad(k, _KEYS) for k in self.keys), tuple(pad(v, _VALUES) for v in self.values)
        return self.replace(keys=keys, values=values)

    def repeat(self, times: int, layout: Layout) -> "KVCache":
        """The cache of as many copies of each sequence, side by side."""
        if times == 1:
            return self

        def repeated(x: jax.Array, axes: Axes) -> jax.Array:
            return layout.activation(copies(x, times), axes)

        keys, values = tuple(repeated(k, _KEYS) for k in self.keys), tuple(repeated(v, _VALUES) for v in self.values)
        return self.replace(keys=keys, values=values, length=copies(self.length, times))

    @jax.named_scope("write_cache")
    def write(self, layer: int, k_BKh: jax.Array, v_BKh: jax.Array, layout: Layout) -> "KVCache":
        """Store a layer's keys and values of the newest token."""

        def put(cache: jax.Array, new: jax.Array, axes: Axes) -> jax.Array:
            updated = jax.lax.dynamic_update_index_in_dim(
                cache, new.astype(cache.dtype), self.newest, axes.index("length")
            )
            return layout.activation(updated, axes)

        keys = (*self.keys[:layer], put(self.keys[layer], k_BKh, _KEYS), *self.keys[layer + 1 :])
        values = (*self.values[:layer], put(self.values[layer], v_BKh, _VALUES), *self.values[layer + 1 :])
        return self.replace(keys=keys, values=values)


class SlotCache(struct.PyTreeNode):
    """Keys and values of every layer, the token at position t of a sequence in column t of its row, whenever the
    sequence entered. So neither a row's neighbors nor the order of admission change the order of sums over a row.

    The columns of a layer lie in parts, each an array of its own, so that a step can leave out those in which no
    sequence has a token yet: a part of one array would be copied for it.
    """

    keys: tuple[tuple[Float[Array, "S K h t"], ...], ...]
    """[layer][part]"""
    values: tuple[tuple[Float[Array, "S K t h"], ...], ...]
    length: Int[Array, " S"]
    """Tokens of each row in the cache."""

    @classmethod
    def empty(cls, num_rows: int, tokens: int, config: ModelConfig, layout: Layout) -> "SlotCache":
        """A cache of no tokens, with room for so many in each row."""
        sizes = [num_columns(tokens)] if layout.is_on_gpu else _part_sizes(num_columns(tokens))

        def zeros(axes: Axes) -> tuple[tuple[jax.Array, ...], ...]:
            shapes = [(num_rows, size, config.num_kv_heads, config.head_size) for size in sizes]
            return tuple(
                tuple(layout.activation(_laid_down(jnp.zeros(s, config.compute_dtype), axes), axes) for s in shapes)
                for _ in range(config.num_layers)
            )

        return cls(keys=zeros(_KEYS), values=zeros(_VALUES), length=jnp.zeros(num_rows, jnp.int32))

    @property
    def num_columns(self) -> int:
        return sum(part.shape[2] for part in self.values[0])

    def occupied(self) -> Bool[Array, "S T"]:
        """True in the columns that hold a token."""
        return jnp.arange(self.num_columns)[None, :] < self.length[:, None]

    def advance(self) -> "SlotCache":
        """Makes room for one more token of every row, which `write` writes. A full row overwrites its last one."""
        return self.replace(length=jnp.minimum(self.length + 1, self.num_columns))

    @jax.named_scope("write_cache")
    def write(self, layer: int, k_SKh: jax.Array, v_SKh: jax.Array, layout: Layout) -> "SlotCache":
        """Stores a layer's keys and values of the newest token of each row."""
        rows, column_S = jnp.arange(len(self.length)), jnp.maximum(self.length - 1, 0)

        def put(parts: tuple[jax.Array, ...], new: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
            written, first, columns = [], 0, axes.index("length")
            for part in parts:
                size, inside_S = part.shape[columns], column_S - first
                inside_S = jnp.where(inside_S < 0, size, inside_S)  # columns of other parts are dropped
                given = dict(unique_indices=True, indices_are_sorted=True, mode="drop")
                where = (rows, *[slice(None)] * (columns - 1), inside_S)
                part = _scattered(part, where, new, **given)
                written.append(layout.activation(part, axes))
                first += size
            return tuple(written)

        keys = (*self.keys[:layer], put(self.keys[layer], k_SKh, _KEYS), *self.keys[layer + 1 :])
        values = (*self.values[:layer], put(self.values[layer], v_SKh, _VALUES), *self.values[layer + 1 :])
        return self.replace(keys=keys, values=values)

    @jax.named_scope("write_cache")
    def enter(
        self, rows_N: Int[Array, " N"], keys_values: PromptKeysValues, length_B: Int[Array, " B"], layout: Layout
    ) -> "SlotCache":
        """Lays each of B sequences down in N / B rows, over the whole row: a NaN that its last occupant left there
        would survive a product with zero.

        Args:
            rows_N: Different ones. Sequences for rows beyond the last are dropped.
            keys_values: Of every layer, a sequence's first token in column 0.
        """
        times = len(rows_N) // len(length_B)

        def put(parts: tuple[jax.Array, ...], new_BPKh: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
            written, first = [], 0
            for part in parts:
                size = part.shape[axes.index("length")]
                columns = new_BPKh[:, first : first + size]
                new = jnp.pad(columns, ((0, 0), (0, size - columns.shape[1]), (0, 0), (0, 0)))
                new = copies(_laid_down(new, axes), times)
                written.append(layout.activation(_scattered(part, (rows_N,), new, mode="drop"), axes))
                first += size
            return tuple(written)

        return SlotCache(
            keys=tuple(put(parts, k, _KEYS) for parts, (k, _) in zip(self.keys, keys_values, strict=True)),
            values=tuple(put(parts, v, _VALUES) for parts, (_, v) in zip(self.values, keys_values, strict=True)),
            length=self.length.at[rows_N].set(copies(length_B, times), mode="drop"),
        )


def num_columns(tokens: int) -> int:
    """Columns of a `SlotCache` for sequences of so many tokens.

    >>> num_columns(20), num_columns(300)
    (24, 320)
    """
    step = COLUMNS if tokens > COLUMNS else SLOTS_ON_GPU
    return math.ceil(tokens / step) * step


def columns_read(used: np.ndarray, tokens: int, *, on_gpu: bool) -> np.ndarray:
    """Columns of a `SlotCache` for sequences of so many tokens that attention reads, given those that are in use.

    >>> columns_read(np.array([1, 64, 65, 300]), 300, on_gpu=False)
    array([ 64,  64, 128, 320])
    """
    columns = num_columns(tokens)
    size = columns if on_gpu else _part_sizes(columns)[0]
    return np.minimum(-(-used // size) * size, columns)


def _part_sizes(columns: int) -> list[int]:
    """The columns of each part: a multiple of `COLUMNS`, of the last one what is left.

    >>> _part_sizes(320), _part_sizes(2048), _part_sizes(24)
    ([64, 64, 64, 64, 64], [256, 256, 256, 256, 256, 256, 256, 256], [24])
    """
    size = COLUMNS * math.ceil(columns / (COLUMNS * _MAX_PARTS))
    return [min(size, columns - first) for first in range(0, columns, size)]


def _scattered(cache: jax.Array, where: tuple[Any, ...], new: jax.Array, **given: Any) -> jax.Array:
    """A cache with new values in some places. In bfloat16 their bits are scattered: the CPU's compiler would widen the
    whole cache for it."""
    new = new.astype(cache.dtype)
    if cache.dtype != jnp.bfloat16:
        return cache.at[where].set(new, **given)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return jax.lax.bitcast_convert_type(bits(cache).at[where].set(bits(new), **given), jnp.bfloat16)


def _laid_down(x_BPKh: jax.Array, axes: Axes) -> jax.Array:
    """Keys or values of prompts in the order of a cache's axes."""
    return x_BPKh.transpose([_PROMPT.index(axis) for axis in axes])


def copies(x: jax.Array, times: int) -> jax.Array:
    """Each row `times` times in a row, on the device that has it."""
    if times == 1:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(-1, *x.shape[1:])


def cache_prefill(
    keys_values: PromptKeysValues,
    length_B: Int[Array, " B"],
    num_slots: int,
    layout: Layout,
) -> KVCache:
    """A cache that is grown to `num_slots` slots and holds the keys and values of prompts, padded on the left to P
    columns."""

    prompts = KVCache(
        keys=tuple(layout.activation(_laid_down(k, _KEYS), _KEYS) for k, _ in keys_values),
        values=tuple(layout.activation(_laid_down(v, _VALUES), _VALUES) for _, v in keys_values),
        newest=jnp.int32(keys_values[0][0].shape[1] - 1),
        length=length_B.astype(jnp.int32),
    )
    return prompts.grow(num_slots, layout)
