"""Pictures of schedules: a row per worker with what it runs, and below them the activation memory that workers keep.

They need matplotlib, which is an optional dependency: `pip install jaxrlhf[pictures]`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.schedules.instructions import Schedule, ScheduleError, spans
from jaxrlhf.schedules.schedule import activation_levels, bubble_fraction

_SHADES = (
    (("#9fc5e8", "#cfe2f3"), ("#0b5394", "#3d85c6")),
    (("#f4b6c2", "#fadde3"), ("#a61c5d", "#d5649c")),
    (("#b6d7a8", "#d9ead3"), ("#38761d", "#6aa84f")),
    (("#f9cb9c", "#fce5cd"), ("#b45f06", "#e69138")),
)
"""Colors of each model: of forwards and of backwards, each in two shades for its pipeline groups in turn."""
_MAX_NUMBERED = 320
"""With more instructions than this on a worker there is no room for the numbers of micro-batches."""


def draw_schedule(
    schedule: Schedule,
    path: Path,
    *,
    names: Sequence[str] = (),
    serial_peak: float | None = None,
    title: str = "",
) -> None:
    """Draws when which worker runs what, into a file whose ending names its format: .png, .svg, .pdf ...

    Forwards are light, backwards dark, each model has a color; what is white is a bubble. Below: the activation memory
    of the worker that keeps the most, at any time, and the range over all workers.

    Args:
        names: What the models are called, in the order of their numbers.
        serial_peak: Of the same models trained one after another by 1F1B, drawn as a line.

    Raises:
        ScheduleError: matplotlib is not there, or does not know the format.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, figure 10.
    """
    try:
        from matplotlib.figure import Figure  # needs no display and no global state, unlike pyplot
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError(
            f"A picture of a schedule: needs matplotlib. Got none that can be imported ({error}). Install it with "
            "'pip install jaxrlhf[pictures]'."
        ) from error

    found = spans(schedule)
    end = max((finish for _, finish in found.values()), default=1)
    num_workers = len(schedule.orders)
    height = max(1.2, min(0.24 * num_workers, 5.0))
    figure = Figure(figsize=(11, height + 2.4), dpi=100, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(height, 1.3))
    for worker in range(num_workers):
        _draw_worker(upper, schedule, worker, found, end)
    upper.set_ylim(num_workers - 0.4, -0.6)
    every = -(-num_workers // 32)
    upper.set_yticks(
        range(0, num_workers, every), [f"worker {worker}" for worker in range(0, num_workers, every)], fontsize=7
    )
    upper.tick_params(axis="y", length=0)
    bubbles = f"{bubble_fraction(schedule):.1%} of the time in bubbles"
    upper.set_title("   ".join([*([title] if title else []), f"latency {end:g}", bubbles]), fontsize=9, loc="left")

    peak = _draw_memory(lower, schedule, end)
    if serial_peak is not None:
        lower.axhline(serial_peak, color="#cc0000", linewidth=1, linestyle=(0, (4, 3)), label="peak of serial 1F1B")
    lower.set_xlim(0, end)
    lower.set_ylim(0, 1.15 * max(peak, serial_peak or 0) or 1)
    lower.set_xlabel("time", fontsize=8)
    lower.set_ylabel("activations", fontsize=8)
    lower.tick_params(labelsize=7)
    lower.legend(fontsize=7, loc="lower center", ncols=3, frameon=False)
    for axes in (upper, lower):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    legend = []
    for model in sorted({pipe.model for pipe in schedule.pipes}):
        name = names[model] if model < len(names) else f"model {model}"
        backwards = any(pipe.backward is not None for pipe in schedule.pipes if pipe.model == model)
        for direction, kind in enumerate(("forward", "backward")[: 1 + backwards]):
            legend.append(Patch(facecolor=_SHADES[model % len(_SHADES)][direction][0], label=f"{name}, {kind}"))
    figure.legend(handles=legend, loc="outside lower center", ncols=min(6, len(legend)), fontsize=8, frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:  # of an ending that it does not know; it lists those that it does
        raise ScheduleError(
            f"A picture of a schedule: must end in the name of a picture's format. Got {path.name!r}. {error}"
        ) from error


def _draw_worker(axes: Any, schedule: Schedule, worker: int, found: dict[Any, tuple[float, float]], end: float) -> None:
    """One row: bars, alike ones in one go, with the numbers of their micro-batches where there is room."""
    groups: dict[int, list[int]] = {}
    for index, pipe in enumerate(schedule.pipes):
        groups.setdefault(pipe.model, []).append(index)
    bars: dict[str, list[tuple[float, float]]] = {}
    order = schedule.orders[worker]
    for task in order:
        start, finish = found[task]
        model = schedule.pipes[task.pipe].model
        shades = _SHADES[model % len(_SHADES)][0 if task.forward else 1]
        color = shades[groups[model].index(task.pipe) % len(shades)]
        bars.setdefault(color, []).append((start, finish - start))
        if len(order) <= _MAX_NUMBERED and finish - start > 0.007 * end:
            axes.text(
                (start + finish) / 2,
                worker,
                str(task.micro_batch),
                ha="center",
                va="center",
                fontsize=5,
                color="black" if task.forward else "white",
            )
    for color, row in bars.items():
        axes.broken_barh(row, (worker - 0.44, 0.88), facecolor=color, edgecolor="white", linewidth=0.3)


def _draw_memory(axes: Any, schedule: Schedule, end: float) -> float:
    """The most and the least that workers keep over time. Returns the peak."""
    curves = memory_curve(schedule)
    times = sorted({time for curve in curves for time, _ in curve} | {end})
    columns: list[list[float]] = [[] for _ in times]
    for curve in curves:
        step = 0
        for column, time in zip(columns, times, strict=True):
            while step + 1 < len(curve) and curve[step + 1][0] <= time:
                step += 1
            column.append(curve[step][1])
    most, least = [max(column) for column in columns], [min(column) for column in columns]
    axes.fill_between(times, least, most, step="post", color="#dddddd", linewidth=0, label="all workers")
    axes.step(times, most, where="post", color="#444444", linewidth=1, label="the worker that keeps the most")
    return max(most)


def memory_curve(schedule: Schedule) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Worker -> steps (time, activation memory from then on).

    It grows when a forward starts and falls when a backward finishes.
    """
    found = spans(schedule)
    curves = []
    for order, levels in zip(schedule.orders, activation_levels(schedule), strict=True):
        times = [found[instruction][0 if instruction.forward else 1] for instruction in order]
        curves.append(((0, 0), *zip(times, levels, strict=True)))
    return tuple(curves)
