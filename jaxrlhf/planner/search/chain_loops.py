"""Chains of plans by Metropolis-Hastings: how a plan is changed, which changes are accepted, which plans are kept.

Loops over lists or arrays of integers alike, as those of `evaluate_loops`, with which they are compiled.
"""

from typing import Any, NamedTuple

from jaxrlhf.planner.search.evaluate_loops import fit, steady_iteration

BUCKETS = 160
PER_UNIT = 8
"""Acceptances are for eighths of a temperature. What is worse by more than 20 is never accepted."""


_KINDS = 12
"""Kinds of changes."""


class Rivals(NamedTuple):
    """The lowest plans in rank that differ in shape."""

    shape: Any
    rank: Any
    nanoseconds: Any
    lacking: Any
    plans: Any
    """[rival, call]"""


def _next_random(x):
    """The next number of a 32-bit xorshift generator (Marsaglia 2003)."""
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    return x ^ ((x << 5) & 0xFFFFFFFF)


def _shape_of(flat, plan, work):
    """A number that is the same for plans that are alike but for which devices are which."""
    number = 0
    for c in range(len(plan)):
        number = (number * 1000003 + work.overlaps[c]) % 2147483647
        number = (number * 1000003 + flat.end[plan[c]] - flat.first[plan[c]]) % 2147483647
    return number


def _note(rivals, shape, rank, nanoseconds, lacking, plan):
    """Keeps a plan if it is the lowest in rank of its shape, and its shape among the lowest."""
    place = 0
    for k in range(len(rivals.rank)):
        if rivals.shape[k] == shape:
            place = k
            break
        if rivals.rank[k] > rivals.rank[place]:
            place = k
    if rank >= rivals.rank[place]:
        return
    rivals.shape[place] = shape
    rivals.rank[place] = rank
    rivals.nanoseconds[place] = nanoseconds
    rivals.lacking[place] = lacking
    for c in range(len(plan)):
        rivals.plans[place * len(plan) + c] = plan[c]


def _lowest(rivals):
    """The lowest rank of all."""
    rank = rivals.rank[0]
    for k in range(1, len(rivals.rank)):
        rank = min(rank, rivals.rank[k])
    return rank


def judge(flat, plan, work, per_byte, fitting, lacking):
    """The cost of a plan, whose calls get the variants that fit: nanoseconds of an iteration, and `per_byte` times as
    many more for every byte that it lacks.

    Notes it among those that fit, by nanoseconds, or, if it would be faster than they, among those that lack memory, by
    what they lack.
    """
    missing = fit(flat, plan, work)
    nanoseconds, _, _ = steady_iteration(flat, plan, work)
    if missing <= 0:
        _note(fitting, _shape_of(flat, plan, work), nanoseconds, nanoseconds, missing, plan)
        return nanoseconds
    if nanoseconds < _lowest(fitting):
        _note(lacking, _shape_of(flat, plan, work), missing, nanoseconds, missing, plan)
    return int(nanoseconds * (1.0 + per_byte * missing))


def judge_neighbors(flat, groups, plan, changed, work, fitting, lacking):
    """Judges all plans that differ from one in one call. `changed`: room for one.

    Returns:
        How many.
    """
    number = 0
    for c in range(len(plan)):
        for m in range(groups.member_begin[groups.begin[c]], groups.member_begin[groups.begin[c + 1]]):
            for a in range(len(plan)):
                changed[a] = plan[a]
            changed[c] = groups.members[m]
            judge(flat, changed, work, 0.0, fitting, lacking)
            number += 1
    return number


def _group_on(groups, c, first, end):
    """The choices of a call on certain devices; -1 if there are none."""
    for g in range(groups.begin[c], groups.begin[c + 1]):
        if groups.first[g] == first and groups.end[g] == end:
            return g
    return -1


def any_group(groups, c, x):
    """One of a call's groups, by a random number: every number of devices is as likely as every other."""
    size = groups.size_begin[c] + (x >> 4) % (groups.size_begin[c + 1] - groups.size_begin[c])
    first = groups.sizes[size]
    end = groups.begin[c + 1]
    if size + 1 < groups.size_begin[c + 1]:
        end = groups.sizes[size + 1]
    return first + (x >> 14) % (end - first)


def member(groups, g, x):
    """One of a group, by a random number: three times in four one of the fastest, each half as often as the one before
    it, else any."""
    size = groups.member_begin[g + 1] - groups.member_begin[g]
    bits = x >> 2
    rank = bits % size
    if x & 3:
        rank = 0
        while bits & 1 and rank + 1 < size:
            rank += 1
            bits >>= 1
    return groups.members[groups.member_begin[g] + rank]


def _change(flat, groups, plan, x):
    """Gives one call, two, or all that share devices others of their choices, in place, by a random number.
    Returns the next random number."""
    num_calls = len(plan)
    x = _next_random(x)
    kind = (x >> 4) % _KINDS
    a = (x >> 8) % num_calls
    b = (a + 1 + (x >> 16) % max(1, num_calls - 1)) % num_calls
    x = _next_random(x)
    if kind == 0:  # where it is
        g = _group_on(groups, a, flat.first[plan[a]], flat.end[plan[a]])
    elif kind < 3:  # where another one is
        g = _group_on(groups, a, flat.first[plan[b]], flat.end[plan[b]])
    else:  # anywhere
        g = any_group(groups, a, x)
    h = -1
    x = _next_random(x)
    if kind >= 10:  # and all others of its devices with it, half of the times in exchange for those there
        return _change_together(flat, groups, plan, flat.first[plan[a]], flat.end[plan[a]], g, kind == 11, x)
    if kind == 2:  # and the other one where it was
        h = _group_on(groups, b, flat.first[plan[a]], flat.end[plan[a]])
    elif kind == 5 or kind == 6:  # and the other one anywhere
        h = any_group(groups, b, x)
    elif kind == 7:  # and the other one there too
        h = _group_on(groups, b, groups.first[g], groups.end[g])
    elif kind > 7:  # and the other one beside it, in the other half of a block
        size = groups.end[g] - groups.first[g]
        first = groups.first[g] - size
        if groups.first[g] // size % 2 == 0:
            first = groups.end[g]
        h = _group_on(groups, b, first, first + size)
    if g >= 0:
        x = _next_random(x)
        plan[a] = member(groups, g, x)
    if h >= 0:
        x = _next_random(x)
        plan[b] = member(groups, h, x)
    return x


def _change_together(flat, groups, plan, first, end, g, exchanges, x):
    """Moves all calls on the devices from `first` to `end` to those of a group `g`, and, if it `exchanges`, those there
    to here. Returns the next random number."""
    for c in range(len(plan)):
        h = -1
        if flat.first[plan[c]] == first and flat.end[plan[c]] == end:
            h = _group_on(groups, c, groups.first[g], groups.end[g])
        elif exchanges and flat.first[plan[c]] == groups.first[g] and flat.end[plan[c]] == groups.end[g]:
            h = _group_on(groups, c, first, end)
        if h >= 0:
            x = _next_random(x)
            plan[c] = member(groups, h, x)
    return x


def chain(flat, groups, plan, steps, x, table, temperatures, per_byte, fitting, lacking, before, work):
    """Metropolis-Hastings, at temperatures that fall, in place.

    Args:
        x: A random number.
        table: [b] -> how many of 2**32 changes are accepted that cost b / 8 of a temperature more.
        temperatures: In nanoseconds, one after the other for as many steps each.
        fitting: Of the plans that fit, those with the shortest iterations.
        lacking: Of the plans that do not fit but would be faster, those that lack least.
        before: Room for a plan.

    Returns:
        The next random number.
    """
    cost = judge(flat, plan, work, per_byte, fitting, lacking)
    for step in range(steps):
        temperature = temperatures[step * len(temperatures) // steps]
        for c in range(len(plan)):
            before[c] = plan[c]
        x = _change(flat, groups, plan, x)
        if x & 3 == 0:
            x = _change(flat, groups, plan, x)
        changed = judge(flat, plan, work, per_byte, fitting, lacking)
        x = _next_random(x)
        if changed > cost:
            bucket = ((changed - cost) * PER_UNIT + temperature - 1) // temperature
            if bucket >= BUCKETS or x >= table[bucket]:
                for c in range(len(plan)):
                    plan[c] = before[c]
                continue
        cost = changed
    return x
