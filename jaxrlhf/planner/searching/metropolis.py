"""Chains of plans by Metropolis-Hastings, over the choices of single calls and of pairs.

Reference:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, 5.2.
"""

import math
import random
from typing import NamedTuple

from jaxrlhf.planner.searching import search_rounds
from jaxrlhf.planner.searching.arena import Arena
from jaxrlhf.planner.searching.flat_problem import Integers, as_integers
from jaxrlhf.planner.searching.lean_plans import fast_to_lean
from jaxrlhf.planner.searching.search_rounds import BUCKETS, NEVER, PER_UNIT


class _Way(NamedTuple):
    """How a chain goes about its rounds. Temperatures are in parts of the shortest iteration known."""

    beginning: str
    """`on`: where it is. `afresh`: at random, many calls on many devices or few. `best`: at the best plan. `rival`: at
    one of the best that differ in shape."""
    first: float
    """The temperature at which a round begins."""
    last: float
    """That at which it ends."""
    cost_of_lack: float
    """How much longer an iteration counts, in parts of it, where a device lacks as much memory as it has."""


WAYS = (
    _Way("on", first=0.3, last=0.003, cost_of_lack=5.0),
    _Way("afresh", first=0.05, last=0.002, cost_of_lack=2.0),
    _Way("best", first=0.05, last=0.002, cost_of_lack=2.0),
    _Way("rival", first=0.02, last=0.001, cost_of_lack=1.0),
)
"""Chains have them in turn."""
_ROUND = 2_000
"""Steps in which a chain cools down once."""
_TEMPERATURES = 32
_DESCENTS = 4
"""Plans at a time whose neighbors are all looked at."""


def walk(arena: Arena, *, seed: int, steps: int, chains: int, part: float) -> None:
    """Chains take turns, a round each, and note what they find in the arena.

    The first round begins at the fastest choice of every call or, where that does not fit, at the first plan that does
    on the way from there to the leanest. In a step, a call or two get other choices: at random, where another call is,
    or beside it. A plan that does not fit costs more the more it lacks, so that a chain finds its way out. Steps are
    taken as if a step back were as likely, which it is not quite.

    Args:
        steps: Of all chains together.
        part: Of the time of the search, after which no round begins but the first.
    """
    chance = random.Random(seed)
    starts = _starts(arena)
    plans = [starts[chain % len(starts)] for chain in range(chains)]
    numbers = [chance.getrandbits(32) or 1 for _ in range(chains)]
    table = as_integers([int(math.exp(-b / PER_UNIT) * 2**32) for b in range(BUCKETS)], compiled=arena.compiled)
    before, capacity = arena.room(len(arena.problem.calls)), max(1, min(arena.problem.capacity))
    length = max(1, min(_ROUND, steps // (4 * chains)))
    taken = turn = 0
    while taken < steps and not (turn and arena.time_is_up(part)):
        chain, length = turn % chains, min(length, steps - taken)
        way = WAYS[chain % len(WAYS)]
        if turn >= chains:
            plans[chain] = _beginning(arena, way, plans[chain], chance)
        plan = as_integers(plans[chain], compiled=arena.compiled)
        numbers[chain] = arena.loops["chain"](
            *(arena.flat, arena.groups, plan, length, numbers[chain], table, _temperatures(arena, way, plans[chain])),
            *(way.cost_of_lack / capacity, arena.fitting, arena.lacking, before, arena.work),
        )
        plans[chain] = [int(number) for number in plan]
        arena.looked_at(length)
        taken += length
        turn += 1


def descend(arena: Arena, *, most: int) -> None:
    """From the best plans, as long as that helps: looks at all plans that differ from one of them in one call.

    Args:
        most: Plans to look at, all together.
    """
    before, tried, neighbors = NEVER + 1, set[tuple[int, ...]](), len(arena.groups.members)
    while arena.best < before and not arena.time_is_up():
        before = arena.best
        for _, _, _, plan in arena.found(arena.fitting)[:_DESCENTS]:
            if plan not in tried and (len(tried) + 1) * neighbors <= most:
                tried.add(plan)
                here = as_integers(plan, compiled=arena.compiled)
                changed = arena.room(len(plan))
                number = arena.loops["judge_neighbors"](
                    *(arena.flat, arena.groups, here, changed, arena.work, arena.fitting, arena.lacking)
                )
                arena.looked_at(int(number))


def _starts(arena: Arena) -> list[list[int]]:
    """The fastest choice of every call, and, on the way from there to the leanest, the first plan that fits."""
    found: list[list[int]] = []
    for plan in fast_to_lean(arena.problem, arena.kept):
        numbers = arena.numbers(plan)
        arena.judge(numbers)
        if not found or arena.best < NEVER:
            found.append(numbers)
        if arena.best < NEVER:
            break
    return found


def _beginning(arena: Arena, way: _Way, plan: list[int], chance: random.Random) -> list[int]:
    """Where a chain goes on in its next round."""
    if way.beginning == "afresh":
        groups, wide, begun = arena.groups, chance.random(), []
        for c in range(len(plan)):
            on_most = chance.random() < wide
            group = groups.begin[c + 1] - 1 if on_most else search_rounds.any_group(groups, c, chance.getrandbits(32))
            begun.append(int(search_rounds.member(groups, group, chance.getrandbits(32))))
        return begun
    found = arena.found(arena.fitting)
    if way.beginning == "on" or not found:
        return plan
    return list(found[0 if way.beginning == "best" else chance.randrange(len(found))][3])


def _temperatures(arena: Arena, way: _Way, plan: list[int]) -> Integers:
    """In nanoseconds, falling. Where no plan is known that fits, in parts of all calls one after another."""
    unit = arena.best if arena.best < NEVER else sum(int(arena.flat.seconds[number]) for number in plan)
    cooler = (way.last / way.first) ** (1 / (_TEMPERATURES - 1))
    degrees = [max(1, int(unit * way.first * cooler**level)) for level in range(_TEMPERATURES)]
    return as_integers(degrees, compiled=arena.compiled)
