"""A plan as one self-contained HTML page: nodes and devices with what rests on them, memory against its capacity, what
each device does over an iteration, and the seconds of calls, predicted and measured.

    write_plan_page(planned, Path("plan.html"), measured={"actor.generate": 1.7})

Everything is in the file: no script, style or font is loaded from elsewhere. Parts of it tell their numbers when the
pointer is over them, or when they have the keyboard's focus.
"""

import html
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrlhf.observe.call_colors import GREY, PALE, role_colors
from jaxrlhf.pages.forecast_html import parts_of_memory
from jaxrlhf.pages.markup import ink
from jaxrlhf.planner.make_plan import Planned
from jaxrlhf.planner.report import placement_in_words
from jaxrlhf.planner.search.peak_memory import DeviceMemory, in_gb
from jaxrlhf.planner.search.simulate import TaskSpan
from jaxrlhf.writing import write_atomically

_MOST_ROWS = 64
"""With more groups of devices than this, the timeline shows the first ones and says so."""


class MeasuredError(ValueError):
    """The outcome of a run that has no measured seconds."""


def measured_seconds(run: Path) -> dict[str, float]:
    """Call -> median seconds, of a run that compared them with its plan's. Raises MeasuredError if it has none."""
    path = run / "outcome.json"
    try:
        calls = json.loads(path.read_text(encoding="utf-8"))["forecast"]["calls"]
        return {name: float(each["measured"]) for name, each in calls.items() if each["measured"] is not None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeasuredError(
            f"--measured: must be the folder of a run that ended, with a plan by the planner. Got {str(run)[:120]!r}, "
            f"whose outcome.json has no measured calls ({type(error).__name__}). Run with `plan: auto` or a saved plan."
        ) from error


def write_plan_page(planned: Planned, path: Path, *, measured: Mapping[str, float] | None = None) -> None:
    """Writes the page of a plan, with the measured seconds of its calls beside the predicted ones if there are some."""
    write_atomically(path, _page(planned, measured or {}))


def _page(planned: Planned, measured: Mapping[str, float]) -> str:
    roles = list(dict.fromkeys(call.role for call in planned.workload.calls))
    shades = role_colors(roles)
    colors = {role: shades[role] for role in roles}
    title = f"{planned.cluster}, {planned.method}: {planned.seconds:.4g} s an iteration"
    legend = "".join(
        f'<span class="key"><i style="background:{color}"></i>{html.escape(role)}</span>'
        for role, color in colors.items()
    )
    legend += f'<span class="key"><i style="background:{GREY}"></i>moving weights and data</span>'
    return _TEMPLATE.format(
        title=html.escape(title), legend=legend, nodes="".join(_nodes(planned)),
        timeline=_timeline(planned, colors), calls=_calls(planned, measured, colors),
    )  # fmt: skip


def _nodes(planned: Planned) -> Iterator[str]:
    """A box for each node, with one for each memory in it."""
    cluster, per_node = planned.cluster, planned.cluster.devices_per_node
    memories = {memory.devices.start: memory for memory in planned.memory}
    for node in range(cluster.num_nodes):
        first = node * per_node
        devices = "".join(
            _device(planned, memories[start])
            for start in range(first, first + per_node, planned.problem.devices_per_memory)
        )
        kind = html.escape(cluster.kind_of(first).name)
        name = f"node {node} <small>{kind}</small>"
        yield f'<section class="node"><h3>{name}</h3><div class="devices">{devices}</div></section>'


def _device(planned: Planned, memory: DeviceMemory) -> str:
    """A device, or the devices that share a memory: the roles that rest there, and how full it is at the most."""
    first, last = memory.devices.start, memory.devices.stop - 1
    name = f"device {first}" if first == last else f"devices {first}-{last}"
    capacity = planned.cluster.capacity(first)
    bar = "".join(
        f'<i data-tip="{html.escape(f"{name}: {what}, {in_gb(size)}", quote=True)}" tabindex="0" '
        f'style="width:{100 * size / capacity:.3f}%;background:{color};opacity:{0.55 if is_work else 1}"></i>'
        for what, size, color, is_work in parts_of_memory(planned, memory)
        if size
    )
    full = f"{memory.total / capacity:.0%}"
    tip = f"{name}: {in_gb(memory.total)} of {in_gb(capacity)} at the most, during {memory.call}"
    return (
        f'<div class="device" data-device="{first}"><b>{first if first == last else f"{first}-{last}"}</b>'
        f'<div class="bar" data-tip="{html.escape(tip, quote=True)}">{bar}</div><small>{full}</small></div>'
    )


def _of_call(planned: Planned, name: str, colors: Mapping[str, str]) -> str:
    return colors.get(next((c.role for c in planned.workload.calls if c.name == name), ""), GREY)


def _timeline(planned: Planned, colors: Mapping[str, str]) -> str:
    """An iteration of the steady state: a row for each group of neighboring devices that do the same."""
    simulation = planned.simulation
    spans = [span for span in simulation.spans if span.task.devices and span.end > span.start]
    end = max((span.end for span in spans), default=1.0)
    rows: list[tuple[list[int], list[TaskSpan]]] = []
    for device in range(planned.cluster.num_devices):
        own = [span for span in spans if any(device in part for part in span.task.devices)]
        if rows and rows[-1][1] == own:
            rows[-1][0].append(device)
        else:
            rows.append(([device], own))
    height, left, width = 24, 90, 900
    drawn = []
    for number, (devices, own) in enumerate(rows[:_MOST_ROWS]):
        label = f"{devices[0]}-{devices[-1]}" if len(devices) > 1 else str(devices[0])
        top = number * height
        drawn.append(f'<text x="{left - 8}" y="{top + 16}" text-anchor="end">{label}</text>')
        for span in own:
            x, w = left + width * span.start / end, max(1.0, width * (span.end - span.start) / end)
            is_call = span.task.kind == "call"
            tip = f"{span.task.name}: {span.end - span.start:.4g} s, from {span.start:.4g} s on, on devices {label}"
            color = _of_call(planned, span.task.call, colors) if is_call else PALE
            drawn.append(
                f'<rect data-tip="{html.escape(tip, quote=True)}" '
                f'data-call="{html.escape(span.task.call, quote=True)}" data-kind="{span.task.kind}" tabindex="0" '
                f'x="{x:.2f}" y="{top + 3}" width="{w:.2f}" height="{height - 6}" fill="{color}"/>'
            )
            if is_call and w > 9 * len(span.task.name) * 0.7:
                name = html.escape(span.task.name)
                drawn.append(f'<text class="in" x="{x + 4:.2f}" y="{top + 16}" fill="{ink(color)}">{name}</text>')
    shown = min(len(rows), _MOST_ROWS)
    for i in range(6):
        x = left + width * i / 5
        drawn.append(f'<text x="{x:.1f}" y="{shown * height + 16}" text-anchor="middle">{end * i / 5:.3g} s</text>')
    more = f"<p>{len(rows) - shown} more groups of devices are not shown.</p>" if len(rows) > shown else ""
    size = f'viewBox="0 0 {left + width + 40} {shown * height + 24}"'
    return f'<svg class="timeline" {size} role="img" aria-label="timeline">{"".join(drawn)}</svg>{more}'


def _calls(planned: Planned, measured: Mapping[str, float], colors: Mapping[str, str]) -> str:
    """The calls with predicted and measured seconds, as numbers and as bars side by side."""
    predicted = {name: planned.call_seconds(name) for name in planned.choices}
    most = max([*predicted.values(), *measured.values(), math.ulp(0.0)])
    rows = []
    for name, choice in planned.choices.items():
        where = html.escape(placement_in_words(choice, planned.cluster.devices_per_node))
        color = _of_call(planned, name, colors)
        bars = _bar(predicted[name], most, color, f"{name}, predicted: {predicted[name]:.4g} s")
        if (seconds := measured.get(name)) is not None:
            bars += _bar(seconds, most, GREY, f"{name}, measured: {seconds:.4g} s")
        seen = "-" if seconds is None else f"{seconds:.4g}"
        off = "-" if not seconds else f"{predicted[name] / seconds - 1:+.0%}"
        rows.append(
            f'<tr><td>{html.escape(name)}</td><td>{where}</td><td class="n">{predicted[name]:.4g}</td>'
            f'<td class="n">{seen}</td><td class="n">{off}</td><td>{bars}</td>'
            f'<td class="n">{planned.call_memory(name) / 1e9:.3g}</td></tr>'
        )
    head = "".join(f"<th>{x}</th>" for x in ("call", "runs", "predicted s", "measured s", "off", "", "peak GB"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _bar(seconds: float, most: float, color: str, tip: str) -> str:
    return (
        f'<i class="seconds" data-tip="{html.escape(tip, quote=True)}" tabindex="0" '
        f'style="width:{200 * seconds / most:.1f}px;background:{color}"></i>'
    )


_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ --paper: #fff; --ink: #222; --line: #ccc; --soft: #eee; color-scheme: light; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #15181c; --ink: #dfe3e8; --line: #414850; --soft: #2a3037; color-scheme: dark; }}
}}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 24px auto; padding: 0 24px; max-width: 1148px;
  color: var(--ink); background: var(--paper); }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 16px; margin-top: 28px; }} h3 {{ font-size: 13px; margin: 0 0 6px; }}
small {{ opacity: 0.7; font-weight: normal; }}
.key {{ margin-right: 16px; }} .key i {{ display: inline-block; width: 12px; height: 12px; margin-right: 5px; }}
.nodes {{ display: flex; flex-wrap: wrap; gap: 12px; }}
.node {{ border: 1px solid var(--line); border-radius: 4px; padding: 8px; }}
.devices {{ display: grid; grid-template-columns: repeat(4, 116px); gap: 6px; }}
.device {{ display: flex; align-items: center; gap: 5px; }} .device b {{ width: 30px; text-align: right; }}
.bar {{ flex: 1; height: 14px; background: var(--soft); display: flex; overflow: hidden; }}
.bar i {{ height: 100%; }}
.timeline {{ width: 100%; font: 11px system-ui, sans-serif; fill: var(--ink); }}
.timeline .in {{ pointer-events: none; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 3px 10px; border-bottom: 1px solid var(--line); }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
.seconds {{ display: block; height: 7px; margin: 1px 0; min-width: 1px; }}
#tip {{ position: fixed; display: none; background: var(--ink); color: var(--paper); padding: 4px 8px;
  border-radius: 3px; pointer-events: none; max-width: 420px; z-index: 9; }}
</style></head><body>
<h1>{title}</h1><p>{legend}</p>
<h2>Memory of devices, when it is fullest</h2><div class="nodes">{nodes}</div>
<h2>An iteration</h2>{timeline}
<h2>Calls</h2>{calls}
<div id="tip" role="tooltip"></div>
<script>
const tip = document.getElementById("tip");
function show(target, x, y) {{
  const holder = target.closest && target.closest("[data-tip]");
  tip.style.display = holder ? "block" : "none";
  if (!holder) return;
  tip.textContent = holder.dataset.tip;
  tip.style.left = Math.min(x + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(y + 12, innerHeight - tip.offsetHeight - 8) + "px";
}}
document.addEventListener("mousemove", event => show(event.target, event.clientX, event.clientY));
document.addEventListener("focusin", event => {{
  const box = event.target.getBoundingClientRect();
  show(event.target, box.left, box.bottom);
}});
</script></body></html>
"""
