"""Times attention of a decoding step on a GPU: that over our cache against JAX's Pallas kernel, over the same tokens.

    python -m scripts.bench_decode_attention                                          # a GPU, a minute
    python -m scripts.bench_decode_attention --slots 128 --columns 2048 8192 --heads 32 8 128
    python -m scripts.bench_decode_attention --interpret --slots 4 --columns 128      # a CPU; only that both agree

Each row of the cache holds a number of tokens by chance, as slots do. Ours multiplies all columns, whose keys lie with
the tokens last; the kernel reads blocks of columns up to the length of a row, and wants the tokens first. It gets a
cache that lies so, and nothing is counted for turning it. Prints JSON: of each size the microseconds of a layer's
attention, the bytes that hold tokens over that time as a part of the memory bandwidth, the ratio, and the largest
difference.

Reference:
    jax.experimental.pallas.ops.gpu.decode_attention.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import decode_attention

from jaxrlhf.models.attention import cached_attention
from scripts.bench_primitives import BANDWIDTH, known


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if jax.default_backend() != "gpu" and not options.interpret:
        print(f"bench_decode_attention: needs a GPU. Got {jax.default_backend()}. Use --interpret to compare results.")
        return 1
    sizes = [measure(slots, columns, options) for slots, columns in itertools.product(options.slots, options.columns)]
    print(json.dumps({"options": vars(options), "device": jax.devices()[0].device_kind, "sizes": sizes}, indent=2))
    return 0 if all(each["largest_difference"] < 0.02 for each in sizes) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--columns", type=int, nargs="+", default=[512, 2048, 8192], help="of the cache")
    parser.add_argument("--heads", type=int, nargs=3, default=[12, 2, 128], help="query heads, key-value heads, size")
    parser.add_argument("--interpret", action="store_true", help="run the kernel without a GPU")
    return parser.parse_args(arguments)


def measure(slots: int, columns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one size of the cache."""
    heads, kv_heads, size = options.heads
    keys = jax.random.split(jax.random.key(0), 3)
    q_SHh = jax.random.normal(keys[0], (slots, heads, size), jnp.bfloat16)
    k_SKhT = jax.random.normal(keys[1], (slots, kv_heads, size, columns), jnp.bfloat16)
    v_SKTh = jax.random.normal(keys[2], (slots, kv_heads, columns, size), jnp.bfloat16)
    k_SKTh = jax.block_until_ready(jnp.asarray(k_SKhT.swapaxes(2, 3)))
    lengths = np.random.default_rng(0).integers(1, columns + 1, slots).astype(np.int32)
    occupied_ST = jnp.asarray(np.arange(columns)[None] < lengths[:, None])

    kernel = functools.partial(decode_attention.gqa, interpret=options.interpret)
    # the kernel's wrapper turns [slots, tokens, heads, size] into the order in which its cache already lies
    in_kernel = jax.jit(lambda q, k, v, length: kernel(q, k.swapaxes(1, 2), v.swapaxes(1, 2), kv_seq_len=length))
    ours, our_seconds = timed(jax.jit(cached_attention), q_SHh, k_SKhT, v_SKTh, occupied_ST)
    theirs, their_seconds = timed(in_kernel, q_SHh, k_SKTh, v_SKTh, jnp.asarray(lengths))
    read = 2 * int(lengths.sum()) * kv_heads * size * 2
    bandwidth = known(BANDWIDTH, jax.devices()[0].device_kind)
    return {
        "slots": slots,
        "columns": columns,
        "microseconds": our_seconds * 1e6,
        "microseconds_kernel": their_seconds * 1e6,
        "bandwidth_of_tokens": read / our_seconds / bandwidth if bandwidth else None,
        "bandwidth_of_tokens_kernel": read / their_seconds / bandwidth if bandwidth else None,
        "ratio": our_seconds / their_seconds,
        "largest_difference": float(jnp.abs(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).max()),
    }


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """The result, and the fewest seconds of a call among rounds of twenty, of which the first compiles."""
    result, seconds = jax.block_until_ready(function(*arguments)), []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(20):
            result = function(*arguments)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - started) / 20)
    return result, min(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
