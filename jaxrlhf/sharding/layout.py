"""Layouts: a mesh with the rules by which weights, activations and rows are sharded over it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.axes import (
    ACTIVATIONS,
    BATCH_AXES,
    FSDP,
    MESH_AXES,
    TENSOR,
    WEIGHTS_AT_REST,
    WEIGHTS_AT_USE,
    Splittable,
    fits,
    mesh_axes,
    partition_spec,
    resting_spec,
)
from jaxrlhf.sharding.mesh import build_mesh, mesh_positions
from jaxrlhf.sharding.strategy import Strategy

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh and strategy of a call. Models get it as an argument and only use logical axes."""

    mesh: Mesh
    strategy: Strategy
    manual_axes: frozenset[str] = frozenset()
    """Mesh axes along which arrays are local to a device, as inside a `shard_map` over these axes."""

    @classmethod
    def over(cls, devices: tuple[int, ...], strategy: Strategy) -> "Layout":
        """The layout of a strategy over devices, given by their positions in `jax.devices()`."""
        return cls(build_mesh(devices, strategy), strategy)

    @property
    def is_pipelined(self) -> bool:
        return self.strategy.pipeline > 1

    @property
    def is_on_gpu(self) -> bool:
        """True on GPUs, described ones too."""
        return self.mesh.devices.flat[0].platform in ("gpu", "cuda")

    def stage(self, stage: int) -> "Layout":
        """The layout of the devices of one stage. Virtual stages beyond the first round are on the same devices."""
        return _stage(self, stage % self.strategy.pipeline)

    def inside_row_shards(self) -> "Layout":
        """The same layout for a program that every row shard runs on its own rows. Only `tensor` is left to the
        partitioner."""
        axes = frozenset(MESH_AXES) if self.strategy.tensor == 1 else frozenset(MESH_AXES) - {TENSOR}
        return dataclasses.replace(self, manual_axes=axes)

    def inside_gathered_row_shards(self) -> "Layout":
        """The same, where weights have been gathered over `fsdp` before; of one row shard without stages, the layout
        itself."""
        data = self.strategy.num_row_shards
        if data == 1 and not self.is_pipelined:
            return self
        gathered = dataclasses.replace(self, strategy=dataclasses.replace(self.strategy, data=data, fsdp=1))
        return gathered.inside_row_shards()

    def over_row_shards(self, function: Callable[..., Any], given: Any, gives: Any) -> Callable[..., Any]:
        """A function that every row shard, and every stage of it, runs on its own arrays, for the layout
        `inside_gathered_row_shards`. `given` and `gives`: the specs of its arguments and of what it gives, as for
        `jax.shard_map`."""
        within = self.inside_gathered_row_shards()
        if not within.manual_axes:
            return function
        axes = within.manual_axes
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=given, out_specs=gives, axis_names=axes, check_vma=False
        )

    def data_group(self, group: int) -> "Layout":
        """The layout of the devices that have the rows of one data group."""
        return _data_group(self, group)

    @property
    def devices(self) -> tuple[int, ...]:
        """Positions in `jax.devices()`."""
        return mesh_positions(self.mesh)

    @property
    def own_devices(self) -> tuple[int, ...]:
        """Positions in `jax.devices()` of those that belong to this process."""
        return mesh_positions(self.mesh, jax.process_index())

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Split along the first axis, the same for every device along `tensor`."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def weight(self, weight: Splittable) -> NamedSharding:
        """The sharding of a weight at rest."""
        return NamedSharding(self.mesh, self._resting(weight))

    def manual_weight(self, weight: Splittable) -> PartitionSpec:
        """The spec of a weight at rest along the manual axes, for the `in_specs` of their `shard_map`."""
        return _only(self._resting(weight), self.manual_axes)

    def copies_of_weight(self, weight: Splittable) -> tuple[str, ...]:
        """The row axes along which devices hold the same shard of a weight, and add up their gradients of it."""
        return tuple(axis for axis in BATCH_AXES if axis not in mesh_axes(self._resting(weight)))

    def _resting(self, weight: Splittable) -> PartitionSpec:
        return resting_spec(weight, self.mesh.shape)

    @property
    def hidden_row_shards(self) -> int:
        """The number of manual row shards: the factor by which arrays of rows are shorter on a device."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES if axis in self.manual_axes)

    def at_use(self, weight: jax.Array, declared: Splittable) -> jax.Array:
        """A weight gathered for use, with heads repeated or a vocabulary padded to what `tensor` divides. Constraining
        weights, rather than activations alone, keeps XLA from rematerializing activations on every device.

        The gradient of a gather over `fsdp` is a reduce-scatter. For the embedding, which is looked up and not
        multiplied, this holds if `fsdp` is manual; otherwise the caller constrains its gradient, since the partitioner
        would move activations instead.
        """
        weight, axes = self._fitted(weight, declared), declared.axes
        at_rest, at_use = partition_spec(axes, WEIGHTS_AT_REST), partition_spec(axes, WEIGHTS_AT_USE)
        if FSDP in self.manual_axes and self.strategy.fsdp > 1 and FSDP in at_rest:
            weight = self._gathered(weight, at_rest.index(FSDP), at_use)
        elif self.strategy.fsdp > 1 and FSDP in at_rest and axes[0] != "vocab":
            return self._constrained_both_ways(weight, at_use, at_rest)
        return self._constrain(weight, at_use)

    def _fitted(self, weight: jax.Array, declared: Splittable) -> jax.Array:
        """A weight that `tensor` divides. Heads are repeated, each beside itself; a vocabulary is padded with zeros.
        One that was fitted before stays.

        Done where the weight rests split along its hidden size, so that it is local, and so is the sum of its gradient
        over copies of a head; then devices exchange what each needs.
        """
        tensor = self.strategy.tensor
        if fits(declared, tensor):
            return weight
        axis = "kv_heads" if "kv_heads" in declared.axes else "vocab"
        dim = declared.axes.index(axis)
        if weight.shape[dim] != declared.shape[dim]:
            return weight
        units, where = declared.units[dim], self._resting(declared)
        fitted = self._constrain(weight, where)
        if axis == "vocab":
            fitted = jnp.pad(fitted, [(0, -units % tensor if i == dim else 0) for i in range(fitted.ndim)])
        else:
            fitted = _repeated(fitted, dim, units, math.lcm(units, tensor) // units)
        return self._constrain(self._constrain(fitted, where), partition_spec(declared.axes, WEIGHTS_AT_REST))

    def _constrained_both_ways(self, array: jax.Array, spec: PartitionSpec, of_gradient: PartitionSpec) -> jax.Array:
        @jax.custom_vjp
        def constrained(array: jax.Array) -> jax.Array:
            return self._constrain(array, spec)

        def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
            return (self._constrain(gradient, of_gradient),)

        constrained.defvjp(lambda array: (constrained(array), None), backward)
        return constrained(array)

    def _gathered(self, weight: jax.Array, dim: int, at_use: PartitionSpec) -> jax.Array:
        def gather(shard: jax.Array) -> jax.Array:
            wide = shard.astype(self.precision_of_sums(shard.dtype))  # because the gradient is a sum
            return jax.lax.all_gather(wide, FSDP, axis=dim, tiled=True).astype(shard.dtype)

        # the partitioner would gather the other axes first
        return self._on_each_device(gather, (at_use,), at_use)(weight)

    def precision_of_sums(self, dtype: Any) -> Any:
        """The dtype in which arrays are summed over devices in a program with manual axes. On CPUs it is never
        bfloat16: their compiler widens it itself, and aborts in such a program (jaxlib 0.10)."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return jnp.promote_types(dtype, jnp.float32) if on_cpu else dtype

    def at_rest(self, weight: jax.Array, declared: Splittable) -> jax.Array:
        """A weight, or its gradient, sharded as at rest."""
        return self._constrain(weight, self._resting(declared))

    def activation(self, array: jax.Array, axes: Axes) -> jax.Array:
        """An activation sharded by its logical axes."""
        return self._constrain(array, partition_spec(axes, ACTIVATIONS))

    def on_each_device(self, function: Callable[..., Any], arrays: Sequence[Axes], output: Axes) -> Callable[..., Any]:
        """A function of activations that each device runs on its own part of them, in a program with manual axes, where
        the partitioner cannot split it. In other programs, the function itself. `arrays`: the logical axes of its
        arguments. `output`: the logical axes of its one output."""
        specs = tuple(partition_spec(axes, ACTIVATIONS) for axes in arrays)
        return self._on_each_device(function, specs, partition_spec(output, ACTIVATIONS))

    def constrain_rows(self, tree: Any) -> Any:
        """Every array of a pytree split along its first axis."""
        return jax.tree.map(lambda x: self._constrain(x, PartitionSpec(BATCH_AXES)), tree)

    def _on_each_device(
        self, function: Callable[..., Any], arrays: tuple[PartitionSpec, ...], output: PartitionSpec
    ) -> Callable[..., Any]:
        axes = self._automatic_axes
        if not self.manual_axes or not axes:
            return function
        return jax.shard_map(
            function,
            mesh=_mesh_inside(self.mesh, self.manual_axes),
            in_specs=tuple(_only(spec, axes) for spec in arrays),
            out_specs=_only(output, axes),
            axis_names=axes,
            check_vma=False,
        )

    @property
    def _automatic_axes(self) -> frozenset[str]:
        """Mesh axes that are left to the partitioner."""
        return frozenset(MESH_AXES) - self.manual_axes

    def _constrain(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        automatic = self._automatic_axes
        if all(self.mesh.shape[axis] == 1 for axis in automatic):
            return array
        mesh = _mesh_inside(self.mesh, self.manual_axes) if self.manual_axes else self.mesh
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, _only(spec, automatic)))


def _repeated(array: jax.Array, dim: int, units: int, times: int) -> jax.Array:
    """An array whose units along a dim, each of some columns, are there several times, side by side."""
    shape = array.shape
    each = array.reshape(*shape[:dim], units, 1, -1, *shape[dim + 1 :])
    every = jnp.broadcast_to(each, (*each.shape[: dim + 1], times, *each.shape[dim + 2 :]))
    return every.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _only(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """A spec without the mesh axes that are not among `axes`."""

    def entry(names: Any) -> Any:
        kept = tuple(name for name in ((names,) if isinstance(names, str) else names or ()) if name in axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*(entry(names) for names in spec))


@functools.lru_cache(maxsize=1024)
def _mesh_inside(mesh: Mesh, manual_axes: frozenset[str]) -> AbstractMesh:
    return mesh.abstract_mesh.update_axis_types(dict.fromkeys(manual_axes, AxisType.Manual))


@functools.lru_cache(maxsize=1024)
def _stage(layout: Layout, stage: int) -> Layout:
    positions = np.array(layout.devices).reshape(layout.strategy.pipeline, -1)[stage]
    strategy = dataclasses.replace(layout.strategy, pipeline=1, chunks=1)
    return Layout.over(tuple(positions.tolist()), strategy)


@functools.lru_cache(maxsize=1024)
def _data_group(layout: Layout, group: int) -> Layout:
    positions = np.array(layout.devices).reshape(layout.mesh.devices.shape)[:, group]
    return Layout.over(tuple(positions.flatten().tolist()), dataclasses.replace(layout.strategy, data=1))
