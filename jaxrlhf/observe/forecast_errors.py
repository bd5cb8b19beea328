"""Predicted and measured seconds of each call of a plan and of a step."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.observe.step_timers import TIMING, timer_of
from jaxrlhf.planner.plans.saved_plan import SavedPlan

STEP = "step"
"""The name of a whole step beside those of calls."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Predicted and measured seconds."""

    seconds: Mapping[str, tuple[float, float | None]]
    """Call, or `STEP` -> predicted seconds, and the median of the measured ones, None if no step has any."""
    steps: int
    """The number of steps that were measured."""

    def rows(self) -> list[dict[str, Any]]:
        """Rows of a table."""
        return [
            {
                "call": name,
                "predicted seconds": predicted,
                "measured seconds": measured,
                "error": f"{100 * (predicted / measured - 1):+.0f} %" if measured else "",
            }
            for name, (predicted, measured) in self.seconds.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data for outcome.json."""
        both = {name: {"predicted": p, "measured": m} for name, (p, m) in self.seconds.items()}
        return {"steps_measured": self.steps, STEP: both.pop(STEP), "calls": both}


def compare(saved: SavedPlan, records: Sequence[Mapping[str, Any]], *, after: int) -> Comparison:
    """Compares the forecast of a step and of its calls with the records of a run's metrics of steps `after` one, since
    in the first step of every start programs are compiled.
    """
    steps = [record for record in records if f"{TIMING}step" in record and record["step"] > after]
    predicted = {name: forecast.seconds for name, forecast in saved.calls.items()}
    if fused := [name for name in saved.plan.fuse if name in predicted]:  # each of them has the seconds of both
        predicted[" + ".join(fused)] = max(predicted.pop(name) for name in fused)
    seconds: dict[str, tuple[float, float | None]] = {}
    for name, expected in {**predicted, STEP: saved.step_seconds}.items():
        timer = STEP if name == STEP else timer_of(name, saved.work[name.partition(" + ")[0]]["kind"])
        alone, together = (
            [record[metric] for record in steps if metric in record]
            for metric in (f"{TIMING}{timer}/{name}", f"{TIMING}{timer}")
        )
        seconds[name] = expected, statistics.median(alone or together) if alone or together else None
    return Comparison(seconds, len(steps))
