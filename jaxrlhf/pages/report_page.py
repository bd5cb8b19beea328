"""The report of runs: one self-contained page with what they were, what they learned, said, did and took.

Curves and samples are drawn by a script in the page, from data in it; nothing is loaded from elsewhere. Without scripts
the main curves are there as pictures.
"""

import importlib.resources
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrlhf.observe.chrome_trace import Rows
from jaxrlhf.observe.forecast_errors import compare
from jaxrlhf.observe.plain_text import cell, duration
from jaxrlhf.observe.step_timers import time_rows
from jaxrlhf.observe.timeline_view import MAX_DEVICE_ROWS, PictureError, TimelineView, choose_steps, timeline_view
from jaxrlhf.observe.utilization import utilization_line
from jaxrlhf.pages.curves import RUN_COLORS, curves_svg
from jaxrlhf.pages.graph_html import graph_picture
from jaxrlhf.pages.markup import STYLE, element, escaped, fragment, legend, shortened, table
from jaxrlhf.pages.plan_html import calls_table, devices_svg
from jaxrlhf.pages.report_data import embedded, first_metrics, metric_names, report_data
from jaxrlhf.pages.run_files import RunFiles
from jaxrlhf.pages.run_html import points_of
from jaxrlhf.pages.timeline_html import legend_of, timeline_svg

_MOST_BOXES = 1_500
"""With more boxes than this in a run's timeline, neighboring devices that do the same share a row, and fewer steps are
drawn."""
_MOST_DIFFERENCES = 200


def report_page(runs: Sequence[RunFiles], *, steps: str | None = None) -> str:
    """The page of some runs. `steps` are those of their timelines, as in '7' or '3-5'; otherwise the last three.

    Raises PictureError if no run has such steps.
    """
    if steps is not None:
        _check_steps(runs, steps)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = {
        "Overview": _overview(runs),
        "Curves": _curves(runs),
        "Samples": _samples(runs),
        "Timeline": _each(runs, lambda run: _timeline(run, steps)),
        "Plan": _each(runs, _plan),
        "Forecast": _each(runs, _forecast),
        "Time": _each(runs, _time),
    }
    body = "".join(
        element("section", element("h2", name), inside, id=name.lower()) for name, inside in sections.items()
    )
    links = "".join(element("a", name, href=f"#{name.lower()}") for name in sections)
    theme = element("button", "light / dark", id="theme", type="button")
    head = element("header", element("h1", escaped(title)), element("nav", links, theme))
    files = importlib.resources.files("jaxrlhf.pages")
    style = STYLE + files.joinpath("report.css").read_text(encoding="utf-8")
    script = files.joinpath("report.js").read_text(encoding="utf-8")
    data = element("script", embedded(report_data(runs)), type="application/json", id="data")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escaped(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head>'
        f'<body>{head}<main>{body}</main><div id="tip" role="tooltip"></div>{data}<script>{script}</script>'
        "</body></html>\n"
    )


def _check_steps(runs: Sequence[RunFiles], steps: str) -> None:
    """Raises PictureError unless a timeline of a run has these steps."""
    rows = [run.rows for run in runs if run.rows is not None]
    if not rows:
        raise PictureError("--steps: goes with a timeline. Got runs without one. Leave it out.")
    for number, each in enumerate(rows):
        try:
            choose_steps(each, steps)
            return
        except PictureError:
            if number == len(rows) - 1:
                raise


def _each(runs: Sequence[RunFiles], make: Callable[[RunFiles], str]) -> str:
    """The same of each run, under its name if there are several."""
    parts = []
    for number, run in enumerate(runs):
        name = element("h3", _swatch(number), escaped(run.name)) if len(runs) > 1 else ""
        parts.append(element("div", name, make(run), class_="of-run", data_run=run.name))
    return "".join(parts)


def _swatch(number: int) -> str:
    return element("i", class_="swatch", style=f"background:{RUN_COLORS[number % len(RUN_COLORS)]}")


def _none(text: str) -> str:
    return element("p", escaped(text), class_="none")


def _overview(runs: Sequence[RunFiles]) -> str:
    """What runs are, one beside the other, and the keys in which their configs differ."""
    facts = [_facts(run) for run in runs]
    names = [name for name in facts[0] if any(fact[name] for fact in facts)]
    heads = [element("th", _swatch(i), escaped(run.name)) for i, run in enumerate(runs)]
    rows = [
        element("tr", element("th", escaped(name)), *(element("td", escaped(fact[name] or "-")) for fact in facts))
        for name in names
    ]
    head = element("thead", element("tr", element("th"), *heads))
    parts = [element("div", element("table", head, element("tbody", *rows), class_="facts-table"), class_="wide")]
    parts += [
        element("p", escaped(f"{run.name}: {note}" if len(runs) > 1 else note), class_="warning")
        for run in runs
        for note in run.notes
    ]
    if len(runs) > 1:
        parts.append(element("h3", "Differences of the configs"))
        parts.append(_differences(runs))
    for number, run in enumerate(runs):
        if run.config_text:
            summary = element("summary", _swatch(number), escaped(f"config.yaml of {run.name}"))
            parts.append(element("details", summary, element("pre", escaped(run.config_text))))
    return "".join(parts)


def _facts(run: RunFiles) -> dict[str, str]:
    times = [float(r["time"]) for r in run.records if isinstance(r.get("time"), int | float)]
    took = sum(y for _, y in points_of(run.records, "timing_s/step") if math.isfinite(y))
    git = run.versions.get("git")
    commit = str(git.get("commit") or "") if isinstance(git, Mapping) else ""
    dirty = ", with changes" if isinstance(git, Mapping) and git.get("dirty") else ""
    packages = [f"{name} {run.versions[name]}" for name in ("jaxrlhf", "jax", "python") if run.versions.get(name)]
    command = run.versions.get("command")
    placements = [each for each in (run.placements or {}).values() if each is not None]
    devices = {device for each in placements for device in each.devices}
    asked = cell(run.config.get("devices", ""))
    return {
        "algorithm": cell(run.config.get("algorithm", "")),
        "state": run.state,
        "batch size": cell(run.config.get("batch_size", "")),
        "seed": cell(run.config.get("seed", "")),
        "devices": ", ".join(x for x in (f"{len(devices)} in the plan" if devices else "", asked) if x),
        "time in steps": duration(took) if took else "",
        "first to last record": duration(max(times) - min(times)) if len(times) > 1 else "",
        "versions": ", ".join(packages),
        "commit": f"{commit[:12]}{dirty}" if commit else "",
        "platform": cell(run.versions.get("platform", "")),
        "command": shortened(" ".join(map(str, command)), 400) if isinstance(command, list) else "",
        "folder": str(run.path),
    }


def _differences(runs: Sequence[RunFiles]) -> str:
    """The keys of configs that have not the same value in all runs."""
    found = list(differing_keys([run.config for run in runs]))
    if not found:
        return _none("None: the configs are the same.")
    rows = [
        [escaped(key), *("-" if value is None else escaped(shortened(_short(value), 80)) for value in values)]
        for key, values in found[:_MOST_DIFFERENCES]
    ]
    more = len(found) - _MOST_DIFFERENCES
    return table(["key", *(run.name for run in runs)], rows, css="rows differences") + (
        _none(f"{more} more keys are not shown.") if more > 0 else ""
    )


def _short(value: Any) -> str:
    """A value of a config; of a section what is not empty."""
    if isinstance(value, Mapping):
        return cell({key: item for key, item in value.items() if item not in (None, "", [], {})})
    return cell(value)


def differing_keys(values: Sequence[Any], path: str = "") -> Iterator[tuple[str, Sequence[Any]]]:
    """(key, the value of each config) where configs differ; None where there is none. A section that some do not have
    counts as one key.

    >>> list(differing_keys([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": {"e": 4}}]))
    [('a.c', [2, 3]), ('d', [None, {'e': 4}])]
    """
    if all(isinstance(value, Mapping) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from differing_keys([value.get(key) for value in values], f"{path}.{key}" if path else str(key))
    elif any(value != values[0] for value in values):
        yield path, values


def _curves(runs: Sequence[RunFiles]) -> str:
    """Where the script draws curves, with what chooses them; without scripts the main curves as pictures."""
    names = metric_names(runs)
    if not names:
        return _none("No metrics yet.")
    static = [
        curves_svg(series, title=name)
        for name in first_metrics(runs, names)
        if (series := {run.name: points for run in runs if (points := points_of(run.records, name))})
    ]
    keys = [element("span", _swatch(i), escaped(run.name), class_="key") for i, run in enumerate(runs)]
    search = element(
        "input", id="search", type="search", placeholder=f"Find one of {len(names)} metrics",
        aria_label="Find a metric", autocomplete="off",
    )  # fmt: skip
    smooth = element("label", '<input type="checkbox" id="smooth">', "smooth")
    log = element("label", '<input type="checkbox" id="log">', "logarithmic")
    bar = element("div", search, smooth, log, element("div", *keys, class_="keys"), class_="bar")
    return (
        f'{bar}<div id="names" aria-label="metrics"></div><div id="charts"></div>'
        f'<noscript><div class="static">{"".join(static)}</div></noscript>'
    )


def _samples(runs: Sequence[RunFiles]) -> str:
    """Where the script shows samples."""
    if not any(run.samples for run in runs):
        return _none("No samples.")
    choose = '<label>step <select id="sample-step"></select></label>'
    turn = "".join(
        element("button", arrow, type="button", id=f"sample-{way}", aria_label=f"{way} this step")
        for way, arrow in (("before", "&larr;"), ("after", "&rarr;"))
    )
    return (
        f'<div class="bar">{choose}{turn}<span id="sample-note" class="note"></span></div>'
        '<div id="sample-table" class="wide"></div>'
    )


def _timeline(run: RunFiles, steps: str | None) -> str:
    """Some steps of a run's timeline."""
    if run.rows is None:
        return _none("No timeline: the run has not ended, was killed, or has `output.timeline: false`.")
    try:
        first, last = choose_steps(run.rows, steps)
        view = _view(run.rows, first, last)
    except PictureError as error:
        return _none(str(error))
    shown, note = min(view.spans), ""
    if shown > first:
        note = _none(f"Steps {first}-{last} have too many calls for one picture: it begins with step {shown}.")
    facts = element("div", escaped("; ".join(view.facts)), class_="note")
    return fragment("timeline", timeline_svg(view), legend(legend_of(view)), facts, note)


def _view(rows: Rows, first: int, last: int) -> TimelineView:
    """The view of steps, or of the last half, quarter ... of them, with few enough boxes, or of the last one."""
    count = last - first + 1
    while True:
        for most_device_rows in (MAX_DEVICE_ROWS, 1):
            view = timeline_view(rows, (last - count + 1, last), most_device_rows=most_device_rows)
            if sum(len(row) for _, row in view.rows) <= _MOST_BOXES:
                return view
        if count == 1:
            return view
        count //= 2


def _plan(run: RunFiles) -> str:
    """The graph of a step, which devices its calls take, and their table."""
    if run.placements is None:
        return _none("No plan.json.")
    roles = {call["name"]: call["role"] or "" for call in run.calls}
    calls = {call["name"]: call for call in run.calls}
    rows = []
    for name, placement in run.placements.items():
        call = calls.get(name, {})
        rows.append(
            {
                "call": name,
                "needs": ", ".join(map(str, call.get("needs", ()))) or "-",
                "placement": "on the host" if placement is None else str(placement),
                "micro-batches": placement.strategy.micro_batches if placement is not None else None,
                "rows": call.get("num_rows"),
            }
        )
    graph = graph_picture(run.calls, run.placements)[0] if run.calls else ""
    devices = devices_svg(run.placements, roles)
    return fragment("plan", graph, devices, calls_table(rows, roles, numbers=("micro-batches",)))


def _forecast(run: RunFiles) -> str:
    """Predicted beside measured seconds."""
    if run.saved is None:
        return _none("No forecast: the run was not planned (`plan: auto`, or a saved plan).")
    compared = compare(run.saved, run.records, after=1)
    rows = compared.rows()
    most = max((float(row[key] or 0) for row in rows for key in _BOTH), default=0.0) or 1.0
    body = []
    for row in rows:
        bars = "".join(
            element("i", class_=key.split()[0], title=f"{key}: {cell(row[key])}", style=f"width:{share:.1f}%")
            for key in _BOTH
            for share in [100 * float(row[key] or 0) / most]
        )
        body.append([escaped(cell(x)) for x in row.values()] + [element("div", bars, class_="both")])
    note = f"Median of {compared.steps} steps, without the first, which compiles." if compared.steps else "No step yet."
    columns = [*(rows[0] if rows else ()), "predicted above, measured below"]
    return fragment(
        "forecast", table(columns, body, numbers=(*_BOTH, "error")), element("div", escaped(note), class_="note")
    )


_BOTH = ("predicted seconds", "measured seconds")


def _time(run: RunFiles) -> str:
    """Where the time went: the timers of all steps."""
    rows: list[dict[str, Any]] = time_rows(run.records) if any("timing_s/step" in r for r in run.records) else []
    if not rows:
        return _none("No steps yet.")
    most = max(float(row["seconds"]) for row in rows) or 1.0
    body = [
        [
            *(escaped(cell(x)) for x in row.values()),
            element("div", element("i", style=f"width:{100 * row['seconds'] / most:.1f}%"), class_="both one"),
        ]
        for row in rows
    ]
    columns = [*rows[0], "of the longest"]
    note = utilization_line(run.records)
    return fragment(
        "time", table(columns, body, numbers=tuple(rows[0])[1:]), element("div", escaped(note), class_="note")
    )
