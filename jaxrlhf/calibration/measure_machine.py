"""Measured rates of the devices of a node: products, memory, kernels, collectives, copies.

All devices do the same at the same time, as they do while a call runs. A rate is the slope between two sizes, or of a
line fitted to several, so that it does not contain the cost of starting a program.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrlhf.calibration.timing import time_in_turn
from jaxrlhf.planner.costs.calibration import Rates
from jaxrlhf.reshard.offload import to_host_memory
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.axes import DATA
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

NARROW_DIMS = (16, 32, 64, 128, 256, 512, 1024)
"""Widths of the square weights of the matrix products that are measured."""
_CHAIN = (16, 144)
"""Kernels of a short program and of a long one."""
_LOOPS = (32, 288)
"""Iterations of a short loop and of a long one."""


def measure_machine(*, large: int | None = None, patience_seconds: float = 3.0) -> Rates:
    """Measures the devices of this process, with as much patience for each of about ten measurements. The largest
    arrays have `large` elements on each device, or as many as keep a device of this kind busy for some milliseconds."""
    large = large or (2**20 if mesh.platform() == "cpu" else 2**27)
    time = functools.partial(_seconds, patience_seconds=patience_seconds)
    count = mesh.devices_per_process()
    layout = Layout.over(mesh.own_positions(), Strategy(data=count))
    products = {dtype: _products(layout, large, dtype, time) for dtype in ("float32", "bfloat16")}
    kernel, graph_kernel, step = _kernels(layout, time)
    several = _collectives(layout, large, time) if count > 1 else {}
    return Rates(
        num_devices=count,
        float32_flops=products["float32"][0],
        bfloat16_flops=products["bfloat16"][0],
        half_dim=products["bfloat16" if mesh.platform() != "cpu" else "float32"][1],
        memory_bandwidth=_memory(layout, large, time),
        kernel_seconds=kernel,
        graph_kernel_seconds=graph_kernel,
        dispatch_seconds=_dispatch(layout, time),
        step_seconds=step,
        host_bandwidth=_host_copies(layout, large, time),
        **several,
    )


Time = Callable[[list[Callable[[], Any]]], list[float]]


def _seconds(programs: list[Callable[[], Any]], *, patience_seconds: float) -> list[float]:
    return [timing.seconds for timing in time_in_turn(programs, patience_seconds=patience_seconds)]


def _slope(seconds: list[float], sizes: tuple[float, float]) -> float:
    """Seconds per unit of size, from a small size and a large one; at least 0, whatever the noise."""
    return max(0.0, seconds[1] - seconds[0]) / (sizes[1] - sizes[0])


def _rate(seconds: list[float], sizes: tuple[float, float]) -> float:
    """Units of size a second: the inverse of the slope, or, where noise hides it, the rate of the large size alone."""
    slope = _slope(seconds, sizes)
    return 1 / slope if slope else sizes[1] / seconds[1]


def _on_each(layout: Layout, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """An array of small random numbers, with `shape` on each device."""
    values = 0.02 * np.random.default_rng(0).standard_normal((layout.strategy.data, *shape), np.float32)
    return jax.device_put(jnp.asarray(values, dtype), layout.rows)


def _products(layout: Layout, large: int, dtype: str, time: Time) -> tuple[float, float]:
    """Operations a second of large products, and the width of a weight that halves them, `half` in
    time = operations (1 + half / dim) / rate."""
    programs, dims = [], []
    for dim in NARROW_DIMS:
        rows = max(dim, large // dim)
        if dim > NARROW_DIMS[0] and dim * dim > large:
            continue
        x_NBD = _on_each(layout, (rows, dim), jnp.dtype(dtype))
        w_ND = jax.device_put(jnp.full((dim, dim), 0.02, dtype), layout.replicated)
        product = jax.jit(lambda x, w: x @ w, out_shardings=layout.rows)
        programs.append(functools.partial(product, x_NBD, w_ND))
        dims.append((dim, 2 * rows * dim * dim))
    seconds = np.array(time(programs)) / np.array([operations for _, operations in dims])
    inverse = np.array([1 / dim for dim, _ in dims])
    weights = 1 / seconds  # least squares of relative errors
    terms = np.stack([np.ones_like(inverse), inverse], axis=1) * weights[:, None]
    one_over_rate, half_over_rate = np.linalg.lstsq(terms, seconds * weights, rcond=None)[0]
    if one_over_rate <= 0:  # narrow products do not predict wide ones
        return float(1 / seconds[-1]), 0.0
    return float(1 / one_over_rate), max(0.0, float(half_over_rate / one_over_rate))


def _memory(layout: Layout, large: int, time: Time) -> float:
    """Memory bandwidth: bytes a second that a kernel reads and writes which adds one to an array."""
    add = jax.jit(lambda x: x + 1, out_shardings=layout.rows)
    sizes = (large, 4 * large)
    seconds = time([functools.partial(add, _on_each(layout, (size,))) for size in sizes])
    return 8 * _rate(seconds, sizes)


def _kernels(layout: Layout, time: Time) -> tuple[float, float, float]:
    """Seconds between the starts of two kernels, the same inside a loop, and the overhead of a loop's iteration."""
    x, w = _on_each(layout, (8, 8)), jax.device_put(jnp.full((8, 8), 0.1), layout.replicated)

    def chain(x: jax.Array, w: jax.Array, length: int) -> jax.Array:
        for _ in range(length):
            x = jnp.tanh(x @ w)  # no two of these can be fused into one kernel
        return x

    def loop(x: jax.Array, w: jax.Array, length: int, times: jax.Array) -> jax.Array:
        def goes_on(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return carry[0] < times

        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, chain(carry[1], w, length)

        return jax.lax.while_loop(goes_on, body, (jnp.int32(0), x))[1]

    jitted = functools.partial(jax.jit, out_shardings=layout.rows)
    chains = [jitted(functools.partial(chain, length=length)) for length in _CHAIN]
    in_chain = _slope(time([functools.partial(program, x, w) for program in chains]), _CHAIN)
    of_loops = []
    for length in (1, 8):
        program = jitted(functools.partial(loop, length=length))
        runs = [functools.partial(program, x, w, times=jnp.int32(times)) for times in _LOOPS]
        of_loops.append(_slope(time(runs), _LOOPS))
    in_loop = _slope(of_loops, (1, 8))
    pair = 2  # kernels: a product and a tanh
    return in_chain / pair, in_loop / pair, max(0.0, of_loops[0] - in_loop)


def _dispatch(layout: Layout, time: Time) -> float:
    """Seconds from dispatch to completion of a program that does next to nothing."""
    program = jax.jit(lambda x: x + 1, out_shardings=layout.rows)
    return time([functools.partial(program, _on_each(layout, (1,)))])[0]


def _host_copies(layout: Layout, large: int, time: Time) -> float:
    """Bytes a second that each device copies to pinned memory of the host."""
    sizes = (large, 4 * large)
    seconds = time([functools.partial(to_host_memory, _on_each(layout, (size,))) for size in sizes])
    return 4 * _rate(seconds, sizes)


def _collectives(layout: Layout, large: int, time: Time) -> dict[str, float]:
    """Seconds of a small all-reduce per doubling of the devices, and the ring bandwidth of a large one."""
    count = layout.strategy.data

    all_reduce = functools.partial(jax.lax.psum, axis_name=DATA)
    split, whole = PartitionSpec(DATA), PartitionSpec()
    summed = jax.jit(jax.shard_map(all_reduce, mesh=layout.mesh, in_specs=split, out_specs=whole))
    sizes = (256, large)
    seconds = time([functools.partial(summed, _on_each(layout, (size,))) for size in sizes])
    moved = 2 * 4 * (count - 1) / count
    return {"collective_seconds": seconds[0] / np.log2(count), "link_bandwidth": moved * _rate(seconds, sizes)}
