"""No plan changes what an algorithm gives: every algorithm, under one device and under three random plans."""

from typing import Any

import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.testing import check_plan_invariance

RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"settings": {"kl": {"coef": 0.1, "adaptive": True}, "actor_update": {"entropy_coef": 0.01}}},
    "ppo_shared": {"roles": {"critic": {"shares": "actor"}}},
    "reinforce_plus_plus": {"settings": {"sampling": {"num_samples": 2}, "group_baseline": True}},
    **{name: {"batch_size": 8, "settings": {"sampling": {"num_samples": 2}}} for name in ("rloo", "grpo", "dr_grpo")},
    "dapo": {"settings": {"sampling": {"num_samples": 2}, "overlong_tokens": 2}},
    "gspo": {"batch_size": 8, "settings": {"sampling": {"num_samples": 2}, "actor_update": {"clip": 0.1}}},
}
"""What is to be other than in the small run of any algorithm: keys of a config."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_plan_changes_the_result(algorithm):
    check_plan_invariance(algorithm, **RUNS.get(algorithm, {}))
