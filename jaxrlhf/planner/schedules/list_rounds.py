"""The inner loop of list scheduling, over lists or arrays of integers alike, so that it can be compiled or not.

Tasks and kinds have numbers, as in `job_shop`: the tasks of kind k stand in `queue` from `queue_first[k]` on, in the
order in which they must run, and the kinds of node i in `kinds` from `kinds_first[i]` on.
"""


def _next_of(
    i,
    kinds,
    kinds_first,
    queue,
    queue_first,
    head,
    partner,
    limit,
    before,
    finish,
    memory,
    rank,
    clock,
    kept,
    cap,
    found,
):
    """Writes what node i would run next, -1 for nothing, and when that could start."""
    best = -1
    best_start = 0
    for index in range(kinds_first[i], kinds_first[i + 1]):
        kind = kinds[index]
        place = queue_first[kind] + head[kind]
        if place == queue_first[kind + 1]:
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
        if partner[kind] >= 0 and head[kind] - head[partner[kind]] >= limit[kind]:
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


def list_round(
    kinds,
    kinds_first,
    queue,
    queue_first,
    partner,
    limit,
    before,
    after,
    node,
    kind_of,
    latency,
    memory,
    rank,
    cap,
    out,
):
    """Always runs next what can start earliest, among those what ranks least, then what has the least number.

    Args:
        partner: Kind -> the kind of its backwards, or -1; `limit`: by how many tasks it may be ahead of them.
        out: `order`, the nodes' tasks one after another; `finish`, by task; and room to work in.

    Returns:
        The makespan; -1 if nothing can start within the cap, though something is left.
    """
    order, finish, place, clock, kept, head, found = out
    num_nodes = len(kinds_first) - 1
    for task in range(len(before)):
        finish[task] = -1
    for kind in range(len(partner)):
        head[kind] = 0
    p = 0
    for i in range(num_nodes):
        place[i] = p
        clock[i] = 0
        kept[i] = 0
        for index in range(kinds_first[i], kinds_first[i + 1]):
            p += queue_first[kinds[index] + 1] - queue_first[kinds[index]]
    for i in range(num_nodes):
        _next_of(
            i, kinds, kinds_first, queue, queue_first, head, partner, limit, before, finish, memory, rank, clock, kept,
            cap, found,
        )  # fmt: skip
    for _ in range(len(before)):
        best = -1
        start = 0
        for i in range(num_nodes):
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
        i = node[best]
        finish[best] = clock[i] = start + latency[best]
        head[kind_of[best]] += 1
        kept[i] += memory[best]
        order[place[i]] = best
        place[i] += 1
        _next_of(
            i, kinds, kinds_first, queue, queue_first, head, partner, limit, before, finish, memory, rank, clock, kept,
            cap, found,
        )  # fmt: skip
        follower = after[best]
        if follower >= 0 and node[follower] != i:
            _next_of(
                node[follower], kinds, kinds_first, queue, queue_first, head, partner, limit, before, finish, memory,
                rank, clock, kept, cap, found,
            )  # fmt: skip
    longest = 0
    for i in range(num_nodes):
        longest = max(longest, clock[i])
    return longest
