import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.attention import (
    attention_implementation,
    cached_attention,
    column_attention,
    full_attention,
    pad_to_even,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

LAYOUT = Layout.over((0,), Strategy())
B, h = 2, 4
GROUPS = [(4, 4), (6, 2), (4, 1)]
"""Heads of queries, heads of keys and values."""


def inputs(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values and a mask with padding on both sides, and in one row inside."""
    rng = np.random.default_rng(0)
    shapes = [(num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads)]
    q, k, v = (jnp.asarray(rng.normal(size=(B, *shape, h)), jnp.float32) for shape in shapes)
    columns_T = np.arange(num_keys)
    return q, k, v, jnp.asarray(np.stack([(columns_T >= 2) & (columns_T < num_keys - 1), columns_T != 1]))


def seen_by(mask_T: Any, column: int) -> np.ndarray:
    """The columns that a query sees."""
    return np.array([t for t in range(column + 1) if mask_T[t] or t == column])


def attention_in_a_loop(q_Hh: Any, k_TKh: Any, v_TKh: Any, seen: Any) -> np.ndarray:
    """Attention of one query position; query head i attends to key-value head i // (H / K)."""
    H = q_Hh.shape[0]
    outputs = np.zeros((H, h))
    for head in range(H):
        kv_head = head // (H // k_TKh.shape[1])
        mass = {t: np.exp(q_Hh[head] @ k_TKh[t, kv_head] / np.sqrt(h)) for t in seen}
        for t, m in mass.items():
            outputs[head] += m / sum(mass.values()) * v_TKh[t, kv_head]
    return outputs


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_attention_over_groups_of_heads(num_heads, num_kv_heads):
    S, T = 3, 7
    q, k, v, mask_BT = inputs(S, T, num_heads, num_kv_heads)
    expected = np.array(
        [[attention_in_a_loop(q[b, s], k[b], v[b], seen_by(mask_BT[b], T - S + s)) for s in range(S)] for b in range(B)]
    )
    full = full_attention(q, k, v, mask_BT, implementation="xla")
    np.testing.assert_allclose(full, expected, atol=1e-5)

    rows_B, at_B = jnp.arange(B), jnp.array([1, 2])
    one_column = column_attention(q[rows_B, at_B], k, v, mask_BT, T - S + at_B)
    np.testing.assert_allclose(one_column, expected[rows_B, at_B], atol=1e-5)

    seen_BT = np.stack([np.isin(np.arange(T), seen_by(mask_BT[b], T - 1)) for b in range(B)])
    cached = cached_attention(q[:, -1], k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), jnp.asarray(seen_BT))
    np.testing.assert_allclose(cached, expected[:, -1], atol=1e-5)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(150, 150), (129, 200), (64, 70)])
def test_blocks_of_queries_change_neither_values_nor_gradients(num_queries, num_keys):
    *arrays, mask_BT = inputs(num_queries, num_keys, 6, 2)
    columns_T = np.arange(num_keys)
    allowed_BST = np.stack([np.tril(np.ones((num_keys, num_keys), bool)) & row for row in np.asarray(mask_BT)])
    allowed_BST = (allowed_BST | (columns_T[:, None] == columns_T))[:, num_keys - num_queries :]
    weight = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)

    def in_blocks(q, k, v):
        return (full_attention(q, k, v, mask_BT, implementation="xla") * weight).sum()

    def at_once(q, k, v):
        attended = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(allowed_BST)[:, None], implementation="xla")
        return (attended * weight).sum()

    got, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*arrays) for f in (in_blocks, at_once))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, expected)


def test_cudnn_needs_a_gpu():
    message = "attention: cudnn needs an NVIDIA GPU and bfloat16. Got cpu and bfloat16. Use xla or auto."
    config = ModelConfig(attention="cudnn", dtype="bfloat16")
    with pytest.raises(ValueError, match=re.escape(message)):
        attention_implementation(config, LAYOUT)
    assert attention_implementation(ModelConfig(dtype="bfloat16"), LAYOUT) == "xla"


@pytest.mark.parametrize(("S", "T"), [(3, 5), (4, 5), (3, 6), (4, 6)])
def test_padding_attention_to_even_lengths_changes_nothing(S, T):
    q, k, v, _ = inputs(S, T, 4, 2)
    allowed = jax.random.bernoulli(jax.random.key(3), 0.5, (B, 1, S, T)).at[..., 0].set(True)
    padded = pad_to_even(q, k, v, allowed)
    assert all(x.shape[1] % 2 == 0 for x in padded[:3])
    assert padded[3].shape[2:] == (padded[0].shape[1], padded[1].shape[1])
    expected = jax.nn.dot_product_attention(q, k, v, mask=allowed, implementation="xla")
    given = jax.nn.dot_product_attention(*padded[:3], mask=padded[3], implementation="xla")[:, :S]
    np.testing.assert_allclose(given, expected, atol=1e-6)
