"""A layout: a mesh with the rules by which weights, activations and rows are laid over it."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.axes import ACTIVATIONS, BATCH_AXES, WEIGHTS_AT_REST, WEIGHTS_AT_USE, partition_spec
from jaxrlhf.sharding.mesh import build_mesh, mesh_positions
from jaxrlhf.sharding.processes import process_index
from jaxrlhf.sharding.strategy import Strategy

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a call's arrays live. Models receive it as an argument and speak to it in logical axes only."""

    mesh: Mesh
    strategy: Strategy

    @classmethod
    def over(cls, devices: tuple[int, ...], strategy: Strategy) -> "Layout":
        """The layout of a strategy over devices, given by their positions in `jax.devices()`."""
        return cls(build_mesh(devices, strategy), strategy)

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
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))
