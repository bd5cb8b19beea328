"""Layered layout of a directed graph, from left to right: Sugiyama's method with barycenters.

Every node lies right of what it depends on. An edge over several layers passes through a lane of its own in each layer
between, so that no edge runs through a node.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

Edge = tuple[str, str]
"""From what is needed to what needs it."""
_LANE = 10.0
"""The height that an edge takes in a layer that it passes."""


@dataclasses.dataclass(frozen=True)
class Box:
    """The place of a node: its left upper corner, and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where nodes lie, and which points edges pass, from the right of a node to the left of another."""

    boxes: Mapping[str, Box]
    layers: Mapping[str, tuple[float, float]]
    """Node -> the left and the right of its layer."""
    routes: Mapping[Edge, tuple[tuple[float, float], ...]]
    width: float
    height: float


_Item = str | tuple[Edge, int]
"""A node, or an edge in a layer that it passes."""


def layered(
    sizes: Mapping[str, tuple[float, float]], edges: Sequence[Edge], *, across: float = 54, between: float = 20
) -> Layout:
    """A layout of nodes, which are in an order in which every edge leads forward.

    Args:
        sizes: Node -> its width and height.
        across: The room between layers.
        between: The room between neighbors in a layer.
    """
    layer = _layers(sizes, edges)
    count = max(layer.values(), default=-1) + 1
    columns: list[list[_Item]] = [[node for node in sizes if layer[node] == i] for i in range(count)]
    before: dict[_Item, list[_Item]] = {node: [] for node in sizes}
    paths: dict[Edge, list[_Item]] = {}
    for edge in dict.fromkeys(edges):
        passed: list[_Item] = [(edge, i) for i in range(layer[edge[0]] + 1, layer[edge[1]])]
        for item in passed:
            columns[item[1]].append(item)  # pyright: ignore
        paths[edge] = [edge[0], *passed, edge[1]]
        for left, right in itertools.pairwise(paths[edge]):
            before.setdefault(right, []).append(left)
    after: dict[_Item, list[_Item]] = {item: [] for column in columns for item in column}
    for item, lefts in before.items():
        for left in lefts:
            after[left].append(item)
    _order(columns, before, after)

    heights = {item: sizes[item][1] if isinstance(item, str) else _LANE for column in columns for item in column}
    middle = _heights(columns, before, after, heights, between)
    boxes: dict[str, Box] = {}
    layers: dict[str, tuple[float, float]] = {}
    lefts, rights, x = [], [], 0.0
    for column in columns:
        width = max((sizes[item][0] for item in column if isinstance(item, str)), default=0.0)
        for item in column:
            if isinstance(item, str):
                own, height = sizes[item]
                layers[item] = x, x + width
                boxes[item] = Box(x + (width - own) / 2, middle[item] - height / 2, own, height)
        lefts.append(x)
        rights.append(x + width)
        x += width + across
    routes = {}
    for edge, path in paths.items():
        start, end = boxes[edge[0]], boxes[edge[1]]
        points = [(start.x + start.width, middle[edge[0]])]
        for item in path[1:-1]:
            points += [(lefts[item[1]], middle[item]), (rights[item[1]], middle[item])]  # pyright: ignore
        routes[edge] = (*points, (end.x, middle[edge[1]]))
    height = max((middle[item] + heights[item] / 2 for item in middle), default=0.0)
    return Layout(boxes, layers, routes, max(0.0, x - across), height)


def _layers(nodes: Mapping[str, object], edges: Sequence[Edge]) -> dict[str, int]:
    """Node -> the length of the longest path to it."""
    layer: dict[str, int] = {}
    for node in nodes:
        layer[node] = max((layer[left] + 1 for left, right in edges if right == node), default=0)
    return layer


def _order(columns: list[list[_Item]], before: Mapping[_Item, list[_Item]], after: Mapping[_Item, list[_Item]]) -> None:
    """Sorts each layer by where its items' neighbors are in the layer beside it, to and fro."""
    for sweep in range(6):
        forward = sweep % 2 == 0
        for column in columns if forward else columns[::-1]:
            place = {item: i / max(1, len(each) - 1) for each in columns for i, item in enumerate(each)}
            near = before if forward else after

            def key(item: _Item, near: Mapping[_Item, list[_Item]] = near, place: dict[_Item, float] = place) -> float:
                beside = [place[each] for each in near.get(item, ())]
                return sum(beside) / len(beside) if beside else place[item]

            column.sort(key=key)


def _heights(
    columns: list[list[_Item]], before: Mapping[_Item, list[_Item]], after: Mapping[_Item, list[_Item]],
    heights: Mapping[_Item, float], between: float,
) -> dict[_Item, float]:  # fmt: skip
    """Item -> its middle: near those of its neighbors, without overlaps."""
    middle: dict[_Item, float] = {}
    for column in columns:
        y = -sum(heights[item] + between for item in column) / 2
        for item in column:
            middle[item] = y + heights[item] / 2
            y += heights[item] + between
    for _ in range(8):
        for column in columns:
            wanted = []
            for item in column:
                beside = [middle[each] for each in (*before.get(item, ()), *after.get(item, ()))]
                wanted.append(sum(beside) / len(beside) if beside else middle[item])
            placed: list[float] = []
            for i, item in enumerate(column):  # pushed down as far as the one above needs
                least = placed[-1] + (heights[column[i - 1]] + heights[item]) / 2 + between if placed else wanted[i]
                placed.append(max(wanted[i], least))
            shift = sum(w - p for w, p in zip(wanted, placed, strict=True)) / len(column)
            middle.update({item: y + shift for item, y in zip(column, placed, strict=True)})
    top = min((middle[item] - heights[item] / 2 for item in middle), default=0.0)
    return {item: y - top for item, y in middle.items()}
