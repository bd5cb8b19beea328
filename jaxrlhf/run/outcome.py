"""The results of a run."""

import dataclasses
from typing import Any

from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.observe.json_lines import split_non_finite
from jaxrlhf.observe.metrics import without_times
from jaxrlhf.run.run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a run from its first step on, also if it was resumed."""

    steps: int
    evaluations: tuple[tuple[int, dict[str, float]], ...]
    """(steps done, metrics), in order."""
    best: tuple[int, float] | None
    """Steps done and value of the best evaluation, whose checkpoint is kept."""
    rewards: tuple[float, ...]
    """The mean score of every step."""
    samples: tuple[dict[str, Any], ...]
    """The latest sampled prompts and completions, with their scores. Empty after a resume until the next samples."""
    shown_at: dict[str, str]
    """The paths or addresses at which trackers show the run, by tracker."""
    folder: RunFolder
    weights: WeightStore
    """The last weights, on the devices."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for outcome.json."""
        evaluations = [
            {"step": done, **split_non_finite(without_times(metrics))[0]} for done, metrics in self.evaluations
        ]
        best = None if self.best is None else {"step": self.best[0], "value": self.best[1]}
        return {"steps": self.steps, "best": best, "evaluations": evaluations, "rewards": list(self.rewards)}
