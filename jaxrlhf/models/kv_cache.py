"""The cache of keys and values: the token at position t of a sequence in column t of its row.

Letters: S slots, T columns, t columns of a part, K key-value heads, h head size, g prompts of a group, n samples of
each, E shared prompts.

A sequence enters a row when another has left it, so the newest tokens of the rows lie in different columns, and a step
writes with one scatter. The column of a token follows from its position alone: neither a row's neighbors nor the moment
at which it entered change the order of sums over a row.

With `SharedPrompts`, a row has the columns of its response only, and its prompt lies in an entry that it shares with
the other samples of this prompt. An entry is free when the last of its samples has left. Attention over both is merged
by the sums of their softmax (Juravsky et al. 2024, Hydragen, arXiv:2402.05099).

Where `tensor` does not divide the key-value heads of a model, K is that of `architecture.computed`: heads are repeated,
so that a device has those that its queries look at.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.architecture import computed
from jaxrlhf.models.attention import Window, attention_in_parts, attention_over_shared
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.layout import Axes, Layout

_UNIT = 8
"""The number of columns is a multiple of this, which cuBLAS needs: it would copy the cache in every step to one."""
COLUMNS = 64
"""Of the columns of a longer cache in parts."""
_MAX_PARTS = 8
"""Parts of the columns: attention is compiled for each number of them that is in use."""
PromptKeysValues = list[tuple[Float[Array, "B P K h"], Float[Array, "B P K h"]]]
PROMPT_AXES: Axes = ("batch", "length", "kv_heads", "head_dim")
KEY_AXES: Axes = ("batch", "kv_heads", "head_dim", "length")
"""Of the keys in a cache. With the length last, XLA does not repack them for matrix products on a CPU."""
VALUE_AXES: Axes = ("batch", "kv_heads", "length", "head_dim")


class SharedPrompts(struct.PyTreeNode):
    """Keys and values of prompts, which are kept once, and read once in a step, for all samples of a prompt."""

    keys: tuple[tuple[Float[Array, "E K h P"]], ...]
    """[layer][0]"""
    values: tuple[tuple[Float[Array, "E K P h"]], ...]
    length: Int[Array, " E"]
    """Tokens of each prompt but its last one, which is the first to enter the rows of its samples."""
    place: Int[Array, " S"]
    """The prompt and the sample in each slot, e n + j; E n in free slots."""
    num_samples: int = struct.field(pytree_node=False)

    def is_free(self) -> Bool[Array, " E"]:
        """Where another prompt may enter."""
        E = len(self.length)
        return jnp.zeros(E, jnp.int32).at[self.place // self.num_samples].add(1, mode="drop") == 0

    def slots(self) -> Int[Array, "E n"]:
        """The slot of each sample; S of those that have ended."""
        E, S, n = len(self.length), len(self.place), self.num_samples
        return jnp.full(E * n, S).at[self.place].set(jnp.arange(S), mode="drop").reshape(E, n)

    def row_length(self) -> Int[Array, " S"]:
        """Tokens of the prompt of each row; 0 for free ones."""
        return self.length.at[self.place // self.num_samples].get(mode="fill", fill_value=0)

    @classmethod
    def empty(
        cls, num_prompts: int, num_samples: int, num_rows: int, tokens: int, config: ModelConfig, layout: Layout
    ) -> "SharedPrompts":
        """Free entries, each with room for so many tokens, beside a cache of `num_rows` rows."""
        keys, values = _empty(num_prompts, [num_columns(tokens)], config, layout)
        place = jnp.full(num_rows, num_prompts * num_samples, jnp.int32)
        return cls(keys, values, jnp.zeros(num_prompts, jnp.int32), place, num_samples)


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer.

    The columns of a layer lie in parts, each an array of its own, so that a step can leave out those in which no
    sequence has a token yet: a part of one array would be copied for it.
    """

    keys: tuple[tuple[Float[Array, "S K h t"], ...], ...]
    """[layer][part]"""
    values: tuple[tuple[Float[Array, "S K t h"], ...], ...]
    length: Int[Array, " S"]
    """Tokens of each row in the cache; those of a shared prompt not counted."""
    prompts: SharedPrompts | None
    """None if each row has its prompt in its own columns."""

    @classmethod
    def empty(
        cls,
        num_rows: int,
        tokens: int,
        config: ModelConfig,
        layout: Layout,
        *,
        prompts: SharedPrompts | None = None,
        grows: bool = False,
    ) -> "KVCache":
        """A cache of no tokens, with room for so many in each row, beside those of shared prompts. One that `grows` has
        no parts: all that it has is in use soon."""
        sizes = [grown_columns(tokens)] if grows else _part_sizes(num_columns(tokens), on_gpu=layout.is_on_gpu)
        return cls(*_empty(num_rows, sizes, config, layout), jnp.zeros(num_rows, jnp.int32), prompts)

    def grow(self, tokens: int, layout: Layout) -> "KVCache":
        """A cache that `grows`, with room for so many tokens in each row."""
        more = grown_columns(tokens) - self.num_columns

        def padded(every: tuple[tuple[jax.Array, ...], ...], axes: Axes) -> tuple[tuple[jax.Array, ...], ...]:
            widths = [(0, more if axis == "length" else 0) for axis in axes]
            return tuple((layout.activation(jnp.pad(array, widths), axes),) for (array,) in every)

        return self.replace(keys=padded(self.keys, KEY_AXES), values=padded(self.values, VALUE_AXES))

    @property
    def num_columns(self) -> int:
        return sum(part.shape[2] for part in self.values[0])

    def occupied(self) -> Bool[Array, "S T"]:
        """True in the columns that hold a token."""
        return jnp.arange(self.num_columns)[None, :] < self.length[:, None]

    def advance(self) -> "KVCache":
        """Makes room for one more token of every row, which `write` writes. A full row overwrites its last one."""
        return self.replace(length=jnp.minimum(self.length + 1, self.num_columns))

    def positions(self) -> Int[Array, " S"]:
        """Of the newest token of each row."""
        own_S = self.length - 1
        return own_S if self.prompts is None else own_S + self.prompts.row_length()

    def layer(self, number: int) -> tuple[Any, ...]:
        """What attention of a layer reads."""
        own = self.keys[number], self.values[number]
        return own if self.prompts is None else (*own, *self.prompts.keys[number], *self.prompts.values[number])

    def attention(self) -> Callable[[jax.Array, tuple[Any, ...], Window], jax.Array]:
        """Of one query a row [S, H, h] over what `layer` gives, or over what a window leaves of it."""
        prompts, occupied_ST = self.prompts, self.occupied()

        def seen(window: Window) -> Bool[Array, "S T"]:
            if window is None:
                return occupied_ST
            return occupied_ST & (jnp.arange(self.num_columns)[None, :] >= (self.length - window)[:, None])

        if prompts is None:
            return lambda q_SHh, layer, window: attention_in_parts(
                q_SHh, *layer, occupied_ST=occupied_ST, seen_ST=seen(window)
            )
        slots_En, position_S = prompts.slots(), self.positions()
        column_P = jnp.arange(prompts.keys[0][0].shape[3])
        filled_EP = column_P[None, :] < prompts.length[:, None]

        def seen_of_prompts(window: Window) -> Bool[Array, "E P"] | Bool[Array, "E n P"]:
            if window is None:
                return filled_EP
            position_En = position_S.at[slots_En].get(mode="fill", fill_value=0)
            return filled_EP[:, None, :] & (column_P[None, None, :] > position_En[..., None] - window)

        def over_shared(q_SHh: jax.Array, layer: tuple[Any, ...], window: Window) -> jax.Array:
            rows = {"occupied_ST": occupied_ST, "slots_En": slots_En, "place_S": prompts.place}
            return attention_over_shared(q_SHh, *layer, seen_ST=seen(window), seen_EP=seen_of_prompts(window), **rows)

        return over_shared

    def of_layers(self, these: slice) -> "KVCache":
        """The cache of some of the layers."""
        prompts = self.prompts
        if prompts is not None:
            prompts = prompts.replace(keys=prompts.keys[these], values=prompts.values[these])
        return self.replace(keys=self.keys[these], values=self.values[these], prompts=prompts)

    def free(self, is_free_S: Bool[Array, " S"]) -> "KVCache":
        """Without the sequences of some rows, so that less is read, and their prompts may leave."""
        prompts = self.prompts
        if prompts is not None:
            none = len(prompts.length) * prompts.num_samples
            prompts = prompts.replace(place=jnp.where(is_free_S, none, prompts.place))
        return self.replace(length=jnp.where(is_free_S, 0, self.length), prompts=prompts)

    def of_rows(self, rows_M: Int[Array, " M"]) -> "KVCache":
        """The cache of some rows, each with a prompt of its own."""
        keys, values, length = jax.tree.map(lambda x: x[rows_M], (self.keys, self.values, self.length))
        if (prompts := self.prompts) is not None:
            entry_M = jnp.minimum(prompts.place[rows_M] // prompts.num_samples, len(prompts.length) - 1)
            own = jax.tree.map(lambda x: x[entry_M], (prompts.keys, prompts.values, prompts.length))
            prompts = SharedPrompts(*own, place=jnp.arange(len(rows_M)), num_samples=1)
        return KVCache(keys, values, length, prompts)

    def joined(self) -> "KVCache":
        """A cache whose rows come from several `of_rows`."""
        if self.prompts is None:
            return self
        return self.replace(prompts=self.prompts.replace(place=jnp.arange(len(self.length))))

    @jax.named_scope("write_cache")
    def write(self, layer: int, k_SKh: jax.Array, v_SKh: jax.Array, layout: Layout) -> "KVCache":
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

        keys = (*self.keys[:layer], put(self.keys[layer], k_SKh, KEY_AXES), *self.keys[layer + 1 :])
        values = (*self.values[:layer], put(self.values[layer], v_SKh, VALUE_AXES), *self.values[layer + 1 :])
        return self.replace(keys=keys, values=values)

    @jax.named_scope("write_cache")
    def enter(
        self,
        rows_N: Int[Array, " N"],
        entry_g: Int[Array, " g"],
        keys_values: PromptKeysValues,
        length_g: Int[Array, " g"],
        layout: Layout,
    ) -> "KVCache":
        """Lays each of g prompts down in the N / g rows of its samples, or in an entry that they share, over the whole
        row or entry: a NaN that its last occupant left there would survive a product with zero.

        Args:
            rows_N: Different ones. Samples for rows beyond the last are dropped.
            entry_g: Different ones, if prompts are shared, beyond the last for those that do not enter.
            keys_values: Of every layer, a prompt's first token in column 0.
        """
        prompts = self.prompts
        if prompts is not None:
            keys, values = _with_prompts(prompts.keys, prompts.values, entry_g, keys_values, layout)
            place_gn = entry_g[:, None] * prompts.num_samples + jnp.arange(prompts.num_samples)[None, :]
            prompts = prompts.replace(
                keys=keys,
                values=values,
                length=prompts.length.at[entry_g].set(length_g, mode="drop"),
                place=prompts.place.at[rows_N].set(place_gn.reshape(-1).astype(jnp.int32), mode="drop"),
            )
            keys_values, length_g = [(k[:, :0], v[:, :0]) for k, v in keys_values], jnp.zeros_like(length_g)
        keys, values = _with_prompts(self.keys, self.values, rows_N, keys_values, layout)
        length = self.length.at[rows_N].set(copies(length_g, len(rows_N) // len(length_g)), mode="drop")
        return KVCache(keys, values, length, prompts)


def _empty(num_rows: int, sizes: list[int], config: ModelConfig, layout: Layout) -> tuple[Any, Any]:
    """Keys and values [layer][part] of so many columns, all zero."""

    num_heads = computed(config, layout.strategy.tensor).num_kv_heads

    def zeros(size: int, axes: Axes) -> jax.Array:
        zeros = jnp.zeros((num_rows, size, num_heads, config.head_size), config.compute_dtype)
        return layout.activation(laid_down(zeros, axes), axes)

    layers = range(config.num_layers)
    keys, values = ([tuple(zeros(n, axes) for n in sizes) for _ in layers] for axes in (KEY_AXES, VALUE_AXES))
    return tuple(keys), tuple(values)


def _with_prompts(
    keys: Any, values: Any, rows_N: Int[Array, " N"], keys_values: PromptKeysValues, layout: Layout
) -> tuple[Any, Any]:
    """Keys and values [layer][part] with g prompts in the N / g rows of each, and zeros after them."""

    def put(parts: tuple[jax.Array, ...], new_gPKh: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
        new_NPKh, first, every = copies(new_gPKh, len(rows_N) // len(new_gPKh)), 0, []
        for part in parts:
            size = part.shape[axes.index("length")]
            columns = new_NPKh[:, first : first + size]
            new = laid_down(jnp.pad(columns, ((0, 0), (0, size - columns.shape[1]), (0, 0), (0, 0))), axes)
            every.append(layout.activation(_scattered(part, (rows_N,), new, mode="drop"), axes))
            first += size
        return tuple(every)

    return (
        tuple(put(parts, k, KEY_AXES) for parts, (k, _) in zip(keys, keys_values, strict=True)),
        tuple(put(parts, v, VALUE_AXES) for parts, (_, v) in zip(values, keys_values, strict=True)),
    )


def laid_down(x_BPKh: jax.Array, axes: Axes) -> jax.Array:
    """Keys or values of prompts in the order of a cache's axes."""
    return x_BPKh.transpose([PROMPT_AXES.index(axis) for axis in axes])


def copies(x: jax.Array, times: int) -> jax.Array:
    """Each row `times` times in a row, on the device that has it."""
    if times == 1:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(x.shape[0] * times, *x.shape[1:])


def num_columns(tokens: int) -> int:
    """Columns of a `KVCache` in parts, for sequences of so many tokens.

    >>> num_columns(20), num_columns(300)
    (24, 320)
    """
    return math.ceil(tokens / COLUMNS) * COLUMNS if tokens > COLUMNS else grown_columns(tokens)


def grown_columns(tokens: int) -> int:
    """Columns of a `KVCache` that grows, with room for so many tokens."""
    return math.ceil(tokens / _UNIT) * _UNIT


def columns_read(used: np.ndarray, tokens: int, *, on_gpu: bool) -> np.ndarray:
    """Columns of a `KVCache` in parts that attention reads, given those that are in use and the most tokens of a row.

    >>> columns_read(np.array([1, 64, 65, 300]), 300, on_gpu=False)
    array([ 64,  64, 128, 320])
    """
    columns = num_columns(tokens)
    size = _part_sizes(columns, on_gpu=on_gpu)[0]
    return np.minimum(-(-used // size) * size, columns)


def _part_sizes(columns: int, *, on_gpu: bool) -> list[int]:
    """The columns of each part: a multiple of `COLUMNS`, of the last one what is left. On GPUs there is one.

    >>> _part_sizes(320, on_gpu=False), _part_sizes(2048, on_gpu=False), _part_sizes(24, on_gpu=False)
    ([64, 64, 64, 64, 64], [256, 256, 256, 256, 256, 256, 256, 256], [24])
    """
    size = columns if on_gpu else COLUMNS * math.ceil(columns / (COLUMNS * _MAX_PARTS))
    return [min(size, columns - first) for first in range(0, columns, size)]


def _scattered(cache: jax.Array, where: tuple[Any, ...], new: jax.Array, **given: Any) -> jax.Array:
    """A cache with new values in some places. In bfloat16 their bits are scattered: the CPU's compiler would widen the
    whole cache for it."""
    new = new.astype(cache.dtype)
    if cache.dtype != jnp.bfloat16:
        return cache.at[where].set(new, **given)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return jax.lax.bitcast_convert_type(bits(cache).at[where].set(bits(new), **given), jnp.bfloat16)
