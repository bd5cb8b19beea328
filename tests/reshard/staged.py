"""A model's weights over the stages of pipelines: layouts, and what a reallocation between two of them must do."""

import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params, param_shardings
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import traffic_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.reshard.layouts import place

MODEL = ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=5, num_heads=2, num_kv_heads=2)

STAGED: dict[str, tuple[tuple[int, ...], Strategy]] = {
    "one_stage": (tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2)),
    "two": (tuple(range(8)), Strategy(pipeline=2, fsdp=2, tensor=2)),
    "two_of_copies": (tuple(range(8)), Strategy(pipeline=2, data=2, tensor=2)),
    "four": (tuple(range(8)), Strategy(pipeline=4, fsdp=2)),
    "chunks": (tuple(range(8)), Strategy(pipeline=2, chunks=2, fsdp=4)),
    "upper": ((4, 5, 6, 7), Strategy(pipeline=4)),
    "backwards": ((7, 6, 5, 4, 3, 2, 1, 0), Strategy(pipeline=2, fsdp=2, tensor=2)),
}
"""Name -> devices and degrees."""
STAGED_PAIRS = list(itertools.permutations(STAGED, 2))


@functools.cache
def values() -> Any:
    """The weights on the host."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), abstract_params(MODEL))


@functools.cache
def shardings(name: str) -> Any:
    return param_shardings(MODEL, Layout.over(*STAGED[name]))


def check_moves(source: str, target: str, *, donate: bool = False) -> None:
    """Every shard of this process holds, bit by bit, what the layout says, and every device received what it lacked."""
    tree = place(values(), shardings(source))
    counted = traffic_of(tree, shardings(target)).received_bytes
    assert {device: n for device, n in counted.items() if n} == lacking(source, target)

    def holds(array: jax.Array, sharding: Any, want: np.ndarray) -> None:
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert {shard.device for shard in array.addressable_shards} == sharding.addressable_devices
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == want[shard.index].tobytes(), (source, target, shard.device)

    jax.tree.map(holds, reallocate(tree, shardings(target), donate=donate), shardings(target), values())


def lacking(source: str, target: str) -> dict[int, int]:
    """Device -> bytes that it is to hold and does not, element by element."""
    missing: dict[int, int] = {}
    for array, held, wanted in zip(
        *map(jax.tree.leaves, (values(), shardings(source), shardings(target))), strict=True
    ):
        there = held.devices_indices_map(array.shape)
        for device, index in wanted.devices_indices_map(array.shape).items():
            lacks = np.zeros(array.shape, bool)
            lacks[index] = True
            if device in there:
                lacks[there[device]] = False
            missing[device.id] = missing.get(device.id, 0) + int(lacks.sum()) * array.itemsize
    return {device: n for device, n in missing.items() if n}
