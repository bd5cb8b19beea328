"""A layout: a mesh with the rules by which weights, activations and rows are laid over it."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.axes import ACTIVATIONS, BATCH_AXES, PIPELINE, WEIGHTS_AT_REST, WEIGHTS_AT_USE, partition_spec
from jaxrlhf.sharding.mesh import build_mesh, mesh_positions
from jaxrlhf.sharding.processes import process_index
from jaxrlhf.sharding.strategy import Strategy

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a call's arrays live. Models receive it as an argument and speak to it in logical axes only."""

    mesh: Mesh
    strategy: Strategy
    is_inside_stages: bool = False
    """Whether arrays are those of one stage, as inside a `shard_map` over the pipeline axis."""

    @classmethod
    def over(cls, devices: tuple[int, ...], strategy: Strategy) -> "Layout":
        """The layout of a strategy over devices, given by their positions in `jax.devices()`."""
        return cls(build_mesh(devices, strategy), strategy)

    @property
    def is_pipelined(self) -> bool:
        return self.strategy.pipeline > 1

    def stage(self, stage: int) -> "Layout":
        """The layout of the devices of one stage. Virtual stages beyond the first round are on the same devices."""
        return _stage(self, stage % self.strategy.pipeline)

    def inside_stages(self) -> "Layout":
        """The same layout for a program that every stage runs on arrays of its own."""
        return dataclasses.replace(self, is_inside_stages=True)

    def data_group(self, group: int) -> "Layout":
        """The layout of the devices that have the same rows."""
        return _data_group(self, group)

    @property
    def devices(self) -> tuple[int, ...]:
        """Positions in `jax.devices()`."""
        return mesh_positions(self.mesh)

    @property
    def own_devices(self) -> tuple[int, ...]:
        """Positions of those that belong to this process."""
        return mesh_positions(self.mesh, process_index())

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Split along the first axis, the same for every device along `tensor`."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def weight(self, axes: Axes) -> NamedSharding:
        """How a weight rests."""
        return NamedSharding(self.mesh, partition_spec(axes, WEIGHTS_AT_REST))

    def at_use(self, weight: jax.Array, axes: Axes) -> jax.Array:
        """A weight gathered for use: constraining weights here, rather than activations alone, is what keeps XLA from
        rematerializing activations on every device."""
        return self._constrain(weight, partition_spec(axes, WEIGHTS_AT_USE))

    def activation(self, array: jax.Array, axes: Axes) -> jax.Array:
        """An activation split by its logical axes."""
        return self._constrain(array, partition_spec(axes, ACTIVATIONS))

    def constrain_rows(self, tree: Any) -> Any:
        """Every array of a pytree split along its first axis."""
        return jax.tree.map(lambda x: self._constrain(x, PartitionSpec(BATCH_AXES)), tree)

    def _constrain(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self.mesh.size == 1:
            return array
        mesh = _mesh_inside_stages(self.mesh) if self.is_inside_stages else self.mesh
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


@functools.lru_cache(maxsize=1024)
def _mesh_inside_stages(mesh: Mesh) -> AbstractMesh:
    return mesh.abstract_mesh.update_axis_types({PIPELINE: AxisType.Manual})


@functools.lru_cache(maxsize=1024)
def _stage(layout: Layout, stage: int) -> Layout:
    positions = np.array(layout.devices).reshape(layout.strategy.pipeline, -1)[stage]
    strategy = dataclasses.replace(layout.strategy, pipeline=1, chunks=1)
    return Layout.over(tuple(positions.tolist()), strategy)


@functools.lru_cache(maxsize=1024)
def _data_group(layout: Layout, group: int) -> Layout:
    positions = np.array(layout.devices).reshape(layout.mesh.devices.shape)[:, group]
    return Layout.over(tuple(positions.flatten().tolist()), dataclasses.replace(layout.strategy, data=1))
