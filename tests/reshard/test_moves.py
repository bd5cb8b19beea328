import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxrlhf.reshard.moves import LOTS, Boxes, Change, Grid, Moves, plan_moves


def one_way(source, target, *, nodes, count=1):
    (lots,) = plan_moves([Change(source, target, 4, count)], nodes)
    return lots


def by_hand(moves: Moves) -> list[tuple[int, int, list[int], list[int]]]:
    return list(
        zip(
            moves.source_M.tolist(), moves.target_M.tolist(), moves.starts_MR.tolist(), moves.stops_MR.tolist(),
            strict=True,
        )
    )  # fmt: skip


def line(devices, degree, size=8):
    """The first dim split over some devices, the others hold copies."""
    return Grid((("copy", len(devices) // degree), ("split", degree)), tuple(devices)).boxes((size,), ("split",))


def test_boxes_of_a_grid():
    grid = Grid((("data", 2), ("fsdp", 2), ("tensor", 2)), (7, 6, 5, 4, 3, 2, 1, 0))
    boxes = grid.boxes((8, 3, 4), (("fsdp", "tensor"), None, "data"))
    assert boxes.devices_N.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert boxes.starts_NR[:, 0].tolist() == [0, 2, 4, 6, 0, 2, 4, 6]
    assert boxes.starts_NR[:, 2].tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert (boxes.stops_NR - boxes.starts_NR).tolist() == [[2, 3, 2]] * 8
    assert grid.boxes((), ()).starts_NR.shape == (8, 0)


def test_what_no_grid_can_be():
    with pytest.raises(ValueError, match=r"Grid .*needs 4 different devices\. Got 4, of which 3 are different\."):
        Grid((("data", 4),), (0, 1, 1, 2))
    grid = Grid((("data", 4),), (0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"dim 1 must be a multiple of its degree 4 \(axes data\)\. Got 6\."):
        grid.boxes((4, 6), (None, "data"))
    with pytest.raises(ValueError, match=r"Unknown mesh axis 'tensor' in \('tensor',\)\. Known: data\."):
        grid.boxes((4,), ("tensor",))


def test_what_is_there_stays():
    ((moves, _),) = one_way(line([0, 1], 2), line([0, 1], 1), nodes=[0, 0])
    assert by_hand(moves) == [
        (0, 0, [0], [4]), (0, 1, [0], [4]), (1, 0, [4], [8]), (1, 1, [4], [8])
    ]  # fmt: skip


def test_an_owner_of_the_same_node_sends():
    ((moves, _),) = one_way(line([0, 2], 1), line([1, 3], 1), nodes=[0, 0, 1, 1])
    assert [(s, t) for s, t, *_ in by_hand(moves)] == [(0, 1), (2, 3)]


def test_owners_take_turns_within_an_array_and_from_array_to_array():
    source, target = line([0, 1], 1), line([2, 3, 4], 1)
    lots = one_way(source, target, nodes=[0] * 5, count=8)
    assert [count for _, count in lots] == [8 // LOTS] * LOTS
    sent = np.zeros(5, int)
    for moves, count in lots:
        sent += count * np.bincount(moves.source_M, minlength=5)
    assert sent.tolist() == [12, 12, 0, 0, 0]


def test_loads_carry_over_from_one_change_to_the_next():
    source = line([0, 1], 1)
    changes = [Change(source, line([2], 1), 4), Change(source, line([3], 1), 4), Change(source, line([2], 1), 4)]
    senders = [lots[0][0].source_M.tolist() for lots in plan_moves(changes, [0] * 4)]
    assert senders == [[0], [1], [0]]


def test_where_all_send_equally_much_one_way_serves_all_arrays():
    lots = one_way(line([0, 1], 1), line([2, 3], 1), nodes=[0] * 4, count=100)
    assert [count for _, count in lots] == [100]


SHAPES = {0: (), 1: (12,), 2: (12, 8), 3: (4, 6, 8)}


@st.composite
def layouts(draw, shape):
    """Boxes of a random grid over some of ten devices."""
    degrees = [draw(st.sampled_from([d for d in (1, 2, 3, 4) if size % d == 0])) for size in shape]
    while np.prod(degrees, initial=1) > 10:
        degrees[int(np.argmax(degrees))] = 1
    copies = draw(st.integers(1, 10 // int(np.prod(degrees, initial=1))))
    size = copies * int(np.prod(degrees, initial=1))
    devices = tuple(draw(st.permutations(range(10)))[:size])
    names = [f"axis{dim}" for dim in range(len(shape))]
    order = draw(st.permutations([("copy", copies), *zip(names, degrees, strict=True)]))
    return Grid(tuple(order), devices).boxes(shape, tuple(names))


@given(st.data())
def test_every_element_arrives_once_from_a_box_that_holds_it(data):
    shape = SHAPES[data.draw(st.sampled_from(sorted(SHAPES)))]
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    count = data.draw(st.integers(1, 6))
    nodes = [device // 4 for device in range(10)]
    lots = one_way(source, target, nodes=nodes, count=count)
    assert sum(n for _, n in lots) == count
    held, wanted = limits(source), limits(target)
    for moves, _ in lots:
        arrivals = {device: np.zeros(shape, int) for device in wanted}
        for sender, receiver, start, stop in by_hand(moves):
            box = tuple(map(slice, start, stop))
            arrivals[receiver][box] += 1
            assert all(a <= b for a, b in zip(held[sender][0], start, strict=True))
            assert all(b <= a for a, b in zip(held[sender][1], stop, strict=True))
            owners = [d for d, box in held.items() if box == held[sender]]
            if receiver in owners:
                assert sender == receiver
            elif any(nodes[d] == nodes[receiver] for d in owners):
                assert nodes[sender] == nodes[receiver]
        for device, (start, stop) in wanted.items():
            expected = np.zeros(shape, int)
            expected[tuple(map(slice, start, stop))] = 1
            assert (arrivals[device] == expected).all()


def limits(boxes: Boxes) -> dict[int, tuple[list[int], list[int]]]:
    rows = zip(boxes.devices_N.tolist(), boxes.starts_NR.tolist(), boxes.stops_NR.tolist(), strict=True)
    return {device: (start, stop) for device, start, stop in rows}
