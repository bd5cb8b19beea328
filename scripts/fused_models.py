"""Two models as pipelines in opposite directions over the same workers, to be trained in one fused schedule: those of
RLHFuse's Table 3, and the baselines that it compares with.

Reference: Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, 5.2 and 7.3.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.schedules.instructions import Instruction, PerStage, Pipe, Schedule, ScheduleError
from jaxrlhf.schedules.job_shop import as_schedule, job_shop, list_schedule, ranks

MODELS: dict[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]] = {
    (8, 4): ((5, 1.95), (4, 2)),
    (8, 8): ((5, 1.95), (2, 1)),
    (16, 8): ((2, 1.64), (2, 2)),
    (16, 16): ((2, 1.64), (1, 1)),
}
"""Stages of both models -> latency of a forward and activation per micro-batch and stage, of each: 33B and 13B
parameters on 8 stages, 65B and 33B on 16."""


@dataclass(frozen=True)
class TrainedModel:
    """The strategy and the costs of a model that is trained by itself.

    Attributes:
        data: Data-parallel degree: how many pipeline groups there are.
        pipeline: Stages of a group.
        tensor: Tensor degree: devices of a stage.
        micro_batches: Micro-batches that each pipeline group processes.
        forward, backward: Latencies of one micro-batch on one stage.
        activation: Memory that a device keeps for a micro-batch on one stage from its forward to its backward.
    """

    data: int
    pipeline: int
    tensor: int
    micro_batches: int
    forward: float
    backward: float
    activation: float


def fused_pipes(first: TrainedModel, second: TrainedModel) -> tuple[Pipe, ...]:
    """The pipes of one fused unit: groups of the first model upwards, groups of the second downwards, over N workers.

    If one tensor degree is s times the other, every s consecutive stages of the model with the smaller one become one,
    on s times the devices: with s times the layers and a tensor degree s times as large, it is taken to have the same
    latency and the same memory for each device. N1 and N2 stages then need K1 and K2 groups, coprime, on N workers:

        K1 * N1 = K2 * N2 = N        K1 * M1 = K2 * M2

    The whole training is data / K such units beside one another.

    Raises:
        ScheduleError: The degrees or the micro-batches do not fit.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 5.2.
    """
    for name, model in (("first", first), ("second", second)):
        for key in ("data", "pipeline", "tensor", "micro_batches"):
            if getattr(model, key) < 1:
                raise ScheduleError(
                    f"{key} of the {name} model: must be at least 1. Got {getattr(model, key)}. Use 1 or more."
                )
    devices = [model.data * model.pipeline * model.tensor for model in (first, second)]
    if devices[0] != devices[1]:
        raise ScheduleError(
            "Fused models: must be trained on equally many devices. Got data * pipeline * tensor = "
            f"{devices[0]} for the first and {devices[1]} for the second. Raise the data degree of the one with fewer."
        )
    stages = []
    for name, model, other in (("first", first, second), ("second", second, first)):
        larger = max(model.tensor, other.tensor)
        if larger % model.tensor:
            raise ScheduleError(
                f"Fused models: one tensor degree must divide the other. Got {first.tensor} and {second.tensor}. "
                "Use powers of two."
            )
        merged = larger // model.tensor
        if model.pipeline % merged:
            raise ScheduleError(
                f"pipeline of the {name} model: with tensor={model.tensor} beside {other.tensor}, every {merged} "
                f"stages become one, so {merged} must divide them. Got {model.pipeline}. "
                f"Use {model.pipeline // merged * merged or merged} or {-(-model.pipeline // merged) * merged}."
            )
        stages.append(model.pipeline // merged)
    num_workers = math.lcm(*stages)
    groups = [num_workers // each for each in stages]
    micro_batches = [count * model.micro_batches for count, model in zip(groups, (first, second), strict=True)]
    if micro_batches[0] != micro_batches[1]:
        raise ScheduleError(
            f"Fused models: must have the same batch. Got {groups[0]} x {first.micro_batches} micro-batches of the "
            f"first and {groups[1]} x {second.micro_batches} of the second in a unit of {num_workers} workers. Choose "
            f"micro_batches in the ratio {groups[1]} to {groups[0]}."
        )
    pipes = []
    for index, (model, count, size) in enumerate(zip((first, second), groups, stages, strict=True)):
        for group in range(count):
            workers = tuple(range(group * size, (group + 1) * size))
            pipes.append(
                Pipe(
                    workers[:: -1 if index else 1],
                    model.micro_batches,
                    model.forward,
                    model.backward,
                    model.activation,
                    index,
                )
            )
    return tuple(pipes)


def paper_pipes(large: int, small: int, micro_batches: int) -> tuple[Pipe, ...]:
    """The pipes of an instance of the paper: stages of both models, micro-batches of the large one. A backward takes
    twice a forward."""
    first, second = (
        TrainedModel(large // stages, stages, 1, micro_batches * stages // large, forward, 2 * forward, activation)
        for stages, (forward, activation) in zip((large, small), MODELS[large, small], strict=True)
    )
    return fused_pipes(first, second)


def serial_latency(pipes: Sequence[Pipe]) -> float:
    """The sum over models of what 1F1B takes, if the next begins when the one before has ended everywhere.

        sum over models of the largest of its pipes' (M + S - 1) * (forward + backward)

    For pipes with K chunks on N workers it is (K M + N - 1) * (forward + backward) if N divides M. Where stages differ,
    micro-batches follow one another as the slowest worker lets them, and pass the others once.
    """
    latest: dict[int, float] = {}
    for pipe in pipes:
        by_worker: dict[int, float] = {}
        for stage, worker in enumerate(pipe.workers):
            by_worker[worker] = by_worker.get(worker, 0) + pipe.work(stage)
        slowest, chunks = max(by_worker.values()), pipe.stages // len(by_worker)
        latency = pipe.micro_batches * slowest + (sum(by_worker.values()) - slowest) / chunks
        latest[pipe.model] = max(latest.get(pipe.model, 0), latency)
    return sum(latest.values())


def shallow_serial_latency(pipes: Sequence[Pipe]) -> float:
    """`serial_latency` with half the stages and twice the data-parallel groups: 1F1B+ in the paper.

    A stage then has twice the layers, so twice the latency; a pipeline has half the micro-batches, rounded up. Pipes of
    an odd number of stages stay as they are. Whether the weights fit is not asked.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 7.3.
    """
    halved = [
        pipe
        if pipe.stages % 2 or len(set(pipe.workers)) < pipe.stages
        else dataclasses.replace(
            pipe,
            workers=pipe.workers[: pipe.stages // 2],
            micro_batches=-(-pipe.micro_batches // 2),
            forward=_in_pairs(pipe.forward),
            backward=None if pipe.backward is None else _in_pairs(pipe.backward),
            activation=_in_pairs(pipe.activation),
        )
        for pipe in pipes
    ]
    return serial_latency(halved)


def _in_pairs(latency: PerStage) -> PerStage:
    """Sums over every two stages."""
    if not isinstance(latency, tuple):
        return 2 * latency
    return tuple(sum(latency[i : i + 2]) for i in range(0, len(latency), 2))


def greedy_schedule(pipes: Sequence[Pipe]) -> Schedule:
    """Always what can start earliest; among those the larger model's, and of these a backward. Memory is no object.

    Reference:
        Zhong et al. 2024, arXiv:2409.13221, 5.2.
    """
    shop = job_shop(pipes)
    found = list_schedule(shop, ranks(shop, _larger_model_first))
    assert found is not None, "without a cap something can always start"
    return as_schedule(shop, found.orders)


def _larger_model_first(pipe: Pipe, instruction: Instruction) -> tuple[float, ...]:
    """The paper's greedy rule: the larger model, of it the backward."""
    before, after = pipe.before_and_after[0, True]
    return (-(before + pipe.latency(0, forward=True) + after), instruction.forward)
