"""Measures of a schedule of several pipes: how short it could be, and what it is without fusion."""

from collections.abc import Sequence

from jaxrlhf.schedules.instructions import Instruction, Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.schedule import forward_only, interleaved_1f1b, peak_activations


def lower_bound(pipes: Sequence[Pipe]) -> float:
    """A makespan below which no schedule of these pipes can be.

    For each node, and each set of the pipes that run on it: when its first instruction can arrive at the earliest, all
    its work there, and the shortest way from its last one to the end. With all pipes as the set this is the paper's.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 7.3.
    """
    heads: dict[tuple[int, int], float] = {}
    tails: dict[tuple[int, int], float] = {}
    work: dict[tuple[int, int], float] = {}
    for number, pipe in enumerate(pipes):
        for (stage, forward), (head, tail) in pipe.ways.items():
            key = (pipe.nodes[stage], number)
            heads[key] = min(heads.get(key, head), head)
            tails[key] = min(tails.get(key, tail), tail)
            work[key] = work.get(key, 0) + pipe.micro_batches * pipe.latency(stage, forward=forward)
    bound = 0.0
    for node in {node for node, _ in work}:
        here = [key for key in work if key[0] == node]
        for head in {heads[key] for key in here}:
            for tail in {tails[key] for key in here}:
                chosen = [key for key in here if heads[key] >= head and tails[key] >= tail]
                if chosen:
                    bound = max(bound, head + sum(work[key] for key in chosen) + tail)
    return bound


def serial_schedule(pipes: Sequence[Pipe]) -> Schedule:
    """One model after another, each by 1F1B; interleaved, where a pipe comes to its nodes several times.

    Raises:
        ScheduleError: A pipe goes over its nodes in other ways than in rounds.
    """
    num_nodes = max(max(pipe.nodes) for pipe in pipes) + 1
    orders: list[list[Instruction]] = [[] for _ in range(num_nodes)]
    for model in sorted({pipe.model for pipe in pipes}):
        for index, pipe in enumerate(pipes):
            if pipe.model != model:
                continue
            stages = len(set(pipe.nodes))
            chunks = pipe.stages // stages
            if pipe.nodes != pipe.nodes[:stages] * chunks:
                raise ScheduleError(
                    f"nodes of pipe {index}: must go over its nodes in rounds. Got {pipe.nodes}. "
                    "Use such as (0, 1, 0, 1)."
                )
            build = forward_only if pipe.backward is None else interleaved_1f1b
            for node, order in zip(pipe.nodes, build(stages, chunks, pipe.micro_batches).orders, strict=False):
                orders[node] += [task._replace(pipe=index) for task in order]
    return Schedule(tuple(pipes), tuple(map(tuple, orders)))


def serial_peak(pipes: Sequence[Pipe]) -> float:
    """The most activation memory of a node when the models are trained one after another by 1F1B."""
    return max(peak_activations(serial_schedule(pipes)))


def added_peaks(pipes: Sequence[Pipe]) -> float:
    """The sum over models of the most activation memory of a node when it is trained by itself by 1F1B."""
    models = {pipe.model for pipe in pipes}
    return sum(serial_peak([pipe for pipe in pipes if pipe.model == model]) for model in models)
