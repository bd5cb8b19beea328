"""What a micro-batch costs each stage, as fused schedules are made with and priced by."""

import dataclasses

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.memory import residuals_per_token
from jaxrlhf.planner.costs.stage_costs import reference_costs, stage_costs
from jaxrlhf.planner.plans.plan import Placement
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

WIDE = dataclasses.replace(TINY, num_layers=8, hidden_size=1024, intermediate_size=4096, vocab_size=32_000)
STEP = ppo(WIDE, rows=16, prompt=256, response=256, mini_batches=1)
CALLS = [STEP.workload.call(name) for name in ("actor.train", "critic.train")]
COSTS = CostModel(read_cluster("1x4:a100-80g"))


def over_stages(**strategy):
    return Placement((0, 1, 2, 3), Strategy(pipeline=4, micro_batches=4, **strategy))


def test_stages_cost_what_the_cost_model_says_and_the_last_has_the_head():
    placement = over_stages()
    actor, critic = stage_costs(CALLS, [placement, placement], COSTS)
    for call, cost in zip(CALLS, (actor, critic), strict=True):
        passes = COSTS.of(call, range(4), placement.strategy).stage_seconds()
        assert (cost.forward, cost.backward) == tuple(zip(*passes, strict=True))
    assert isinstance(actor.backward, tuple) and isinstance(critic.backward, tuple)
    assert isinstance(actor.forward, tuple)
    assert actor.forward[:3] == pytest.approx([actor.forward[0]] * 3) and actor.forward[3] == 0.0
    assert actor.backward[3] > 1.2 * (actor.forward[0] + actor.backward[0])  # the head over the whole vocabulary
    assert critic.backward[3] < 1.1 * (actor.forward[0] + actor.backward[0])  # one number


def test_what_is_kept_hangs_on_what_a_backward_computes_anew():
    """Bytes of a micro-batch; the last stage keeps its input."""
    kept, anew = stage_costs(CALLS, [over_stages(), over_stages(remat="layer")], COSTS)
    tokens = 4 * 512
    strategy = over_stages().strategy
    layers = tokens * WIDE.itemsize * residuals_per_token(WIDE, strategy, 2)
    only_input = tokens * WIDE.itemsize * 1024
    assert kept.activation == (layers, layers, layers, only_input)
    assert anew.activation == (only_input,) * 4
    assert residuals_per_token(WIDE, strategy, 0) == 1024 < residuals_per_token(WIDE, strategy, 2)
    assert isinstance(kept.forward, tuple) and isinstance(anew.forward, tuple) and isinstance(anew.backward, tuple)
    assert anew.backward[0] > 2.5 * anew.forward[0]


def test_a_run_prices_stages_alike_whatever_devices_it_sees():
    placements = [over_stages(), over_stages()]
    assert stage_costs(CALLS, placements, reference_costs(8, 4)) == stage_costs(
        CALLS, placements, CostModel(read_cluster("2x4:h100"))
    )
