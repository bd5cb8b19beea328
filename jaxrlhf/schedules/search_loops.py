"""The inner loops of annealing and of list scheduling, over lists or arrays of integers alike, so that they can be
compiled or not.

Tasks have numbers, as in `job_shop`. In annealing, `order` is the workers' orders one after another, of which that of
worker i begins at `first[i]`; all other sequences are by task: the task that it needs and the one that needs it
(`before`, `after`, -1 if none), `worker`, `latency`, `memory` (by which it changes that of its worker), and `lane`
(equal ones are never exchanged).

In list scheduling, the tasks of lane k stand in `queue` from `queue_first[k]` on, in the order in which they must run,
and the lanes of worker i in `lanes` from `lanes_first[i]` on.
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


def _next_of(i, tables, limit, rank, cap, work):
    """Writes to `found` what worker i would run next, -1 for nothing, and when that could start."""
    lanes, lanes_first, queue, queue_first, partner, before, _, _, _, _, memory = tables
    _, finish, _, clock, kept, head, found = work
    best = -1
    best_start = 0
    for index in range(lanes_first[i], lanes_first[i + 1]):
        lane = lanes[index]
        place = queue_first[lane] + head[lane]
        if place == queue_first[lane + 1]:
            continue
        task = queue[place]
        need = before[task]
        start = clock[i]
        if need >= 0:
            if finish[need] < 0:
                continue
            start = max(start, finish[need])
        if memory[task] > 0 and kept[i] + memory[task] > cap:
            continue
        if partner[lane] >= 0 and head[lane] - head[partner[lane]] >= limit[lane]:
            continue
        if (
            best < 0
            or start < best_start
            or (start == best_start and (rank[task] < rank[best] or (rank[task] == rank[best] and task < best)))
        ):
            best = task
            best_start = start
    found[2 * i] = best
    found[2 * i + 1] = best_start


def list_round(tables, limit, rank, cap, work):
    """Always runs next what can start earliest, among those what ranks least, then what has the least number.

    Args:
        tables: `job_shop.Tables`.
        limit: Lane -> by how many tasks it may be ahead of the lane of its backwards.
        work: The results, `order` (the workers' tasks one after another) and `finish` (by task), and room to work in.

    Returns:
        The makespan; -1 if nothing can start within the cap, though something is left.
    """
    lanes, lanes_first, _, queue_first, partner, before, after, worker, lane_of, latency, memory = tables
    order, finish, place, clock, kept, head, found = work
    num_workers = len(lanes_first) - 1
    for task in range(len(before)):
        finish[task] = -1
    for lane in range(len(partner)):
        head[lane] = 0
    p = 0
    for i in range(num_workers):
        place[i] = p
        clock[i] = 0
        kept[i] = 0
        for index in range(lanes_first[i], lanes_first[i + 1]):
            p += queue_first[lanes[index] + 1] - queue_first[lanes[index]]
    for i in range(num_workers):
        _next_of(i, tables, limit, rank, cap, work)
    for _ in range(len(before)):
        best = -1
        start = 0
        for i in range(num_workers):
            task = found[2 * i]
            if task < 0:
                continue
            at = found[2 * i + 1]
            if (
                best < 0
                or at < start
                or (at == start and (rank[task] < rank[best] or (rank[task] == rank[best] and task < best)))
            ):
                best = task
                start = at
        if best < 0:
            return -1
        i = worker[best]
        finish[best] = clock[i] = start + latency[best]
        head[lane_of[best]] += 1
        kept[i] += memory[best]
        order[place[i]] = best
        place[i] += 1
        _next_of(i, tables, limit, rank, cap, work)
        follower = after[best]
        if follower >= 0 and worker[follower] != i:
            _next_of(worker[follower], tables, limit, rank, cap, work)
    longest = 0
    for i in range(num_workers):
        longest = max(longest, clock[i])
    return longest
