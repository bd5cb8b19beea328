"""The weights of a model by the stages of a pipeline.

In a pipelined layout every weight rests on the devices of one stage: the embedding on the first, each layer on its own,
the final norm and the heads on the last. Layers are a list there, never stacked. What belongs to one stage is the same
tree with None in place of all other weights, so that what is done to weights one by one is done to it as to the whole.

Here a stage is a group of devices. With chunks it has several parts of the layers, which are stages to a schedule.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import DictKey, KeyPath, SequenceKey

from jaxrlhf.models.architecture import FIRST_STAGE, LAST_STAGE, LAYERS
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.stage_layers import device_group, stage_of_layer


def virtual_stage_of_weight(path: KeyPath, num_layers: int, num_stages: int) -> int | None:
    """The virtual stage of a weight, or of its moment in an optimizer's state. None means that a leaf, such as a
    counter, belongs to no weight."""
    for i, key in enumerate(path):
        name = key.key if isinstance(key, DictKey) else None
        if name == LAYERS:
            number = path[i + 1]
            assert isinstance(number, SequenceKey), "layers are a list in a pipelined layout"
            return stage_of_layer(num_layers, num_stages)[number.idx]
        if name in FIRST_STAGE:
            return 0
        if name in LAST_STAGE:
            return num_stages - 1
    return None


def stage_of_weight(path: KeyPath, num_layers: int, layout: Layout) -> int | None:
    """The stage of a weight; None means all."""
    stage = virtual_stage_of_weight(path, num_layers, layout.strategy.num_stages)
    return None if stage is None else device_group(stage, layout.strategy)


def pick(tree: Any, stage: int, num_layers: int, layout: Layout) -> Any:
    """The weights of one stage, on its devices: None in place of all others.

    Leaves that belong to no weight are whole on every device, and are seen on those of the stage.
    """
    own = layout.stage(stage)

    def of_stage(path: KeyPath, x: Any) -> Any:
        at = stage_of_weight(path, num_layers, layout)
        if at is None:
            return seen_from(x, own.replicated)
        return x if at == stage else None

    return jax.tree_util.tree_map_with_path(of_stage, tree)


def pick_virtual(tree: Any, stage: int, num_layers: int, num_stages: int) -> Any:
    """The weights of one virtual stage: None in place of all others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if virtual_stage_of_weight(path, num_layers, num_stages) == stage else None, tree
    )


def lend_embedding(params: Any, embedding: Any) -> Any:
    """The weights of the last stage with the embedding of the first, for a head that is tied to it."""
    return {**params, "embedding": embedding}


def fill(trees: Sequence[Any]) -> Any:
    """One tree of several that have None in different places."""
    return jax.tree.map(
        lambda *leaves: next((x for x in leaves if x is not None), None), *trees, is_leaf=lambda x: x is None
    )


def join(parts: Sequence[Any], num_layers: int, layout: Layout) -> Any:
    """The tree whose stages these are. What belongs to no weight is taken from all of them, who have the same."""
    leaves = [jax.tree_util.tree_flatten_with_path(part, is_leaf=lambda x: x is None) for part in parts]
    joined = []
    for i, (path, _) in enumerate(leaves[0][0]):
        at = stage_of_weight(path, num_layers, layout)
        every = [part[0][i][1] for part in leaves]
        joined.append(every[at] if at is not None else seen_from(every[0], layout.replicated, *every[1:]))
    return leaves[0][1].unflatten(joined)


def seen_from(array: Any, sharding: NamedSharding, *others: Any) -> Any:
    """The view of an array from the devices of a sharding, or of it and others that lie on other devices, without a
    copy: an array of the same shape, whose shards are theirs.

    Shapes, which lie nowhere, get the sharding.
    """
    if isinstance(array, NamedSharding):
        return sharding
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return array if array.sharding == sharding else _from_shards([array, *others], array.shape, sharding)


def part_of(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The part of an array, of some shape, on some of its devices, as an array of its own with the same shards, without
    a copy."""
    assert sharding.shard_shape(shape) == array.sharding.shard_shape(array.shape), (shape, sharding, array.sharding)
    return _from_shards([array], shape, sharding)


def whole_of(arrays: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """The array that others, each on its own devices, are the parts of along the first axis, without a copy."""
    rows = sum(array.shape[0] for array in arrays)
    return _from_shards(arrays, (rows, *arrays[0].shape[1:]), sharding)


def _from_shards(arrays: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The array whose shards are those of some arrays on the devices of a sharding."""
    wanted = sharding.addressable_devices
    shards = {s.device: s.data for array in arrays for s in array.addressable_shards if s.device in wanted}
    assert len(shards) == len(wanted), (shape, sharding)
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()), dtype=arrays[0].dtype)
