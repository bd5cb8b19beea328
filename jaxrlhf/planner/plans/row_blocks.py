"""How the rows of a call are cut: over its placements, into blocks, and between a generation and its tail."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jaxrlhf.call_graph import Call
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.sharding.strategy import Strategy

_NEAR = 0.05
"""Shares of a call begin with a block of its source that begins so near, as a fraction of all rows."""


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """How the sequences of a generation are split: over shares, whose row shards hand on some and leave the others to
    the tail."""

    prompts: tuple[int, ...]
    """Of each share."""
    bounds: tuple[tuple[int, ...], ...]
    """Share -> sequences of each row shard that it has handed on after each part, from 0 on."""
    stay: tuple[int, ...]
    """Share -> sequences of each row shard that move to the tail."""
    tail_bounds: tuple[int, ...]
    """Sequences of each row shard that the tail has handed on after each part; 0 alone without one."""


def split_rows(where: str, call: Call, placement: Placement) -> tuple[int, ...]:
    """The rows of each share of a call; prompts of a generation, as many as divide over the share's devices. Raises
    PlanError if a share has none."""
    shares = (placement, *placement.shares)
    unit = [s.strategy.num_row_shards * s.strategy.pipeline if call.kind == "generate" else 1 for s in shares]
    rows = [round(s.rows * call.num_rows / u) * u for s, u in zip(shares[1:], unit[1:], strict=True)]
    rows = [call.num_rows - sum(rows), *rows]
    for number, (count, share) in enumerate(zip(rows, shares, strict=True)):
        if count < 1:
            of = f" divisible by {unit[number]}" if unit[number] > 1 else ""
            raise PlanError(
                f"{where}: each placement of a call must have rows{of}. Got {share.rows:g} of {call.num_rows} rows for "
                f"placement {number + 1} of {len(shares)}. Change `rows`, or leave the placement out."
            )
    return tuple(rows)


def split_sequences(where: str, call: Call, placement: Placement, together: int = 1) -> SequenceSplit:
    """The split of a generation over shares, parts and the tail, with so many neighboring sequences always together.
    Raises PlanError if it does not work out."""
    prompts, shares, tail = split_rows(where, call, placement), (placement, *placement.shares), placement.tail
    of_shard = []
    for number, (count, share) in enumerate(zip(prompts, shares, strict=True)):
        parts = share.strategy.num_row_shards * share.strategy.pipeline
        if count % parts:
            raise PlanError(
                f"{where}: data x fsdp x pipeline must divide the prompts of a generation in parts. Got {parts} for "
                f"{count} prompts of placement {number + 1}. Lower a degree, or use another batch size."
            )
        of_shard.append(count * call.num_drawn // share.strategy.num_row_shards)
        if share.parts > (most := of_shard[-1] // together):
            what = "sequences" if together == 1 else f"groups of {together} sequences"
            raise PlanError(
                f"{where}.parts: must be at most the {what} of each row shard, {most}. Got {share.parts}. Use fewer "
                "parts."
            )
    stay, tail_bounds = [0] * len(shares), (0,)
    if tail is not None:
        stay, tail_rows = _moving(tail.rows, of_shard, shares, tail.strategy, together)
        each = tail_rows // tail.strategy.num_row_shards
        tail_bounds = bounds_of(each, min(tail.parts, each // together), together) if each else (0,)
    bounds = [
        bounds_of(count - left, min(share.parts, (count - left) // together), together)
        for count, left, share in zip(of_shard, stay, shares, strict=True)
    ]
    return SequenceSplit(prompts, tuple(bounds), tuple(stay), tail_bounds)


def _moving(
    fraction: float, of_shard: Sequence[int], shares: Sequence[Placement], tail: Strategy, together: int
) -> tuple[list[int], int]:
    """Sequences of each row shard of every share that move, at most so large a fraction, and all together."""
    parts = tail.num_row_shards * tail.pipeline * together
    for most in range(math.floor(fraction * max(of_shard) + 1e-9), -1, -1):
        stay = [min(most * count // max(of_shard), count) // together * together for count in of_shard]
        total = sum(count * share.strategy.num_row_shards for count, share in zip(stay, shares, strict=True))
        if total % parts == 0:
            return stay, total
    raise AssertionError("no sequences divide by everything")


def near_blocks(rows: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """The rows of shares, each of which begins where the nearest of some blocks of rows does, if that is near.

    >>> near_blocks([75, 25], [40, 38, 22]), near_blocks([60, 40], [40, 38, 22])
    ([78, 22], [60, 40])
    """
    total, ends = sum(rows), list(itertools.accumulate(blocks))
    starts = [0]
    for start in itertools.accumulate(rows[:-1]):
        near = min(ends, key=lambda end: abs(end - start))
        starts.append(near if abs(near - start) <= _NEAR * total and near < total else start)
    sizes = [high - low for low, high in itertools.pairwise([*starts, total])]
    return sizes if min(sizes) > 0 else list(rows)


def block_bounds(blocks: Sequence[int], first: int, last: int, parts: int) -> list[int]:
    """The bounds of parts of the rows from the first to the last: those of blocks, if there are as many, or else of
    equal parts.

    >>> block_bounds([6, 6, 4], 0, 16, parts=3), block_bounds([6, 6, 4], 0, 16, parts=2)
    ([0, 6, 12, 16], [0, 8, 16])
    """
    inside = [end for end in itertools.accumulate(blocks) if first < end < last]
    if len(inside) + 1 == parts:
        return [first, *inside, last]
    return [first + bound for bound in bounds_of(last - first, parts)]


def bounds_of(count: int, parts: int, together: int = 1) -> tuple[int, ...]:
    """The bounds of equal parts, the later ones larger by one where it does not divide, or by so many as stay
    together."""
    return tuple(count // together * i // parts * together for i in range(parts + 1)) if parts else (0, 0)
