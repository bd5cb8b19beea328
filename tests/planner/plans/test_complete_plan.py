"""Placements of calls that a search does not place."""

import pytest

from jaxrlhf.algorithms.algorithm import EvaluationConfig, evaluation_step
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_step
from jaxrlhf.experience import Sampling
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.complete_plan import complete_plan, spread
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import DescribedStep, ppo, traced

STEP = ppo(rows=16, mini_batches=2)
ON_SECOND_HALF = Placement((4, 5, 6, 7), Strategy(fsdp=2, tensor=2, micro_batches=4))
CHOSEN = {
    "actor.generate": Placement(tuple(range(8)), Strategy(data=2, tensor=2, pipeline=2, micro_batches=2)),
    "reference.logprobs": Placement((2, 3), Strategy(tensor=2)),
    "critic.values": Placement((0, 1, 2, 3), Strategy(data=4)),
    "reward.scores": Placement((0,), Strategy()),
    "actor.train": ON_SECOND_HALF,
    "critic.train": Placement((0, 1), Strategy(data=2)),
}


def placed(step: DescribedStep, written=None, chosen=CHOSEN):
    return complete_plan(step.graph, chosen, step.models, num_devices=8, devices_per_node=4, written=written or {})


def test_what_is_computed_goes_to_the_first_train_call_that_takes_it():
    plan = placed(STEP)
    assert {name: plan.placements[name] for name in CHOSEN} == CHOSEN
    assert plan.placements["ppo_batch"] == Placement((4, 5, 6, 7), Strategy(data=4))
    check(plan, STEP.graph, STEP.models, 8, 4)


def test_a_computation_that_nobody_trains_on_stays_where_its_inputs_are_made():
    evaluation = traced(evaluation_step, STEP.roles, (), EvaluationConfig(Sampling(max_new_tokens=4)), rows=16)
    assert placed(evaluation).placements["actor.generate"] == CHOSEN["actor.generate"]
    assert set(placed(evaluation).placements) == {"actor.generate", "reward.scores"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, Placement(tuple(range(8)), Strategy(data=2, tensor=2, pipeline=2, micro_batches=2))),
        (4, Placement(tuple(range(8)), Strategy(data=2, tensor=2, pipeline=2))),
        (2, Placement((0, 1, 2, 3), Strategy(tensor=2, pipeline=2))),
        (3, Placement((0, 1, 2, 3), Strategy(tensor=2, pipeline=2))),
        (7, Placement(tuple(range(8)), Strategy(data=2, tensor=2, pipeline=2))),
        (9, Placement(tuple(range(8)), Strategy(data=2, tensor=2, pipeline=2))),  # 12, not 16, in two micro-batches
    ],
)
def test_a_call_with_other_rows_runs_as_near_as_it_can(rows, expected):
    evaluation = traced(evaluation_step, STEP.roles, (), EvaluationConfig(Sampling(max_new_tokens=4)), rows=rows)
    plan = placed(evaluation)
    assert plan.placements["actor.generate"] == expected
    check(plan, evaluation.graph, evaluation.models, 8, 4)


def test_a_call_of_another_name_runs_as_one_of_its_role():
    config = SFTConfig(update=SupervisedUpdate(mini_batches=1))
    warm_start = traced(sft_step, {"actor": STEP.roles["actor"]}, (), config, rows=16, response=8)
    only_generated = {"actor.generate": Placement((2, 3), Strategy(tensor=2))}
    assert placed(warm_start, chosen=only_generated).placements["actor.train"] == only_generated["actor.generate"]
    assert placed(warm_start, chosen={}).placements["actor.train"] == Placement(tuple(range(8)), Strategy(data=8))


def test_what_is_written_is_kept_whether_it_fits_or_not():
    on_three = Placement((0, 1, 2), Strategy(data=3))
    plan = placed(STEP, {"critic.train": on_three, "ppo_batch": Placement((0,), Strategy())})
    assert plan.placements["critic.train"] == on_three
    assert plan.placements["ppo_batch"] == Placement((0,), Strategy())
    with pytest.raises(
        PlanError, match=r"plan\.calls\.critic\.train: micro_batches x data x fsdp must divide a mini-batch of"
    ):
        check(plan, STEP.graph, STEP.models, 8, 4)


def test_rows_are_spread_over_part_of_a_node_or_whole_nodes():
    call = next(call for call in STEP.graph.calls if call.name == "ppo_batch")
    everywhere = tuple(range(12))
    assert spread(call, everywhere, devices_per_node=4).devices == tuple(range(8))  # three nodes do not divide 16 rows
    assert spread(call, everywhere, devices_per_node=6).devices == (0, 1, 2, 3)
    assert spread(call, (5, 6, 7), devices_per_node=4).devices == (5, 6)
