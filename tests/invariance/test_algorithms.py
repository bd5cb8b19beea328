"""No plan changes what an algorithm gives: every algorithm, under one device and under three random plans."""

from typing import Any

import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.testing import check_plan_invariance

RUNS: dict[str, dict[str, Any]] = {
    "ppo": {"settings": {"kl": {"coef": 0.1, "adaptive": True}, "actor_update": {"entropy_coef": 0.01}}},
}
"""What is to be other than in the small run of any algorithm: keys of a config."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_plan_changes_the_result(algorithm):
    check_plan_invariance(algorithm, **RUNS.get(algorithm, {}))
