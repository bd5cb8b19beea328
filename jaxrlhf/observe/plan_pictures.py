"""Pictures of a plan: the timeline of some iterations under it, and the progress of the search for it.

They need matplotlib, as those of timelines do, and look like them.
"""

import math
from pathlib import Path

from jaxrlhf.observe.chrome_trace import Rows, trace_rows
from jaxrlhf.observe.events import MOVING, Event, ProcessEvents
from jaxrlhf.observe.timeline_picture import check_matplotlib, draw_timeline
from jaxrlhf.observe.timeline_view import DEFAULT_STEPS, PictureError
from jaxrlhf.planner.make_plan import YARDSTICK, Planned
from jaxrlhf.planner.search.simulate import TaskSpan

REALLOCATE, OFFLOAD = MOVING
_FAR = 2.0
"""The picture of a search includes the yardstick up to this many times the slowest plan of the search."""
_KINDS = {"weights": REALLOCATE, "data": REALLOCATE, "load": OFFLOAD, "unload": OFFLOAD}
"""Kind of a simulated task that is no call -> kind of event."""


def draw_plan(planned: Planned, path: Path) -> None:
    """Draws the calls of every device in some iterations, once they are periodic. Raises as `draw_timeline`."""
    title = f"{planned.cluster}, {planned.method}: {planned.seconds:.3g} s an iteration"
    draw_timeline(plan_rows(planned), path, steps=(1, DEFAULT_STEPS), title=title)


def plan_rows(planned: Planned) -> Rows:
    """The rows of a timeline with enough iterations to draw steps from 1 on.

    Steps up to 0 are earlier iterations, whose calls may reach into step 1.
    """
    simulation = planned.simulation
    period = max(1, simulation.period)
    begin = min(span.task.iteration for span in simulation.spans)
    times = 2 + math.ceil(DEFAULT_STEPS / period) + 2
    before = 2 * period
    events = [
        _event(span, planned, step=number * period + span.task.iteration - begin + 1 - before, later=number * period)
        for number in range(times)
        for span in simulation.spans
        if span.task.devices and not (span.task.kind == "call" and span.task.call in planned.fuse[1:])
    ]
    return trace_rows([ProcessEvents(tuple(events), 0.0)])


def _event(span: TaskSpan, planned: Planned, *, step: int, later: int) -> Event:
    """A task as an event of a timeline, `later` iterations after its own."""
    task, shift = span.task, later * planned.simulation.seconds
    kind = planned.workload.call(task.call).kind if task.kind == "call" else _KINDS[task.kind]
    devices = tuple(sorted({device for part in task.devices for device in part}))
    fused = task.kind == "call" and task.call in planned.fuse
    return Event(
        " + ".join(planned.fuse) if fused else task.name, kind, devices, step, span.start + shift, span.end + shift
    )


def draw_search(planned: Planned, path: Path) -> None:
    """Draws the seconds of the best plan over the plans evaluated. Raises PictureError if there was no search."""
    check_matplotlib()
    from matplotlib.figure import Figure

    history = [each for each in planned.result.history if math.isfinite(each.seconds)]
    if not history:
        raise PictureError(f"A picture of the search: needs one. Got a plan by {planned.method}. Use search.")
    figure = Figure(figsize=(7, 3.2), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    evaluated, seconds = [each.evaluated for each in history], [each.seconds for each in history]
    axes.step(evaluated, seconds, where="post", color="#0b5394", label=f"{planned.method}: {seconds[-1]:.4g} s")
    least = min(seconds[-1], planned.seconds)
    highest = max(seconds)
    if planned.heuristic is not None and planned.heuristic.seconds < _FAR * highest:
        highest = max(highest, planned.heuristic.seconds)
    axes.set_ylim(0.98 * least, 1.02 * highest)
    if planned.fuse:
        label = f"{' + '.join(planned.fuse)} fused: {planned.seconds:.4g} s"
        axes.plot(evaluated[-1:], [planned.seconds], "o", color="#b45f06", clip_on=False, label=label)
    if planned.heuristic is not None:  # outside of the picture, the label still has its seconds
        usual = planned.heuristic.seconds
        axes.axhline(usual, color="#9a9a9a", linestyle=(0, (4, 3)), label=f"{YARDSTICK}: {usual:.4g} s")
    axes.set_xscale("log")
    axes.set_xlabel("plans looked at", fontsize=8)
    axes.set_ylabel("seconds an iteration", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(
        f"{planned.cluster}: {planned.result.evaluated:,} plans in {history[-1].elapsed:.1f} s", fontsize=9, loc="left"
    )
    figure.savefig(path)
