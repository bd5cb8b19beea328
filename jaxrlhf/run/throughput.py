"""How many tokens a step worked on, and how fast."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.call_graph import Ref
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.observe.step_timers import timer_seconds


@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step's sequences, padding not counted."""

    prompt: int
    response: int

    @property
    def total(self) -> int:
        return self.prompt + self.response


def count_tokens(result: StepResult) -> TokenCounts:
    """The tokens of every rollout of a step; of its data, where it generates none. Waits for them.

    A graph of another kind, whose data are no sequences, has no tokens.
    """
    rollouts = [call.outputs for call in result.graph.calls if call.kind == "generate"]
    sequences = rollouts or jax.tree.leaves(result.graph.inputs["data"], is_leaf=_is_sequences)
    masks = [(x.mask, x.response) for x in sequences if _is_sequences(x)]
    counted = [(int(np.sum(mask)), int(np.sum(response))) for mask, response in result.read(masks)]
    response = sum(response for _, response in counted)
    return TokenCounts(prompt=sum(both for both, _ in counted) - response, response=response)


def _is_sequences(x: Any) -> bool:
    return not isinstance(x, Ref) and hasattr(x, "mask") and hasattr(x, "response")


def throughput_metrics(
    tokens: TokenCounts, timings: Mapping[str, float], *, seconds: float, num_devices: int
) -> dict[str, float]:
    """How fast a step was.

    Args:
        timings: The step's metrics `timing_s/<timer>`.
        seconds: Wall time of the whole step.
        num_devices: Devices of the run, idle ones too.

    Returns:
        `perf/...`, `timing_s/step` and `timing_per_token_ms/<timer>`: generation over response tokens, everything else
        that works on whole sequences over all tokens.
    """
    metrics = {
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/total_num_tokens": float(tokens.total),
        "perf/throughput": tokens.total / (seconds * num_devices),
    }
    for timer, timer_time in timer_seconds(timings).items():
        num_tokens = tokens.response if timer == "gen" else tokens.total
        if num_tokens and timer != "reward" and not timer.startswith(("reallocate_", "offload_")):
            metrics[f"timing_per_token_ms/{timer}"] = 1e3 * timer_time / num_tokens
    return metrics
