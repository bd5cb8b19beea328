"""Data between calls: which device gets which rows of a call's inputs.

A transfer protocol is a function over a grid of devices: the rows that each device receives of data that is whole. It
moves nothing itself: `row_sharding` turns what it says into a JAX sharding, and each device then receives its own part,
straight from a device that has it. HybridFlow's protocols also collect outputs; here a `jax.Array` knows where its
parts are, so that outputs are collected by being read.

Reference:
    Sheng et al. 2024 (HybridFlow), arXiv:2409.19256, section 4.1 and table 3.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.axes import BATCH_AXES, MESH_AXES
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.suggest import did_you_mean

AUTO = "auto"
"""In a plan: the protocol that `choose` finds."""


class Coordinates(NamedTuple):
    """The coordinates of a device in a grid."""

    pipeline: int
    data: int
    micro_data: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class Grid:
    """Devices by what they hold of a model and of its rows."""

    pipeline: int = 1
    """Stages of layers."""
    data: int = 1
    """Groups of devices that share rows: data x fsdp of a layout."""
    micro_data: int = 1
    """Parts into which a group divides its rows when its devices hold larger shards of the model than in training."""
    tensor: int = 1
    """Shards of each matrix product."""

    @property
    def devices(self) -> tuple[Coordinates, ...]:
        """All of them by rank: tensor changes fastest."""
        axes = (self.pipeline, self.data, self.micro_data, self.tensor)
        return tuple(Coordinates(*at) for at in itertools.product(*map(range, axes)))


Distribute = Callable[[Grid, int], Mapping[Coordinates, slice]]
"""(grid, number of rows) -> the rows that each device receives."""
Axis = Literal["pipeline", "data", "micro_data", "tensor"]


def split_over(*axes: Axis) -> Distribute:
    """Rows are split over these axes of the grid, the first one slowest; devices along all others get the same."""

    def distribute(grid: Grid, num_rows: int) -> dict[Coordinates, slice]:
        parts = 1
        for axis in axes:
            parts *= getattr(grid, axis)
        if num_rows % parts:
            raise ValueError(
                f"rows: {' x '.join(axes)} must divide them. Got {num_rows} rows for {parts} parts. Lower a degree, or "
                "use another batch_size."
            )
        rows, received = num_rows // parts, {}
        for device in grid.devices:
            part = 0
            for axis in axes:
                part = part * getattr(grid, axis) + getattr(device, axis)
            received[device] = slice(part * rows, (part + 1) * rows)
        return received

    return distribute


PROTOCOLS: Mapping[str, Distribute] = {
    # everyone gets everything: settings, scalars, weights
    "ONE_TO_ALL": split_over(),
    # one part a data group
    "3D_PROTO": split_over("data"),
    # generation on the devices of training, with more replicas of the model: every one gets rows of its own
    "3D_ALL_MICRO_DP": split_over("data", "micro_data"),
    "3D_PP_ONLY": split_over(),
    # every device is a data group of its own
    "DP_PROTO": split_over("pipeline", "data", "micro_data", "tensor"),
    # the data is one part a device already: to look at what single devices do
    "ALL_TO_ALL": split_over("pipeline", "data", "micro_data", "tensor"),
}
"""HybridFlow's protocols."""


def find(name: str) -> Distribute:
    """The protocol of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in PROTOCOLS:
        raise ValueError(
            f"protocol: must be {AUTO} or one of {', '.join(PROTOCOLS)}. Got {name!r}.{did_you_mean(name, PROTOCOLS)}"
        )
    return PROTOCOLS[name]


def choose(source: Layout | None, destination: Layout) -> str:
    """The name of the protocol by which rows reach a call.

    Args:
        source: Where they are. None: on the host.
    """
    if destination.strategy.tensor == destination.strategy.pipeline == 1:
        return "DP_PROTO"
    return "3D_ALL_MICRO_DP" if _micro_data(source, destination) > 1 else "3D_PROTO"


def grid_of(destination: Layout, source: Layout | None = None) -> Grid:
    """The grid of a layout's devices, seen from the layout that its data comes from."""
    strategy, micro_data = destination.strategy, _micro_data(source, destination)
    return Grid(strategy.pipeline, strategy.num_row_shards // micro_data, micro_data, strategy.tensor)


def _micro_data(source: Layout | None, destination: Layout) -> int:
    """Replicas of the model in `destination` on the devices that hold one replica in `source`; 1 on other devices."""
    if source is None or set(source.mesh.devices.flat) != set(destination.mesh.devices.flat):
        return 1
    theirs, ours = (x.strategy.tensor * x.strategy.pipeline for x in (source, destination))
    return theirs // ours if theirs % ours == 0 else 1


@functools.lru_cache(maxsize=4096)  # asked for every input of every call of every step
def row_sharding(protocol: str, layout: Layout, num_rows: int, grid: Grid) -> NamedSharding:
    """A protocol as a sharding of the first axis over the layout's mesh.

    Raises:
        ValueError: The parts do not divide the rows, or are not split over some of the mesh axes and repeated over the
            others.
    """
    received = find(protocol)(grid, num_rows)
    wanted = {
        device: received[at].indices(num_rows)[:2]
        for device, at in zip(layout.mesh.devices.flat, grid.devices, strict=True)
    }
    orders = [axes for n in range(len(MESH_AXES) + 1) for axes in itertools.permutations(MESH_AXES, n)]
    # what programs expect comes first: the same split, written otherwise, would compile them anew
    orders = [BATCH_AXES, *(axes for axes in orders if axes != BATCH_AXES)]
    for axes in orders:
        if num_rows % math.prod(layout.mesh.shape[axis] for axis in axes):
            continue
        sharding = NamedSharding(layout.mesh, PartitionSpec(axes) if axes else PartitionSpec())
        places = sharding.devices_indices_map((num_rows,))
        if all(places[device][0].indices(num_rows)[:2] == rows for device, rows in wanted.items()):
            return sharding
    raise ValueError(
        f"protocol {protocol}: must split the rows evenly over mesh axes. Got {sorted(set(wanted.values()))} of "
        f"{num_rows} rows over {dict(layout.mesh.shape)}. Use {AUTO}."
    )


def input_shardings(
    arrays: Sequence[Any], has_rows: Sequence[bool], layout: Layout, protocol: str = AUTO
) -> list[NamedSharding]:
    """The sharding of each input of a call: rows by a protocol, everything else on every device.

    Args:
        has_rows: Which arrays have rows; the others are settings and states.
        protocol: The name of the one for rows, over the grid of the layout by itself; `auto` finds it by where each
            array is and where it goes.
    """
    shardings = []
    for array, rows in zip(arrays, has_rows, strict=True):
        source = _layout_of(array) if protocol == AUTO else None
        if rows:
            chosen = choose(source, layout) if protocol == AUTO else protocol
            shardings.append(row_sharding(chosen, layout, array.shape[0], grid_of(layout, source)))
        else:
            shardings.append(layout.replicated)  # whatever its dims are, none are rows
    return shardings


def _layout_of(array: Any) -> Layout | None:
    """The layout that an array lies in; None for one on the host, or not laid out by a call."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or tuple(sharding.mesh.axis_names) != MESH_AXES:
        return None
    mesh = sharding.mesh
    return Layout(mesh, Strategy(**dict(mesh.shape))) if isinstance(mesh, Mesh) else None
