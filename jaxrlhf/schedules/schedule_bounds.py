"""Schedules of several pipes: a lower bound of the makespan, and the schedule without fusion with its memory."""

from collections.abc import Sequence

from jaxrlhf.schedules.instructions import Instruction, Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.schedule import forward_only, interleaved_1f1b, peak_activations


def lower_bound(pipes: Sequence[Pipe]) -> float:
    """A makespan below which no schedule of these pipes can be.

    For each worker, and each set of the pipes that run on it, the sum of: the earliest time at which an instruction of
    the set can start, all its work there, and the shortest time from its last instruction to the end. The maximum over
    workers and sets. The paper takes only the set of all pipes.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 7.3.
    """
    heads: dict[tuple[int, int], float] = {}
    tails: dict[tuple[int, int], float] = {}
    work: dict[tuple[int, int], float] = {}
    for number, pipe in enumerate(pipes):
        for (stage, forward), (head, tail) in pipe.before_and_after.items():
            key = (pipe.workers[stage], number)
            heads[key] = min(heads.get(key, head), head)
            tails[key] = min(tails.get(key, tail), tail)
            work[key] = work.get(key, 0) + pipe.micro_batches * pipe.latency(stage, forward=forward)
    bound = 0.0
    for worker in {worker for worker, _ in work}:
        here = [key for key in work if key[0] == worker]
        for head in {heads[key] for key in here}:
            for tail in {tails[key] for key in here}:
                chosen = [key for key in here if heads[key] >= head and tails[key] >= tail]
                if chosen:
                    bound = max(bound, head + sum(work[key] for key in chosen) + tail)
    return bound


def serial_schedule(pipes: Sequence[Pipe]) -> Schedule:
    """The models trained one after another by 1F1B, interleaved if a worker has several stages of a pipe. Raises
    ScheduleError if the stages of a pipe are not dealt to its workers in rounds."""
    num_workers = max(max(pipe.workers) for pipe in pipes) + 1
    orders: list[list[Instruction]] = [[] for _ in range(num_workers)]
    for model in sorted({pipe.model for pipe in pipes}):
        for index, pipe in enumerate(pipes):
            if pipe.model != model:
                continue
            stages = len(set(pipe.workers))
            chunks = pipe.stages // stages
            if pipe.workers != pipe.workers[:stages] * chunks:
                raise ScheduleError(
                    f"workers of pipe {index}: must go over its workers in rounds. Got {pipe.workers}. "
                    "Use such as (0, 1, 0, 1)."
                )
            build = forward_only if pipe.backward is None else interleaved_1f1b
            for worker, order in zip(pipe.workers, build(stages, chunks, pipe.micro_batches).orders, strict=False):
                orders[worker] += [task._replace(pipe=index) for task in order]
    return Schedule(tuple(pipes), tuple(map(tuple, orders)))


def serial_peak(pipes: Sequence[Pipe]) -> float:
    """The most activation memory of a worker when the models are trained one after another by 1F1B."""
    return max(peak_activations(serial_schedule(pipes)))


def added_peaks(pipes: Sequence[Pipe]) -> float:
    """The sum over models of the most activation memory of a worker when it is trained by itself by 1F1B."""
    models = {pipe.model for pipe in pipes}
    return sum(serial_peak([pipe for pipe in pipes if pipe.model == model]) for model in models)
