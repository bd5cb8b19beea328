"""Pictures of timelines: a row for each device and host, calls in the colors of their roles, borders between steps.

They need matplotlib, an optional dependency: `pip install jaxrlhf[pictures]`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.observe.chrome_trace import Rows
from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.utilization import step_span, utilization

DEFAULT_STEPS = 3
"""The number of steps, the last ones, that are drawn by default."""
_HUES = {
    "actor": ("#0b5394", "#3d85c6", "#6fa8dc", "#b4d3ee"),
    "critic": ("#b45f06", "#e69138", "#f6b26b", "#fbdcb9"),
    "reference": ("#38761d", "#6aa84f", "#a3cf91"),
    "reward": ("#674ea7", "#8e7cc3", "#b4a7d6"),
}
"""The roles of PPO have colors of their own, dark to light, so that pictures of different runs can be compared."""
_MORE_HUES = (
    ("#a61c5d", "#d5649c", "#eab3cf"),
    ("#0f7b7b", "#45b3b0", "#a5dcd9"),
    ("#7f6000", "#c9a227", "#e8d48a"),
    ("#990000", "#cc5b5b", "#e6a8a8"),
)
_COMPUTE = ("#d6b656", "#e8d594", "#bfa145")
"""Colors of calls that belong to no role."""
_GREY, _PALE, _FAINT = "#9a9a9a", "#dddddd", "#f5f5f5"
MAX_DEVICE_ROWS = 32
"""With more devices than this, neighbors with the same events share a row."""
_MAX_LABELS = 48
"""The most rows that have a label. With more rows, only every second, third ... has one."""


class PictureError(ValueError):
    """A picture that cannot be drawn."""


def check_matplotlib() -> None:
    """Checks that matplotlib is installed.

    Raises:
        PictureError: It is not.
    """
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise PictureError(
            f"A picture: needs matplotlib. Got none that can be imported ({error}). Install it with "
            "'pip install jaxrlhf[pictures]', or open timeline.json in ui.perfetto.dev."
        ) from error


def has_matplotlib() -> bool:
    """Returns whether matplotlib is installed."""
    try:
        check_matplotlib()
    except PictureError:
        return False
    return True


def choose_steps(rows: Rows, text: str | None) -> tuple[int, int]:
    """The first and the last step to draw, from '7' or '3-5'; by default, the last steps of the timeline.

    Raises:
        PictureError: The timeline has none of these steps.
    """
    there = sorted({event.step for _, row in rows for event in row if event.phase == STEP and event.devices})
    if not there:
        raise PictureError("A picture: needs a step of training. Got a timeline without any. Name that of another run.")
    if text is None:
        return there[-DEFAULT_STEPS:][0], there[-1]
    span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
    if not any(first <= step <= last for step in there):
        raise PictureError(
            f"--steps: must be a step, or the first and the last one of several, of those that the timeline has: "
            f"{there[0]}-{there[-1]}. Got {text[:40]!r}. Such as --steps {there[-2:][0]}-{there[-1]}."
        )
    return max(first, there[0]), min(last, there[-1])


def draw_timeline(rows: Rows, path: Path, *, steps: tuple[int, int], title: str = "") -> None:
    """Draws some steps into a file, whose suffix names its format: .png, .svg, .pdf ...

    There is a row for each device, or, with many devices, for each group of neighbors with the same events. Events of
    other steps and of evaluations are drawn where they reach into the span.

    Args:
        rows: Rows from `chrome_trace.read_rows`.
        steps: The first and the last step.

    Raises:
        PictureError: matplotlib is not installed, or does not know the format.
    """
    check_matplotlib()
    from matplotlib.figure import Figure  # needs no display and no global state, unlike pyplot
    from matplotlib.patches import Patch

    events = [event for _, row in rows for event in row]
    spans = {step: span for step in range(steps[0], steps[1] + 1) if (span := step_span(events, step)) is not None}
    if not spans:
        raise PictureError(
            f"--steps: must have a span of time. Got {steps[0]}-{steps[1]}, of which nothing ran by itself."
        )
    start, end = min(span[0] for span in spans.values()), max(span[1] for span in spans.values())
    shown = [
        (label, [event for event in row if event.start < end and event.end > start])
        for label, row in _joined(rows)
        if any(event.devices for event in row) or any(event.start < end and event.end > start for event in row)
    ]
    color_of = call_colors(events)
    height = min(0.34, 14 / len(shown))
    figure = Figure(figsize=(11, 1.9 + height * len(shown)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for position, (_, row) in enumerate(shown):
        _draw_row(axes, position, row, color_of, start=start, end=end)

    for step, (left, right) in spans.items():
        for border in (left, right):
            axes.axvline(border - start, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=4)
        if right - left > 0.05 * (end - start):  # else labels would overlap
            middle = (left + right) / 2 - start
            axes.text(middle, -0.62, f"step {step}", ha="center", va="bottom", fontsize=8, fontweight="bold")
    axes.set_xlim(0, end - start)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    every = -(-len(shown) // _MAX_LABELS)
    axes.set_yticks(range(0, len(shown), every), [label for label, _ in shown[::every]], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(_title(title, events, (start, end)), fontsize=9, loc="left", pad=20)

    kinds = {event.kind for _, row in shown for event in row}
    drawn = {_call(event) for _, row in shown for event in row}
    legend = [Patch(facecolor=color, label=name) for name, color in color_of.items() if name in drawn]
    if kinds.intersection(MOVING):
        legend.append(Patch(facecolor=_PALE, edgecolor=_GREY, hatch="////", label="moving weights or data"))
    if WAIT in kinds:
        legend.append(Patch(facecolor=_FAINT, edgecolor=_GREY, label="host waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(6, len(legend)), fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:  # an unknown suffix; the error lists the known ones
        raise PictureError(f"--out: must end in the name of a picture's format. Got {path.name!r}. {error}") from error


def call_colors(events: Sequence[Event]) -> dict[str, str]:
    """Call -> color: a hue for each role, a shade for each of its calls, the same in every picture of a run."""
    calls = sorted({name for event in events if (name := _call(event)) is not None})
    kinds = {_call(event): event.kind for event in events}
    hues, more = dict(_HUES), list(_MORE_HUES)
    taken: dict[str, int] = {}
    colors = {}
    for name in calls:
        role = name.partition(".")[0]
        if kinds[name] == "compute":
            shades = _COMPUTE
            role = ""
        else:
            if role not in hues:
                more.append(more.pop(0))
                hues[role] = more[-1]
            shades = hues[role]
        colors[name] = shades[taken.get(role, 0) % len(shades)]
        taken[role] = taken.get(role, 0) + 1
    return colors


def _joined(rows: Rows) -> Rows:
    """The rows of many devices, with neighbors that have the same events joined into one."""
    if sum(label.startswith("device ") for label, _ in rows) <= MAX_DEVICE_ROWS:
        return rows
    joined: list[tuple[str, str, list[Event], Any]] = []
    for label, row in rows:
        does = [(event.call, event.start, event.end) for event in row] if label.startswith("device ") else label
        if joined and joined[-1][3] == does:
            joined[-1] = (joined[-1][0], label, row, does)
        else:
            joined.append((label, label, row, does))
    return [
        (first if first == last else f"{first.replace('device', 'devices')}-{last.split()[-1]}", row)
        for first, last, row, _ in joined
    ]


def _call(event: Event) -> str | None:
    """The key of an event's color, 'actor.generate' for any call of that name; None if it is not a call."""
    return None if event.kind in (*MOVING, WAIT) else event.name.partition("#")[0]


def _draw_row(
    axes: Any, position: int, row: Sequence[Event], color_of: dict[str, str], *, start: float, end: float
) -> None:
    """Draws events as bars, those that look the same in one call."""
    bars: dict[tuple[Any, ...], tuple[dict[str, Any], list[tuple[float, float]]]] = {}
    for event in row:
        left, right = max(event.start, start) - start, min(event.end, end) - start
        look = _look(event, color_of)
        bars.setdefault(tuple(look.values()), (look, []))[1].append((left, right - left))
        # the name of what was waited for, if it fits
        if event.kind == WAIT and right - left > 0.009 * len(event.name) * (end - start):
            middle = (left + right) / 2
            axes.text(middle, position, event.name, ha="center", va="center", fontsize=7, color="#555555")
    for look, spans in bars.values():
        axes.broken_barh(spans, (position - 0.4, 0.8), **look)
    axes.axhline(position + 0.5, color=_PALE, linewidth=0.5, zorder=0)


def _look(event: Event, color_of: dict[str, str]) -> dict[str, Any]:
    if event.kind in MOVING:
        return {"facecolor": _PALE, "edgecolor": _GREY, "hatch": "////", "linewidth": 0.4}
    if event.kind == WAIT:
        return {"facecolor": _FAINT, "edgecolor": _GREY, "linewidth": 0.6}
    name = _call(event)
    assert name is not None
    # evaluations and the warm start are no part of a step
    alpha = 1 if event.phase == STEP else 0.4
    return {"facecolor": color_of[name], "edgecolor": "white", "linewidth": 0.3, "alpha": alpha}


def _title(title: str, events: Sequence[Event], span: tuple[float, float]) -> str:
    devices = sorted({device for event in events for device in event.devices})
    used = utilization(events, span, devices)
    parts = [
        *([title] if title else []),
        f"devices busy {used.busy_fraction:.0%}",
        f"two or more calls at once {used.overlap:.0%}",
        f"moving weights and data {used.reallocation_share:.0%}",
    ]
    return "   ".join(parts)
