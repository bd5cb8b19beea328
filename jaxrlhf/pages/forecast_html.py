"""The forecast of a plan as a fragment: the seconds of an iteration and of its calls, and the memory of devices."""

from collections.abc import Iterator

from jaxrlhf.observe.call_colors import GREY, role_colors
from jaxrlhf.observe.plan_pictures import plan_rows
from jaxrlhf.observe.timeline_view import timeline_view
from jaxrlhf.pages.markup import element, escaped, fragment, legend, table
from jaxrlhf.pages.timeline_html import legend_of, timeline_svg
from jaxrlhf.planner.make_plan import Planned
from jaxrlhf.planner.memory_forecast import alike
from jaxrlhf.planner.report import placement_in_words, summary_lines
from jaxrlhf.planner.search.peak_memory import DeviceMemory, in_gb

_BAR = 130
"""The width of the longest bar of a call, in pixels."""


def forecast_html(planned: Planned) -> str:
    """A fragment with the forecast of a plan: an iteration of the steady state, its calls, and how full each device's
    memory is at the most."""
    title = f"{planned.seconds:.4g} s an iteration on {planned.cluster}, planned by {planned.method}"
    lines = [element("div", escaped(line), class_="note") for line in summary_lines(planned)[1:3]]
    lines += [element("div", escaped(f"Note: {note}"), class_="note") for note in planned.notes]
    view = timeline_view(plan_rows(planned), (1, 1))
    return fragment(
        "forecast", element("div", escaped(title), class_="title"), *lines, timeline_svg(view),
        legend(legend_of(view)), calls_forecast(planned), memory_forecast(planned),
    )  # fmt: skip


def calls_forecast(planned: Planned) -> str:
    """A row for each call: where it runs, its seconds, and the fullest memory while it does."""
    colors = role_colors(call.role for call in planned.workload.calls)
    roles = {call.name: call.role for call in planned.workload.calls}
    most = max((planned.call_seconds(name) for name in planned.choices), default=0.0) or 1.0
    rows = []
    for name, choice in planned.choices.items():
        seconds, color = planned.call_seconds(name), colors[roles[name]]
        bar = element("i", style=f"width:{_BAR * seconds / most:.1f}px;background:{color}")
        with_other = name in planned.fuse[1:]
        rows.append(
            [
                element("i", class_="dot", style=f"background:{color}") + escaped(name),
                escaped(placement_in_words(choice, planned.cluster.devices_per_node)),
                "" if with_other else element("div", bar, class_="bars", style=f"width:{_BAR}px"),
                "(fused)" if with_other else f"{seconds:.4g}",
                f"{planned.call_memory(name) / 1e9:.3g}",
            ]
        )
    return table(["call", "runs", "", "seconds", "peak GB"], rows, numbers=("seconds", "peak GB"))


def memory_forecast(planned: Planned) -> str:
    """A row for each device, or for neighbors that are equally full: what its memory holds when it is fullest."""
    rows = []
    for same in alike(planned.memory, planned.cluster):
        first, last = same[0], same[-1].devices.stop - 1
        capacity = planned.cluster.capacity(first.devices.start)
        where = str(first.devices.start) if first.devices.start == last else f"{first.devices.start}-{last}"
        where += ", shared" if len(first.devices) > 1 else ""
        bars = [
            element(
                "i", title=f"{what}: {in_gb(size)}",
                style=f"width:{100 * size / capacity:.3f}%;background:{color};opacity:{0.6 if is_work else 1}",
            )
            for what, size, color, is_work in parts_of_memory(planned, first)
        ]  # fmt: skip
        rows.append(
            [
                escaped(where), element("div", *bars, class_="bars", style="width:260px"),
                f"{first.total / capacity:.0%}", f"{first.total / 1e9:.3g} of {capacity / 1e9:.3g}",
                escaped(first.call),
            ]
        )  # fmt: skip
    columns = ["devices", "memory when it is fullest", "full", "GB", "during"]
    return table(columns, rows, numbers=("full", "GB"))


def parts_of_memory(planned: Planned, memory: DeviceMemory) -> Iterator[tuple[str, int, str, bool]]:
    """What a memory holds when it is fullest: in words, bytes, the color of the role, and True for working memory."""
    colors = role_colors(call.role for call in planned.workload.calls)
    calls = planned.workload.calls
    role_of = {call.name: call.role for call in calls}
    for weights, size in memory.resting.items():
        role = next((call.role for call in calls if weights in (call.weights, call.base)), "")
        yield f"{weights} at rest", size, colors.get(role, GREY), False
    for call, size in memory.copies.items():
        yield f"copy for {call}", size, colors.get(role_of.get(call, ""), GREY), False
    for call, size in memory.beside.items():
        yield f"{call} beside it", size, colors.get(role_of.get(call, ""), GREY), True
    yield f"{memory.call} at work", memory.working, colors.get(role_of.get(memory.call, ""), GREY), True
