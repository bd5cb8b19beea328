"""Layouts over eight devices, and a tree of every kind of array: for reallocation in one process and in several."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.reshard.moves import Grid
from jaxrlhf.reshard.traffic import DescribedArray

LAYOUTS: dict[str, tuple[list[int], tuple[int, int, int]]] = {
    "one": ([0], (1, 1, 1)),
    "another": ([6], (1, 1, 1)),
    "data": ([0, 1, 2, 3, 4, 5, 6, 7], (8, 1, 1)),
    "fsdp": ([0, 1, 2, 3, 4, 5, 6, 7], (1, 8, 1)),
    "tensor": ([0, 1, 2, 3, 4, 5, 6, 7], (1, 1, 8)),
    "data_tensor": ([0, 1, 2, 3, 4, 5, 6, 7], (4, 1, 2)),
    "all_three": ([0, 1, 2, 3, 4, 5, 6, 7], (2, 2, 2)),
    "reversed": ([7, 6, 5, 4, 3, 2, 1, 0], (1, 4, 2)),
    "regrouped": ([0, 4, 1, 5, 2, 6, 3, 7], (2, 1, 4)),
    "lower": ([0, 1, 2, 3], (1, 2, 2)),
    "upper": ([4, 5, 6, 7], (1, 4, 1)),
    "middle": ([2, 3, 4, 5], (2, 1, 2)),
    "three": ([6, 1, 3], (3, 1, 1)),
}
"""Name -> devices, and the degrees of data, fsdp and tensor."""

SPECS = {
    "weight": PartitionSpec("fsdp", "tensor"),
    "half": PartitionSpec("tensor", "fsdp"),
    "stacked": PartitionSpec(None, "fsdp", "tensor"),
    "rows": PartitionSpec(("fsdp", "tensor")),
    "integers": PartitionSpec(),
    "mask": PartitionSpec(None, ("tensor", "fsdp")),
    "step": PartitionSpec(),
    "seed": PartitionSpec(),
    "empty": PartitionSpec("fsdp"),
}


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """A tree on the host."""
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(16, 24)).astype(np.float32),
        "half": rng.normal(size=(8, 16)).astype(ml_dtypes.bfloat16),
        "stacked": rng.normal(size=(3, 8, 8)).astype(np.float32),
        "rows": rng.integers(-(2**30), 2**30, (8, 3)).astype(np.int32),
        "integers": rng.integers(-9, 9, (5,)).astype(np.int32),
        "mask": rng.random((3, 8)) > 0.5,
        "step": np.array(3, np.int32),
        "seed": np.array(2**32 - 1, np.uint32),
        "empty": np.zeros((0, 4), np.float32),
    }


def mesh(name: str) -> Mesh:
    devices, degrees = LAYOUTS[name]
    everything = jax.devices()
    grid = np.array([everything[i] for i in devices]).reshape(degrees)
    return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def shardings(name: str) -> dict[str, NamedSharding]:
    return {key: NamedSharding(mesh(name), spec) for key, spec in SPECS.items()}


def place(tree: Any, targets: Any) -> Any:
    """Laid out from the host, without the code under test."""
    return jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index], dtype=x.dtype), tree, targets
    )


def assert_holds(tree: dict[str, jax.Array], name: str, expected: dict[str, np.ndarray]) -> None:
    """Every shard of this process holds, bit by bit, what the layout says."""
    for key, sharding in shardings(name).items():
        array, value = tree[key], expected[key]
        assert (array.shape, array.dtype) == (value.shape, value.dtype)
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert {shard.device for shard in array.addressable_shards} == sharding.addressable_devices
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes(), (key, shard.device)


def grid(name: str) -> Grid:
    """A layout without its devices."""
    devices, degrees = LAYOUTS[name]
    return Grid(tuple(zip(("data", "fsdp", "tensor"), degrees, strict=True)), tuple(devices))


def described() -> list[DescribedArray]:
    """The tree without its arrays."""
    return [
        DescribedArray(value.shape, value.dtype, tuple(SPECS[key]), tuple(SPECS[key]))
        for key, value in sorted(values().items())
        if value.size
    ]


PAIRS = [
    ("fsdp", "data_tensor"),
    ("fsdp", "data"),
    ("data", "tensor"),
    ("fsdp", "regrouped"),
    ("reversed", "all_three"),
    ("fsdp", "upper"),
    ("upper", "fsdp"),
    ("lower", "upper"),
    ("lower", "middle"),
    ("middle", "lower"),
    ("one", "another"),
    ("another", "three"),
    ("three", "all_three"),
    ("upper", "another"),
]
"""Pairs of layouts of every kind: other splits, other orders, subsets, supersets, disjoint and overlapping devices."""
