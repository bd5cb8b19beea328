"""Evaluation of a run: mean scores of responses to held-out prompts, the algorithm's own metrics on held-out rows, and
the best evaluation."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrlhf.configured.function_roles import decode_responses
from jaxrlhf.execution.executor import Executor
from jaxrlhf.experience import Rollout
from jaxrlhf.observe.metrics import best_evaluation, evaluations_in, flatten, less_is_better
from jaxrlhf.rewards.repeated_samples import answer_vote, expected_best, majority_score
from jaxrlhf.run.assembly import Assembly, Phase, category
from jaxrlhf.run.records import Records

EVALUATION_STEP = 2**32 - 1
"""The step number that determines the noise of every evaluation. No training step has it."""


class Evaluator:
    """Evaluates, and keeps the results.

    Args:
        history: Records of the run from before this start.
        since: Evaluations after at most so many steps are never the best, since their checkpoints are another run's.
    """

    def __init__(self, assembly: Assembly, history: Sequence[dict[str, Any]], *, since: int = 0) -> None:
        self._since = since
        self._assembly, self._config = assembly, assembly.config.evaluation
        self._metric = f"eval/{assembly.best_by}"  # by which the best is chosen
        self.results = evaluations_in(history)
        """(steps done, metrics), in order."""

    def is_due(self, done: int) -> bool:
        """Returns whether to evaluate after `done` steps."""
        if self._config is None or done == 0:
            return False
        return done == self._assembly.config.steps or bool(self._config.every and done % self._config.every == 0)

    def is_missing(self, done: int) -> bool:
        """Returns whether the evaluation after `done` steps was due and is missing, since it failed."""
        due = self._config is not None and (done == 0 or self.is_due(done))
        return due and all(at != done for at, _ in self.results)

    def best(self) -> tuple[int, float] | None:
        """Steps done and value of the best evaluation after a step; of equals, the first."""
        valued = [(done, metrics) for done, metrics in self.results if self.value(done) is not None]
        return best_evaluation(valued, self._metric) if valued else None

    def value(self, done: int) -> float | None:
        """The value of the evaluation after `done` steps, higher is better; None if unknown, or excluded by `since`."""
        value = next((metrics.get(self._metric, math.nan) for at, metrics in self.results if at == done), math.nan)
        known = done > self._since and math.isfinite(value)
        return (-value if less_is_better(self._metric) else value) if known else None

    def run(self, done: int, state: Any, executor: Executor, records: Records) -> dict[str, float]:
        """Evaluates weights and state after `done` steps. Metrics and samples are written to the records."""
        started = time.perf_counter()
        metrics = self._sampled(done, executor, records) | self._measured(done, state, executor)
        metrics["timing_s/testing"] = time.perf_counter() - started
        records.write_metrics(done, metrics)
        self.results.append((done, metrics))
        return metrics

    def measure(self, done: int, state: Any, executor: Executor) -> dict[str, float]:
        """Evaluates as `run` does, and keeps nothing."""
        return self._sampled(done, executor, None) | self._measured(done, state, executor)

    def _sampled(self, done: int, executor: Executor, records: Records | None) -> dict[str, float]:
        """Scores and lengths of responses to held-out prompts."""
        phase = self._assembly.evaluation
        if phase is None:
            return {}
        fetched, counted = zip(*self._run(phase, phase.first_state, executor, done), strict=True)
        for each in fetched:  # only now, so that an evaluation that fails, and is repeated, writes no samples
            if records is not None:
                records.write_samples(done, "held-out", each["rollout"], each["scores"])
        scores = {name: np.concatenate([each["scores"][name] for each in fetched]) for name in fetched[0]["scores"]}
        means = {f"eval/{name}": float(scores_B.mean()) for name, scores_B in scores.items()}
        means["eval/response_length"] = float(np.concatenate([each["rollout"].lengths for each in fetched]).mean())
        counts = {f"eval/{name}": float(sum(each[name] for each in counted)) for name in counted[0]}
        rollouts = [each["rollout"] for each in fetched]
        return means | self._of_several(scores, rollouts) | self._by_category(scores, rollouts) | counts

    def _of_several(self, scores: Mapping[str, np.ndarray], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The best of k, pass@k and majority votes of several responses to each prompt."""
        config, table = self._config, self._assembly.table
        assert config is not None
        num = 1 if config.sampling is None else config.sampling.num_samples
        metrics: dict[str, float] = {}
        for name, scores_B in scores.items():
            passes_B = (scores_B >= config.pass_score).astype(np.float64)
            for k in config.pass_at:
                metrics[f"eval/{name}/best@{k}"] = expected_best(scores_B, k, num_samples=num)
                metrics[f"eval/{name}/pass@{k}"] = expected_best(passes_B, k, num_samples=num)
        if config.majority != "none":
            texts = [text for rollout in rollouts for text in decode_responses(rollout, table)]
            votes = [answer_vote(text, config.majority) for text in texts]
            for name, scores_B in scores.items():
                metrics[f"eval/{name}/majority"] = majority_score(scores_B, votes, num_samples=num)
        return metrics

    def _by_category(self, scores: Mapping[str, np.ndarray], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The mean scores of the rows with each value of a column."""
        config, table = self._config, self._assembly.table
        assert config is not None
        if not config.by:
            return {}
        rows = np.concatenate([np.asarray(rollout.row) for rollout in rollouts])
        values = np.array([category(value) for value in table.columns(rows)[config.by]])
        return {
            f"eval/{name}/{config.by}/{value}": float(scores_B[values == value].mean())
            for name, scores_B in scores.items()
            for value in sorted(set(values.tolist()))
        }

    def _measured(self, done: int, state: Any, executor: Executor) -> dict[str, float]:
        """The algorithm's own metrics on held-out rows, averaged over the batches."""
        phase = self._assembly.held_out
        if phase is None:
            return {}
        measured = [flatten({"eval": results}) for results, _ in self._run(phase, state, executor, done)]
        return {name: float(np.mean([each[name] for each in measured])) for name in measured[0]}

    def _run(self, phase: Phase, state: Any, executor: Executor, done: int) -> list[tuple[Any, dict[str, int]]]:
        """The results of every batch, and what its functions counted. Waits for them."""
        at: dict[str, Any] = {"step": EVALUATION_STEP, "phase": "evaluation", "number": done}
        results = (executor.run(phase.graph, phase.plan, state, x, **at) for x in phase.batches)
        return [(each.fetch(), each.counts()) for each in results]
