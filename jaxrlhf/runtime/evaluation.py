"""Evaluation of a run: mean scores of responses to held-out prompts, and which of them was the best."""

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrlhf.runtime.assembly import Assembly
from jaxrlhf.runtime.executor import Executor
from jaxrlhf.runtime.metrics import evaluations_in
from jaxrlhf.runtime.records import Records, SilentRecords

EVALUATION_STEP = 2**32 - 1
"""The step number that decides an evaluation's noise: the same in every evaluation, and that of no training step."""


class Evaluator:
    """Evaluates, and remembers what came out.

    Args:
        history: Records of the run from before this start.
        since: Evaluations after so many steps and fewer are never the best: their checkpoints are not this run's.
    """

    def __init__(self, assembly: Assembly, history: Sequence[dict[str, Any]], *, since: int = 0) -> None:
        self._since = since
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

    def is_missing(self, done: int) -> bool:
        """Whether an evaluation after so many steps was due and is not there: it failed, and the run was saved."""
        due = self._config is not None and (done == 0 or self.is_due(done))
        return due and all(at != done for at, _ in self.results)

    def best(self) -> tuple[int, float] | None:
        """Steps done and value of the best evaluation after a step; of equals, the first."""
        values = [(done, self.value(done)) for done, _ in self.results]
        there = [(done, value) for done, value in values if value is not None]
        return max(there, key=lambda result: result[1], default=None)

    def value(self, done: int) -> float | None:
        """How good the policy was after so many steps; None where that was not found out, or cannot be the best."""
        value = next((metrics.get(self._metric, math.nan) for at, metrics in self.results if at == done), math.nan)
        return value if done > self._since and math.isfinite(value) else None

    def run(self, done: int, executor: Executor, records: Records | SilentRecords) -> dict[str, float]:
        """Metrics of the policy as it is. They are written to the records, with samples."""
        phase = self._phase
        assert phase is not None
        started = time.perf_counter()
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        rollouts: list[dict[str, Any]] = []
        for batch in self._batches:
            result = executor.run(
                phase.graph, phase.plan, phase.first_state, batch, step=EVALUATION_STEP, phase="evaluation", number=done
            )
            fetched = result.fetch()
            for name, value in fetched["scores"].items():
                scores[name].append(value)
            lengths.append(fetched["rollout"].lengths)
            rollouts.append(fetched)
        for fetched in rollouts:  # only now: an evaluation that fails, and is made up for, leaves nothing behind
            records.write_samples(done, "held-out", fetched["rollout"], fetched["scores"])
        metrics = {f"eval/{name}": float(np.concatenate(values).mean()) for name, values in scores.items()}
        metrics["eval/response_length"] = float(np.concatenate(lengths).mean())
        metrics["timing_s/testing"] = time.perf_counter() - started
        records.write_metrics(done, metrics)
        self.results.append((done, metrics))
        return metrics
