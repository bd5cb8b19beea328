"""Calls get their role's weights from where training has them."""

import numpy as np
import pytest

from jaxrlhf.planner.plans.device_order import reuse_training_shards, training_placements
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.reshard.moves import Grid
from jaxrlhf.reshard.traffic import describe, traffic
from jaxrlhf.sharding.strategy import Strategy
from tests.made_up_step import actor_critic, trace_step

GRAPH = trace_step(actor_critic)
EIGHT = tuple(range(8))


def generate_devices(generate: Placement, train: Placement, *, devices_per_node: int = 8) -> tuple[int, ...]:
    other = Placement(EIGHT, Strategy(data=8))
    names = {call.plan_name: other for call in GRAPH.calls if call.kind != "host"}
    plan = Plan({**names, "actor.generate": generate, "actor.train": train})
    trained = training_placements(plan, GRAPH)
    return reuse_training_shards(plan, GRAPH, trained, devices_per_node).placements["actor.generate"].devices


def received(train: Placement, generate: Placement, devices: tuple[int, ...]) -> int:
    def grid(placement, devices):
        strategy = placement.strategy
        return Grid((("data", strategy.data), ("fsdp", strategy.fsdp), ("tensor", strategy.tensor)), devices)

    weights = describe([((64, 64), np.float32, ("embed", "mlp"))])
    return traffic(weights, grid(train, train.devices), grid(generate, devices), node_size=8).moved_bytes


def test_generation_gets_the_order_in_which_it_needs_least():
    train, generate = Placement(EIGHT, Strategy(tensor=8)), Placement(EIGHT, Strategy(data=4, tensor=2))
    devices = generate_devices(generate, train)
    assert devices == (0, 4, 1, 5, 2, 6, 3, 7)
    # half of the weights a device, less the eighth that it has
    assert received(train, generate, devices) == 8 * (64 * 64 * 4) * 3 // 8
    assert received(train, generate, EIGHT) > received(train, generate, devices)


@pytest.mark.parametrize(
    ("train", "generate", "devices_per_node"),
    [
        pytest.param(Strategy(fsdp=8), Strategy(data=8), 8, id="there is nothing to save"),
        pytest.param(Strategy(tensor=8), Strategy(data=4, tensor=2), 4, id="a tensor group would lie over two nodes"),
        pytest.param(Strategy(fsdp=2, tensor=2), Strategy(data=4), 8, id="training has other devices"),
    ],
)
def test_the_natural_order_stays_where(train, generate, devices_per_node):
    places = [Placement(tuple(range(8 - s.num_devices, 8)), s) for s in (generate, train)]
    if train.num_devices == 4:
        places[0] = Placement((0, 1, 2, 3), generate)
    assert generate_devices(*places, devices_per_node=devices_per_node) == places[0].devices


def test_an_order_that_was_chosen_stays():
    chosen = (7, 6, 5, 4, 3, 2, 1, 0)
    generate = Placement(chosen, Strategy(data=4, tensor=2))
    assert generate_devices(generate, Placement(EIGHT, Strategy(tensor=8))) == chosen


def test_a_graph_that_trains_nothing_takes_the_order_of_the_step():
    """An evaluation is such a graph."""
    generate = Placement(EIGHT, Strategy(data=4, tensor=2))
    plan = Plan({call.plan_name: generate for call in GRAPH.calls if call.kind != "host"})
    trained = {"actor": Placement(EIGHT, Strategy(tensor=8))}
    ordered = reuse_training_shards(plan, GRAPH, trained, 8).placements
    assert ordered["actor.generate"].devices == (0, 4, 1, 5, 2, 6, 3, 7)
    assert ordered["critic.values"].devices == EIGHT
