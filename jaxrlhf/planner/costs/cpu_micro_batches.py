"""Micro-batches of train calls on CPUs, where a config leaves them open.

Memory for what a backward pass needs is asked of the system anew in every update. From about half a gigabyte on, that
takes longer than smaller products and adding up gradients do.
"""

import dataclasses

from jaxrlhf.planner.costs.memory import call_memory, logits_bytes
from jaxrlhf.planner.plans.splits import divisors
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Strategy

MOST_BYTES = 500_000_000
"""The most activations and logits of a micro-batch, as forecast. Measured with 135 million parameters on two cores:
GRPO's updates took 0.78 of the time in 4 micro-batches, the first number below this, and 0.90 in 8; a reward model's
0.94 in 4, again the first, and 1.05 in 8."""


def with_micro_batches(call: ModelCall, strategy: Strategy) -> Strategy:
    """The strategy of a train call, with the fewest micro-batches that need at most `MOST_BYTES` on a device; if
    no number does, with as many as it can have."""
    rows = min(call.divisible) // strategy.num_row_shards
    found = strategy
    for number in divisors(rows):
        wanted = dataclasses.replace(strategy, micro_batches=number)
        if not call.can_split(number * strategy.num_row_shards):
            continue
        found = wanted
        if _saved_bytes(call, found) <= MOST_BYTES:
            break
    return found


def _saved_bytes(call: ModelCall, strategy: Strategy) -> int:
    logits = 2 * logits_bytes(call, strategy, call.part_rows(strategy))
    return call_memory(call, strategy, is_trained=True).activations + logits
