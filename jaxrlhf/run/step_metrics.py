"""Metrics of a step from its sequences: tokens and their rates, decoding steps, padding, scores, and the balance of
tokens over devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.call_graph import Call, Ref, named_sequences
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.observe.step_timers import timer_seconds
from jaxrlhf.planner.costs.rollout_steps import simulate_slots
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.splits import copied_rows
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.programs.roles import ENCODE, weighted_sum
from jaxrlhf.reshard.balance import token_imbalance
from jaxrlhf.sharding.strategy import Strategy

RESPONSE_LENGTH = "perf/response_length/"
"""Begins the names of metrics that `run.recorded_lengths` reads."""


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step's sequences, without padding."""

    total: int
    response: int
    mean_response: float = 0.0
    """Tokens of a drawn response on average. 0, as below, if none were drawn."""
    p99_response: int = 0
    """The tokens that 99 % of them have at most."""


def count_tokens(result: StepResult) -> TokenCounts:
    """The tokens of all rollouts of a step, or of its data if it generates none. Waits for the sequences.

    There are none if the data are not sequences.
    """
    rollouts = [call.outputs for call in result.graph.calls if call.kind == "generate"]
    sequences = rollouts or jax.tree.leaves(result.graph.inputs["data"], is_leaf=_is_sequences)
    masks = [(x.mask, x.response) for x in sequences if _is_sequences(x)]
    counted = [(int(np.sum(mask)), np.sum(response, axis=1)) for mask, response in result.read(masks)]
    lengths = np.concatenate([lengths for _, lengths in counted] or [np.zeros(0, int)])
    total, response = sum(both for both, _ in counted), int(lengths.sum())
    if not rollouts or not len(lengths):
        return TokenCounts(total, response)
    p99 = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
    return TokenCounts(total, response, float(lengths.mean()), p99)


def _is_sequences(x: Any) -> bool:
    return not isinstance(x, Ref) and hasattr(x, "mask") and hasattr(x, "response")


def throughput_metrics(
    tokens: TokenCounts, timings: Mapping[str, float], *, seconds: float, num_devices: int
) -> dict[str, float]:
    """`perf/...`, `timing_s/step` and `timing_per_token_ms/<timer>` of a step of some seconds: over response tokens for
    generation, over all tokens for other calls on whole sequences; `perf/response_length/...`, which a later forecast
    may assume. `timings` are its metrics `timing_s/<timer>`, `num_devices` counts idle devices too.
    """
    metrics = {
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/total_num_tokens": float(tokens.total),
        "perf/throughput": tokens.total / (seconds * num_devices),
    }
    if tokens.mean_response:
        metrics[f"{RESPONSE_LENGTH}mean"] = tokens.mean_response
        metrics[f"{RESPONSE_LENGTH}p99"] = float(tokens.p99_response)
    for timer, timer_time in timer_seconds(timings).items():
        num_tokens = tokens.response if timer == "gen" else tokens.total
        if num_tokens and timer != "reward" and not timer.startswith(("reallocate_", "offload_")):
            metrics[f"timing_per_token_ms/{timer}"] = 1e3 * timer_time / num_tokens
    return metrics


def decoding_metrics(result: StepResult, plan: Plan) -> dict[str, float]:
    """The decoding steps of generate calls and how full they were, from the lengths of the responses: what the devices
    did follows from these, so nothing has to be read from them. Waits for the sequences.

    Returns:
        For every whole generate call without stages and micro-batches, `perf/decode_steps/<call>`, of its slowest row
        shard,
        and `perf/decode_occupancy/<call>`, the rows of all steps whose token was kept. If it has slots,
        `perf/prefill_groups/<call>`, of all row shards, and `perf/decode_steps_in_waves/<call>`, those that it would
        take to decode as many sequences at a time until the longest of them has ended.
    """
    calls = [call for call in result.graph.calls if call.kind == "generate" and _is_sequences(call.outputs)]
    calls = [call for call in calls if plan[call].strategy.pipeline == plan[call].strategy.micro_batches == 1]
    calls = [call for call in calls if plan[call].is_whole]
    metrics = {}
    read = result.read([(call.outputs.response, call.args[0].expected_tokens) for call in calls])
    for call, (response, expected_B) in zip(calls, read, strict=True):
        strategy, samples = plan[call].strategy, call.args[1].num_samples
        lengths = _of_row_shards(np.sum(response, axis=1).reshape(-1, samples), call, strategy)
        shards = lengths.reshape(len(lengths), -1)
        made = np.full(len(shards), shards.max())  # all rows at once end together
        if strategy.slots:
            slots = slots_of(strategy)
            if expected_B is not None:
                order = np.argsort(-_of_row_shards(expected_B, call, strategy), axis=1, kind="stable")
                lengths = np.take_along_axis(lengths, order[:, :, None], axis=1)
            each = [simulate_slots(of_shard.reshape(-1), samples, slots) for of_shard in lengths]
            made = np.array([shard.rounds * slots.steps for shard in each])
            metrics[f"perf/prefill_groups/{call.plan_name}"] = float(sum(shard.groups for shard in each))
            waves = [np.maximum.reduceat(x, np.arange(0, len(x), slots.slots)).sum() for x in shards]
            metrics[f"perf/decode_steps_in_waves/{call.plan_name}"] = float(max(waves))
        metrics[f"perf/decode_steps/{call.plan_name}"] = float(made.max())
        rows = strategy.slots or shards.shape[1]
        metrics[f"perf/decode_occupancy/{call.plan_name}"] = float(shards.sum() / (made.sum() * rows))
    return metrics


def _of_row_shards(x_B: np.ndarray, call: Call, strategy: Strategy) -> np.ndarray:
    """An array with a row for each prompt of a generate call as [row shard, prompt, ...], copied rows included."""
    copied = np.concatenate([x_B, x_B[: copied_rows(call, strategy)]])
    return copied.reshape(strategy.num_row_shards, -1, *x_B.shape[1:])


def balance_metrics(result: StepResult, plan: Plan) -> dict[str, float]:
    """Padding and token balance, from the lengths of the sequences and the plan. Waits for the sequences.

    Returns:
        `perf/padded_rows`, the copied rows in all calls of the step (`sharding.row_padding`); `perf/padding_waste`;
        and, for every whole inference and train call with split rows, `perf/token_imbalance/<call>`, with
        `perf/token_imbalance_undealt/<call>` if the plan balances it. For a train call with several mini-batches, rows
        are counted in their original order, since only the devices know the shuffled one. Of several batches, the
        least balanced one counts.
    """
    calls = [(call, masks) for call in result.graph.calls if (masks := _masks(call))]
    tokens = [
        [np.sum([np.asarray(mask).sum(axis=1) for mask in group], axis=0) for group in groups]
        for groups in result.read([masks for _, masks in calls])
    ]
    positions = sum(mask.shape[0] * mask.shape[1] for _, masks in calls for group in masks for mask in group)
    graph, placed = in_parts(result.graph, plan)
    padded_rows = sum(copied_rows(call, placed[call].strategy) for call in graph.calls if call.kind != "host")
    metrics = {"perf/padded_rows": float(padded_rows)}
    if positions:
        total = sum(int(tokens_B.sum()) for every in tokens for tokens_B in every)
        metrics["perf/padding_waste"] = 1 - total / positions
    for (call, _), every in zip(calls, tokens, strict=True):
        strategy = plan[call].strategy
        if strategy.num_row_shards == 1 or not plan[call].is_whole:
            continue
        copies = copied_rows(call, strategy)
        mini_batches = call.update.mini_batches if call.kind == "train" else 1
        padded = [np.concatenate([tokens_B, tokens_B[:copies]]) for tokens_B in every]
        degrees = {"num_shards": strategy.num_row_shards, "micro_batches": strategy.micro_batches}
        both = [tuple(token_imbalance(tokens_B, mini_batches=mini_batches, **degrees)) for tokens_B in padded]
        undealt, dealt = max(both, key=lambda pair: pair[0])
        metrics[f"perf/token_imbalance/{call.plan_name}"] = float(dealt if strategy.balance else undealt)
        if strategy.balance:
            metrics[f"perf/token_imbalance_undealt/{call.plan_name}"] = float(undealt)
    return metrics


def _masks(call: Call) -> list[list[Any]]:
    """The masks of the sequences of an inference or train call, grouped by batch."""
    batches = [term.batch["sequences"] for term in call.terms] or list(call.sequences)
    groups = [[x.mask for x in named_sequences(batch).values() if hasattr(x, "mask")] for batch in batches]
    return [group for group in groups if group]


def reward_metrics(result: StepResult) -> dict[str, float]:
    """The mean score of each scorer, if there are several, and what Python functions count."""
    scores = scores_of(result)
    means = {f"reward/{name}/mean": float(values.mean()) for name, values in scores.items()} if len(scores) > 1 else {}
    return means | {f"reward/{name}": float(count) for name, count in result.counts().items()}


def scores_of(result: StepResult, *, of: str | None = None) -> dict[str, np.ndarray]:
    """The scores of rollouts by role, and their weighted sums. `of`: only those of the rollout of this call."""
    chosen: dict[str, str] = {}
    graph = result.graph
    encoded = {call.name for call in graph.calls if call.method == ENCODE and of in graph.dependencies(call)}
    for call in graph.calls:
        of_it = of is None or not {of, *encoded}.isdisjoint(ref.call for ref in call.refs)
        scores = call.method == "scores" and of_it
        if scores or (call.function is weighted_sum and all(ref.call in chosen for ref in call.refs)):
            chosen[call.name] = call.name.replace(".scores", "").replace(f".{weighted_sum.__name__}", "")
    return {role: result.outputs(name) for name, role in chosen.items()}
