"""The cache of keys and values: a ring of slots in which all sequences write at one common slot.

Letters: B sequences, T slots, K key-value heads, h head size.

Every decoding step writes one slot, the same for all sequences, however long each of them is: a sequence of n tokens
occupies the n most recent slots. So one `dynamic_update_slice` serves a ragged batch, no padding mask is kept, and a
sequence that joins later, or comes from another device, only has to be laid down with its last token at the present
slot.
Keys are rotated by their own positions before they are stored, so the order of slots does not matter to attention.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.attention import cached_attention
from jaxrlhf.sharding.layout import Axes, Layout

SLOTS_ON_GPU = 8
"""On GPUs the number of slots is a multiple of this: otherwise cuBLAS would copy every cache in every step, to one that
is. On other devices it is as requested."""
PromptKeysValues = list[tuple[Float[Array, "B P K h"], Float[Array, "B P K h"]]]
PROMPT_AXES: Axes = ("batch", "length", "kv_heads", "head_dim")
KEY_AXES: Axes = ("batch", "kv_heads", "head_dim", "length")
"""Of the keys in a cache. With the length last, XLA does not repack them for matrix products on a CPU."""
VALUE_AXES: Axes = ("batch", "kv_heads", "length", "head_dim")


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer."""

    keys: tuple[Float[Array, "B K h T"], ...]
    """One array a layer: separate arrays can be updated in place, slices of a stacked one are copied."""
    values: tuple[Float[Array, "B K T h"], ...]
    newest: Int[Array, ""]
    """The slot that was written last."""
    length: Int[Array, " B"]
    """Tokens of each sequence in the cache."""
    COUNTS: ClassVar = ("newest", "length")
    """What `advance` changes."""

    @property
    def num_slots(self) -> int:
        return self.values[0].shape[2]

    def occupied(self) -> Bool[Array, "B T"]:
        """True at the slots that hold a token of the sequence: those at most `length - 1` steps old."""
        age_T = (self.newest - jnp.arange(self.num_slots)) % self.num_slots
        return age_T[None, :] < self.length[:, None]

    def positions(self) -> Int[Array, " B"]:
        """Of the newest token of each sequence."""
        return self.length - 1

    def layer(self, number: int) -> tuple[jax.Array, jax.Array]:
        """What attention of a layer reads."""
        return self.keys[number], self.values[number]

    def attention(self) -> Callable[..., jax.Array]:
        """Of one query a sequence [B, H, h] over what `layer` gives."""
        occupied_BT = self.occupied()
        return lambda q_BHh, layer: cached_attention(q_BHh, layer[0], layer[1], occupied_BT)

    def of_layers(self, these: slice) -> "KVCache":
        """The cache of some of the layers."""
        return self.replace(keys=self.keys[these], values=self.values[these])

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

        keys, values = tuple(pad(k, KEY_AXES) for k in self.keys), tuple(pad(v, VALUE_AXES) for v in self.values)
        return self.replace(keys=keys, values=values)

    def repeat(self, times: int, layout: Layout) -> "KVCache":
        """The cache of as many copies of each sequence, side by side."""
        if times == 1:
            return self

        def repeated(x: jax.Array, axes: Axes) -> jax.Array:
            return layout.activation(copies(x, times), axes)

        keys, values = (
            tuple(repeated(k, KEY_AXES) for k in self.keys),
            tuple(repeated(v, VALUE_AXES) for v in self.values),
        )
        return self.replace(keys=keys, values=values, length=copies(self.length, times))

    @jax.named_scope("write_cache")
    def write(self, layer: int, k_BKh: jax.Array, v_BKh: jax.Array, layout: Layout) -> "KVCache":
        """Store a layer's keys and values of the newest token."""

        def put(cache: jax.Array, new: jax.Array, axes: Axes) -> jax.Array:
            updated = jax.lax.dynamic_update_index_in_dim(
                cache, new.astype(cache.dtype), self.newest, axes.index("length")
            )
            return layout.activation(updated, axes)

        keys = (*self.keys[:layer], put(self.keys[layer], k_BKh, KEY_AXES), *self.keys[layer + 1 :])
        values = (*self.values[:layer], put(self.values[layer], v_BKh, VALUE_AXES), *self.values[layer + 1 :])
        return self.replace(keys=keys, values=values)


def laid_down(x_BPKh: jax.Array, axes: Axes) -> jax.Array:
    """Keys or values of prompts in the order of a cache's axes."""
    return x_BPKh.transpose([PROMPT_AXES.index(axis) for axis in axes])


def copies(x: jax.Array, times: int) -> jax.Array:
    """Each row `times` times in a row, on the device that has it."""
    if times == 1:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], times, *x.shape[1:])).reshape(x.shape[0] * times, *x.shape[1:])


def cache_prefill(
    keys_values: PromptKeysValues,
    length_B: Int[Array, " B"],
    num_slots: int,
    layout: Layout,
) -> KVCache:
    """A cache that is grown to `num_slots` slots and holds the keys and values of prompts, padded on the left to P
    columns."""

    prompts = KVCache(
        keys=tuple(layout.activation(laid_down(k, KEY_AXES), KEY_AXES) for k, _ in keys_values),
        values=tuple(layout.activation(laid_down(v, VALUE_AXES), VALUE_AXES) for _, v in keys_values),
        newest=jnp.int32(keys_values[0][0].shape[1] - 1),
        length=length_B.astype(jnp.int32),
    )
    return prompts.grow(num_slots, layout)
