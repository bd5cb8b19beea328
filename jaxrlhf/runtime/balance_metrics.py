"""How much of a step's work is padding, and how evenly its tokens lie on the devices."""

from typing import Any

import numpy as np

from jaxrlhf.call_graph import Call
from jaxrlhf.planner.plan import Plan, train_sizes
from jaxrlhf.reshard.balance import token_imbalance
from jaxrlhf.runtime.executor import StepResult


def balance_metrics(result: StepResult, plan: Plan) -> dict[str, float]:
    """From the lengths of the sequences and the plan alone. Waits for the sequences.

    Returns:
        `perf/padding_waste`, and for every inference and train call whose rows are split `perf/token_imbalance/<call>`;
        where the plan balances it, `perf/token_imbalance_undealt/<call>` too. A train call with several mini-batches is
        counted as if its rows came in their order: in which they really came, only the devices know.
    """
    calls = [call for call in result.graph.calls if _sequences(call) is not None]
    masks = result.read([_sequences(call).mask for call in calls])
    tokens = [np.asarray(mask).sum(axis=1) for mask in masks]
    positions = sum(mask.size for mask in masks)
    metrics = {}
    if positions:
        metrics["perf/padding_waste"] = 1 - sum(int(tokens_B.sum()) for tokens_B in tokens) / positions
    for call, tokens_B in zip(calls, tokens, strict=True):
        strategy = plan[call].strategy
        if strategy.num_row_shards == 1:
            continue
        undealt, dealt = token_imbalance(
            tokens_B,
            num_shards=strategy.num_row_shards,
            micro_batches=strategy.micro_batches,
            mini_batches=train_sizes(call, strategy).mini_batches if call.kind == "train" else 1,
        )
        metrics[f"perf/token_imbalance/{call.plan_name}"] = float(dealt if strategy.balance else undealt)
        if strategy.balance:
            metrics[f"perf/token_imbalance_undealt/{call.plan_name}"] = float(undealt)
    return metrics


def _sequences(call: Call) -> Any:
    """What an inference or train call runs its model on."""
    sequences = None
    if call.kind == "infer":
        (sequences,) = call.args
    elif call.kind == "train":
        sequences = call.args[1]["sequences"]
    return sequences if hasattr(sequences, "mask") else None
