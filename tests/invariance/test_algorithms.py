"""No plan changes what an algorithm gives: every algorithm, under one device and under three random plans."""

from typing import Any

import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.testing import SMALL_MODEL, check_plan_invariance

TRAINED = {"optimizer": {"learning_rate": 3e-4, "eps": 1e-5}}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"settings": {"kl": {"coef": 0.1, "adaptive": True}, "actor_update": {"entropy_coef": 0.01}}},
    "ppo_shared": {"roles": {"critic": {"shares": "actor", "head": "scalar"}}},
    "safe_rlhf": {"roles": {"cost_critic": {"init": "actor", "head": "scalar", **TRAINED}}},
    "reward_model": {"roles": {"reward": {"model": SMALL_MODEL, "head": "scalar", **TRAINED}}},
    # weights of its own: next to those of the actor, which of two responses has the higher implied reward is rounding
    "dpo": {"roles": {"reference": {"model": SMALL_MODEL}}},
}
"""What is to be other than in the small run of any algorithm: keys of a config."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_plan_changes_the_result(algorithm):
    check_plan_invariance(algorithm, **RUNS.get(algorithm, {}))
