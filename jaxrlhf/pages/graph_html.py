"""The call graph of a step as a fragment: calls from left to right, their placements, and what flows between them."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.observe.call_colors import role_colors
from jaxrlhf.pages.graph_layout import Box, Edge, Layout, layered
from jaxrlhf.pages.markup import WIDTH, element, escaped, fragment, label, legend, shortened, svg
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.plan_table import parts_in_words

_BOLD, _PLAIN = 7.9, 6.6
"""The width of a character, in wide fonts: that of names, and that of what stands under them."""
_LINE, _PADDING = 16, 9
_COLUMNS, _MOST_LINES = 23, 3
"""Characters of a line in a node, and its lines between name and rows."""
_MARGIN, _LANE = 12, 22
_LEAST_SCALE = 0.65
"""A graph is not drawn smaller than this."""


Calls = Sequence[Mapping[str, Any]]
"""The calls of a graph as plain data: as `CallGraph.to_rows` gives them, and graph.json has them."""


@dataclasses.dataclass(frozen=True)
class _Node:
    name: str
    lines: tuple[str, ...]
    """What stands under its name."""
    told: str
    """The whole of it, for the pointer."""

    @property
    def size(self) -> tuple[float, float]:
        widest = max(_BOLD * len(shortened(self.name, 28)), *(_PLAIN * len(line) for line in self.lines), 60)
        return widest + 2 * _PADDING + 5, _LINE * (1 + len(self.lines)) + 12


def graph_html(graph: CallGraph, plan: Plan | None = None) -> str:
    """A fragment with the picture of a graph, and of the placements that a plan gives its calls.

    A line is an array that a call needs of another. A dashed line is a new version of weights: on its way to a later
    call, or to the next iteration. A dotted one stands for weights that must not change while a call still reads them;
    it is left out where other lines say the same.
    """
    drawn = {call.name: call.num_drawn for call in graph.calls}
    calls = [{**call, "num_rows": call["num_rows"] * drawn[call["name"]]} for call in graph.to_rows()]
    return fragment("graph", *graph_picture(calls, None if plan is None else plan.placements))


def graph_picture(calls: Calls, placements: Mapping[str, Placement | None] | None) -> tuple[str, str]:
    """The picture of such a graph, and its legend. Placements are by the names of calls in plans."""
    nodes = {call["name"]: _node(call, placements) for call in calls}
    roles = {call["name"]: call["role"] or "" for call in calls}
    edges = graph_edges(calls)
    layout = layered({name: node.size for name, node in nodes.items()}, list(edges))
    colors = role_colors(roles.values())
    again = next_iteration(calls)
    drawn = [_edge(layout, edge, kind, colors[roles[edge[0]]]) for edge, kind in edges.items()]
    drawn += [
        _way_back(layout, edge, number, colors[roles[edge[0]]], _is_moved(placements or {}, edge))
        for number, edge in enumerate(again)
    ]
    drawn += [_drawn(node, layout.boxes[name], colors[roles[name]]) for name, node in nodes.items()]
    width, height = layout.width + 2 * _MARGIN + 24, layout.height + 2 * _MARGIN + _LANE * len(again)
    moved = element("g", *drawn, transform=f"translate({_MARGIN + 12},{_MARGIN})")
    shown = {role or "compute": colors[role] for role in dict.fromkeys(roles.values())}
    least = _LEAST_SCALE * width if _LEAST_SCALE * width > WIDTH else 0  # a long graph is scrolled
    picture = svg(width, height, moved, name="call graph", least=least)
    return element("div", picture, class_="wide"), legend(shown)


def graph_edges(calls: Calls) -> dict[Edge, str]:
    """(needed, needing) -> 'data', 'weights' or 'order', as they are drawn."""
    writer = {(call["weights"], call["writes"]): call["name"] for call in calls if call["writes"] is not None}
    edges: dict[Edge, str] = {}
    for call in calls:
        arrays = {array.partition("[")[0] for array in call["inputs"]}
        for needed in call["needs"]:
            new = writer.get((call["weights"], call["reads"])) == needed
            edges[needed, call["name"]] = "data" if needed in arrays else "weights" if new else "order"
    kept: dict[Edge, str] = {}
    for edge, kind in edges.items():
        others = [other for other in edges if other != edge]
        if kind != "order" or not _leads(others, *edge):
            kept[edge] = kind
    return kept


def next_iteration(calls: Calls) -> list[Edge]:
    """(train call, call that will read its weights in the next iteration): of each role the last one that trains, and
    the first calls that read what was there before."""
    edges = []
    last = {call["weights"]: call["name"] for call in calls if call["writes"] is not None}
    for weights, name in last.items():
        first = min(call["reads"] for call in calls if call["weights"] == weights)
        readers = [c for c in calls if c["weights"] == weights and c["reads"] == first and c["kind"] != "train"]
        edges += [(name, reader["name"]) for reader in readers]
    return edges


def _leads(edges: list[Edge], start: str, end: str) -> bool:
    """True if there is a way from one node to another."""
    reached, new = {start}, {start}
    while new:
        new = {right for left, right in edges if left in new} - reached
        reached |= new
    return end in reached


def _plan_name(call: str) -> str:
    """The name of a call in plans, without the iteration."""
    return call.split(":", 1)[-1]


def _is_moved(placements: Mapping[str, Placement | None], edge: Edge) -> bool:
    """True if a plan gives two calls different layouts of their weights."""
    first, second = (placements.get(_plan_name(name)) for name in edge)
    if first is None or second is None:
        return False
    degrees = [(x.strategy.fsdp, x.strategy.tensor, x.strategy.pipeline, x.devices) for x in (first, second)]
    return degrees[0] != degrees[1]


def _node(call: Mapping[str, Any], placements: Mapping[str, Placement | None] | None) -> _Node:
    placement = (placements or {}).get(_plan_name(call["name"]))
    if call["kind"] == "host":
        where = ["on the host" if placement is None or placement.is_whole else parts_in_words(placement, on_host=True)]
    elif placement is not None:
        on = f"on {devices_to_text(placement.devices)}"
        where = [str(placement.strategy), on if placement.is_whole else parts_in_words(placement, on_host=False)]
    else:
        where = ["arrays of the batch" if call["kind"] == "compute" else call["kind"]]
    rows = call["num_rows"]
    amount = f"{rows:,} row{'s' if rows != 1 else ''}" if rows else ""
    lines = [line for words in where for line in textwrap.wrap(words, _COLUMNS)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"{lines[_MOST_LINES - 1]} ..."]
    lines = [shortened(line, _COLUMNS + 5) for line in lines]
    told = ", ".join(x for x in (call["name"], *where, amount) if x)
    return _Node(call["name"], (*lines, *([amount] if amount else [])), told)


def _drawn(node: _Node, box: Box, color: str) -> str:
    """A node: a box in the color of its role, and its lines."""
    frame = element(
        "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=6, fill=color, fill_opacity=0.13,
        stroke=color, stroke_width=1.4,
    )  # fmt: skip
    left = box.x + _PADDING + 3
    name = label(left, box.y + 18, shortened(node.name, 28), font_size=12, font_weight=600)
    lines = [
        label(left, box.y + 18 + _LINE * (i + 1), line, fill_opacity=0.75, font_size=11)
        for i, line in enumerate(node.lines)
    ]
    told = element("title", escaped(node.told))
    return element("g", told, frame, name, *lines, class_="node", data_call=node.name)


def _edge(layout: Layout, edge: Edge, kind: str, color: str) -> str:
    """A curve along the points of an edge, with an arrow at its end."""
    points = layout.routes[edge]
    (x, y), parts = points[0], []
    parts.append(f"M{x:.1f} {y:.1f}")
    for number, (to_x, to_y) in enumerate(points[1:], start=1):
        end = to_x - (6 if number == len(points) - 1 else 0)
        bend = (end - x) / 2
        straight = number % 2 == 0  # through a layer
        parts.append(
            f"L{end:.1f} {to_y:.1f}"
            if straight
            else f"C{x + bend:.1f} {y:.1f} {end - bend:.1f} {to_y:.1f} {end:.1f} {to_y:.1f}"
        )
        x, y = end, to_y
    words = {"data": "data", "weights": "new weights", "order": "weights stay until it has read them"}[kind]
    return _line("".join(parts), points[-1], f"{edge[0]} to {edge[1]}: {words}", kind=kind, color=color)


def _way_back(layout: Layout, edge: Edge, number: int, color: str, is_moved: bool) -> str:
    """A dashed line under the graph, from a train call to what reads its weights in the next iteration."""
    source, target = layout.boxes[edge[0]], layout.boxes[edge[1]]
    y = layout.height + _LANE * (number + 0.75)
    right = layout.layers[edge[0]][1] + 10 + 4 * (number % 3)
    left = layout.layers[edge[1]][0] - 14 - 4 * (number % 3)
    start, end = source.y + source.height / 2 + 6, target.y + target.height / 2 + 8
    path = (
        f"M{source.x + source.width:.1f} {start:.1f}"
        f"H{right - 5:.1f}Q{right:.1f} {start:.1f} {right:.1f} {start + 5:.1f}"
        f"V{y - 5:.1f}Q{right:.1f} {y:.1f} {right - 5:.1f} {y:.1f}"
        f"H{left + 5:.1f}Q{left:.1f} {y:.1f} {left:.1f} {y - 5:.1f}"
        f"V{end + 5:.1f}Q{left:.1f} {end:.1f} {left + 5:.1f} {end:.1f}H{target.x - 6:.1f}"
    )
    words = "new weights, reallocated" if is_moved else "new weights"
    told = f"{edge[0]} to {edge[1]} of the next iteration: {words}"
    line = _line(path, (target.x, end), told, kind="next", color=color)
    return line + label((left + right) / 2, y - 4, words, fill_opacity=0.75, text_anchor="middle", font_size=10.5)


_LOOKS: Mapping[str, Mapping[str, object]] = {
    "data": {"stroke": "currentColor", "stroke_opacity": 0.5, "stroke_width": 1.2},
    "weights": {"stroke_width": 1.5, "stroke_dasharray": "6 4"},
    "next": {"stroke_width": 1.5, "stroke_dasharray": "6 4"},
    "order": {"stroke": "currentColor", "stroke_opacity": 0.45, "stroke_width": 1, "stroke_dasharray": "1.5 3.5"},
}


def _line(path: str, tip: tuple[float, float], told: str, *, kind: str, color: str) -> str:
    look = {"stroke": color, **_LOOKS[kind]}
    x, y = tip
    arrow = element(
        "polygon", points=f"{x:.1f},{y:.1f} {x - 7:.1f},{y - 3.5:.1f} {x - 7:.1f},{y + 3.5:.1f}",
        fill=look["stroke"], fill_opacity=look.get("stroke_opacity"),
    )  # fmt: skip
    curve = element("path", d=path, fill="none", **look)
    return element("g", element("title", escaped(told)), curve, arrow, class_=f"edge edge-{kind}")
