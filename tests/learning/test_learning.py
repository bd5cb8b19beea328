"""Every algorithm learns: in some dozens of steps of a model of one layer, a number goes as far as it should."""

import dataclasses
import json
import os
from typing import Any

import numpy as np
import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.testing import SMALL_MODEL, learning_curve

SEEDS = range(3) if os.environ.get("ALL_SEEDS") else range(1)
"""One of them, unless ALL_SEEDS=1 is in the environment."""
SCORE = "critic/score/mean"
"""How much of a response is digits: 0.04 of one that is drawn at random, at most 1."""
PAIRS = [
    {"prompt": f"{i}:", "chosen": str(10007 * i % 100000), "rejected": "abcdefghijk"[i % 7 : i % 7 + 4]}
    for i in range(64)
]
"""Digits are preferred to letters."""


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


TRAINED = {"optimizer": {"learning_rate": 1e-2, "eps": 1e-5}}
SCALAR = {"model": SMALL_MODEL, "head": "scalar"}
NEAR_REFERENCE = {"settings": {"kl": {"coef": 0.01}}, "batch_size": 32}
SAMPLED_OFTEN = {"batch_size": 8}
LESSONS: dict[str, Lesson] = {
    "ppo": Lesson(SCORE, +0.7, 30, NEAR_REFERENCE),
    "ppo_ptx": Lesson(SCORE, +0.6, 20, NEAR_REFERENCE),
    "ppo_shared": Lesson(
        SCORE, +0.7, 30, {**NEAR_REFERENCE, "roles": {"critic": {"shares": "actor", "head": "scalar"}}}
    ),
    "safe_rlhf": Lesson(
        SCORE, +0.6, 20, {**NEAR_REFERENCE, "roles": {"cost_critic": {"init": "actor", "head": "scalar", **TRAINED}}}
    ),
    "remax": Lesson(SCORE, +0.4, 40, {"batch_size": 32}),
    "rloo": Lesson(SCORE, +0.6, 40, SAMPLED_OFTEN),
    "reinforce_plus_plus": Lesson(SCORE, +0.6, 30, {"batch_size": 32}),
    "grpo": Lesson(SCORE, +0.6, 20, SAMPLED_OFTEN),
    "dr_grpo": Lesson(SCORE, +0.6, 20, SAMPLED_OFTEN),
    "dapo": Lesson(SCORE, +0.6, 30, SAMPLED_OFTEN),
    "gspo": Lesson(SCORE, +0.6, 20, SAMPLED_OFTEN),
    "sft": Lesson("actor/loss", -2.0, 20),
    "reward_model": Lesson("reward/loss", -0.3, 20, {"roles": {"reward": {**SCALAR, **TRAINED}}}),
    "dpo": Lesson("actor/loss", -0.2, 20, {"learning_rate": 1e-3}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_learns(algorithm, seed, tmp_path):
    assert algorithm in LESSONS, "say in LESSONS what it must learn"
    lesson, data = LESSONS[algorithm], {}
    if algorithm in ("reward_model", "dpo"):
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
        data = {"data": {"path": str(tmp_path / "pairs.jsonl"), "eval_rows": 8}}
    curve = learning_curve(algorithm, metric=lesson.metric, steps=lesson.steps, seed=seed, **data, **lesson.run)
    change = np.mean(curve[-5:]) - np.mean(curve[:5])
    assert change >= lesson.change if lesson.change > 0 else change <= lesson.change, curve
