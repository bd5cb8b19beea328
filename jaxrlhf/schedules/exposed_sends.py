"""Seconds of sends between the stages of a pipeline that no computation hides: in closed form, as `spans` times them.

Stages compute while their outputs are under way, one at a time over each link. What a schedule waits for all the same
follows from its order. Letters, in comments: p workers, v virtual stages of each, m micro-batches, c seconds of a send.
"""

import functools

from jaxrlhf.schedules.schedule import interleaved_1f1b, makespan


def exposed_in_inference(stages: int, chunks: int, micro_batches: int, *, forward: float, send: float) -> float:
    """Exposed seconds of micro-batches through all stages, forward only, in the order of `forward_only`.

    The first micro-batch waits for every send. With chunks, so does the first of every group, each time that it comes
    round to a worker that has nothing else to do. Where sends are slower than stages, links set the pace.

    Args:
        forward: Seconds of a virtual stage.
        send: Seconds of one send.
    """
    groups = -(-micro_batches // stages)
    waits = stages * chunks - 1 + (groups - 1) * stages * (chunks - 1)
    return waits * send + (micro_batches - 1) * max(0.0, send - forward)


def exposed_in_training(
    schedule: str, stages: int, chunks: int, micro_batches: int, *, forward: float, backward: float, send: float
) -> float:
    """Exposed seconds of micro-batches through all stages and back.

    GPipe waits for the sends of the first micro-batch, forward and back. 1F1B has no micro-batch to spare: of p in a
    row, one waits for the way to the last stage and back. With chunks there are some to spare, and the schedule is
    timed.

    Args:
        schedule: 'gpipe' or '1f1b', as of a strategy.
        forward, backward: Seconds of a virtual stage.
        send: Seconds of one send.
    """
    if chunks > 1:
        return _exposed_interleaved(stages, chunks, micro_batches, forward, backward, send)
    there_and_back = 2 * (stages - 1) * send
    if schedule == "gpipe":
        pace = max(0.0, send - forward) + max(0.0, send - backward)
        return there_and_back + (micro_batches - 1) * pace
    groups, more = divmod(micro_batches - 1, stages)
    order = there_and_back * (groups + 1) + 2 * max(0, more - 1) * send
    # or every micro-batch goes over the first link, one after another
    link = (micro_batches + 2 * stages - 3) * send - (micro_batches - 1) * (forward + backward)
    return max(order, link)


@functools.lru_cache(maxsize=4096)
def _exposed_interleaved(
    stages: int, chunks: int, micro_batches: int, forward: float, backward: float, send: float
) -> float:
    schedule = interleaved_1f1b(stages, chunks, micro_batches, forward=forward, backward=backward)
    return makespan(schedule, send=send) - makespan(schedule)
