"""Groups of devices, in all the ways in which HLO writes them."""

import itertools
import math
import re

import numpy as np

DeviceGroups = tuple[tuple[int, ...], ...]


def device_groups(attributes: str, num_devices: int) -> DeviceGroups:
    """The groups of a collective, in whatever form they are written.

    replica_groups={{0,1},{2,3}}                                        listed; {} is all devices
    source_target_pairs={{0,1},{1,0}}                                   from one device to another
    replica_groups=[2,4]<=[8]T(1,0)                                     as a transposed grid of numbers
    replica_groups=mesh['a'=2,'b'=4], device_ids=([8]T(0)) {'a'}        along axes of a mesh, or parts of an axis
    """
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return tuple(map(_integers, re.findall(r"\{([\d,]+)\}", match[1]))) or (tuple(range(num_devices)),)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _as_groups(_grid(match[2]).reshape(_integers(match[1])))
    match = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", attributes)
    assert match is not None, attributes
    return _along_axes(match[1], match[2], match[3])


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _grid(text: str) -> np.ndarray:
    """Numbers from 0 on in a grid, maybe with its dims in another order: '[2,4]T(1,0)'."""
    dims, _, order = text.partition("T")
    shape = _integers(dims.strip("[]"))
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_integers(order.strip("()"))) if order else grid


def _as_groups(rows: np.ndarray) -> DeviceGroups:
    return tuple(map(tuple, rows.tolist()))


def _along_axes(mesh: str, device_ids: str | None, chosen: str) -> DeviceGroups:
    """Groups of the devices that differ only along some axes, or parts of axes: 'a':(2)4 are the coordinates of `a`
    divided into 2 parts, of which each is divided into 4, and which of these 4."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    ]
    dims: list[int] = []
    position: dict[tuple[str, int], list[int]] = {}  # (axis, parts before) -> dims that the part of the axis is made of
    for name, size in sizes.items():
        inner = {cut for axis, before, count in wanted if axis == name for cut in (before, before * count)}
        cuts = sorted({1, size, *inner})
        first = len(dims)
        dims += [after // before for before, after in itertools.pairwise(cuts)]
        for axis, before, count in wanted:
            if axis == name:
                parts = range(cuts.index(before), cuts.index(before * count))
                position[name, before] = [first + part for part in parts]
    if device_ids is None:
        ids = np.arange(math.prod(dims))
    elif device_ids.startswith("["):
        ids = _grid(device_ids).reshape(-1)
    else:
        ids = np.array(_integers(device_ids))
    along = [dim for name, before, _ in wanted for dim in position[name, before]]
    others = [dim for dim in range(len(dims)) if dim not in along]
    size = math.prod(dims[dim] for dim in along)
    return _as_groups(ids.reshape(dims).transpose(others + along).reshape(-1, size))
