"""The costs of a micro-batch of a train call for each of its stages, by which fused schedules are found and priced.

One rule for the planner, which knows the cluster, and for a run whose plan was written by hand, which goes by the
numbers of `REFERENCE`: all of its processes must find the same schedule, whatever devices each of them sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.memory import residuals_per_token
from jaxrlhf.planner.plans.plan import Placement
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.schedules.instructions import PerStage
from jaxrlhf.sharding.stage_layers import layers_of_stages

REFERENCE = "h100"
"""The kind of devices by which a run prices stages."""


@dataclass(frozen=True)
class StageCost:
    """The costs of a micro-batch for the stages of one of two calls, the same for all or one for each. Only ratios
    between the two calls matter to a schedule."""

    forward: PerStage
    """Seconds."""
    backward: PerStage
    activation: PerStage
    """Bytes on a device, saved from forward to backward."""


def stage_costs(
    calls: Sequence[ModelCall], placements: Sequence[Placement], costs: CostModel
) -> tuple[StageCost, StageCost]:
    """The costs of the stages of two train calls, from the first stage of each to its last.

    A stage has its layers, the last one the head and the loss too. The last runs both passes of a micro-batch in its
    backward, so its forward takes nothing, and what it keeps is its input.
    """
    found = []
    for call, placement in zip(calls, placements, strict=True):
        strategy, model = placement.strategy, call.model
        devices = range(min(placement.devices), max(placement.devices) + 1)
        forward, backward = zip(*costs.of(call, devices, strategy).stage_seconds(), strict=True)
        *layers, _ = map(len, layers_of_stages(model.num_layers, strategy.num_stages))
        kept = [residuals_per_token(model, strategy, num_layers) for num_layers in layers] + [model.hidden_size]
        bytes_ = call.part_rows(strategy) * call.columns * model.itemsize
        found.append(StageCost(forward, backward, tuple(bytes_ * each for each in kept)))
    first, second = found
    return first, second


def reference_costs(num_devices: int, devices_per_node: int) -> CostModel:
    """Costs on devices of the reference kind."""
    return CostModel(read_cluster(f"{num_devices // devices_per_node}x{devices_per_node}:{REFERENCE}"))
