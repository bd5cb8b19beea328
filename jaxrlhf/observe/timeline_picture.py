"""Pictures of timelines: a row for each device and host, calls in the colors of their roles, borders between steps.

They need matplotlib, an optional dependency: `pip install jaxrlhf[pictures]`.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.observe.chrome_trace import Rows
from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.utilization import step_span, utilization

DEFAULT_STEPS = 3
"""The number of steps, the last ones, that are drawn by default."""
_HUES = {"actor": ("tab20c", 0), "critic": ("tab20c", 4), "reference": ("tab20c", 8), "reward": ("tab20c", 12)}
"""The roles of PPO have colors of their own, so that pictures of different runs can be compared: a colormap of
matplotlib and the first of its four shades, dark to light."""
_MORE_HUES = (("tab20b", 12), ("tab20b", 0), ("tab20b", 4), ("tab20b", 16))
_COMPUTE = ("tab20b", 8)
"""The hue of calls that belong to no role."""
_GREY, _PALE, _FAINT = "#9a9a9a", "#dddddd", "#f5f5f5"
MAX_DEVICE_ROWS = 32
"""With more devices than this, neighbors with the same events share a row."""
_MAX_LABELS = 48
"""The most rows that have a label. With more rows, only every second, third ... has one."""


class PictureError(ValueError):
    """A picture that cannot be drawn."""


def check_matplotlib() -> None:
    """Raises PictureError unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise PictureError(
            f"A picture: needs matplotlib. Got none that can be imported ({error}). Install it with "
            "'pip install jaxrlhf[pictures]', or open timeline.json in ui.perfetto.dev."
        ) from error


def choose_steps(rows: Rows, text: str | None) -> tuple[int, int]:
    """The first and the last step to draw, from '7' or '3-5', or the last ones; PictureError if there are none."""
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
    """Draws some steps, the first and the last one of `steps`, into a file, whose suffix names its format: .png, .svg,
    .pdf ... Raises PictureError if matplotlib does not know it.

    There is a row for each device, or, with many devices, for each group of neighbors with the same events. Events of
    other steps and of evaluations are drawn where they reach into the span.
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
    shown = [(label, [each for each in row if each.start < end and each.end > start]) for label, row in _joined(rows)]
    shown = [(label, row) for label, row in shown if row or label.startswith("device")]
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
    used = utilization(events, (start, end), sorted({device for event in events for device in event.devices}))
    facts = [
        f"devices busy {used.busy_fraction:.0%}",
        f"two or more calls at once {used.overlap:.0%}",
        f"moving weights and data {used.reallocation_share:.0%}",
    ]
    axes.set_title("   ".join([title] * bool(title) + facts), fontsize=9, loc="left", pad=20)

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


def call_colors(events: Sequence[Event]) -> dict[str, Any]:
    """Call -> color: a hue for each role, a shade for each of its calls, the same in every picture of a run."""
    from matplotlib import colormaps

    kinds = {name: event.kind for event in events if (name := _call(event)) is not None}
    role_of = {name: "" if kinds[name] == "compute" else name.partition(".")[0] for name in sorted(kinds)}
    more = itertools.cycle(_MORE_HUES)
    hues = {"": _COMPUTE, **_HUES} | {
        role: next(more) for role in dict.fromkeys(role_of.values()) if role and role not in _HUES
    }
    shades = {role: itertools.cycle([colormaps[name](at + i) for i in range(4)]) for role, (name, at) in hues.items()}
    return {name: next(shades[role]) for name, role in role_of.items()}


def _joined(rows: Rows) -> Rows:
    """The rows of many devices, with neighbors that have the same events joined into one."""
    if sum(label.startswith("device ") for label, _ in rows) <= MAX_DEVICE_ROWS:
        return rows

    def does(labelled: tuple[str, list[Event]]) -> Any:
        label, row = labelled
        return [(event.call, event.start, event.end) for event in row] if label.startswith("device ") else id(row)

    joined = []
    for _, group in itertools.groupby(rows, does):
        (first, row), *others = group
        label = f"{first.replace('device', 'devices')}-{others[-1][0].split()[-1]}" if others else first
        joined.append((label, row))
    return joined


def _call(event: Event) -> str | None:
    """The key of an event's color, 'actor.generate' for any call of that name; None if it is not a call."""
    return None if event.kind in (*MOVING, WAIT) else event.name.partition("#")[0]


def _draw_row(
    axes: Any, position: int, row: Sequence[Event], color_of: dict[str, Any], *, start: float, end: float
) -> None:
    """Draws events as bars, those that look the same in one call."""
    bars: dict[tuple[tuple[str, Any], ...], list[tuple[float, float]]] = {}
    for event in row:
        left, right = max(event.start, start) - start, min(event.end, end) - start
        bars.setdefault(tuple(_look(event, color_of).items()), []).append((left, right - left))
        # the name of what was waited for, if it fits
        if event.kind == WAIT and right - left > 0.009 * len(event.name) * (end - start):
            middle = (left + right) / 2
            axes.text(middle, position, event.name, ha="center", va="center", fontsize=7, color="#555555")
    for look, spans in bars.items():
        axes.broken_barh(spans, (position - 0.4, 0.8), **dict(look))
    axes.axhline(position + 0.5, color=_PALE, linewidth=0.5, zorder=0)


def _look(event: Event, color_of: dict[str, Any]) -> dict[str, Any]:
    if event.kind in MOVING:
        return {"facecolor": _PALE, "edgecolor": _GREY, "hatch": "////", "linewidth": 0.4}
    if event.kind == WAIT:
        return {"facecolor": _FAINT, "edgecolor": _GREY, "linewidth": 0.6}
    # evaluations and the warm start are no part of a step
    alpha = 1 if event.phase == STEP else 0.4
    return {"facecolor": color_of[str(_call(event))], "edgecolor": "white", "linewidth": 0.3, "alpha": alpha}
