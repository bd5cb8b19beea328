import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrlhf.reshard import protocols
from jaxrlhf.reshard.protocols import (
    PROTOCOLS,
    Coordinates,
    Grid,
    Protocol,
    choose,
    find,
    grid_of,
    input_shardings,
    register,
    row_sharding,
    split_over,
    taken_at,
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
    """What each device receives of ROWS rows, and whose outputs are collected: a loop over table 3 of the paper."""
    received, collected, rank = {}, [], 0
    num_devices = grid.pipeline * grid.data * grid.micro_data * grid.tensor
    for p in range(grid.pipeline):
        for d in range(grid.data):
            for m in range(grid.micro_data):
                for t in range(grid.tensor):
                    at = (p, d, m, t)
                    everything, stage_end = list(range(ROWS)), p == grid.pipeline - 1
                    part, parts, gives = {
                        "ONE_TO_ALL": (0, 1, True),
                        "3D_PROTO": (d, grid.data, stage_end and m == 0 and t == 0),
                        "3D_ALL_MICRO_DP": (d * grid.micro_data + m, grid.data * grid.micro_data, stage_end and t == 0),
                        "3D_PP_ONLY": (0, 1, d == m == t == 0),
                        "DP_PROTO": (rank, num_devices, True),
                        "ALL_TO_ALL": (rank, num_devices, True),
                    }[name]
                    received[at] = np.array_split(everything, parts)[part].tolist()
                    collected += [at] if gives else []
                    rank += 1
    return received, collected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_those_of_the_paper(name, grid):
    received, collected = by_hand(name, grid)
    got = PROTOCOLS[name].distribute(grid, ROWS)
    assert {tuple(at): list(range(ROWS))[rows] for at, rows in got.items()} == received
    assert [tuple(at) for at in PROTOCOLS[name].collect(grid)] == collected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["3D_PROTO", "3D_ALL_MICRO_DP", "DP_PROTO"])
def test_what_is_distributed_and_collected_is_whole_again(name, grid):
    """A call that works on rows, and whose outputs exist where the protocol says."""
    protocol, data = PROTOCOLS[name], np.arange(ROWS) * 3
    parts = protocol.distribute(grid, ROWS)
    outputs = {at: data[rows] + 1 for at, rows in parts.items()}
    if name == "DP_PROTO" or grid.micro_data == 1 or name == "3D_ALL_MICRO_DP":
        np.testing.assert_array_equal(np.concatenate([outputs[at] for at in protocol.collect(grid)]), data + 1)


def test_ranks_count_tensor_first():
    assert Grid(data=2, tensor=2).devices == (
        Coordinates(0, 0, 0, 0), Coordinates(0, 0, 0, 1), Coordinates(0, 1, 0, 0), Coordinates(0, 1, 0, 1),
    )  # fmt: skip


def test_rows_that_do_not_split():
    message = "rows: data x micro_data must divide them. Got 10 rows for 4 parts. Lower a degree, or use another"
    with pytest.raises(ValueError, match=re.escape(message)):
        PROTOCOLS["3D_ALL_MICRO_DP"].distribute(Grid(data=2, micro_data=2), 10)


ONE = Layout.over((0,), Strategy())
DATA = Layout.over(tuple(range(8)), Strategy(data=4, fsdp=2))
THREE = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
TENSOR = Layout.over(tuple(range(7, -1, -1)), Strategy(tensor=4, data=2))
HALF = Layout.over((5, 4, 7, 6), Strategy(fsdp=2, tensor=2))
LAYOUTS = [ONE, DATA, THREE, TENSOR, HALF]


@pytest.mark.parametrize(
    ("source", "destination", "has_rows", "name"),
    [
        (None, THREE, False, "ONE_TO_ALL"),
        (DATA, ONE, False, "ONE_TO_ALL"),
        (None, DATA, True, "DP_PROTO"),
        (TENSOR, DATA, True, "DP_PROTO"),
        (None, THREE, True, "3D_PROTO"),
        (HALF, THREE, True, "3D_PROTO"),
        (THREE, TENSOR, True, "3D_PROTO"),
        (TENSOR, THREE, True, "3D_ALL_MICRO_DP"),
    ],
)
def test_the_layouts_choose_the_protocol(source, destination, has_rows, name):
    assert choose(source, destination, has_rows=has_rows).name == name


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


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(protocols, "PROTOCOLS", dict(PROTOCOLS))


def test_a_protocol_of_one_s_own(registered):
    register(Protocol("BY_TENSOR", split_over("tensor"), taken_at(data=0)))
    (sharding,) = input_shardings([np.arange(16)], [True], THREE, "BY_TENSOR")
    assert sharding.spec == PartitionSpec(("tensor",))
    message = "protocol: a name may be registered once. Got 'BY_TENSOR' again. Choose another."
    with pytest.raises(ValueError, match=re.escape(message)):
        register(Protocol("BY_TENSOR", split_over(), taken_at()))


def test_a_protocol_that_no_mesh_can_follow():
    def backwards(grid, num_rows):
        parts = split_over("data")(grid, num_rows)
        return dict(zip(parts, list(parts.values())[::-1], strict=True))

    message = (
        "protocol BACKWARDS: must split the rows evenly over mesh axes. Got [(0, 4), (4, 8), (8, 12), (12, 16)] of"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        row_sharding(Protocol("BACKWARDS", backwards, taken_at()), THREE, 16, grid_of(THREE))


def test_names_of_protocols():
    assert find("3D_PROTO") is PROTOCOLS["3D_PROTO"]
    message = (
        "protocol: must be auto or one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO, ALL_TO_ALL. "
        "Got 'DP_PROTOCOL'. Did you mean 'DP_PROTO'?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        find("DP_PROTOCOL")
