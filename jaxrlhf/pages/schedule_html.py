"""A schedule of pipelines as a fragment: a row for each worker, a box for each forward and backward."""

from collections.abc import Sequence

from jaxrlhf.pages.curves import nice_ticks
from jaxrlhf.pages.markup import WIDTH, element, escaped, fragment, ink, label, legend, svg
from jaxrlhf.schedules.instructions import Instruction, Schedule, spans
from jaxrlhf.schedules.schedule import bubble_fraction, makespan, peak_activations

COLORS = (("#9fc5e8", "#0b5394"), ("#f4b6c2", "#a61c5d"), ("#b6d7a8", "#38761d"), ("#f9cb9c", "#b45f06"))
"""Colors of models: of forwards and of backwards."""
_LEFT, _TOP, _RIGHT, _ROW = 72, 4, 12, 22
_LEAST_NUMBERED = 14
"""The width of a box, in pixels, from which on it has the number of its micro-batch."""


def schedule_html(schedule: Schedule, *, names: Sequence[str] = (), title: str = "", end: float | None = None) -> str:
    """A fragment with what every worker runs when; what is empty is a bubble.

    Args:
        names: Of the models, in the order of their numbers.
        end: The time at the right edge, so that schedules are drawn to one scale; otherwise that of the last
            instruction.
    """
    facts = (
        f"ends at {makespan(schedule):g}; workers wait {bubble_fraction(schedule):.1%} of the time until then; "
        f"at most {max(peak_activations(schedule), default=0):g} of activations on a worker"
    )
    models = sorted({pipe.model for pipe in schedule.pipes})
    keys = {}
    for model in models:
        backwards = any(pipe.backward is not None for pipe in schedule.pipes if pipe.model == model)
        for color, kind in zip(_colors(model), ("forward", "backward")[: 1 + backwards], strict=False):
            keys[f"{names[model] if model < len(names) else f'model {model}'}, {kind}"] = color
    head = [element("div", escaped(title), class_="title")] if title else []
    note = element("div", escaped(facts), class_="note")
    return fragment("schedule", *head, note, schedule_svg(schedule, end=end), legend(keys))


def schedule_svg(schedule: Schedule, *, end: float | None = None) -> str:
    """The picture."""
    found = spans(schedule)
    last = end or makespan(schedule) or 1.0
    scale, bottom = (WIDTH - _LEFT - _RIGHT) / last, _TOP + _ROW * len(schedule.orders)
    drawn = []
    for worker, order in enumerate(schedule.orders):
        y = _TOP + _ROW * worker
        drawn.append(label(_LEFT - 8, y + 15, f"worker {worker}", text_anchor="end", font_size=10.5))
        for instruction in order:
            start, finish = found[instruction]
            drawn.append(_box(schedule, instruction, start, finish, y, scale))
    for tick, text in nice_ticks(0.0, last, 10):
        drawn.append(
            label(_LEFT + tick * scale, bottom + 13, text, text_anchor="middle", fill_opacity=0.75, font_size=10)
        )
    return svg(WIDTH, bottom + 20, *drawn, name="schedule")


def _box(schedule: Schedule, instruction: Instruction, start: float, finish: float, y: float, scale: float) -> str:
    width = (finish - start) * scale
    color = _colors(schedule.pipes[instruction.pipe].model)[0 if instruction.forward else 1]
    told = element("title", escaped(f"{instruction}: {start:g} to {finish:g}"))
    box = element(
        "rect", x=_LEFT + start * scale, y=y + 1.5, width=max(0.5, width), height=_ROW - 3, fill=color,
        stroke="#ffffff", stroke_width=0.5,
    )  # fmt: skip
    numbered = width >= _LEAST_NUMBERED
    text = label(
        _LEFT + (start + finish) / 2 * scale, y + 15, instruction.micro_batch, text_anchor="middle", font_size=9.5,
        fill=ink(color), pointer_events="none",
    )  # fmt: skip
    return element("g", told, box, text if numbered else "")


def _colors(model: int) -> tuple[str, str]:
    return COLORS[model % len(COLORS)]
