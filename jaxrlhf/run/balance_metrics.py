"""How much of a step's work is padding, and how evenly its tokens lie on the devices."""

from typing import Any

import numpy as np

from jaxrlhf.call_graph import Call, named_sequences
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import copied_rows
from jaxrlhf.reshard.balance import token_imbalance


def balance_metrics(result: StepResult, plan: Plan) -> dict[str, float]:
    """From the lengths of the sequences and the plan alone. Waits for the sequences.

    Returns:
        `perf/padded_rows`, the rows of no weight in all calls of the step (`sharding.row_padding`);
        `perf/padding_waste`; and for every inference and train call whose rows are split `perf/token_imbalance/<call>`;
        where the plan balances it, `perf/token_imbalance_undealt/<call>` too. A train call with several mini-batches is
        counted as if its rows came in their order: in which they really came, only the devices know. Of several batches
        the one that lies least evenly counts.
    """
    calls = [(call, masks) for call in result.graph.calls if (masks := _masks(call))]
    tokens = [_tokens(masks) for masks in result.read([masks for _, masks in calls])]
    positions = sum(mask.shape[0] * mask.shape[1] for _, masks in calls for group in masks for mask in group)
    placed = [call for call in result.graph.calls if call.kind != "host"]
    metrics = {"perf/padded_rows": float(sum(copied_rows(call, plan[call].strategy) for call in placed))}
    if positions:
        total = sum(int(tokens_B.sum()) for every in tokens for tokens_B in every)
        metrics["perf/padding_waste"] = 1 - total / positions
    for (call, _), every in zip(calls, tokens, strict=True):
        strategy = plan[call].strategy
        if strategy.num_row_shards == 1:
            continue
        copies = copied_rows(call, strategy)
        mini_batches = call.update.mini_batches if call.kind == "train" else 1
        undealt, dealt = max(
            (
                tuple(
                    token_imbalance(
                        np.concatenate([tokens_B, tokens_B[:copies]]), num_shards=strategy.num_row_shards,
                        micro_batches=strategy.micro_batches, mini_batches=mini_batches,
                    )
                )
                for tokens_B in every
            ),
            key=lambda pair: pair[0],
        )  # fmt: skip
        metrics[f"perf/token_imbalance/{call.plan_name}"] = float(dealt if strategy.balance else undealt)
        if strategy.balance:
            metrics[f"perf/token_imbalance_undealt/{call.plan_name}"] = float(undealt)
    return metrics


def _masks(call: Call) -> list[list[Any]]:
    """The masks of the sequences that an inference or train call runs its model on, those of one batch together."""
    batches = [term.batch["sequences"] for term in call.terms] or list(call.sequences)
    groups = [[x.mask for x in named_sequences(batch).values() if hasattr(x, "mask")] for batch in batches]
    return [group for group in groups if group]


def _tokens(groups: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The tokens of each row of each batch."""
    return [np.sum([np.asarray(mask).sum(axis=1) for mask in group], axis=0) for group in groups]
