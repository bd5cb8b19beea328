"""Two models as pipelines in opposite directions over the same nodes, to be trained in one fused schedule."""

import math
from dataclasses import dataclass

from jaxrlhf.planner.schedules.instructions import Pipe, ScheduleError


@dataclass(frozen=True)
class TrainedModel:
    """How a model is trained by itself.

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
    """The pipes of one fused unit: groups of the first model upwards, groups of the second downwards, over N nodes.

    If one tensor degree is s times the other, every s consecutive stages of the model with the smaller one become one,
    on s times the devices: with s times the layers and a tensor degree s times as large, it is taken to have the same
    latency and the same memory for each device. N1 and N2 stages then need K1 and K2 groups, coprime, on N nodes:

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
    num_nodes = math.lcm(*stages)
    groups = [num_nodes // each for each in stages]
    micro_batches = [count * model.micro_batches for count, model in zip(groups, (first, second), strict=True)]
    if micro_batches[0] != micro_batches[1]:
        raise ScheduleError(
            f"Fused models: must have the same batch. Got {groups[0]} x {first.micro_batches} micro-batches of the "
            f"first and {groups[1]} x {second.micro_batches} of the second in a unit of {num_nodes} nodes. Choose "
            f"micro_batches in the ratio {groups[1]} to {groups[0]}."
        )
    pipes = []
    for index, (model, count, size) in enumerate(zip((first, second), groups, stages, strict=True)):
        for group in range(count):
            nodes = tuple(range(group * size, (group + 1) * size))
            pipes.append(
                Pipe(
                    nodes[:: -1 if index else 1],
                    model.micro_batches,
                    model.forward,
                    model.backward,
                    model.activation,
                    index,
                )
            )
    return tuple(pipes)
