import dataclasses
from typing import Any

import jax
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.counts import cache_entries, decode_step_bytes, forward_flops, program_flops, train_flops
from jaxrlhf.models.params import abstract_params

CONFIG = ModelConfig(
    vocab_size=11, hidden_size=6, intermediate_size=7, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=2
)
D, F, H, K, h, V = 6, 7, 4, 2, 2, 11


@pytest.mark.parametrize("scored", [1, 3, 5])
def test_flops_equal_a_loop_over_columns(scored):
    columns, multiplications = 5, 0
    for layer in range(3):
        for column in range(columns):
            multiplications += 2 * D * K * h
            if layer < 2 or column >= columns - scored:
                multiplications += D * H * h + H * h * D + 3 * D * F
                multiplications += 2 * H * h * (column + 1)
    head = scored * D * V
    assert forward_flops(CONFIG, rows=2, columns=columns, scored=scored) == 2 * 2 * (multiplications + head)
    assert train_flops(CONFIG, rows=2, columns=columns, scored=scored) == 3 * 4 * (multiplications + head)
    scalar = dataclasses.replace(CONFIG, head="scalar")
    assert forward_flops(scalar, rows=2, columns=columns, scored=scored) == 4 * (multiplications + scored * D)


@pytest.mark.parametrize(("attention", "columns", "pairs"), [("xla", 5, 5 * 5), ("cudnn", 5, 6 * 6)])
def test_flops_of_programs_count_hidden_pairs_too(attention, columns, pairs):
    """One block of queries, which cuDNN wants to be even in number, as the keys."""
    scored = 3
    of_last = scored * columns if attention == "xla" else (scored + 1) * (columns + 1)
    products = 3 * columns * 2 * D * K * h + (2 * columns + scored) * (2 * D * H * h + 3 * D * F) + scored * D * V
    attended = 2 * H * h * (2 * pairs + of_last)
    sizes: dict[str, Any] = dict(rows=2, columns=columns, scored=scored, attention=attention)
    assert program_flops(CONFIG, **sizes) == 2 * 2 * (products + attended)
    times = 3.5 if attention == "cudnn" else 3
    assert program_flops(CONFIG, **sizes, gradient=True) == 2 * 2 * (3 * products + times * attended)
    scanned = dataclasses.replace(CONFIG, scan_layers=True)
    more = (columns - scored) * (2 * D * H * h + 3 * D * F) + 2 * H * h * (pairs - of_last)
    assert program_flops(scanned, **sizes) == 2 * 2 * (products + attended + more)


def test_blocks_of_queries_multiply_only_the_keys_up_to_their_end():
    config = dataclasses.replace(CONFIG, num_layers=1)
    with_pairs = program_flops(config, rows=1, columns=130, scored=130, attention="xla")
    without = program_flops(config, rows=1, columns=130, scored=130, attention="cudnn") - 4 * H * h * 130 * 130
    assert with_pairs - without == 4 * H * h * (64 * 64 + 64 * 128 + 2 * 130)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_a_decoding_step(tied, dtype, size):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, dtype=dtype)
    leaves = {jax.tree_util.keystr(p): x.size for p, x in jax.tree_util.tree_leaves_with_path(abstract_params(config))}
    weights = sum(leaves.values()) - (0 if tied else leaves["['embedding']"] - 4 * D)
    assert cache_entries(config, rows=4, slots=10) == 3 * 2 * 4 * 10 * K * h
    cache = cache_entries(config, rows=4, slots=10)
    assert decode_step_bytes(config, rows=4, tokens=10) == size * (weights + cache)
