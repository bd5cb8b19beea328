"""The test bench for algorithms finds what it is for."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from jaxrlhf.algorithms.ppo import PPOConfig
from jaxrlhf.algorithms.sft import SupervisedUpdate, sft_loss
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import SMALL_MODEL, check_plan_invariance, learning_curve, random_plan, small_run
from jaxrlhf.tracing import compute

HERE = __file__
_times_compiled = itertools.count()


@dataclasses.dataclass(frozen=True)
class Settings:
    sampling: Sampling = Sampling()
    update: SupervisedUpdate = SupervisedUpdate(mini_batches=4)


def imitate(roles, state, prompts: Prompts, config: Settings):
    """The actor learns its own responses by heart."""
    rollout = roles.actor.generate(prompts, config.sampling)
    return {"actor": roles.actor.train(sft_loss, {"sequences": rollout}, config.update)}, state


def impure_step(roles, state, prompts: Prompts, config: Settings):
    results, state = imitate(roles, state, prompts, config)
    return {**results, "impure": compute(impure, prompts)}, state


def impure(prompts):
    """Another number in every program that it becomes part of."""
    return jnp.float32(next(_times_compiled))


def idle_step(roles, state, prompts: Prompts, config: Settings):
    return {"length": compute(mean_length, roles.actor.generate(prompts, config.sampling))}, state


def mean_length(rollout):
    return rollout.lengths.mean()


ROLES = {"critic": None, "reference": None, "reward": None, "cost": None}


def test_a_result_that_hangs_on_the_plan_is_found():
    with pytest.raises(AssertionError, match=r"impure_step, random plan 0 \(actor\.generate on .*\): step 1: impure"):
        check_plan_invariance(f"{HERE}:impure_step", num_plans=1, steps=1, roles=ROLES)


def test_training_that_changes_nothing_is_found():
    still = {**ROLES, "actor": {"model": SMALL_MODEL, "optimizer": {"learning_rate": 1e-20}}}
    with pytest.raises(AssertionError, match=r"imitate: training must change weights. Got the same after 1 steps"):
        check_plan_invariance(f"{HERE}:imitate", num_plans=0, steps=1, roles=still)


def test_a_small_run_is_small_where_nobody_says_otherwise():
    settings = small_run("ppo").settings
    assert isinstance(settings, PPOConfig)
    assert (settings.sampling.max_new_tokens, settings.actor_update.mini_batches) == (6, 2)
    settings = small_run("ppo", settings={"sampling": {"max_new_tokens": 9}, "gae_lambda": 0.5}).settings
    assert (settings.sampling.max_new_tokens, settings.gae_lambda) == (9, 0.5)
    assert settings.actor_update.mini_batches == 2 and settings.sampling.stop_ids
    assert list(small_run("sft").roles) == ["actor"]
    assert small_run("ppo", batch_size=4, roles={"extra": {"init": "actor"}}).roles["extra"].init == "actor"
    assert small_run("ppo", learning_rate=0.5).roles["critic"].optimizer.learning_rate == 0.5  # pyright: ignore


def test_random_plans_are_valid_and_differ():
    phase = assemble(small_run("ppo"), 8, 4).train
    models = {name: role.model for name, role in phase.roles.items() if name != "reward"}  # pyright: ignore
    plans = [random_plan(phase, seed=seed) for seed in range(8)]
    for plan in plans:
        check(plan, phase.graph, models, 8, 4)
    assert len({str(plan) for plan in plans}) == 8
    strategies = [placement.strategy for plan in plans for placement in plan.placements.values()]
    for degree in ("data", "fsdp", "tensor", "micro_batches"):
        assert any(getattr(strategy, degree) > 1 for strategy in strategies), degree
    assert any(s.balance for s in strategies) and any(plan.offload for plan in plans)


def test_an_unknown_metric_names_those_that_are_there():
    with pytest.raises(KeyError, match=r"must have the metric. Got 'score/mean'. It has: .*length"):
        learning_curve(f"{HERE}:idle_step", metric="score/mean", steps=1, roles=ROLES)


def test_adapters_under_both_heads_of_one_model():
    """The head of the values is new: the weights that are adapted have none."""
    actor = {"model": SMALL_MODEL, "optimizer": {"learning_rate": 1e-2}, "lora": {"rank": 2}}
    roles = {"actor": actor, "critic": {"shares": "actor", "head": "scalar"}}
    assert all(x > 0 for x in learning_curve("ppo_shared", metric="actor/grad_norm", steps=2, roles=roles))


def test_an_algorithm_may_be_given_itself():
    config = small_run(imitate, settings={"sampling": {"num_samples": 2}})
    assert config.algorithm.endswith(":imitate")
