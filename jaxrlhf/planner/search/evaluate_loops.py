"""Evaluation of a plan, many thousand times a second: the time of an iteration, and the memory that the plan lacks.

`steady_iteration` is ReaL's Algorithm 1: tasks run in the order in which they get ready, each when all of its devices
are free. Of tasks that get ready at the same time, the one of the earlier iteration and call runs first. A task that is
ready keeps later ones off its devices, even while it cannot start and they could. `fit` finds the memory that a plan
lacks, as `peak_memory` does. `simulate` puts names to the tasks.

All are loops over a `FlatProblem` of lists or of arrays of integers, so that numba can compile them. A plan is, for
each call, the number of its choice among the choices of all calls.

Single devices do not occur: a task waits for the last one on any of the devices of its call, or of its two calls, so
the loops keep the time at which all devices of each call are free. Transfers of outputs occupy no device and are no
tasks here: the call that needs them waits longer. Only where nothing runs at the same time are they tasks like others.

Reference:
    Mei et al. 2024 (ReaL), arXiv:2406.14088, 5.1 and Algorithm 1.
"""

from typing import Any, NamedTuple

RUN_AHEAD = 2
"""An iteration begins when the one this far before it has ended: the trainer reads metrics a step late."""
ITERATIONS = 24
"""The most that are simulated. Nearly all plans repeat after two or three."""
FIRST_SETTLED = RUN_AHEAD + 1
"""The first iteration that can be seen to repeat: only from the second on do iterations have the same tasks."""
LAST_SETTLED = ITERATIONS - 1 - RUN_AHEAD
"""The last one that calls of later iterations, which are not simulated, cannot hold up."""
NEVER = 1 << 62
"""Later than any time, more than any memory."""
# These are defined here, not where else they are used, so that compiled loops follow their changes.


class Workspace(NamedTuple):
    """Room for one plan at a time.

    The tasks of an iteration have slots: `num_calls + 4` for each call, of which the first is for bringing its weights,
    one for bringing outputs of every other call, and the last three for loading, the call itself and unloading.
    """

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
    """[iteration, call]: the number of tasks that it waits for and that have no start time yet."""
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


def sizes_of_work(num_calls, num_waits):
    """The lengths of the sequences of `Workspace`."""
    most_ready = num_calls * (num_calls + 4) * (RUN_AHEAD + 2)
    by_iteration = ITERATIONS * num_calls
    slots = num_calls * (num_calls + 4)
    return (
        *(num_calls, num_calls, num_waits, num_waits, num_waits, num_calls * (RUN_AHEAD + 1)),
        *(by_iteration, by_iteration, by_iteration, by_iteration, most_ready, most_ready, most_ready, most_ready),
        *(ITERATIONS * slots, ITERATIONS, slots, 3 * num_calls, num_calls),
    )


def _find_overlaps(flat, plan, work):
    """Notes which calls have devices in common, or cannot run at the same time for another reason."""
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
        Bytes by which the fullest memory is above its capacity; negative if all have room.

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
    """Notes the times of transfers, the number of tasks that each call waits for, and the slots of all tasks.

    Returns:
        The number of tasks of an iteration after the first.
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
    """The number of iterations after which all tasks of one and of the one before repeat; 0 if not yet."""
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


def _add_ready(work, count, since, place, length, partner):
    """Adds a task to the ready ones. Returns the number of these."""
    work.ready[count] = since
    work.place[count] = place
    work.length[count] = length
    work.partner[count] = partner
    return count + 1


def _add_reached(work, count, entry, later):
    """Adds an entry to those that wait for one task less. Returns the number of these."""
    work.reached[count] = entry
    work.later[count] = later
    return count + 1


def steady_iteration(flat, plan, work):
    """The steady state of a plan. `work.starts` has the starts of the tasks, up to the iteration returned.

    They have settled once two consecutive iterations repeat two earlier ones, every task later by the same time: as no
    task waits for more than the two iterations before its own, all that follows then repeats too. The period can be
    longer than an iteration, where calls of two iterations take turns on a device in another order every other time.
    Plans that have not settled after `LAST_SETTLED` iterations get the average of the later half.

    Returns:
        Nanoseconds of an iteration; the last iteration simulated; the number of iterations after which all repeats, 0
        if they have not settled.
    """
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
                num_reached = _add_reached(work, num_reached, entry, 0)
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
                place = entry * per_call + num_calls + 2
                length = flat.seconds[plan[c]]
                if flat.load[plan[c]] > 0:
                    place -= 1
                    length = flat.load[plan[c]]
                num_ready = _add_ready(work, num_ready, work.arrived[entry], place, length, c)

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
                    num_ready = _add_ready(work, num_ready, end, entry * per_call, work.weights[w], c)
                if work.data[w] > 0 and flat.one_at_a_time:
                    num_ready = _add_ready(work, num_ready, end, entry * per_call + 1 + c, work.data[w], c)
                elif work.data[w] > 0 or work.weights[w] == 0:
                    num_reached = _add_reached(work, num_reached, entry, work.data[w])
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
                        num_reached = _add_reached(work, num_reached, entry, 0)
        else:
            if kind == num_calls + 3:
                entry += num_calls
            if entry < ITERATIONS * num_calls:
                num_reached = _add_reached(work, num_reached, entry, 0)
        if length > 0:  # what follows a call's weights, or itself, on its devices
            num_ready = _add_ready(work, num_ready, end, place + 1, length, c)

        work.timed[iteration] += 1
        while work.timed[last] == num_tasks:
            period = 0
            if last >= FIRST_SETTLED:
                period = _settled(work, last, num_slots, num_tasks)
            if period > 0 or last == LAST_SETTLED:
                since = period if period > 0 else last - last // 2
                slot = work.slots[0]
                for k in range(1, num_tasks):
                    slot = min(slot, work.slots[k])
                total = work.starts[last * num_slots + slot] - work.starts[(last - since) * num_slots + slot]
                return total // since, last, period
            last += 1
