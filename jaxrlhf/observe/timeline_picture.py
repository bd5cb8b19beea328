"""Pictures of timelines: a row for each device and host, calls in the colors of their roles, borders between steps.

They need matplotlib, an optional dependency: `pip install jaxrlhf[pictures]`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.observe.call_colors import FAINT, GREY, PALE
from jaxrlhf.observe.chrome_trace import Rows
from jaxrlhf.observe.events import MOVING, STEP, WAIT, Event
from jaxrlhf.observe.timeline_view import PictureError, call_of, timeline_view

_MAX_LABELS = 48
"""The most rows that have a label. With more rows, only every second, third ... has one."""


def check_matplotlib() -> None:
    """Raises PictureError unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise PictureError(
            f"A picture: needs matplotlib. Got none that can be imported ({error}). Install it with "
            "'pip install jaxrlhf[pictures]', or open timeline.json in ui.perfetto.dev."
        ) from error


def draw_timeline(rows: Rows, path: Path, *, steps: tuple[int, int], title: str = "") -> None:
    """Draws some steps, the first and the last one of `steps`, into a file, whose suffix names its format: .png, .svg,
    .pdf ... Raises PictureError if matplotlib does not know it.

    There is a row for each device, or, with many devices, for each group of neighbors with the same events. Events of
    other steps and of evaluations are drawn where they reach into the span.
    """
    check_matplotlib()
    from matplotlib.figure import Figure  # needs no display and no global state, unlike pyplot
    from matplotlib.patches import Patch

    view = timeline_view(rows, steps)
    shown, start, end = view.rows, view.start, view.end
    height = min(0.34, 14 / len(shown))
    figure = Figure(figsize=(11, 1.9 + height * len(shown)), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for position, (_, row) in enumerate(shown):
        _draw_row(axes, position, row, view.colors, start=start, end=end)

    for step, (left, right) in view.spans.items():
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
    axes.set_title("   ".join([*[title] * bool(title), *view.facts]), fontsize=9, loc="left", pad=20)

    kinds = {event.kind for _, row in shown for event in row}
    drawn = {call_of(event) for _, row in shown for event in row}
    legend = [Patch(facecolor=color, label=name) for name, color in view.colors.items() if name in drawn]
    if kinds.intersection(MOVING):
        legend.append(Patch(facecolor=PALE, edgecolor=GREY, hatch="////", label="moving weights or data"))
    if WAIT in kinds:
        legend.append(Patch(facecolor=FAINT, edgecolor=GREY, label="host waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(6, len(legend)), fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:  # an unknown suffix; the error lists the known ones
        raise PictureError(f"--out: must end in the name of a picture's format. Got {path.name!r}. {error}") from error


def _draw_row(
    axes: Any, position: int, row: Sequence[Event], color_of: Mapping[str, str], *, start: float, end: float
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
    axes.axhline(position + 0.5, color=PALE, linewidth=0.5, zorder=0)


def _look(event: Event, color_of: Mapping[str, str]) -> dict[str, Any]:
    if event.kind in MOVING:
        return {"facecolor": PALE, "edgecolor": GREY, "hatch": "////", "linewidth": 0.4}
    if event.kind == WAIT:
        return {"facecolor": FAINT, "edgecolor": GREY, "linewidth": 0.6}
    # evaluations and the warm start are no part of a step
    alpha = 1 if event.phase == STEP else 0.4
    return {"facecolor": color_of[str(call_of(event))], "edgecolor": "white", "linewidth": 0.3, "alpha": alpha}
