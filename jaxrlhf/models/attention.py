"""Attention: of whole sequences, of one column of each, and of a new token over a cache.

Letters: B sequences, T columns, S query columns (the last S of T), H query heads, K key-value heads, G = H / K queries
a group, h head size, C query columns of a block, t the key columns that a block sees.

A window is the number of columns that a query sees, its own and the latest before it; None is all, and an array is one
that is known when the program runs. Windows count columns, so padding is before and after the tokens of a sequence.

Keys and values are never repeated: the G queries of a group share a product with the one head that they look at. The
softmax is in float32, and its division comes after the value product, where there is less to divide.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrlhf.models.config import ModelConfig, at_least_float32
from jaxrlhf.sharding.layout import Layout

_MIN_BLOCK, _MAX_BLOCKS = 64, 8
"""Queries are taken in blocks, each of which multiplies only the keys up to its own end. Smaller blocks would waste
less, but their products would be too small; more of them would take longer to compile."""
Window = int | Int[Array, ""] | None
_LOWEST = float(jnp.finfo(jnp.float32).min)


def attention_implementation(config: ModelConfig, layout: Layout) -> str:
    """The implementation of attention over whole sequences in a layout: 'xla' or 'cudnn'. Raises ValueError if cuDNN is
    asked for where there is no NVIDIA GPU, or for float32, which it does not compute."""
    may_use_cudnn = layout.is_on_gpu and config.dtype == "bfloat16"
    if config.attention == "cudnn" and not may_use_cudnn:
        raise ValueError(
            f"attention: cudnn needs an NVIDIA GPU and bfloat16. Got {layout.mesh.devices.flat[0].platform} and "
            f"{config.dtype}. Use xla or auto."
        )
    if config.attention == "auto":
        return "cudnn" if may_use_cudnn and config.head_size % 8 == 0 and config.head_size <= 128 else "xla"
    return config.attention


def full_attention(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask_BT: Bool[Array, "B T"],
    window: Window = None,
    *,
    implementation: str,
) -> Float[Array, "B S H h"]:
    """Grouped-query attention of whole sequences, for queries in the last S columns.

    A query sees the real columns that are not later, and itself, so that padding sees something. Blocks of queries
    multiply only the keys that one of them may see, where the window is a number.
    """
    assert implementation in ("xla", "cudnn")
    B, S, H, h = q_BSHh.shape
    T, K = k_BTKh.shape[1:3]
    first = T - S
    if implementation == "cudnn":
        allowed_BST = _allowed(mask_BT, first, S, range(T), window)
        # its backward pass with a mask takes even lengths only
        padded = pad_to_even(q_BSHh, k_BTKh, v_BTKh, allowed_BST[:, None])
        with jax.named_scope("cudnn"):
            return jax.nn.dot_product_attention(*padded[:3], mask=padded[3], implementation="cudnn")[:, :S]

    q_BKGSh = q_BSHh.reshape(B, S, K, H // K, h).transpose(0, 2, 3, 1, 4)
    k_BKTh, v_BKTh = (x.transpose(0, 2, 1, 3) for x in (k_BTKh, v_BTKh))
    blocks = []
    for start, end in query_blocks(S):
        C, seen = end - start, block_keys(first + start, first + end, window)
        allowed_BCt = _allowed(mask_BT[:, seen.start : seen.stop], first + start, C, seen, window)
        q_BKmh = q_BKGSh[:, :, :, start:end].reshape(B, K, -1, h)
        k_BKth, v_BKth = (x[:, :, seen.start : seen.stop] for x in (k_BKTh, v_BKTh))
        attended = _attend(q_BKmh, k_BKth, v_BKth, allowed_BCt[:, None, None])
        blocks.append(attended.reshape(B, K, -1, C, h))
    attended_BKGSh = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=3)
    return attended_BKGSh.transpose(0, 3, 1, 2, 4).reshape(q_BSHh.shape)


def chunk_attention(
    q_BCHh: Float[Array, "B C H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    first: Int[Array, ""],
    window: Window = None,
    *,
    implementation: str,
) -> Float[Array, "B C H h"]:
    """Grouped-query attention of C queries from column `first` on, each of which sees its own column and the earlier
    ones, or those in its window. Multiplies all keys, also those that no query sees."""
    B, C, H, h = q_BCHh.shape
    K = k_BTKh.shape[2]
    query_C1, key_1T = first + jnp.arange(C)[:, None], jnp.arange(k_BTKh.shape[1])[None, :]
    allowed_BCT = jnp.broadcast_to(_in_window(key_1T <= query_C1, query_C1, key_1T, window), (B, C, k_BTKh.shape[1]))
    if implementation == "cudnn":
        padded = pad_to_even(q_BCHh, k_BTKh, v_BTKh, allowed_BCT[:, None])
        with jax.named_scope("cudnn"):
            return jax.nn.dot_product_attention(*padded[:3], mask=padded[3], implementation="cudnn")[:, :C]
    q_BKmh = q_BCHh.reshape(B, C, K, H // K, h).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, h)
    k_BKTh, v_BKTh = (x.transpose(0, 2, 1, 3) for x in (k_BTKh, v_BTKh))
    attended_BKmh = _attend(q_BKmh, k_BKTh, v_BKTh, allowed_BCT[:, None, None])
    return attended_BKmh.reshape(B, H, C, h).swapaxes(1, 2)


def query_blocks(num_queries: int) -> list[tuple[int, int]]:
    """The blocks in which queries are taken where matrix products compute attention: of each, the first and the end."""
    size = max(_MIN_BLOCK, math.ceil(num_queries / _MAX_BLOCKS))
    return [(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]


def block_keys(first: int, end: int, window: Window) -> range:
    """The keys that a block of queries in columns `first` to `end` multiplies.

    >>> block_keys(64, 128, None), block_keys(64, 128, 10)
    (range(0, 128), range(55, 128))
    """
    return range(max(0, first + 1 - window) if isinstance(window, int) else 0, end)


def column_attention(
    q_BHh: Float[Array, "B H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    mask_BT: Bool[Array, "B T"],
    at_B: Int[Array, " B"],
    window: Window = None,
) -> Float[Array, "B H h"]:
    """Grouped-query attention of the query in column `at_B` of each sequence, which sees as in `full_attention`."""
    columns_1T, at_B1 = jnp.arange(mask_BT.shape[1])[None, :], at_B[:, None]
    allowed_BT = _in_window((columns_1T <= at_B1) & mask_BT, at_B1, columns_1T, window) | (columns_1T == at_B1)
    return cached_attention(q_BHh, k_BTKh.transpose(0, 2, 3, 1), v_BTKh.swapaxes(1, 2), allowed_BT)


def cached_attention(
    q_BHh: Float[Array, "B H h"],
    k_BKhT: Float[Array, "B K h T"],
    v_BKTh: Float[Array, "B K T h"],
    allowed_BT: Bool[Array, "B T"],
) -> Float[Array, "B H h"]:
    """Grouped-query attention of one token a sequence over a cache."""
    B, H, h = q_BHh.shape
    q_BKGh = q_BHh.reshape(B, k_BKhT.shape[1], -1, h)
    return _attend(q_BKGh, k_BKhT.swapaxes(2, 3), v_BKTh, allowed_BT[:, None, None, None]).reshape(B, H, h)


def attention_in_parts(
    q_SHh: Float[Array, "S H h"],
    keys: Sequence[Float[Array, "S K h t"]],
    values: Sequence[Float[Array, "S K t h"]],
    occupied_ST: Bool[Array, "S T"],
    seen_ST: Bool[Array, "S T"],
) -> Float[Array, "S H h"]:
    """`cached_attention` over columns that lie in several arrays, of which only the first ones are read up to the last
    with a token. The result is the same, to the bit, however many are read."""
    if len(keys) == 1:
        return cached_attention(q_SHh, keys[0], values[0], seen_ST)
    q_SKGh = q_SHh.reshape(len(q_SHh), keys[0].shape[1], -1, q_SHh.shape[-1])
    return _sums_of_parts(q_SKGh, keys, values, occupied_ST, seen_ST).attended(q_SHh)


def attention_over_shared(
    q_SHh: Float[Array, "S H h"],
    keys: Sequence[Float[Array, "S K h t"]],
    values: Sequence[Float[Array, "S K t h"]],
    prompt_keys: Float[Array, "E K h P"],
    prompt_values: Float[Array, "E K P h"],
    occupied_ST: Bool[Array, "S T"],
    seen_ST: Bool[Array, "S T"],
    seen_EP: Bool[Array, "E P"] | Bool[Array, "E n P"],
    slots_En: Int[Array, "E n"],
    place_S: Int[Array, " S"],
) -> Float[Array, "S H h"]:
    """`attention_in_parts` of rows that also see one of E prompts each, whose keys and values are read once for all n
    rows that do.

    Args:
        seen_EP: The columns of each prompt that its rows see, or each of its rows.
        slots_En: The rows that see each prompt; S where there are fewer.
        place_S: The place of each row among these; E n for rows that see none.
    """
    (E, n), (K, h) = slots_En.shape, prompt_keys.shape[1:3]
    q_SKGh = q_SHh.reshape(len(q_SHh), K, -1, h)
    own = _sums_of_parts(q_SKGh, keys, values, occupied_ST, seen_ST)
    q_EnKGh = q_SKGh.at[slots_En].get(mode="fill", fill_value=0)
    q_EKmh = q_EnKGh.swapaxes(1, 2).reshape(E, K, -1, h)
    seen_of_queries = seen_EP if seen_EP.ndim == 2 else jnp.repeat(seen_EP, q_SKGh.shape[2], axis=1)
    of_prompts = _sums(q_EKmh, prompt_keys, prompt_values, seen_of_queries)

    def by_row(x_EKm: jax.Array) -> jax.Array:
        x_EnKG = x_EKm.reshape(E, K, n, -1, x_EKm.shape[-1]).swapaxes(1, 2)
        return x_EnKG.reshape(E * n, *x_EnKG.shape[2:])[jnp.minimum(place_S, E * n - 1)]

    return own.joined(jax.tree.map(by_row, of_prompts)).attended(q_SHh)


class _Sums(NamedTuple):
    """A softmax over some columns and its weighted values, before the division, in at least float32."""

    highest: Float[Array, "S K G 1"]
    total: Float[Array, "S K G 1"]
    weighted: Float[Array, "S K G h"]

    def joined(self, other: "_Sums") -> "_Sums":
        """Over the columns of both."""
        highest = jnp.maximum(self.highest, other.highest)
        mine, others = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        total = self.total * mine + other.total * others
        return _Sums(highest, total, self.weighted * mine + other.weighted * others)

    def attended(self, q_SHh: jax.Array) -> jax.Array:
        return (self.weighted / self.total).astype(q_SHh.dtype).reshape(q_SHh.shape)


def _sums(
    q_SKGh: Float[Array, "S K G h"],
    k_SKht: Float[Array, "S K h t"],
    v_SKth: Float[Array, "S K t h"],
    allowed_St: Bool[Array, "S t"] | Bool[Array, "S G t"],
) -> _Sums:
    """Over some columns. A row that may see none of them has a sum whose `highest` is so low that it adds nothing to
    another."""
    wide = at_least_float32(q_SKGh.dtype)
    allowed_S1Gt = allowed_St[:, None, None] if allowed_St.ndim == 2 else allowed_St[:, None]
    score = jnp.einsum("skgh,skht->skgt", q_SKGh, k_SKht, preferred_element_type=wide) * q_SKGh.shape[-1] ** -0.5
    score = jnp.where(allowed_S1Gt, score, _LOWEST)
    highest = score.max(axis=-1, keepdims=True)
    mass = jnp.exp(score - highest)
    weighted = jnp.einsum("skgt,skth->skgh", mass.astype(v_SKth.dtype), v_SKth, preferred_element_type=wide)
    return _Sums(highest, mass.sum(axis=-1, keepdims=True), weighted)


def _sums_of_parts(
    q_SKGh: Float[Array, "S K G h"],
    keys: Sequence[Float[Array, "S K h t"]],
    values: Sequence[Float[Array, "S K t h"]],
    occupied_ST: Bool[Array, "S T"],
    seen_ST: Bool[Array, "S T"],
) -> _Sums:
    """Over columns that lie in several arrays, of which only the first ones are read up to the last with a token.

    Every part has a branch of its own, and what has no token adds exact zeros: a branch for each number of parts would
    be a program of its own, in which the compiler adds up in another order.
    """
    size = keys[0].shape[3]
    last = (occupied_ST.any(axis=0).sum() - 1) // size
    found = _sums(q_SKGh, keys[0], values[0], seen_ST[:, :size])
    for j, (k, v) in enumerate(zip(keys[1:], values[1:], strict=True), 1):
        allowed = seen_ST[:, j * size : j * size + k.shape[3]]
        empty = _Sums(jnp.full_like(found.highest, _LOWEST), *map(jnp.zeros_like, (found.total, found.weighted)))
        found = found.joined(jax.lax.cond(j <= last, _sums, lambda *_, empty=empty: empty, q_SKGh, k, v, allowed))
    return found


def _attend(q_BKmh: jax.Array, k_BKth: jax.Array, v_BKth: jax.Array, allowed_B11Ct: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(h)) v for the m = G x C queries of a group."""
    B, K, m, h = q_BKmh.shape
    C, t = allowed_B11Ct.shape[3:]
    wide = at_least_float32(q_BKmh.dtype)
    with jax.named_scope("scores"):
        score = jnp.einsum("bkmh,bkth->bkmt", q_BKmh, k_BKth, preferred_element_type=wide) * h**-0.5
    score = jnp.where(allowed_B11Ct, score.reshape(B, K, m // C, C, t), _LOWEST)
    mass = jnp.exp(score - jax.lax.stop_gradient(score.max(axis=-1, keepdims=True)))
    total_BKm1 = mass.sum(axis=-1).reshape(B, K, m, 1)
    mass_BKmt = mass.reshape(B, K, m, t).astype(v_BKth.dtype)
    with jax.named_scope("weighted_values"):
        weighted = jnp.einsum("bkmt,bkth->bkmh", mass_BKmt, v_BKth, preferred_element_type=wide)
    return (weighted / total_BKm1).astype(q_BKmh.dtype)


def _allowed(mask_Bt: jax.Array, first: int, num_queries: int, keys: range, window: Window) -> jax.Array:
    """The mask of the keys that queries in columns `first` and later attend to, [B, queries, keys]. `mask_Bt`: of the
    keys."""
    query, key = jnp.arange(first, first + num_queries)[:, None], jnp.arange(keys.start, keys.stop)[None, :]
    return (_in_window(key <= query, query, key, window)[None] & mask_Bt[:, None, :]) | (key == query)[None]


def _in_window(seen: jax.Array, query: jax.Array, key: jax.Array, window: Window) -> jax.Array:
    """The mask of the columns in a query's window."""
    return seen if window is None else seen & (key > query - window)


def pad_to_even(
    q_BSHh: Float[Array, "B S H h"],
    k_BTKh: Float[Array, "B T K h"],
    v_BTKh: Float[Array, "B T K h"],
    allowed_B1ST: Bool[Array, "B 1 S T"],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """An even number of queries and of keys: one more key is seen by none, one more query sees the rest."""
    more_q, more_k = q_BSHh.shape[1] % 2, k_BTKh.shape[1] % 2

    def pad(x: jax.Array, more: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))

    allowed = jnp.pad(allowed_B1ST, ((0, 0), (0, 0), (0, more_q), (0, 0)), constant_values=True)
    allowed = jnp.pad(allowed, ((0, 0), (0, 0), (0, 0), (0, more_k)), constant_values=False)
    return pad(q_BSHh, more_q), pad(k_BTKh, more_k), pad(v_BTKh, more_k), allowed
