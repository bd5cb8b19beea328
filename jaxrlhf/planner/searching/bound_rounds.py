"""The inner loops of branch and bound, over lists or arrays of integers alike: which plans could be below a limit.

First every call is given a group of choices, those on the same devices; then one choice of its group. What is not
chosen yet counts with the least that it could be. `exhaustive` says why the bound holds.
"""

from typing import Any, NamedTuple


class Leasts(NamedTuple):
    """The least of what the choices of every group take."""

    seconds: Any
    """[call]: of a call and of loading its weights, in nanoseconds; of all its choices."""
    area: Any
    """[call]: of nanoseconds with loading and unloading, times devices."""
    group_seconds: Any
    """[group], as all that follow: the least of a call and of loading its weights."""
    group_busy: Any
    """The least of that with unloading them."""
    resting: Any
    working: Any
    copy: Any
    base: Any
    between: Any
    """[call, call]: the calls that come after the one and before the other in every iteration, as bits; -1 where the
    other one does not wait for the one."""
    weights: Any
    """[wait]: where in `table` the least seconds of bringing weights begin; -1 where none are brought."""
    data: Any
    """The same of outputs."""
    alone: Any
    """[wait]: 1 where the weights that it is for are brought for it alone, else 0."""
    table: Any
    """Tables of nanoseconds one after another, row by row: rows are groups of the call that is waited for."""
    order: Any
    """[level]: in which order calls are given a group, and then a choice."""


class State(NamedTuple):
    """Where the loop is, and room for one bound."""

    level: Any
    """[0]: how many groups and choices are given."""
    tried: Any
    """[level]: how many groups or choices have been tried."""
    group: Any
    """[call]: its group; -1: none yet."""
    choice: Any
    """[call]: its choice; -1: none yet."""
    seconds: Any
    """[call]"""
    path: Any
    """[call, call]: the least from the start of the one to the end of the other."""
    brought: Any
    """[wait]: the least between the end of the one call and the start of the other."""
    load: Any
    """[call]: the least that devices are busy on the first device of a call."""
    looked: Any
    """[0]: how many bounds have been computed."""


def sizes_of_state(num_calls, num_waits):
    """How long each of the sequences of `State` is."""
    return (1, 2 * num_calls, num_calls, num_calls, num_calls, num_calls * num_calls, num_waits, num_calls, 1)


def _has(groups, g, device):
    """Whether a device is one of a group's."""
    return groups.first[g] <= device < groups.end[g]


def _find_brought(flat, groups, leasts, state):
    """Notes the least that each wait takes, and how long that keeps the first devices of calls busy.

    Returns:
        The least that all of them take together.
    """
    num_calls = len(state.group)
    total = 0
    for c in range(num_calls):
        state.load[c] = 0
    for w in range(len(flat.before)):
        a = flat.before[w]
        b = flat.after[w]
        weights = 0
        data = 0
        if state.group[a] >= 0 and state.group[b] >= 0:
            x = state.choice[a]
            y = state.choice[b]
            if x >= 0 and y >= 0:
                if flat.weights[w] >= 0:
                    weights = flat.table[flat.at[flat.weights[w] + x] + flat.at[flat.weights_to[w] + y]]
                if flat.data[w] >= 0:
                    data = flat.table[flat.at[flat.data[w] + x] + flat.at[flat.data_to[w] + y]]
            else:
                width = groups.begin[b + 1] - groups.begin[b]
                entry = (state.group[a] - groups.begin[a]) * width + state.group[b] - groups.begin[b]
                if leasts.weights[w] >= 0:
                    weights = leasts.table[leasts.weights[w] + entry]
                if leasts.data[w] >= 0:
                    data = leasts.table[leasts.data[w] + entry]
            busy = data if flat.one_at_a_time else 0  # else data takes no device
            if leasts.alone[w] > 0:
                busy += weights
            total += busy
            if busy > 0:
                for c in range(num_calls):
                    g = state.group[c]
                    if g >= 0 and (
                        _has(groups, state.group[a], groups.first[g]) or _has(groups, state.group[b], groups.first[g])
                    ):
                        state.load[c] += busy
        state.brought[w] = max(weights, data)
    return total


def _least_nanoseconds(flat, groups, leasts, state, num_devices):
    """No plan with these groups and choices has shorter iterations."""
    num_calls = len(state.group)
    total = _find_brought(flat, groups, leasts, state)
    area = 0
    for c in range(num_calls):
        g = state.group[c]
        x = state.choice[c]
        if g < 0:
            state.seconds[c] = leasts.seconds[c]
            area += leasts.area[c]
            total += leasts.seconds[c]
            continue
        if x < 0:
            state.seconds[c] = leasts.group_seconds[g]
            busy = leasts.group_busy[g]
        else:
            state.seconds[c] = flat.seconds[x] + flat.load[x]
            busy = state.seconds[c] + flat.unload[x]
        total += busy
        area += busy * (groups.end[g] - groups.first[g])
        for other in range(num_calls):
            at = state.group[other]
            if at >= 0 and _has(groups, g, groups.first[at]):
                state.load[other] += busy
    least = area // num_devices
    if flat.one_at_a_time:
        least = total
    for c in range(num_calls):
        least = max(least, state.load[c])

    for a in range(num_calls):
        for b in range(num_calls):
            state.path[a * num_calls + b] = -1
        state.path[a * num_calls + a] = state.seconds[a]
    for w in range(len(flat.before)):
        if flat.lag[w] == 0:
            entry = flat.before[w] * num_calls + flat.after[w]
            here = state.seconds[flat.before[w]] + state.brought[w] + state.seconds[flat.after[w]]
            state.path[entry] = max(state.path[entry], here)
    for width in range(1, num_calls):
        for a in range(num_calls - width):
            b = a + width
            between = leasts.between[a * num_calls + b]
            if between < 0:
                continue
            way = state.path[a * num_calls + b]
            for c in range(a + 1, b):
                if between >> c & 1:
                    way = max(way, state.path[a * num_calls + c] + state.path[c * num_calls + b] - state.seconds[c])
                    at = state.group[c]
                    if at >= 0:
                        together = state.seconds[a] + state.seconds[b]
                        for other in range(a + 1, b):
                            g = state.group[other]
                            if between >> other & 1 and g >= 0 and _has(groups, g, groups.first[at]):
                                together += state.seconds[other]
                        way = max(way, together)
            state.path[a * num_calls + b] = way

    for w in range(len(flat.before)):
        lag = flat.lag[w]
        if lag == 0:
            continue
        a = flat.before[w]
        b = flat.after[w]
        if state.path[b * num_calls + a] >= 0:
            least = max(least, (state.path[b * num_calls + a] + state.brought[w]) // lag)
        for v in range(w):
            if lag == 1 and flat.lag[v] == 1:
                there = state.path[b * num_calls + flat.before[v]]
                back = state.path[flat.after[v] * num_calls + a]
                if there >= 0 and back >= 0:
                    least = max(least, (there + back + state.brought[w] + state.brought[v]) // 2)
    return least


def _same_layout(flat, state, a, b):
    """Whether two calls have their weights in the same layout, or still could have."""
    if state.choice[a] >= 0 and state.choice[b] >= 0:
        return flat.layout[state.choice[a]] == flat.layout[state.choice[b]]
    return True


def _least_memory_lacking(flat, groups, leasts, state):
    """In every plan with these groups and choices, some memory lacks at least so many bytes."""
    num_calls = len(state.group)
    lacking = -(1 << 62)
    for point in range(num_calls + len(flat.stretch)):
        if point < num_calls:
            if state.group[point] < 0:
                continue
            memory = groups.first_memory[state.group[point]]
        else:
            memory = flat.stretch[point - num_calls]
        here = 0
        for a in range(num_calls):
            g = state.group[a]
            if g >= 0 and groups.first_memory[g] <= memory < groups.end_memory[g]:
                here |= 1 << a
        resting = 0
        for k in range(len(flat.resters)):
            a = flat.resters[k]
            if not here >> a & 1:
                continue
            counted = False
            for m in range(k):
                b = flat.resters[m]
                if here >> b & 1 and flat.rests[k] >= 0 and flat.rests[m] == flat.rests[k]:
                    counted = counted or (_on_the_same(groups, state, a, b) and _same_layout(flat, state, a, b))
            if not counted and flat.of_base[k]:
                resting += flat.base[state.choice[a]] if state.choice[a] >= 0 else leasts.base[state.group[a]]
            elif not counted:
                resting += flat.resting[state.choice[a]] if state.choice[a] >= 0 else leasts.resting[state.group[a]]
        most = 0
        for c in range(num_calls):
            size = 0
            if here >> c & 1:
                x = state.choice[c]
                size = flat.least_working[x] if x >= 0 else leasts.working[state.group[c]]
            alive = flat.alive[c] & here
            for k in range(len(flat.copies)):
                a = flat.copies[k]
                if not alive >> a & 1:
                    continue
                counted = False
                for m in range(k):
                    b = flat.copies[m]
                    if alive >> b & 1 and flat.copied_from[b] == flat.copied_from[a]:
                        counted = counted or (_on_the_same(groups, state, a, b) and _same_layout(flat, state, a, b))
                if not counted and state.choice[a] >= 0:
                    size += flat.copy[state.choice[a]] - flat.shared_with_training[state.choice[a]]
                elif not counted:
                    size += leasts.copy[state.group[a]]
            most = max(most, size)
        lacking = max(lacking, resting + most - flat.capacity[memory])
    return lacking


def _on_the_same(groups, state, a, b):
    """Whether two calls are on the same devices."""
    return (
        groups.first[state.group[a]] == groups.first[state.group[b]]
        and groups.end[state.group[a]] == groups.end[state.group[b]]
    )


def next_plans(flat, groups, leasts, state, num_devices, limit, limit_of_lack, found, most_looked):
    """Goes on through all plans, and notes those that could take less than a limit and lack less than another.

    Calls are on many devices first, and run the fastest way first.

    Args:
        limit: In nanoseconds.
        limit_of_lack: In bytes; 1 for plans that fit.
        found: [plan, call], room for them.
        most_looked: Bounds to compute at the most.

    Returns:
        How many plans are in `found` now, and whether it went through all.
    """
    num_calls = len(state.group)
    num_found = 0
    room = len(found) // num_calls
    until = state.looked[0] + most_looked
    while True:
        level = state.level[0]
        if num_found == room or state.looked[0] >= until:
            return num_found, False
        c = leasts.order[level % num_calls]
        if level < num_calls:
            candidate = groups.begin[c + 1] - 1 - state.tried[level]
            left = candidate - groups.begin[c] + 1
        else:
            candidate = groups.member_begin[state.group[c]] + state.tried[level]
            left = groups.member_begin[state.group[c] + 1] - candidate
        if left == 0:
            if level < num_calls:
                state.group[c] = -1
            else:
                state.choice[c] = -1
            state.tried[level] = 0
            if level == 0:
                return num_found, True
            state.level[0] = level - 1
            continue
        state.tried[level] += 1
        if level < num_calls:
            state.group[c] = candidate
        else:
            state.choice[c] = groups.members[candidate]
        state.looked[0] += 1
        if _least_nanoseconds(flat, groups, leasts, state, num_devices) >= limit:
            continue
        if _least_memory_lacking(flat, groups, leasts, state) >= limit_of_lack:
            continue
        if level + 1 < 2 * num_calls:
            state.level[0] = level + 1
            continue
        for a in range(num_calls):
            found[num_found * num_calls + a] = state.choice[a]
        num_found += 1
