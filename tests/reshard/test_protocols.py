import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrlhf.reshard.protocols import (
    PROTOCOLS,
    Coordinates,
    Grid,
    choose,
    find,
    grid_of,
    input_shardings,
    row_sharding,
)
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

GRIDS = [
    Grid(),
    Grid(data=4),
    Grid(tensor=4),
    Grid(data=2, tensor=2),
    Grid(pipeline=2, data=2, tensor=2),
    Grid(pipeline=2, data=3, micro_data=2, tensor=2),
]
ROWS = 24


def by_hand(name, grid):
    """What each device receives of ROWS rows: a loop over table 3 of the paper."""
    received, rank = {}, 0
    num_devices = grid.pipeline * grid.data * grid.micro_data * grid.tensor
    for p in range(grid.pipeline):
        for d in range(grid.data):
            for m in range(grid.micro_data):
                for t in range(grid.tensor):
                    part, parts = {
                        "ONE_TO_ALL": (0, 1),
                        "3D_PROTO": (d, grid.data),
                        "3D_ALL_MICRO_DP": (d * grid.micro_data + m, grid.data * grid.micro_data),
                        "3D_PP_ONLY": (0, 1),
                        "DP_PROTO": (rank, num_devices),
                        "ALL_TO_ALL": (rank, num_devices),
                    }[name]
                    received[p, d, m, t] = np.array_split(list(range(ROWS)), parts)[part].tolist()
                    rank += 1
    return received


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_those_of_the_paper(name, grid):
    got = PROTOCOLS[name](grid, ROWS)
    assert {tuple(at): list(range(ROWS))[rows] for at, rows in got.items()} == by_hand(name, grid)


def test_ranks_count_tensor_first():
    assert Grid(data=2, tensor=2).devices == (
        Coordinates(0, 0, 0, 0), Coordinates(0, 0, 0, 1), Coordinates(0, 1, 0, 0), Coordinates(0, 1, 0, 1),
    )  # fmt: skip


def test_rows_that_do_not_split():
    message = "rows: data x micro_data must divide them. Got 10 rows for 4 parts. Lower a degree, or use another"
    with pytest.raises(ValueError, match=re.escape(message)):
        PROTOCOLS["3D_ALL_MICRO_DP"](Grid(data=2, micro_data=2), 10)


ONE = Layout.over((0,), Strategy())
DATA = Layout.over(tuple(range(8)), Strategy(data=4, fsdp=2))
THREE = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
TENSOR = Layout.over(tuple(range(7, -1, -1)), Strategy(tensor=4, data=2))
HALF = Layout.over((5, 4, 7, 6), Strategy(fsdp=2, tensor=2))
LAYOUTS = [ONE, DATA, THREE, TENSOR, HALF]


@pytest.mark.parametrize(
    ("source", "destination", "name"),
    [
        (None, DATA, "DP_PROTO"),
        (TENSOR, DATA, "DP_PROTO"),
        (None, THREE, "3D_PROTO"),
        (HALF, THREE, "3D_PROTO"),
        (THREE, TENSOR, "3D_PROTO"),
        (TENSOR, THREE, "3D_ALL_MICRO_DP"),
    ],
)
def test_the_layouts_choose_the_protocol(source, destination, name):
    assert choose(source, destination) == name


def test_replicas_of_generation_within_a_group_of_training():
    assert grid_of(THREE, TENSOR) == Grid(data=2, micro_data=2, tensor=2)
    assert grid_of(THREE) == Grid(data=4, tensor=2)
    assert grid_of(TENSOR, THREE) == Grid(data=2, tensor=4)


@pytest.mark.parametrize(("source", "destination"), list(itertools.product([None, *LAYOUTS], LAYOUTS)))
def test_what_is_chosen_is_how_programs_expect_their_rows(source, destination):
    array = np.zeros((16, 3), np.float32)
    inputs = [array if source is None else jax.device_put(array, source.rows), np.float32(1)]
    rows, scalar = input_shardings(inputs, [True, False], destination)
    assert rows == destination.rows and scalar == destination.replicated


@pytest.mark.parametrize("source", [None, *LAYOUTS])
@pytest.mark.parametrize("destination", [DATA, THREE, TENSOR, HALF])
def test_each_device_receives_its_part_only(source, destination):
    rows = np.arange(48, dtype=np.int32).reshape(16, 3)
    array = rows if source is None else jax.device_put(rows, source.rows)
    (moved,) = reallocate([array], input_shardings([array], [True], destination))
    strategy = destination.strategy
    size = 16 // (strategy.data * strategy.fsdp)
    assert {shard.device.id for shard in moved.addressable_shards} == set(destination.devices)
    for shard in moved.addressable_shards:
        rank = destination.devices.index(shard.device.id)
        first = rank // strategy.tensor * size
        np.testing.assert_array_equal(np.asarray(shard.data), rows[first : first + size])


def test_a_protocol_by_name_is_what_moves_the_rows():
    rows = np.arange(16)
    by_device = [PartitionSpec(("data", "fsdp", "tensor")), PartitionSpec()]
    for name, spec in zip(["DP_PROTO", "ONE_TO_ALL"], by_device, strict=True):
        (sharding,) = input_shardings([rows], [True], THREE, name)
        assert sharding.is_equivalent_to(jax.sharding.NamedSharding(THREE.mesh, spec), 1)


def test_a_protocol_by_name_gives_every_data_group_its_part_wherever_the_rows_come_from():
    """Also from a layout that holds a replica where the destination holds two."""
    wide = Layout.over(tuple(range(8)), Strategy(data=4, tensor=2))
    rows = jax.device_put(np.arange(16), TENSOR.rows)
    assert input_shardings([rows], [True], wide, "3D_PROTO") == [wide.rows]


def test_a_split_that_no_mesh_axes_make():
    wide = Layout.over(tuple(range(8)), Strategy(data=4, tensor=2))
    message = "protocol 3D_PROTO: must split the rows evenly over mesh axes. Got [(0, 8), (8, 16)] of 16 rows over"
    with pytest.raises(ValueError, match=re.escape(message)):
        row_sharding("3D_PROTO", wide, 16, Grid(data=2, micro_data=2, tensor=2))


def test_names_of_protocols():
    assert find("3D_PROTO") is PROTOCOLS["3D_PROTO"]
    message = (
        "protocol: must be auto or one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO, ALL_TO_ALL. "
        "Got 'DP_PROTOCOL'. Did you mean 'DP_PROTO'?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find("DP_PROTOCOL")
