"""A plan as a fragment: which devices each call takes, and the table of its calls."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.call_colors import role_colors
from jaxrlhf.observe.plain_text import cell
from jaxrlhf.pages.markup import WIDTH, element, escaped, fragment, ink, label, shortened, svg, table
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.plan_table import plan_rows

_LEFT, _ROW, _TOP = 150, 22, 20
_LEAST_CELL = 11
"""The width of a device, in pixels, from which on there are borders between neighbors."""
_CHARACTER = 6.8
_SHORT = 30
"""Characters of a placement that stays in one line."""
NUMBERS = ("rows", "tokens")
"""Columns of a plan's table that hold numbers."""


def plan_html(plan: Plan, graph: CallGraph, models: Mapping[str, ModelConfig]) -> str:
    """A fragment with the devices of every call of a graph, and the table of the plan. `models` are those of roles."""
    rows = plan_rows(plan, graph, models)
    roles = {call.name: call.role or "" for call in graph.calls}
    placements = {call.name: plan.placements.get(call.plan_name) for call in graph.calls}
    return fragment("plan", devices_svg(placements, roles), calls_table(rows, roles))


def calls_table(rows: Sequence[Mapping[str, Any]], roles: Mapping[str, str], *, numbers: Iterable[str] = ()) -> str:
    """The rows of a table of calls, each with the color of its role. Columns without any value are left out."""
    colors = role_colors(roles.values())
    columns = [c for c in (rows[0] if rows else ()) if any(row.get(c) not in (None, "", "-") for row in rows)]

    def shown(row: Mapping[str, Any], column: str) -> str:
        text = escaped(cell(row.get(column)))
        if column != "call":  # '0-7' is not to be broken
            short = column == "placement" and len(text) <= _SHORT
            return element("span", text, style="white-space:nowrap") if short else text
        return element("i", class_="dot", style=f"background:{colors[roles.get(str(row['call']), '')]}") + text

    body = [[shown(row, column) for column in columns] for row in rows]
    return table(columns, body, numbers=(*NUMBERS, *numbers))


def devices_svg(placements: Mapping[str, Placement | None], roles: Mapping[str, str]) -> str:
    """A row for each call with the devices that it takes, in the color of its role. Those without a placement run on
    the host."""
    colors = role_colors(roles.values())
    taken = {call: list(_places(placement)) if placement else [] for call, placement in placements.items()}
    count = 1 + max((device for places in taken.values() for devices, _, _ in places for device in devices), default=0)
    size = min(46.0, (WIDTH - _LEFT - 10) / count)
    drawn = []
    every = -(-count // max(1, int((WIDTH - _LEFT) // 26))) if size < 26 else 1
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2**20) if n >= every)
    for device in range(0, count, every):
        drawn.append(
            label(_LEFT + size * (device + 0.5), 13, device, text_anchor="middle", fill_opacity=0.7, font_size=10)
        )
    for number, (call, places) in enumerate(taken.items()):
        y = _TOP + _ROW * number
        drawn.append(label(_LEFT - 8, y + 15, shortened(call, 20), text_anchor="end", font_size=11.5))
        drawn.append(
            element(
                "line", x1=_LEFT, x2=_LEFT + size * count, y1=y + _ROW, y2=y + _ROW, stroke="currentColor",
                stroke_opacity=0.12,
            )
        )  # fmt: skip
        color = colors[roles.get(call, "")]
        boxes = [_boxes(devices, words, y, size, color, call, later) for devices, words, later in places]
        if not places:
            boxes = [label(_LEFT + 4, y + 15, "on the host", fill_opacity=0.7, font_style="italic", font_size=10.5)]
        drawn.append(element("g", *boxes, class_="call", data_call=call))
    drawn.append(label(_LEFT - 8, 13, "devices", text_anchor="end", fill_opacity=0.7, font_size=10))
    width = max(_LEFT + size * count + 10, _LEFT + 120)
    return svg(width, _TOP + _ROW * len(taken) + 6, *drawn, name="devices of calls")


def _places(placement: Placement) -> Iterable[tuple[tuple[int, ...], str, bool]]:
    """Devices, degrees, and True for those that only have a tail."""
    for share in (placement, *placement.shares):
        yield share.devices, str(share.strategy), False
    if placement.tail is not None:
        yield placement.tail.devices, str(placement.tail.strategy), True


def _boxes(devices: Sequence[int], words: str, y: float, size: float, color: str, call: str, is_tail: bool) -> str:
    """The boxes of one placement, with its degrees in the longest of them."""
    told = f"{call}{', its tail' if is_tail else ''}: {words} on {devices_to_text(tuple(devices))}"
    runs = _runs(sorted(devices))
    boxes = [
        element(
            "rect", x=_LEFT + size * first + 0.5, y=y + 3, width=size * (last - first + 1) - 1, height=_ROW - 5, rx=2,
            fill=color, fill_opacity=0.45 if is_tail else None,
        )
        for first, last in runs
    ]  # fmt: skip
    borders = [device for first, last in runs for device in range(first + 1, last + 1) if size >= _LEAST_CELL]
    boxes += [
        element(
            "line", x1=_LEFT + size * border, x2=_LEFT + size * border, y1=y + 3, y2=y + _ROW - 2, stroke="#ffffff",
            stroke_opacity=0.3,
        )
        for border in borders
    ]  # fmt: skip
    first, last = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    room = int((size * (last - first + 1) - 8) / _CHARACTER)
    inside = ""
    if room >= len(words) and not is_tail:
        middle = _LEFT + size * (first + last + 1) / 2
        inside = label(middle, y + 15, words, text_anchor="middle", fill=ink(color), font_size=10.5)
    return element("g", element("title", escaped(told)), *boxes, inside)


def _runs(devices: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last one of each run of consecutive devices."""
    runs = []
    for _, group in itertools.groupby(enumerate(devices), lambda pair: pair[1] - pair[0]):
        members = [device for _, device in group]
        runs.append((members[0], members[-1]))
    return runs
