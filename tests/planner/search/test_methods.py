"""Plans as people make them, and HybridFlow's mapping."""

import dataclasses
import functools
import itertools

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.plans.plan import Placement, PlanError
from jaxrlhf.planner.report import summary_lines
from jaxrlhf.planner.search.choices import make_problem, strategies
from jaxrlhf.planner.search.mappings import split, standalone
from jaxrlhf.planner.search.methods import METHODS, colocate, find_method, heuristic
from jaxrlhf.planner.search.peak_memory import peak_memory
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.search import fastest_that_fits
from jaxrlhf.planner.search.search_result import SearchResult
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

MODEL = dataclasses.replace(TINY, hidden_size=512, intermediate_size=1536, num_heads=8, num_kv_heads=4, vocab_size=2048)
CLUSTER = read_cluster("2x4:a100-80g")
STEP = ppo(MODEL, rows=64, prompt=32, response=32)


@functools.cache
def everything() -> Problem:
    return make_problem(STEP.workload, CLUSTER, CostModel(CLUSTER))


@functools.cache
def usual() -> Problem:
    return make_problem(STEP.workload, CLUSTER, CostModel(CLUSTER), among="usual")


def placed(result: SearchResult, problem: Problem):
    return {call.name: call.choices[i] for call, i in zip(problem.calls, result.plan, strict=True)}


@pytest.mark.parametrize("name", ["heuristic", "colocate", "standalone", "split", "hybridflow"])
def test_every_strategy_gives_a_plan_that_fits(name):
    problem = usual() if name == "heuristic" else everything()
    result = find_method(name)(problem)
    assert result.memory == peak_memory(problem, result.plan)
    assert all(taken <= room for taken, room in zip(result.memory, problem.capacity, strict=True))
    assert result.seconds == steady_state(problem, result.plan).seconds


def test_the_usual_plan_has_tensor_within_nodes_and_pipeline_across():
    for choice in placed(heuristic(usual()), usual()).values():
        assert (choice.devices, choice.strategy.tensor, choice.strategy.pipeline) == (range(8), 4, 2)


def test_models_share_all_devices_or_have_their_own():
    assert {c.devices for c in placed(colocate(everything()), everything()).values()} == {range(8)}
    own = placed(standalone(everything()), everything())
    sets = {call.weights: own[call.name].devices for call in everything().calls}
    assert sum(len(devices) for devices in sets.values()) == 8
    assert all(not set(a) & set(b) for a, b in itertools.combinations(sets.values(), 2))


def test_the_reference_stays_with_the_actor_and_the_reward_model_with_the_critic():
    devices = {name: c.devices for name, c in placed(split(everything()), everything()).items()}
    assert devices["actor.generate"] == devices["actor.train"] == devices["reference.logprobs"]
    assert devices["critic.values"] == devices["critic.train"] == devices["reward.scores"]
    assert not set(devices["actor.train"]) & set(devices["critic.train"])


def test_leaner_choices_are_taken_where_the_fastest_do_not_fit():
    problem = everything()
    choices = [range(len(call.choices)) for call in problem.calls]
    fastest = fastest_that_fits(problem, choices, "test")
    room = max(peak_memory(problem, fastest)) - 1
    tight = dataclasses.replace(problem, capacity=(room,) * 8)
    leaner = fastest_that_fits(tight, choices, "test")
    assert leaner != fastest
    assert max(peak_memory(tight, leaner)) <= room
    with pytest.raises(PlanError, match=r"test: must fit into the 1,000 bytes .* too much"):
        fastest_that_fits(dataclasses.replace(problem, capacity=(1000,) * 8), choices, "test")


def test_where_rows_do_not_divide_over_all_nodes_plans_are_on_as_many_as_they_do():
    """Nor on more nodes than a model has layers: four layers go over three nodes, and not over five."""
    given = Placement((0, 1), Strategy(tensor=2))
    step = ppo(rows=32, mini_batches=2)
    fixed = {"reference.logprobs": given}
    for name, (nodes, devices) in itertools.product(("heuristic", "colocate"), {3: 6, 5: 8}.items()):
        plan = plan_workload(step.workload, read_cluster(f"{nodes}x2:a100-80g"), method=name, fixed=fixed)
        for call, choice in plan.choices.items():
            assert choice.devices == (range(2) if call == "reference.logprobs" else range(devices)), call


@pytest.mark.parametrize("cluster", ["1x8:a100-80g", "1x8:a100-40g"])
def test_the_usual_plan_is_as_lean_as_it_has_to_be(cluster):
    """7 billion parameters for four models, on one node: with many micro-batches and remat."""
    work = ppo(ModelConfig(**PRESETS["7b"]), rows=512, prompt=1024, response=1024, mini_batches=8).workload
    plan = plan_workload(work, read_cluster(cluster), method="heuristic")
    assert {(c.strategy.tensor, c.strategy.num_devices) for c in plan.choices.values()} == {(8, 8)}
    assert plan.choices["actor.train"].strategy.micro_batches > 1


def test_sets_by_themselves_may_take_longer_than_a_plan_that_is_known():
    """On a processor, where calls on fewer devices are no slower together, all of them on all devices are faster."""
    plan = plan_workload(ppo(rows=64).workload, read_cluster("cpu:8"), method="standalone")
    devices = {call.weights: plan.choices[call.name].devices for call in plan.workload.calls}
    assert all(not set(a) & set(b) for a, b in itertools.combinations(devices.values(), 2))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(PlanError, match=r"must be one of search, .*. Got 'colocated'. Did you mean 'colocate'\?"):
        find_method("colocated")
    assert set(METHODS) == {
        "search", "hybridflow", "heuristic", "colocate", "standalone", "split", "interleaving", "interleaving-2",
        "disaggregated", "placement",
    }  # fmt: skip


def test_the_usual_plan_is_as_fast_as_its_degrees_allow():
    """The yardstick must not be slowed by micro-batches or remat that nobody would choose."""
    costs = CostModel(CLUSTER)
    plan = heuristic(usual())
    for call, i in zip(usual().calls, plan.plan, strict=True):
        degrees = call.choices[i].strategy
        work = STEP.workload.call(call.name)
        alike = [
            costs.seconds(work, range(8), s).total
            for s in strategies(work, 8, 4)
            if (s.tensor, s.pipeline, s.data, s.fsdp) == (degrees.tensor, degrees.pipeline, degrees.data, degrees.fsdp)
        ]
        assert call.choices[i].seconds == pytest.approx(min(alike))


def test_rows_that_do_not_divide_are_generated_on_all_devices():
    """512 prompts on 12 nodes of 8: once on 64 devices, as training that must divide left no other."""
    work = ppo(ModelConfig(**PRESETS["7b"]), rows=512, prompt=1024, response=1024, mini_batches=8).workload
    plan = plan_workload(work, read_cluster("12x8:h100"), method="colocate")
    generate, call = plan.choices["actor.generate"], work.call("actor.generate")
    assert generate.devices == range(96)
    copies = call.copied_rows(generate.strategy)
    assert copies == -512 % generate.strategy.num_row_shards > 0
    assert f"Rows of no weight, where rows do not divide: actor.generate {copies} beside 512" in "\n".join(
        summary_lines(plan)
    )
    model = CostModel(plan.cluster)
    whole = dataclasses.replace(call, rows=512 + copies)  # copies cost what rows cost
    assert model.seconds(call, range(96), generate.strategy) == model.seconds(whole, range(96), generate.strategy)
