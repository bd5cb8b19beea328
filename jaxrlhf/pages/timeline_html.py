"""A timeline as a fragment: a row for each device and host, a box for each call, with its seconds under the pointer."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxrlhf.observe.call_colors import GREY, PALE
from jaxrlhf.observe.chrome_trace import Rows, read_rows, trace_rows
from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event, ProcessEvents
from jaxrlhf.observe.timeline_view import TimelineView, call_of, choose_steps, timeline_view
from jaxrlhf.pages.curves import nice_ticks
from jaxrlhf.pages.markup import WIDTH, element, escaped, fragment, hatching, ink, label, legend, shortened, svg

_LEFT, _TOP, _RIGHT = 92, 20, 12
_CHARACTER = 6.4
_MOVED = "moving weights or data"


def timeline_html(
    source: str | os.PathLike[str] | Sequence[Event], *, steps: int | tuple[int, int] | None = None
) -> str:
    """A fragment with some steps of a timeline.

    Args:
        source: The folder of a run, its timeline.json, or events on one clock.
        steps: A step, or the first and the last one of several; otherwise the last three.

    Raises:
        TraceError: The file is not the timeline of a run.
        PictureError: There are no such steps.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        rows = read_rows(path / "timeline.json" if path.is_dir() else path)
    else:
        rows = trace_rows([ProcessEvents(tuple(source), 0.0)])
    wanted = steps if steps is None or isinstance(steps, int) else f"{steps[0]}-{steps[1]}"
    return rows_html(rows, None if wanted is None else str(wanted))


def rows_html(rows: Rows, steps: str | None = None) -> str:
    """The same for rows, with `steps` as in '7' or '3-5'."""
    view = timeline_view(rows, choose_steps(rows, steps))
    note = element("div", escaped("; ".join(view.facts)), class_="note")
    return fragment("timeline", timeline_svg(view), legend(legend_of(view)), note)


def legend_of(view: TimelineView) -> dict[str, str]:
    """What is drawn -> its color."""
    events = [event for _, row in view.rows for event in row]
    drawn = {call_of(event) for event in events}
    colors = {name: color for name, color in view.colors.items() if name in drawn}
    if any(event.kind in MOVING for event in events):
        colors[_MOVED] = GREY
    return colors


def timeline_svg(view: TimelineView) -> str:
    """The picture: rows from top to bottom, steps between dashed lines, seconds from the left."""
    row_height = 20 if len(view.rows) <= 16 else 15
    height, width = row_height * len(view.rows), WIDTH - _LEFT - _RIGHT
    scale = width / (view.end - view.start)
    defs, hatched = hatching(GREY)
    drawn = [defs]
    for number, (name, row) in enumerate(view.rows):
        y = _TOP + row_height * number
        drawn.append(label(_LEFT - 8, y + row_height / 2 + 4, shortened(name, 15), text_anchor="end", font_size=10.5))
        drawn.append(_rule(_LEFT, y + row_height, WIDTH - _RIGHT, y + row_height, stroke_opacity=0.12))
        drawn += [_box(event, view, y, row_height, scale, hatched) for event in row]
    bottom = _TOP + height
    for step, (left, right) in view.spans.items():
        for border in dict.fromkeys((left, right)):
            x = _LEFT + (border - view.start) * scale
            drawn.append(_rule(x, _TOP - 4, x, bottom, stroke_opacity=0.6, stroke_dasharray="4 3"))
        if (right - left) * scale > 46:  # else labels would overlap
            middle = _LEFT + ((left + right) / 2 - view.start) * scale
            drawn.append(label(middle, _TOP - 8, f"step {step}", text_anchor="middle", font_weight=600))
    for tick, text in nice_ticks(0.0, view.end - view.start, 8):
        x = _LEFT + tick * scale
        drawn.append(_rule(x, bottom, x, bottom + 4, stroke_opacity=0.5))
        drawn.append(label(x, bottom + 16, f"{text} s", text_anchor="middle", fill_opacity=0.75, font_size=10))
    return svg(WIDTH, bottom + 24, *drawn, name="timeline")


def _box(event: Event, view: TimelineView, y: float, height: float, scale: float, hatched: str) -> str:
    start, end = max(event.start, view.start), min(event.end, view.end)
    x, width = _LEFT + (start - view.start) * scale, max(0.6, (end - start) * scale)
    color = view.colors[str(call_of(event))] if call_of(event) is not None else PALE
    look: dict[str, object] = {"fill": color}
    if event.kind in MOVING:
        look = {"fill": hatched, "stroke": GREY, "stroke_width": 0.5}
    elif event.kind == WAIT:
        look = {"fill": "currentColor", "fill_opacity": 0.06, "stroke": GREY, "stroke_width": 0.6}
    elif event.phase != STEP:  # evaluations and the warm start are no part of a step
        look["fill_opacity"] = 0.4
    box = element("rect", x=x, y=y + 2, width=width, height=height - 4, rx=1.5 if width > 4 else None, **look)
    named = ""
    if event.kind not in MOVING and width > _CHARACTER * len(event.name) + 6:
        light = {"fill_opacity": 0.7} if event.kind == WAIT or event.phase != STEP else {"fill": ink(color)}
        named = label(
            x + width / 2, y + height / 2 + 3.5, event.name, text_anchor="middle", font_size=10, pointer_events="none",
            **light,
        )  # fmt: skip
    return element("g", element("title", escaped(_told(event, view.start))), box, named, class_=f"event {event.kind}")


def _told(event: Event, zero: float) -> str:
    """An event in words."""
    what = f"waits for {event.name}" if event.kind == WAIT else event.name
    what += f", {event.part}" if event.part else ""
    when = f"{event.phase} {event.step}: {event.end - event.start:.4g} s, from {event.start - zero:.4g} s on"
    return f"{what}, {when}{f'; {event.bytes / 1e6:,.1f} MB moved' if event.bytes else ''}"


def _rule(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", **attributes)
