"""The inner loops of annealing, over lists or arrays of integers alike, so that they can be compiled or not.

Tasks have numbers, as in `job_shop`. `order` is the workers' orders one after another, of which that of worker i begins
at `first[i]`; all other sequences are by task: the task that it needs and the one that needs it (`before`, `after`, -1
if none), `worker`, `latency`, `memory` (by which it changes that of its worker), and `lane` (equal ones are never
exchanged).
"""

BUCKETS = 160
PER_UNIT = 8
"""Acceptances are for eighths of the average latency or activation. What is worse by more than 20 is never accepted."""


def next_random(x: int) -> int:
    """The next number of a 32-bit xorshift generator (Marsaglia 2003)."""
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    return x ^ ((x << 5) & 0xFFFFFFFF)


def accepted(worse, unit, level, x, table) -> bool:
    """True if a move that is worse by this amount is taken. `unit` is the average of the table, `x` a random number."""
    bucket = (worse * PER_UNIT + unit - 1) // unit
    return bucket < BUCKETS and x < table[level * BUCKETS + bucket]


def heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack):
    """Computes when each task finishes, and a sequence in which each comes after what it needs; -1 if they deadlock.

    Every worker runs until it has to wait, and goes on when what it waits for is there.

    Args:
        order: The workers' orders, one after another; `first[i]` is where worker i's begins.
    """
    num_workers = len(first) - 1
    for task in range(len(before)):
        finish[task] = -1
    for i in range(num_workers):
        place[i] = first[i]
        clock[i] = 0
        waiting[i] = -1
        stack[i] = i
    top = num_workers
    done = 0
    while top > 0:
        top -= 1
        i = stack[top]
        now = clock[i]
        p = place[i]
        end = first[i + 1]
        while p < end:
            task = order[p]
            need = before[task]
            if need >= 0:
                arrival = finish[need]
                if arrival < 0:
                    waiting[i] = need
                    break
                if arrival > now:
                    now = arrival
            now += latency[task]
            finish[task] = now
            sequence[done] = task
            done += 1
            p += 1
            follower = after[task]
            if follower >= 0 and waiting[worker[follower]] == task:
                waiting[worker[follower]] = -1
                stack[top] = worker[follower]
                top += 1
        place[i] = p
        clock[i] = now
    if done < len(before):
        return -1
    longest = 0
    for i in range(num_workers):
        longest = max(longest, clock[i])
    return longest


def tails(order, first, after, worker, latency, sequence, position, tail):
    """Computes the time from the start of each task to the end of all tasks that wait for it."""
    for index in range(len(sequence) - 1, -1, -1):
        task = sequence[index]
        rest = 0
        if after[task] >= 0:
            rest = tail[after[task]]
        p = position[task] + 1
        if p < first[worker[task] + 1]:
            rest = max(rest, tail[order[p]])
        tail[task] = rest + latency[task]


def longest_after_exchange(p, order, first, before, after, worker, latency, finish, tail):
    """The longest way through the tasks at p and p + 1 once they are exchanged. The makespan, if that is not less."""
    a = order[p]
    b = order[p + 1]
    i = worker[a]
    head_b = 0
    if p > first[i]:
        head_b = finish[order[p - 1]]
    if before[b] >= 0:
        head_b = max(head_b, finish[before[b]])
    head_a = head_b + latency[b]
    if before[a] >= 0:
        head_a = max(head_a, finish[before[a]])
    tail_a = 0
    if after[a] >= 0:
        tail_a = tail[after[a]]
    if p + 2 < first[i + 1]:
        tail_a = max(tail_a, tail[order[p + 2]])
    tail_a += latency[a]
    tail_b = tail_a
    if after[b] >= 0:
        tail_b = max(tail_b, tail[after[b]])
    return max(head_a + tail_a, head_b + latency[b] + tail_b)


def latency_round(
    order, first, before, after, worker, latency, memory, lane, cap, target, unit, table, levels, moves, x, best, work
):
    """Exchanges neighbors on a critical path, at random, in place. Those cannot deadlock; no others shorten anything.

    Returns:
        The least makespan found, whose orders are then in `best`, and the moves tried.
    """
    finish, sequence, place, clock, waiting, stack, tail, position, level_at, arcs = work
    for i in range(len(first) - 1):
        kept = 0
        for p in range(first[i], first[i + 1]):
            position[order[p]] = p
            kept += memory[order[p]]
            level_at[order[p]] = kept
    span = heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack)
    tails(order, first, after, worker, latency, sequence, position, tail)
    shortest = span
    best[:] = order
    num_arcs = -1
    for move in range(moves):
        if shortest <= target:
            return shortest, move
        if num_arcs < 0:
            num_arcs = 0
            for i in range(len(first) - 1):
                for p in range(first[i], first[i + 1] - 1):
                    a = order[p]
                    b = order[p + 1]
                    if (
                        finish[a] + tail[b] == span
                        and finish[a] - latency[a] + tail[a] == span
                        and lane[a] != lane[b]
                        and before[b] != a
                    ):
                        arcs[num_arcs] = p
                        num_arcs += 1
            if num_arcs == 0:
                return shortest, move
        x = next_random(x)
        p = arcs[x % num_arcs]
        a = order[p]
        b = order[p + 1]
        level_b = level_at[a] - memory[a] + memory[b]
        if level_b > cap and memory[b] > 0:
            continue
        worse = longest_after_exchange(p, order, first, before, after, worker, latency, finish, tail) - span
        if worse > 0:
            x = next_random(x)
            if not accepted(worse, unit, move * levels // moves, x, table):
                continue
        order[p] = b
        order[p + 1] = a
        position[b] = p
        position[a] = p + 1
        level_at[b] = level_b
        level_at[a] = level_b + memory[a]
        span = heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack)
        tails(order, first, after, worker, latency, sequence, position, tail)
        num_arcs = -1
        if span < shortest:
            shortest = span
            best[:] = order
    return shortest, moves


def memory_round(
    order, first, before, after, worker, latency, memory, lane, floor, limit, unit, table, levels, moves, x, best, work
):
    """Exchanges any neighbors, half of them where memory is above a cap, as long as the makespan stays within a limit.

    What is made smaller is the sum of all that is above the cap. Once nothing is, the cap is lowered by a quarter of
    what the peak is above `floor`.

    Returns:
        The lowest peak found, whose orders are then in `best`, and the moves tried.
    """
    finish, sequence, place, clock, waiting, stack, tail, position, level_at, over = work
    num_tasks = len(before)
    for i in range(len(first) - 1):
        kept = 0
        for p in range(first[i], first[i + 1]):
            position[order[p]] = p
            kept += memory[order[p]]
            level_at[order[p]] = kept
    heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack)
    tails(order, first, after, worker, latency, sequence, position, tail)
    excess = 0
    num_over = 0
    lowest = -1
    cap = 0
    for move in range(moves):
        if excess == 0:
            lowest = 0
            for task in range(num_tasks):
                lowest = max(lowest, level_at[task])
            best[:] = order
            if lowest <= floor:
                return lowest, move
            cap = lowest - max(1, (lowest - floor) // 4)
            num_over = 0
            for task in range(num_tasks):
                place_of_over = -1
                if level_at[task] > cap:
                    excess += level_at[task] - cap
                    over[num_over] = task
                    place_of_over = num_over
                    num_over += 1
                over[num_tasks + task] = place_of_over
        x = next_random(x)
        if x & 1:
            p = position[over[(x >> 8) % num_over]] - 1 + (x >> 1) % 3
        else:
            p = (x >> 8) % num_tasks
        if p < 0 or p + 1 >= num_tasks:
            continue
        a = order[p]
        b = order[p + 1]
        if worker[a] != worker[b] or lane[a] == lane[b] or before[b] == a:
            continue
        level_b = level_at[a] - memory[a] + memory[b]
        worse = max(0, level_b - cap) - max(0, level_at[a] - cap)
        if worse > 0:
            x = next_random(x)
            if not accepted(worse, unit, move * levels // moves, x, table):
                continue
        if longest_after_exchange(p, order, first, before, after, worker, latency, finish, tail) > limit:
            continue
        order[p] = b
        order[p + 1] = a
        if heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack) < 0:
            order[p] = a
            order[p + 1] = b
            heads(order, first, before, after, worker, latency, finish, sequence, place, clock, waiting, stack)
            continue
        position[b] = p
        position[a] = p + 1
        tails(order, first, after, worker, latency, sequence, position, tail)
        excess += worse
        level_at[b] = level_b
        level_at[a] = level_b + memory[a]
        for task in (a, b):
            place_of_over = over[num_tasks + task]
            if place_of_over >= 0 and level_at[task] <= cap:
                num_over -= 1
                over[place_of_over] = over[num_over]
                over[num_tasks + over[num_over]] = place_of_over
                over[num_tasks + task] = -1
            elif place_of_over < 0 and level_at[task] > cap:
                over[num_over] = task
                over[num_tasks + task] = num_over
                num_over += 1
    return lowest, moves
