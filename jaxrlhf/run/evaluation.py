"""Evaluation of a run: mean scores of responses to held-out prompts, what the algorithm measures on held-out rows,
and which evaluation was the best."""

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.metrics import evaluations_in, flatten, less_is_better
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.records import Records, SilentRecords

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
        self._assembly = assembly
        self._config, self._steps = assembly.config.evaluation, assembly.config.steps
        self._metric = f"eval/{assembly.best_by}"  # by which the best is chosen
        self._sign = -1.0 if less_is_better(self._metric) else 1.0
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
        best = max(there, key=lambda result: result[1], default=None)
        return None if best is None else (best[0], self._sign * best[1])

    def value(self, done: int) -> float | None:
        """How good it was after so many steps, more is better; None where that is not known, or cannot be the best."""
        value = next((metrics.get(self._metric, math.nan) for at, metrics in self.results if at == done), math.nan)
        return self._sign * value if done > self._since and math.isfinite(value) else None

    def run(self, done: int, state: Any, executor: Executor, records: Records | SilentRecords) -> dict[str, float]:
        """Metrics of the roles as they are. They are written to the records, with samples.

        Args:
            state: The algorithm's, after so many steps.
        """
        started = time.perf_counter()
        metrics = self._sampled(done, executor, records) | self._measured(done, state, executor)
        metrics["timing_s/testing"] = time.perf_counter() - started
        records.write_metrics(done, metrics)
        self.results.append((done, metrics))
        return metrics

    def _sampled(self, done: int, executor: Executor, records: Records | SilentRecords) -> dict[str, float]:
        """Scores and lengths of responses to held-out prompts."""
        phase = self._assembly.evaluation
        if phase is None:
            return {}
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        rollouts: list[dict[str, Any]] = []
        for batch in self._assembly.eval_batches:
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
        return metrics

    def _measured(self, done: int, state: Any, executor: Executor) -> dict[str, float]:
        """What the algorithm measures on held-out rows, averaged over the batches."""
        phase = self._assembly.held_out
        if phase is None:
            return {}
        measured: dict[str, list[float]] = collections.defaultdict(list)
        for batch in self._assembly.held_out_batches:
            result = executor.run(
                phase.graph, phase.plan, state, batch, step=EVALUATION_STEP, phase="evaluation", number=done
            )
            for name, value in flatten({"eval": result.fetch()}).items():
                measured[name].append(value)
        return {name: float(np.mean(values)) for name, values in measured.items()}
