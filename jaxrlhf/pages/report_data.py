"""What the script of a report draws: curves and samples as plain data, cut to a size that a browser likes."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.pages.curves import MOST_POINTS, RUN_COLORS, thinned
from jaxrlhf.pages.run_files import RunFiles
from jaxrlhf.pages.run_html import main_metric, points_of

FIRST = (
    "kl/mean", "response_length/mean", "actor/loss", "critic/loss", "actor/entropy", "perf/throughput",
    "timing_s/step",
)  # fmt: skip
"""Metrics whose curves are shown at first, after that of the reward and the evaluations."""
_MOST_EVALUATIONS = 6
_NOT_METRICS = ("step", "time", "non_finite")
MOST_TEXT = 2_000
"""The most characters of a prompt or completion."""
MOST_SAMPLE_BYTES = 500_000
"""The most bytes of all samples of a report."""


def report_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Runs, curves, the metrics to show at first, and samples."""
    names = metric_names(runs)
    samples, of = _samples(runs)
    return {
        "runs": [{"name": run.name, "color": RUN_COLORS[i % len(RUN_COLORS)]} for i, run in enumerate(runs)],
        "metrics": {name: [_curve(run, name) for run in runs] for name in names},
        "shown": first_metrics(runs, names),
        "samples": samples,
        "sample_steps": of,
        "most_text": MOST_TEXT,
    }


def metric_names(runs: Sequence[RunFiles]) -> list[str]:
    """All metrics of runs: those of evaluations, of steps, of clocks, and of the warm start."""
    found = dict.fromkeys(
        name
        for run in runs
        for record in run.records
        for name, value in record.items()
        if name not in _NOT_METRICS and (value is None or _is_number(value))
    )
    order = {"eval/": 0, "timing_": 2, "perf/": 2, "training/": 2, "warm_start/": 3}

    def group(name: str) -> int:
        return next((place for start, place in order.items() if name.startswith(start)), 1)

    return sorted(found, key=group)


def first_metrics(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """The metrics whose curves are shown at first."""
    mains = [main for run in runs if (main := main_metric(run.records))]
    evaluations = [name for name in names if name.startswith("eval/")][:_MOST_EVALUATIONS]
    wanted = dict.fromkeys([*mains, *evaluations, *FIRST])
    return [name for name in wanted if name in names] or list(names[:8])


def embedded(data: object) -> str:
    """Plain data as JSON that may stand inside of a script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate as its JSON escape
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _curve(run: RunFiles, name: str) -> dict[str, Any] | None:
    """Steps and values of a metric, null where they are not finite; None if the run does not have it."""
    points = points_of(run.records, name)
    if not points:
        return None
    kept = thinned(points)
    curve: dict[str, Any] = {
        "x": [int(x) for x, _ in kept],
        "y": [float(f"{y:.6g}") if math.isfinite(y) else None for _, y in kept],
    }
    return curve | ({"of": len(points)} if len(points) > MOST_POINTS else {})


def _samples(runs: Sequence[RunFiles]) -> tuple[list[dict[str, Any]], int]:
    """The samples of each step and split, beside one another, and how many such groups there are. Of groups that
    are too large together, some are kept, evenly spread."""
    groups: dict[tuple[int, str], list[list[dict[str, Any]]]] = {}
    for number, run in enumerate(runs):
        for sample in run.samples:
            if isinstance(sample.get("step"), int):
                key = int(sample["step"]), str(sample.get("split", ""))
                groups.setdefault(key, [[] for _ in runs])[number].append(_sample(sample))
    listed = [{"step": step, "split": split, "runs": groups[step, split]} for step, split in sorted(groups)]
    sizes = [len(json.dumps(each)) for each in listed]
    for every in itertools.count(1):
        # the last one always stays
        kept = [i for i in range(len(listed)) if (len(listed) - 1 - i) % every == 0]
        if sum(sizes[i] for i in kept) <= MOST_SAMPLE_BYTES or len(kept) <= 1:
            return [listed[i] for i in kept], len(listed)
    raise AssertionError


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    scores = sample.get("scores")
    return {
        "prompt": _cut(sample.get("prompt")),
        "completion": _cut(sample.get("completion")),
        "scores": {
            str(name): float(f"{value:.4g}") if _is_number(value) and math.isfinite(value) else None
            for name, value in (scores.items() if isinstance(scores, Mapping) else ())
        },
        "finish": str(sample.get("finish", "")),
    }


def _cut(text: object) -> str:
    text = "" if text is None else str(text)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
