"""The inner loops of the search: how long an iteration takes under a plan, what memory it lacks, and better plans.

The first two are what `simulate.steady_state` and `peak_memory` say, on a `FlatProblem`, over lists or arrays of
integers alike, so that they can be compiled or not. Here a plan has for each call the number of its choice among the
choices of all calls.

Single devices do not occur. A task waits for the last one on any of the devices of its call, or of its two calls; so
what is kept is when all devices of each call are free. Outputs that are brought take no devices, and no task here: the
call that needs them waits so much longer. Where nothing runs beside anything else, they are tasks like all others.
"""

from typing import Any, NamedTuple

ITERATIONS = 24
RUN_AHEAD = 2
FIRST_SETTLED = 3
LAST_SETTLED = 21
"""These are as in `simulate`."""
BUCKETS = 160
PER_UNIT = 8
"""Acceptances are for eighths of a temperature. What is worse by more than 20 is never accepted."""
NEVER = 1 << 62
"""The rank of a rival that is not there yet."""


class Work(NamedTuple):
    """Room for one plan at a time. Tasks of a call have slots, in which they stand as `simulate.unroll` has them."""

    overlaps: Any
    """[call]: the calls that have devices in common with it, as bits."""
    free: Any
    """[call]: when all of its devices are free."""
    weights: Any
    """[wait]: nanoseconds of bringing the weights that it is for."""
    data: Any
    """[wait]: nanoseconds of bringing the outputs that it is for."""
    leader: Any
    """[wait]: the wait whose task brings the weights."""
    waits: Any
    """[call]: tasks that it waits for in a late iteration; and for each lag, how many more than in an early one."""
    missing: Any
    """[iteration, call]: of the tasks that it waits for, those that have not been given their time."""
    arrived: Any
    """[iteration, call]: when the last of the others ends."""
    reached: Any
    """Entries of the two for calls that the last task was one less to wait for."""
    later: Any
    """[the same]: nanoseconds from its end until they know."""
    ready: Any
    """[task that is ready]: since when."""
    place: Any
    """[task that is ready]: its iteration and slot in one number, by which those go that are ready at the same time."""
    length: Any
    """[task that is ready]: nanoseconds."""
    partner: Any
    """[task that is ready]: the other call on whose devices it runs, or its own."""
    starts: Any
    """[iteration, slot]"""
    timed: Any
    """[iteration]: tasks of it that have been given their time."""
    slots: Any
    """The slots in which the plan has tasks, in iterations but the first."""
    sizes: Any
    """[rester]: bytes that count of what rests with it, and from twice the calls on [call]: of its copy."""
    room: Any
    """[call]: bytes that it may work with, of those that its memories have."""


class Rivals(NamedTuple):
    """The lowest plans in rank that differ in shape."""

    shape: Any
    rank: Any
    nanoseconds: Any
    lacking: Any
    plans: Any
    """[rival, call]"""


def sizes_of_work(num_calls, num_waits):
    """How long each of the sequences of `Work` is."""
    most_ready = num_calls * (num_calls + 4) * (RUN_AHEAD + 2)
    by_iteration = ITERATIONS * num_calls
    slots = num_calls * (num_calls + 4)
    return (
        *(num_calls, num_calls, num_waits, num_waits, num_waits, num_calls * (RUN_AHEAD + 1)),
        *(by_iteration, by_iteration, by_iteration, by_iteration, most_ready, most_ready, most_ready, most_ready),
        *(ITERATIONS * slots, ITERATIONS, slots, 3 * num_calls, num_calls),
    )


def _find_overlaps(flat, plan, work):
    """Notes which calls have devices in common, or cannot run side by side for another reason."""
    for a in range(len(plan)):
        bits = 0
        for b in range(len(plan)):
            apart = flat.first[plan[a]] >= flat.end[plan[b]] or flat.first[plan[b]] >= flat.end[plan[a]]
            if flat.one_at_a_time or not apart:
                bits |= 1 << b
        work.overlaps[a] = bits


def fit(flat, plan, work):
    """Gives each call the variant that fits, in place, where calls get it.

    Returns:
        Bytes by which the fullest memory is above its capacity; negative where all have room.

    Within a stretch of equal capacity, most is in its first memory or in the first memory of a call: those to the right
    of it are of the same calls, or of fewer.
    """
    num_calls = len(plan)
    for c in range(3 * num_calls):
        work.sizes[c] = 0
    for a in range(num_calls):
        work.room[a] = NEVER
    for k in range(len(flat.resters)):
        a = flat.resters[k]
        holder = k
        if flat.rests[k] >= 0:
            holder = 0
            while flat.rests[holder] != flat.rests[k] or (
                flat.layout[plan[flat.resters[holder]]] != flat.layout[plan[a]]
            ):
                holder += 1
        size = flat.base[plan[a]] if flat.of_base[k] else flat.resting[plan[a]]
        work.sizes[holder] = max(work.sizes[holder], size)
    for k in range(len(flat.copies)):
        a = flat.copies[k]
        m = 0
        while flat.copied_from[flat.copies[m]] != flat.copied_from[a] or (
            flat.layout[plan[flat.copies[m]]] != flat.layout[plan[a]]
        ):
            m += 1
        holder = 2 * num_calls + flat.copies[m]
        size = flat.copy[plan[a]]
        if flat.layout[plan[flat.copied_from[a]]] == flat.layout[plan[a]]:
            size -= flat.shared_with_training[plan[a]]
        work.sizes[holder] = max(work.sizes[holder], size)
    lacking = -NEVER
    for point in range(num_calls + len(flat.stretch)):
        memory = flat.first_memory[plan[point]] if point < num_calls else flat.stretch[point - num_calls]
        resting = 0
        here = 0
        for a in range(num_calls):
            if flat.first_memory[plan[a]] <= memory < flat.end_memory[plan[a]]:
                here |= 1 << a
        for k in range(len(flat.resters)):
            if here >> flat.resters[k] & 1:
                resting += work.sizes[k]
        for a in range(num_calls):
            alive = flat.alive[a] & here
            beside = flat.beside[a] & here
            most_beside = 0
            room = flat.capacity[memory] - resting
            for b in range(num_calls):
                if alive >> b & 1:
                    room -= work.sizes[2 * num_calls + b]
                if beside >> b & 1 and (
                    flat.first[plan[a]] >= flat.end[plan[b]] or flat.first[plan[b]] >= flat.end[plan[a]]
                ):
                    most_beside = max(most_beside, flat.working[plan[b]])
            if here >> a & 1:
                work.room[a] = min(work.room[a], room - most_beside)
            else:
                lacking = max(lacking, -room)
    for a in range(num_calls):
        if flat.fits:
            plan[a] = flat.fastest[plan[a]]
            while flat.working[plan[a]] > work.room[a] and flat.leaner[plan[a]] >= 0:
                plan[a] = flat.leaner[plan[a]]
        lacking = max(lacking, flat.working[plan[a]] - work.room[a])
    return lacking


def _tasks_of(flat, plan, work):
    """Notes how long it takes to bring what, what each call waits for, and the slots of all tasks.

    Returns:
        How many tasks an iteration has, but the first.
    """
    num_calls = len(plan)
    per_call = num_calls + 4
    for c in range(len(work.waits)):
        work.waits[c] = 0
    for w in range(len(flat.before)):
        a = flat.before[w]
        b = flat.after[w]
        work.weights[w] = 0
        work.data[w] = 0
        work.leader[w] = w
        if flat.weights[w] >= 0:
            work.weights[w] = flat.table[flat.at[flat.weights[w] + plan[a]] + flat.at[flat.weights_to[w] + plan[b]]]
        if flat.data[w] >= 0:
            work.data[w] = flat.table[flat.at[flat.data[w] + plan[a]] + flat.at[flat.data_to[w] + plan[b]]]
    for k in range(len(flat.sharers)):
        w = flat.sharers[k]
        m = 0
        while flat.before[flat.sharers[m]] != flat.before[w] or (
            flat.layout[plan[flat.after[flat.sharers[m]]]] != flat.layout[plan[flat.after[w]]]
        ):
            m += 1
        work.leader[w] = flat.sharers[m]
        work.weights[w] = work.weights[flat.sharers[m]]
    num_tasks = 0
    for w in range(len(flat.before)):
        number = 0
        if work.weights[w] > 0:
            number += 1
            if work.leader[w] == w:
                work.slots[num_tasks] = flat.after[w] * per_call
                num_tasks += 1
        if work.data[w] > 0:
            number += 1
            if flat.one_at_a_time:
                work.slots[num_tasks] = flat.after[w] * per_call + 1 + flat.before[w]
                num_tasks += 1
        work.waits[flat.lag[w] * num_calls + flat.after[w]] += max(1, number)
    for c in range(num_calls):
        work.slots[num_tasks] = c * per_call + num_calls + 2
        num_tasks += 1
        if flat.load[plan[c]] > 0:
            work.slots[num_tasks] = c * per_call + num_calls + 1
            num_tasks += 1
        if flat.unload[plan[c]] > 0:
            work.slots[num_tasks] = c * per_call + num_calls + 3
            num_tasks += 1
            work.waits[num_calls + c] += 1
    return num_tasks


def _settled(work, last, num_slots, num_tasks):
    """After how many iterations all tasks of one and of the one before come again; 0 if not yet."""
    for period in range(1, last - RUN_AHEAD + 1):
        here = last * num_slots
        before = (last - period) * num_slots
        later = work.starts[here + work.slots[0]] - work.starts[before + work.slots[0]]
        same = True
        for k in range(num_tasks):
            slot = work.slots[k]
            if work.starts[here + slot] != work.starts[before + slot] + later or (
                work.starts[here - num_slots + slot] != work.starts[before - num_slots + slot] + later
            ):
                same = False
                break
        if same:
            return period
    return 0


def iteration_length(flat, plan, work):
    """Nanoseconds of an iteration of those that a plan settles to."""
    _find_overlaps(flat, plan, work)
    num_calls = len(plan)
    per_call = num_calls + 4
    num_slots = num_calls * per_call
    num_tasks = _tasks_of(flat, plan, work)
    num_reached = 0
    for iteration in range(ITERATIONS):
        work.timed[iteration] = 0
        for c in range(num_calls):
            entry = iteration * num_calls + c
            work.missing[entry] = work.waits[c]
            work.arrived[entry] = 0
            for lag in range(1, min(iteration, RUN_AHEAD) + 1):
                work.missing[entry] += work.waits[lag * num_calls + c]
            if work.missing[entry] == 0:
                work.reached[num_reached] = entry
                work.later[num_reached] = 0
                num_reached += 1
    for c in range(num_calls):
        work.free[c] = 0
    num_ready = 0
    end = 0
    last = 1
    while True:
        for k in range(num_reached):
            entry = work.reached[k]
            work.arrived[entry] = max(work.arrived[entry], end + work.later[k])
            work.missing[entry] -= 1
            if work.missing[entry] <= 0:
                c = entry % num_calls
                work.ready[num_ready] = work.arrived[entry]
                work.partner[num_ready] = c
                if flat.load[plan[c]] > 0:
                    work.place[num_ready] = entry * per_call + num_calls + 1
                    work.length[num_ready] = flat.load[plan[c]]
                else:
                    work.place[num_ready] = entry * per_call + num_calls + 2
                    work.length[num_ready] = flat.seconds[plan[c]]
                num_ready += 1

        k = 0
        for m in range(1, num_ready):
            if work.ready[m] < work.ready[k] or (work.ready[m] == work.ready[k] and work.place[m] < work.place[k]):
                k = m
        place = work.place[k]
        b = work.partner[k]
        entry = place // per_call
        iteration = entry // num_calls
        c = entry - iteration * num_calls
        kind = place - entry * per_call
        start = max(work.ready[k], work.free[c], work.free[b])
        end = start + work.length[k]
        num_ready -= 1
        work.ready[k] = work.ready[num_ready]
        work.place[k] = work.place[num_ready]
        work.length[k] = work.length[num_ready]
        work.partner[k] = work.partner[num_ready]
        held = work.overlaps[c] | work.overlaps[b]
        for a in range(num_calls):
            if held >> a & 1 and work.free[a] < end:
                work.free[a] = end
        work.starts[place] = start

        num_reached = 0
        length = 0
        if kind == num_calls + 2:
            for k in range(flat.out_begin[c], flat.out_begin[c + 1]):
                w = flat.out[k]
                entry = (iteration + flat.lag[w]) * num_calls + flat.after[w]
                if entry >= ITERATIONS * num_calls:
                    continue
                if work.weights[w] > 0 and work.leader[w] == w:
                    work.ready[num_ready] = end
                    work.place[num_ready] = entry * per_call
                    work.length[num_ready] = work.weights[w]
                    work.partner[num_ready] = c
                    num_ready += 1
                if work.data[w] > 0 and flat.one_at_a_time:
                    work.ready[num_ready] = end
                    work.place[num_ready] = entry * per_call + 1 + c
                    work.length[num_ready] = work.data[w]
                    work.partner[num_ready] = c
                    num_ready += 1
                elif work.data[w] > 0 or work.weights[w] == 0:
                    work.reached[num_reached] = entry
                    work.later[num_reached] = work.data[w]
                    num_reached += 1
            length = flat.unload[plan[c]]
        elif kind == num_calls + 1:
            length = flat.seconds[plan[c]]
        elif kind == 0:
            for k in range(len(flat.sharers)):
                w = flat.sharers[k]
                leader = work.leader[w]
                if flat.after[leader] == c:
                    entry = (iteration - flat.lag[leader] + flat.lag[w]) * num_calls + flat.after[w]
                    if entry < ITERATIONS * num_calls:
                        work.reached[num_reached] = entry
                        work.later[num_reached] = 0
                        num_reached += 1
        else:
            if kind == num_calls + 3:
                entry += num_calls
            if entry < ITERATIONS * num_calls:
                work.reached[num_reached] = entry
                work.later[num_reached] = 0
                num_reached += 1
        if length > 0:  # what follows a call's weights, or itself, on its devices
            work.ready[num_ready] = end
            work.place[num_ready] = place + 1
            work.length[num_ready] = length
            work.partner[num_ready] = c
            num_ready += 1

        work.timed[iteration] += 1
        while work.timed[last] == num_tasks:
            period = 0
            if last >= FIRST_SETTLED:
                period = _settled(work, last, num_slots, num_tasks)
            slot = work.slots[0]
            if period == 0 and last == LAST_SETTLED:
                period = last - last // 2
                for k in range(1, num_tasks):
                    slot = min(slot, work.slots[k])
            if period > 0:
                return (
                    work.starts[last * num_slots + slot] - work.starts[(last - period) * num_slots + slot]
                ) // period
            last += 1


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
    nanoseconds = iteration_length(flat, plan, work)
    if missing <= 0:
        _note(fitting, _shape_of(flat, plan, work), nanoseconds, nanoseconds, missing, plan)
        return nanoseconds
    if nanoseconds < _lowest(fitting):
        _note(lacking, _shape_of(flat, plan, work), missing, nanoseconds, missing, plan)
    return int(nanoseconds * (1.0 + per_byte * missing))


def judge_each(flat, plans, number, plan, work, fitting, lacking):
    """Judges the first so many of `plans`, [plan, call]. `plan`: room for one."""
    for k in range(number):
        for c in range(len(plan)):
            plan[c] = plans[k * len(plan) + c]
        judge(flat, plan, work, 0.0, fitting, lacking)


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
    """Gives one call or two others of their choices, in place, by a random number. Returns the next random number."""
    num_calls = len(plan)
    x = _next_random(x)
    kind = (x >> 4) % 10
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
