"""Zero-redundancy grouping, against HybridFlow's Figure 8 and Table 2."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from jaxrlhf.reshard.grouping import zero_redundancy_order
from jaxrlhf.reshard.moves import Boxes, Grid
from jaxrlhf.reshard.traffic import DescribedArray, describe, traffic

AXES = ("data", "pipeline", "tensor")
STACKED = DescribedArray((64, 64), np.dtype(np.float32), ("pipeline", "tensor"), ("pipeline", "tensor"))
"""All weights of a model: layers over pipeline stages, columns over tensor shards."""
MODEL_BYTES = 64 * 64 * 4


def degrees(data, pipeline, tensor) -> dict[str, int]:
    return dict(zip(AXES, (data, pipeline, tensor), strict=True))


def grid(by_axis, devices) -> Grid:
    return Grid(tuple(by_axis.items()), tuple(devices))


def groups(by_axis, devices, axis) -> list[list[int]]:
    """The devices that differ along one axis only."""
    array = np.array(devices).reshape(tuple(by_axis.values()))
    return sorted(np.moveaxis(array, list(by_axis).index(axis), -1).reshape(-1, by_axis[axis]).tolist())


def test_the_groups_of_figure_8():
    gpus = range(1, 9)
    train, generate = degrees(2, 1, 4), degrees(4, 1, 2)
    assert groups(train, gpus, "tensor") == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert groups(train, gpus, "data") == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert groups(generate, gpus, "tensor") == [[1, 2], [3, 4], [5, 6], [7, 8]]  # (a), as in training

    ours = zero_redundancy_order(train, generate, gpus)
    assert groups(generate, ours, "tensor") == [[1, 3], [2, 4], [5, 7], [6, 8]]
    micro_data = np.array(ours).reshape(2, 2, 2)  # d, d_g, t_g
    assert sorted(micro_data.transpose(0, 2, 1).reshape(-1, 2).tolist()) == [[1, 2], [3, 4], [5, 6], [7, 8]]


def elements(boxes: Boxes) -> dict[int, set[tuple[int, ...]]]:
    """Device -> what it holds, for arrays of 8 x 8."""
    rows = zip(boxes.devices_N.tolist(), boxes.starts_NR.tolist(), boxes.stops_NR.tolist(), strict=True)
    return {device: set(itertools.product(*map(range, start, stop))) for device, start, stop in rows}


def test_on_which_gpus_figure_8_finds_no_overlap():
    train, generate = grid(degrees(2, 1, 4), range(1, 9)), grid(degrees(4, 1, 2), range(1, 9))
    held, wanted = (elements(g.boxes((8, 8), STACKED.source)) for g in (train, generate))
    assert [gpu for gpu in range(1, 9) if not held[gpu] & wanted[gpu]] == [2, 3, 6, 7]


POWERS = [
    (p, t, d, pg, tg)
    for p, t, d, pg, tg in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8))
    if pg <= p and tg <= t
]


def received_shares(source: Grid, target: Grid, spec=STACKED) -> set[Fraction]:
    counted = traffic([spec], source, target, node_size=8)
    return {Fraction(b, MODEL_BYTES) for b in counted.received_bytes.values()}


def held_share(layout: Grid, spec=STACKED.target) -> Fraction:
    boxes = layout.boxes(STACKED.shape, spec)
    (size,) = set(np.prod(boxes.stops_NR - boxes.starts_NR, axis=1).tolist())
    return Fraction(size * 4, MODEL_BYTES)


def redundant_shares(source: Grid, target: Grid) -> list[Fraction]:
    """Device by device: what of its part in training is not in its part in generation, so must be kept beside it."""
    held, wanted = (layout.boxes(STACKED.shape, STACKED.source) for layout in (source, target))
    rows = {d: (a, b) for d, a, b in zip(wanted.devices_N.tolist(), wanted.starts_NR, wanted.stops_NR, strict=True)}
    shares = []
    for device, start, stop in zip(held.devices_N.tolist(), held.starts_NR, held.stops_NR, strict=True):
        to_start, to_stop = rows[device]
        common = np.clip(np.minimum(stop, to_stop) - np.maximum(start, to_start), 0, None).prod()
        shares.append(Fraction(int((stop - start).prod() - common) * 4, MODEL_BYTES))
    return shares


@pytest.mark.parametrize(("p", "t", "d", "pg", "tg"), POWERS)
def test_table_2(p, t, d, pg, tg):
    n = p * t * d
    train, generate = degrees(d, p, t), degrees(n // (pg * tg), pg, tg)
    source = grid(train, range(n))

    # HybridFlow: our grouping. Volume (tp - tg pg) / (tg pg tp) M, peak M / (tg pg), nothing redundant.
    ours = grid(generate, zero_redundancy_order(train, generate, range(n)))
    assert received_shares(source, ours) == {Fraction(t * p - tg * pg, tg * pg * t * p)}
    assert held_share(ours) == Fraction(1, tg * pg)
    assert set(redundant_shares(source, ours)) == {0}

    # HybridFlow-V gathers the whole model within each group of training, then keeps a part: (tp - 1) / tp M, peak M.
    whole = STACKED._replace(target=())
    assert received_shares(source, source, whole) == {Fraction(t * p - 1, t * p)}
    assert held_share(source, ()) == 1

    # The naive order by itself, moved by our transfer plan: never more than HybridFlow-V, never less than ours.
    naive = grid(generate, range(n))
    least, most = min(received_shares(source, naive)), max(received_shares(source, naive))
    assert Fraction(t * p - tg * pg, tg * pg * t * p) <= least <= most <= Fraction(1, tg * pg)
    redundant = redundant_shares(source, naive)
    assert max(redundant) in (0, Fraction(1, t * p))  # the table's 1 / tp is that of the devices without overlap


def test_the_naive_order_in_figure_8_costs_half_as_much_again():
    train, generate = degrees(2, 1, 4), degrees(4, 1, 2)
    source, naive = grid(train, range(8)), grid(generate, range(8))
    ours = grid(generate, zero_redundancy_order(train, generate, range(8)))
    sums = [sum(traffic([STACKED], source, to, node_size=4).received_bytes.values()) for to in (naive, ours)]
    assert [Fraction(each, 8 * MODEL_BYTES) for each in sums] == [Fraction(3, 8), Fraction(1, 4)]


MESH_AXES = ("data", "fsdp", "tensor")
WEIGHTS = [
    ((16, 16), np.float32, ("embed", "heads")),
    ((16, 16), np.float32, ("mlp", "embed")),
    ((32, 16), np.float32, ("vocab", "embed")),
    ((16,), np.float32, ("norm",)),
]
EIGHT = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8]


@pytest.mark.parametrize("train", EIGHT, ids=str)
def test_every_device_gets_the_least_that_it_can(train):
    arrays = describe(WEIGHTS)
    source = Grid(tuple(zip(MESH_AXES, train, strict=True)), tuple(range(8)))
    for generate in EIGHT:
        order = zero_redundancy_order(dict(source.axes), dict(zip(MESH_AXES, generate, strict=True)), source.devices)
        assert sorted(order) == list(range(8))
        target = Grid(tuple(zip(MESH_AXES, generate, strict=True)), order)
        received = traffic(arrays, source, target, node_size=8).received_bytes
        least = 0
        for array in arrays:
            held, wanted = (
                grid.boxes(array.shape, spec) for grid, spec in ((source, array.source), (target, array.target))
            )
            starts = np.maximum(held.starts_NR[:, None], wanted.starts_NR[None])
            stops = np.minimum(held.stops_NR[:, None], wanted.stops_NR[None])
            common = np.clip(stops - starts, 0, None).prod(axis=-1).max()
            least += 4 * int((wanted.stops_NR[0] - wanted.starts_NR[0]).prod() - common)
        assert set(received.values()) == {least}, generate


def test_no_order_of_four_devices_moves_less():
    arrays = describe(WEIGHTS)
    shapes = [(1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2), (4, 1, 1)]
    for train, generate in itertools.product(shapes, shapes):
        source = Grid(tuple(zip(MESH_AXES, train, strict=True)), (0, 1, 2, 3))
        axes = tuple(zip(MESH_AXES, generate, strict=True))
        order = zero_redundancy_order(dict(source.axes), dict(axes), source.devices)
        moved = {
            devices: traffic(arrays, source, Grid(axes, devices), node_size=8).moved_bytes
            for devices in itertools.permutations(range(4))
        }
        assert moved[order] == min(moved.values())


def test_degrees_that_cannot_be_ordered():
    with pytest.raises(ValueError, match=r"tensor: its degree in training and that in generation must divide one"):
        zero_redundancy_order(dict(data=2, tensor=3), dict(data=3, tensor=2), range(6))
    with pytest.raises(ValueError, match=r"must take all 6 devices\. Got degrees .* for 6 and .* for 4\."):
        zero_redundancy_order(dict(data=2, tensor=3), dict(data=2, tensor=2), range(6))
    with pytest.raises(ValueError, match=r"must have the same axes\. Got \['data', 'tensor'\] and \['data', 'fsdp'\]"):
        zero_redundancy_order(dict(data=2, tensor=3), dict(data=2, fsdp=3), range(6))
