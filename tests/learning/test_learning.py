"""Every algorithm learns: in some dozens of steps of a model of one layer, a number goes as far as it should."""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.testing import learning_curve

SEEDS = range(3) if os.environ.get("ALL_SEEDS") else range(1)
"""One of them, unless ALL_SEEDS=1 is in the environment."""


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What an algorithm must learn."""

    metric: str
    change: float
    """At least this much up, or down where it is negative, from the mean of the first five steps to that of the last
    five."""
    steps: int = 40
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is to be other than in the small run of any algorithm: keys of a config."""


GROUPS: dict[str, Any] = {"batch_size": 8, "settings": {"sampling": {"num_samples": 4}}}

# The reward of a small run is how much of a response is digits: 0.04 of one that is drawn at random, at most 1.
LESSONS: dict[str, Lesson] = {
    "ppo": Lesson("critic/score/mean", +0.7, run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}}}),
    "ppo_ptx": Lesson(
        "critic/score/mean",
        +0.5,
        run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}, "pretraining": {"coef": 0.1}}},
    ),
    "ppo_shared": Lesson(
        "critic/score/mean",
        +0.7,
        run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}}, "roles": {"critic": {"shares": "actor"}}},
    ),
    "safe_rlhf": Lesson(
        "critic/score/mean",
        +0.5,
        run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}, "pretraining": {"coef": 0.1}, "cost_budget": 0.1}},
    ),
    "remax": Lesson("critic/score/mean", +0.5, run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}}}),
    "rloo": Lesson("critic/score/mean", +0.5, run={"batch_size": 8, "settings": {"kl": {"coef": 0.01}}}),
    "reinforce_plus_plus": Lesson(
        "critic/score/mean", +0.5, run={"batch_size": 32, "settings": {"kl": {"coef": 0.01}}}
    ),
    **{name: Lesson("critic/score/mean", +0.5, run=GROUPS) for name in ("grpo", "dr_grpo", "gspo")},
    "dapo": Lesson("critic/score/mean", +0.5, run={"batch_size": 16, "settings": {"sampling": {"num_samples": 4}}}),
    "sft": Lesson("actor/loss", -2.0, steps=20),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_learns(algorithm, seed):
    assert algorithm in LESSONS, "say in LESSONS what it must learn"
    lesson = LESSONS[algorithm]
    curve = learning_curve(algorithm, metric=lesson.metric, steps=lesson.steps, seed=seed, **lesson.run)
    change = np.mean(curve[-5:]) - np.mean(curve[:5])
    assert change >= lesson.change if lesson.change > 0 else change <= lesson.change, curve
