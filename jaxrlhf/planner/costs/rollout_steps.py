"""The decoding steps that a rollout is expected to take, by the lengths of its responses.

All rows at once decode until the longest response has ended. In slots, a simulation of the admission of prompts
(`generation.continuous_batching`) counts steps and prefills, for responses of drawn lengths: always the same draws, so
that a forecast is a function of its arguments.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.generation.rollout_settings import Slots, columns_of_steps
from jaxrlhf.models.kv_cache import columns_read, num_columns
from jaxrlhf.planner.costs.response_lengths import length_cdf
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Strategy

FEWEST_SLOTS, MOST_CHOICES = 16, 6
"""The fewest slots that a search looks at, and how many numbers of slots, each half of the next."""
SAVED = 0.98
"""Slots are looked at where the mean response has at most so much of the length of the longest one."""
WORTH_SHARING = 0.8
"""Shared prompts are looked at where the cache with them has at most so much of the size that it has without."""
_SIMULATED = 4096
"""Sequences of a simulation, at least: of as many equal rollouts as have them."""


@dataclasses.dataclass(frozen=True)
class RolloutSteps:
    """The expected work of a generate call on its slowest row shard."""

    steps: float
    """Decoding steps."""
    groups: float
    """Groups of prompts that are prefilled."""
    columns: float
    """Columns of the cache that a step reads for each row, on average. Those of shared prompts count in parts."""


@dataclasses.dataclass(frozen=True)
class RolloutSpan:
    """A part of a rollout: from when some sequences of each row shard have finished until more have."""

    prompts: int
    """Of a row shard of the share."""
    num_samples: int
    shards: int
    """Row shards of the share."""
    slots: Slots
    handed_on: tuple[int, int]
    """Sequences of each row shard, of the share or of the tail, that have been handed on before and after it."""
    stay: int = 0
    """Of the tail: sequences of each row shard of the share that move to it."""
    tail_shards: int = 0
    """Row shards of the tail; 0 for a part of the share itself."""


@functools.lru_cache(maxsize=4096)
def steps_of_span(
    lengths: ResponseLengths | None, prompt: int, response: int, span: RolloutSpan, on_gpu: bool
) -> RolloutSteps:
    """The steps of a part of a rollout, which ends when its slowest row shard does. The tail begins when all row shards
    of the share have left it no more than it takes, and no prompt waits."""
    per_round, (first, last) = span.slots.steps, span.handed_on
    steps, groups, used = [], [], []
    for of_rollout in _drawn(lengths, response, span.prompts * span.num_samples, span.shards):
        each = [simulate_slots(of_rows, span.num_samples, span.slots) for of_rows in of_rollout]
        ends = np.sort(np.stack([shard.left for shard in each]), axis=1).max(axis=0)  # of the slowest, after so many
        if not span.tail_shards:
            low, high = (int(ends[count - 1]) if count else 0 for count in (first, last))
            entered = np.stack([shard.entered for shard in each])
            groups.append(each[0].groups * ((entered >= low) & (entered < max(high, 1))).mean())
            oldest = max(each, key=lambda shard: shard.rounds).ages(per_round)
            used.append(oldest[low * per_round : high * per_round])
        else:
            kept = ends.shape[0] - span.stay
            begin = max(int(ends[kept - 1]) if kept else 0, max(int(shard.entered.max()) for shard in each))
            left = np.sort(np.concatenate([np.sort(shard.left)[kept:] for shard in each])) - begin
            of_tail = span.stay * span.shards / span.tail_shards
            places = (math.ceil(count / of_tail * len(left)) - 1 for count in (first, last))
            low, high = (max(int(left[place]), 0) if place >= 0 else 0 for place in places)
            groups.append(0.0)
            used.append(begin * per_round + np.arange(low * per_round, high * per_round))
        steps.append((high - low) * per_round)
    ages, tokens = np.concatenate(used), prompt + response - 1
    read = columns_read(np.minimum(prompt + ages, tokens), tokens, on_gpu=on_gpu) if len(ages) else np.array([prompt])
    return RolloutSteps(float(np.mean(steps)), float(np.mean(groups)), float(read.mean()))


@functools.lru_cache(maxsize=4096)
def steps_at_once(lengths: ResponseLengths | None, prompt: int, response: int, rows: int) -> RolloutSteps:
    """The steps until the longest of `rows` responses, of at most `response` tokens, has ended."""
    goes_on = 1.0 - np.concatenate([[0.0], length_cdf(lengths, response)[:-1]]) ** rows  # the chance of each step
    steps = float(goes_on.sum())
    return RolloutSteps(steps, 1.0, float((goes_on * columns_of_steps(prompt, response)).sum()) / steps)


@functools.lru_cache(maxsize=4096)
def steps_in_slots(
    lengths: ResponseLengths | None,
    prompt: int,
    response: int,
    num_prompts: int,
    num_samples: int,
    shards: int,
    slots: Slots,
    on_gpu: bool,
) -> RolloutSteps:
    """The steps of a rollout in slots, until the last of some row shards, each with so many prompts, has ended. On a
    GPU a step reads the whole cache, not only the columns that are in use."""
    found = []
    drawn = _drawn(lengths, response, num_prompts * num_samples, shards)
    for of_rollout in drawn:
        each = [simulate_slots(of_rows, num_samples, slots) for of_rows in of_rollout]
        found.append(max(each, key=lambda shard: shard.rounds))
    repeats = len(drawn)
    ages = np.concatenate([each.ages(slots.steps) for each in found])
    own, tokens, shared = prompt, prompt + response - 1, 0.0
    if slots.shared_prompts:
        own, tokens = 1, response
        shared = slots.shared_prompts / slots.slots * num_columns(prompt - 1)
    read = columns_read(np.minimum(own + ages, tokens), tokens, on_gpu=on_gpu)
    steps = slots.steps * sum(each.rounds for each in found) / repeats
    return RolloutSteps(steps, sum(each.groups for each in found) / repeats, float(read.mean()) + shared)


def _drawn(lengths: ResponseLengths | None, response: int, of_shard: int, shards: int) -> np.ndarray:
    """Lengths [rollout, row shard, sequence], as many short ones as are expected. Of many row shards some."""
    looked_at = max(1, min(shards, 4 * _SIMULATED // of_shard))
    repeats = math.ceil(_SIMULATED / (looked_at * of_shard)) if lengths is not None else 1
    count = repeats * looked_at * of_shard
    rng = np.random.default_rng(0)
    spread = (rng.permutation(count) + rng.random(count)) / count
    drawn = 1 + np.searchsorted(length_cdf(lengths, response), spread)
    return drawn.reshape(repeats, looked_at, of_shard)


@dataclasses.dataclass(frozen=True)
class SimulatedSlots:
    """A simulated rollout of a row shard."""

    rounds: int
    groups: int
    entered: np.ndarray
    """Sequence -> the round before which it enters, in the order of the queue."""
    left: np.ndarray
    """Sequence -> the round before which its slot is free again."""

    def ages(self, steps: int) -> np.ndarray:
        """Tokens of the longest row before each step: those since the sequence entered that is there longest."""
        rounds = np.arange(self.rounds)
        oldest = np.searchsorted(np.maximum.accumulate(self.left), rounds, side="right")
        return ((rounds - self.entered[oldest])[:, None] * steps + np.arange(steps)).reshape(-1)


def simulate_slots(lengths: Sequence[int] | np.ndarray, num_samples: int, slots: Slots) -> SimulatedSlots:
    """The rounds of `generation.continuous_batching.advance` for responses of known lengths: groups of prompts enter
    before a round where there is room for as many as are to enter together, and a slot is free after the round in which
    its sequence ends. The lengths are in the order of the queue, the samples of a prompt one after another."""
    lasts = -(-np.asarray(lengths) // slots.steps)
    num_prompts = len(lasts) // num_samples
    free, entries = slots.slots, slots.shared_prompts or num_prompts
    most = min(slots.prefill_rows, free // num_samples, entries)
    entered = np.zeros(len(lasts), int)
    ends: list[tuple[int, int]] = []  # a round, and 1 for the last sample of a prompt to end
    head, now, groups = 0, 0, 0
    while head < num_prompts:
        waiting = num_prompts - head
        room = min(free // num_samples, entries, waiting, slots.prefill_rows)
        if room >= min(waiting, slots.admit or most, most):
            for _ in range(room):
                first = head * num_samples
                entered[first : first + num_samples] = now
                of_prompt = sorted(lasts[first : first + num_samples].tolist())
                for i, last in enumerate(of_prompt):
                    heapq.heappush(ends, (now + last, int(i == num_samples - 1)))
                head += 1
            free, entries, groups = free - room * num_samples, entries - room, groups + 1
        else:
            now = ends[0][0]
            while ends and ends[0][0] == now:
                entries += heapq.heappop(ends)[1]
                free += 1
    left = entered + lasts
    return SimulatedSlots(int(left.max()), groups, entered, left)


def slot_choices(call: ModelCall, strategy: Strategy) -> list[Strategy]:
    """The strategy with every number of slots that is worth a look: powers of two, fewer than a row shard has rows, and
    at least as many as samples of a prompt enter together. None where lengths are unknown, or hardly differ.

    Prompts enter when an eighth of the slots is free, or there is room for 8 of them: wider groups are prefilled
    faster, and leave more slots empty. Where that makes the cache much smaller, every number of slots is also looked at
    with as many shared prompts as are expected to be in slots.
    """
    if call.kind != "generate" or call.lengths is None or strategy.pipeline > 1 or strategy.micro_batches > 1:
        return []
    rows, n = math.ceil(call.part_rows(strategy)) * call.num_samples, call.num_samples
    one, longest = (steps_at_once(call.lengths, call.prompt, call.response, each).steps for each in (1, rows))
    if longest * SAVED < one:
        return []
    sizes = [2**i for i in range(rows.bit_length()) if max(FEWEST_SLOTS, n) <= 2**i < rows]
    choices = []
    for size in sizes[-MOST_CHOICES:]:
        prefill_rows = max(1, min(Slots.prefill_rows, size // (8 * n)))
        choices.append(dataclasses.replace(strategy, slots=size, prefill_rows=prefill_rows))
        shared = math.ceil(size / n * _staying(call.lengths, call.response, n))
        own, prompt = num_columns(call.response), num_columns(call.prompt - 1)
        if n > 1 and size * own + shared * prompt < WORTH_SHARING * size * num_columns(call.columns - 1):
            choices.append(dataclasses.replace(choices[-1], shared_prompts=shared))
    return choices


def _staying(lengths: ResponseLengths, response: int, num_samples: int) -> float:
    """How many times as long as a sample, on average, the last of a prompt's samples takes: so many more prompts are in
    slots than if their samples ended together."""
    cdf = length_cdf(lengths, response)[:-1]
    return float((1.0 - cdf**num_samples).sum() / (1.0 - cdf).sum())
