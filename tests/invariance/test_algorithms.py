"""No plan changes what an algorithm gives: every algorithm, under one device and under random plans."""

import os
from typing import Any

import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.config.placement_strategy import STRATEGIES
from jaxrlhf.testing import SMALL_MODEL, check_plan_invariance

OPTIMIZER = {"learning_rate": 1e-2, "eps": 1e-5}
TRAINED = {"optimizer": {"learning_rate": 3e-4, "eps": 1e-5}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"settings": {"kl": {"coef": 0.1, "adaptive": True}, "actor_update": {"entropy_coef": 0.01}}},
    "reinforce_plus_plus": {"settings": {"sampling": {"num_samples": 2}, "group_baseline": True}},
    **{name: {"batch_size": 8, "settings": {"sampling": {"num_samples": 2}}} for name in ("rloo", "grpo")},
    "dr_grpo": {"batch_size": 8, "settings": {"sampling": {"num_samples": 2}, "actor_update": {"mini_batches": 1}}},
    "dapo": {  # a reward that most groups have none of: these are left out
        "roles": {"reward": {"function": "jaxrlhf.testing:share_of_digits"}},
        "settings": {"sampling": {"num_samples": 2}, "overlong_tokens": 2},
    },
    "gspo": {"batch_size": 8, "settings": {"sampling": {"num_samples": 2}, "actor_update": {"clip": 0.1}}},
    "ppo_shared": {
        "roles": {
            "actor": {"model": SMALL_MODEL, "optimizer": OPTIMIZER},
            "critic": {"shares": "actor", "head": "scalar"},
        }
    },
    "safe_rlhf": {"roles": {"cost_critic": {"init": "actor", "head": "scalar", **TRAINED}}},
    "reward_model": {"roles": {"reward": {"model": SMALL_MODEL, "head": "scalar", **TRAINED}}},
    # weights of its own: next to those of the actor, which of two responses has the higher implied reward is rounding
    "dpo": {"roles": {"reference": {"model": SMALL_MODEL}}},
}
"""What is to be other than in the small run of any algorithm: keys of a config."""


ALL_PLANS = bool(os.environ.get("ALL_PLANS"))
"""Run with ALL_PLANS=1 in the environment: every algorithm under three random plans. Without, one of the first two, so
that each of these is one of an algorithm with a critic: calls of the same name have the same placement in both."""

PLACED = [("ppo", "disaggregated"), ("ppo_shared", "interleaving-2"), ("safe_rlhf", "interleaving")]
"""Algorithms under plans with the devices of a placement strategy."""
if ALL_PLANS:
    PLACED = [(name, strategy) for name in ("ppo", "ppo_shared", "grpo", "safe_rlhf") for strategy in STRATEGIES]
LORA = {"rank": 4, "alpha": 8.0}
ADAPTED: dict[str, Any] = {
    "actor": {"model": SMALL_MODEL, "optimizer": OPTIMIZER, "lora": {**LORA, "merge": "always"}},
    "critic": {"init": "actor", "head": "scalar", "optimizer": OPTIMIZER, "lora": LORA},
    "slow": {"average": {"of": "actor", "decay": 0.5}},
    "judge": {"model": SMALL_MODEL, "head": "scalar"},
}
WHOLE = {name: {key: x for key, x in role.items() if key != "lora"} for name, role in ADAPTED.items()}


@pytest.mark.parametrize(
    ("roles", "num_plans"), [(WHOLE, 1), (ADAPTED, 2 if ALL_PLANS else 1)], ids=["whole weights", "adapters"]
)
def test_no_plan_changes_what_any_method_gives(roles, num_plans):
    """Pinned versions, averages, adapters, sums of losses, several samples, other sampling. Under the first plan of
    adapters the actor generates in slots and the critic is trained over stages."""
    seed = 17 if roles is ADAPTED else 0
    check_plan_invariance("tests.invariance.every_method:every_method", roles=roles, num_plans=num_plans, seed=seed)


@pytest.mark.parametrize(("number", "algorithm"), [*enumerate(ALGORITHMS)], ids=ALGORITHMS)
def test_no_plan_changes_the_result(number, algorithm):
    num_plans, seed = (3, 0) if ALL_PLANS else (1, (20, 6)[number % 2])  # both generate in parts, with a tail
    check_plan_invariance(algorithm, num_plans=num_plans, seed=seed, **RUNS.get(algorithm, {}))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "gspo"] if ALL_PLANS else ["grpo"])
def test_no_plan_changes_what_stale_generation_gives(algorithm):
    check_plan_invariance(algorithm, num_plans=1, steps=3, seed=20, staleness=1, **RUNS.get(algorithm, {}))


@pytest.mark.parametrize(("algorithm", "strategy"), PLACED)
def test_no_placement_strategy_changes_the_result(algorithm, strategy):
    check_plan_invariance(algorithm, num_plans=1, seed=3, strategy=strategy, **RUNS.get(algorithm, {}))
