"""Evaluation of a run: mean scores of responses to held-out prompts, and which of them was the best."""

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrlhf.runtime.assembly import Assembly
from jaxrlhf.runtime.executor import Executor
from jaxrlhf.runtime.metrics import best_evaluation, evaluations_in
from jaxrlhf.runtime.records import Records

EVALUATION_STEP = 2**32 - 1
"""The step number that decides an evaluation's noise: the same in every evaluation, and that of no training step."""


class Evaluator:
    """Evaluates, and remembers what came out.

    Args:
        history: Records of the run from before this start.
    """

    def __init__(self, assembly: Assembly, history: Sequence[dict[str, Any]]) -> None:
        self._phase, self._batches = assembly.evaluation, assembly.eval_batches
        self._config, self._steps = assembly.config.evaluation, assembly.config.steps
        by = (self._config.best_by or self._config.scorers[0]) if self._config is not None else ""
        self._metric = f"eval/{by}"  # by which the best is chosen
        self.results = evaluations_in(history)
        """(steps done, metrics), in order."""

    def is_due(self, done: int) -> bool:
        """Whether to evaluate after so many steps."""
        if self._config is None or done == 0:
            return False
        return done == self._steps or bool(self._config.every and done % self._config.every == 0)

    def best(self) -> tuple[int, float] | None:
        """Steps done and value of the best evaluation after a step; of equals, the first."""
        later = [(done, metrics) for done, metrics in self.results if done > 0]
        return best_evaluation(later, self._metric) if later else None

    def value(self, done: int) -> float | None:
        """How good the policy was after so many steps; None where it was not evaluated, or the score is no number."""
        value = next((metrics[self._metric] for at, metrics in self.results if at == done), math.nan)
        return value if math.isfinite(value) else None

    def run(self, done: int, executor: Executor, records: Records) -> dict[str, float]:
        """Metrics of the policy as it is. They are written to the records, with samples."""
        phase = self._phase
        assert phase is not None
        started = time.perf_counter()
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        for batch in self._batches:
            result = executor.run(
                phase.graph, phase.plan, phase.first_state, batch, step=EVALUATION_STEP, phase="evaluation", number=done
            )
            fetched = result.fetch()
            for name, value in fetched["scores"].items():
                scores[name].append(value)
            lengths.append(fetched["rollout"].lengths)
            records.write_samples(done, "held-out", fetched["rollout"], fetched["scores"])
        metrics = {f"eval/{name}": float(np.concatenate(values).mean()) for name, values in scores.items()}
        metrics["eval/response_length"] = float(np.concatenate(lengths).mean())
        metrics["timing_s/testing"] = time.perf_counter() - started
        records.write_metrics(done, metrics)
        self.results.append((done, metrics))
        return metrics
