"""The ways in which HLO writes groups of devices."""

import numpy as np
import pytest

from tests.planner.compiled.device_groups import device_groups


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", [[0, 1], [2, 3]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}, x", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=4], device_ids=(3,1,2,0) {'a'}, x", [[3, 1, 2, 0]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(1)2,'a':(4)2}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_groups_of_devices(attributes, groups):
    assert [list(group) for group in device_groups(f", channel_id=1, {attributes}", 4)] == groups


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_grids_and_meshes_say_the_same(order):
    """A transposed grid, and a mesh along whose last axis the groups lie."""
    dims = (2, 3, 4)
    sizes = [dims[i] for i in order]
    listed = ",".join(map(str, order))
    grid = f"replica_groups=[{sizes[0] * sizes[1]},{sizes[2]}]<=[2,3,4]T({listed}), x"
    mesh = f"replica_groups=mesh['a'={sizes[0]},'b'={sizes[1]},'c'={sizes[2]}], device_ids=([2,3,4]T({listed})) {{'c'}}"
    expected = np.arange(24).reshape(dims).transpose(order).reshape(-1, sizes[2]).tolist()
    assert [list(group) for group in device_groups(grid, 24)] == expected
    assert [list(group) for group in device_groups(mesh, 24)] == expected
