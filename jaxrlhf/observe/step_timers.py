"""The timers of a step: the calls that each covers, and their seconds.

A timer covers all calls of one purpose: generation, the reference's log-probabilities, the updates of a role. Names are
those of verl, the same for every algorithm, so that runs can be compared with one another and with verl's.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.observe.events import MOVING, WAIT

TIMING = "timing_s/"

Spans = list[tuple[float, float]]
"""Beginnings and ends, in seconds."""


def timer_of(name: str, kind: str) -> str:
    """The timer that covers a call, by its name in a plan and the kind of its event.

    >>> [timer_of(name, kind) for name, kind in (("actor.generate#2", "generate"), ("critic.train", "train"))]
    ['gen', 'update_critic']
    """
    role, _, method = name.partition("#")[0].partition(".")
    of_kind = {"generate": "gen", "compute": "adv", "train": f"update_{role}", WAIT: WAIT}
    of_kind |= {moving: f"{moving}_{role}" for moving in MOVING}
    if kind in of_kind:
        return of_kind[kind]
    if method in ("scores", "token_scores", "encode"):
        return "reward"
    if method in ("logprobs", "policy"):
        return {"reference": "ref", "actor": "old_log_prob"}.get(role, f"log_prob_{role}")
    return method or role


def timing_metrics(spans_of: Mapping[tuple[str, str], Spans]) -> dict[str, float]:
    """Seconds of every timer, as `timing_s/<timer>`: the time during which at least one of its calls ran.

    If a timer covers several calls, each of them has a metric too, `timing_s/<timer>/<call>`. `spans_of` has the spans
    in which each call, by name and kind, ran.
    """
    timers: dict[str, dict[str, Spans]] = {}
    for (name, kind), spans in spans_of.items():
        timers.setdefault(timer_of(name, kind), {})[name] = spans
    metrics = {}
    for timer, calls in timers.items():
        metrics[f"{TIMING}{timer}"] = covered_seconds([span for spans in calls.values() for span in spans])
        if len(calls) > 1:
            metrics |= {f"{TIMING}{timer}/{name}": covered_seconds(spans) for name, spans in calls.items()}
    return metrics


def timer_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Timer -> seconds, from a step's metrics, without the whole step, waits, and single calls of a timer."""
    named = {name.removeprefix(TIMING): value for name, value in metrics.items() if name.startswith(TIMING)}
    return {timer: seconds for timer, seconds in named.items() if timer not in ("step", WAIT) and "/" not in timer}


def time_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of a run by timer, the longest first: rows for a table, from the records of its metrics.

    The total includes compilation; the median is that of a typical step. Timers that overlap add up to more than the
    whole time.
    """
    steps = [record for record in records if f"{TIMING}step" in record]
    whole = sum(record[f"{TIMING}step"] for record in steps)
    timed: dict[str, list[tuple[float, int]]] = {}
    for record in steps:
        for timer, seconds in timer_seconds(record).items():
            timed.setdefault(timer, []).append((seconds, record["step"]))
    rows = []
    for timer, times in timed.items():
        total = sum(seconds for seconds, _ in times)
        longest, at = max(times)
        rows.append(
            {
                "timer": timer,
                "seconds": round(total, 3),
                "share": f"{100 * total / whole:.0f} %",
                "median": round(statistics.median(seconds for seconds, _ in times), 3),
                "longest": round(longest, 3),
                "at step": at,
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"])


def covered_seconds(spans: Spans) -> float:
    """The length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
