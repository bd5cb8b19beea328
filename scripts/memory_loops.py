"""The inner loop of annealing for memory, over lists or arrays of integers alike, so that it can be compiled or not.

Names are those of `jaxrlhf.schedules.search_loops`, with which it is compiled.
"""

from jaxrlhf.schedules.search_loops import accepted, heads, longest_after_exchange, next_random, tails


def memory_round(
    order, first, before, after, node, latency, memory, lane, floor, limit, unit, table, levels, moves, x, best, work
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
    heads(order, first, before, after, node, latency, finish, sequence, place, clock, waiting, stack)
    tails(order, first, after, node, latency, sequence, position, tail)
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
        if node[a] != node[b] or lane[a] == lane[b] or before[b] == a:
            continue
        level_b = level_at[a] - memory[a] + memory[b]
        worse = max(0, level_b - cap) - max(0, level_at[a] - cap)
        if worse > 0:
            x = next_random(x)
            if not accepted(worse, unit, move * levels // moves, x, table):
                continue
        if longest_after_exchange(p, order, first, before, after, node, latency, finish, tail) > limit:
            continue
        order[p] = b
        order[p + 1] = a
        if heads(order, first, before, after, node, latency, finish, sequence, place, clock, waiting, stack) < 0:
            order[p] = a
            order[p + 1] = b
            heads(order, first, before, after, node, latency, finish, sequence, place, clock, waiting, stack)
            continue
        position[b] = p
        position[a] = p + 1
        tails(order, first, after, node, latency, sequence, position, tail)
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
