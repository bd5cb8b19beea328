import itertools
import re

import jax
import numpy as np
import pytest

from jaxrlhf.reshard.protocols import PROTOCOLS, input_shardings, split_axes
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

ONE = Layout.over((0,), Strategy())
DATA = Layout.over(tuple(range(8)), Strategy(data=4, fsdp=2))
THREE = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
TENSOR = Layout.over(tuple(range(7, -1, -1)), Strategy(tensor=4, data=2))
HALF = Layout.over((5, 4, 7, 6), Strategy(fsdp=2, tensor=2))
STAGES = Layout.over(tuple(range(8)), Strategy(pipeline=2, data=2, tensor=2))
LAYOUTS = [ONE, DATA, THREE, TENSOR, HALF, STAGES]
ROWS = 24


def by_hand(name, strategy):
    """What each device receives of ROWS rows, in the order of the mesh: a loop over table 3 of the paper."""
    received = []
    groups = strategy.data * strategy.fsdp
    for p, d, t in itertools.product(range(strategy.pipeline), range(groups), range(strategy.tensor)):
        rank = (p * groups + d) * strategy.tensor + t
        part, parts = {
            "ONE_TO_ALL": (0, 1),
            "3D_PROTO": (d, groups),
            "3D_ALL_MICRO_DP": (d, groups),  # a group holds one replica of the model
            "3D_PP_ONLY": (0, 1),
            "DP_PROTO": (rank, strategy.num_devices),
            "ALL_TO_ALL": (rank, strategy.num_devices),
        }[name]
        received.append(np.array_split(np.arange(ROWS), parts)[part].tolist())
    return received


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.strategy))
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_are_those_of_the_paper(name, layout):
    (sharding,) = input_shardings([True], layout, name)
    places = sharding.devices_indices_map((ROWS,))
    got = [np.arange(ROWS)[places[device]].tolist() for device in layout.mesh.devices.flat]
    assert got == by_hand(name, layout.strategy)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.strategy))
def test_rows_reach_programs_as_they_expect_them(layout):
    """The same sharding, not only an equivalent one, which would compile the program again."""
    assert input_shardings([True, False], layout) == [layout.rows, layout.replicated]
    assert input_shardings([True], layout, "3D_PROTO") == [layout.rows]


def test_a_split_that_is_that_of_programs_is_written_as_theirs():
    assert input_shardings([True], DATA, "DP_PROTO") == [DATA.rows]
    assert input_shardings([True], ONE, "ONE_TO_ALL") == [ONE.rows]
    assert input_shardings([True], THREE, "DP_PROTO") != [THREE.rows]


@pytest.mark.parametrize("source", [None, *LAYOUTS])
@pytest.mark.parametrize("destination", [DATA, THREE, TENSOR, HALF])
def test_each_device_receives_its_part_only(source, destination):
    rows = np.arange(48, dtype=np.int32).reshape(16, 3)
    array = rows if source is None else jax.device_put(rows, source.rows)
    (moved,) = reallocate([array], input_shardings([True], destination))
    strategy = destination.strategy
    size = 16 // (strategy.data * strategy.fsdp)
    assert {shard.device.id for shard in moved.addressable_shards} == set(destination.devices)
    for shard in moved.addressable_shards:
        rank = destination.devices.index(shard.device.id)
        first = rank // strategy.tensor * size
        np.testing.assert_array_equal(np.asarray(shard.data), rows[first : first + size])


def test_names_of_protocols():
    message = (
        "protocol: must be auto or one of ONE_TO_ALL, 3D_PROTO, 3D_ALL_MICRO_DP, 3D_PP_ONLY, DP_PROTO, ALL_TO_ALL. "
        "Got 'DP_PROTOCOL'. Did you mean 'DP_PROTO'?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        split_axes("DP_PROTOCOL", Strategy())
