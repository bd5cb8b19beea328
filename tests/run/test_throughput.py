from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.config.schema import load_run
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.experience import Sequences
from jaxrlhf.run.assembly import assemble
from jaxrlhf.run.throughput import TokenCounts, count_tokens, throughput_metrics


def test_rates_are_over_the_tokens_that_a_timer_covers() -> None:
    timings = {"timing_s/gen": 2.0, "timing_s/gen/a": 1.0, "timing_s/ref": 0.5, "timing_s/reward": 9.0,
               "timing_s/reallocate_actor": 0.1}  # fmt: skip
    metrics = throughput_metrics(TokenCounts(prompt=60, response=40), timings, seconds=4.0, num_devices=5)
    assert metrics == pytest.approx(
        {
            "timing_s/step": 4.0,
            "perf/time_per_step": 4.0,
            "perf/total_num_tokens": 100.0,
            "perf/throughput": 5.0,
            "timing_per_token_ms/gen": 50.0,
            "timing_per_token_ms/ref": 5.0,
        }
    )


def test_without_tokens_there_are_no_rates_per_token() -> None:
    metrics = throughput_metrics(TokenCounts(0, 0), {"timing_s/gen": 2.0}, seconds=4.0, num_devices=1)
    assert metrics["perf/throughput"] == 0.0 and "timing_per_token_ms/gen" not in metrics


def test_tokens_of_rollouts_and_of_demonstrations_are_counted() -> None:
    run = assemble(load_run("ppo_arithmetic", ["batch_size=64", "settings.actor_update.mini_batches=1"]), 8)

    def result(graph: Any, outputs: dict[str, Any]) -> StepResult:
        return StepResult(graph, (), {name: jax.tree.leaves(tree) for name, tree in outputs.items()})

    graph = run.train.graph
    rollout = jax.tree.map(lambda ref: np.zeros(ref.shape, ref.dtype), graph.calls[0].outputs)
    mask, response = np.zeros_like(rollout.mask), np.zeros_like(rollout.response)
    mask[:3, 2:9], response[:3, :4] = True, True
    rollout = rollout.replace(mask=mask, response=response)
    counted = count_tokens(result(graph, {"data": run.train_rows(0), "actor.generate": rollout}))
    assert counted == TokenCounts(prompt=9, response=12) and counted.total == 21

    assert run.warm_start is not None
    rows = run.loader.demonstrations(0, 512, 10)
    assert isinstance(rows, Sequences)
    counted = count_tokens(result(run.warm_start.graph, {"data": rows}))
    assert counted.total == rows.mask.sum() and counted.response == rows.response.sum() > 0
