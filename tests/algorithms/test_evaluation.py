import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxrlhf.algorithms.algorithm import EvaluationConfig, evaluation_step
from jaxrlhf.experience import Prompts, Sampling


def test_samples_once_and_asks_every_scorer():
    config = EvaluationConfig(scorers=("reward", "cost"))
    roles = SimpleNamespace(
        actor=SimpleNamespace(generate=lambda prompts, sampling: ("rollout", prompts, sampling)),
        reward=SimpleNamespace(scores=lambda rollout: ("reward", rollout)),
        cost=SimpleNamespace(scores=lambda rollout: ("cost", rollout)),
    )
    prompts = Prompts(
        tokens=jnp.zeros((1, 2), jnp.int32),
        mask=jnp.ones((1, 2), bool),
        row=jnp.zeros(1, jnp.int32),
        id=jnp.zeros(1, jnp.uint32),
    )
    results, state = evaluation_step(roles, "state", prompts, config)
    rollout = ("rollout", prompts, config.sampling)
    assert results == {"rollout": rollout, "scores": {"reward": ("reward", rollout), "cost": ("cost", rollout)}}
    assert state == "state"


def test_greedy_unless_told():
    assert EvaluationConfig().sampling == Sampling(temperature=0.0)


def test_refuses_a_scorer_named_twice():
    message = "evaluation.scorers: must name each role once. Got ('reward', 'reward')."
    with pytest.raises(ValueError, match=re.escape(message)):
        EvaluationConfig(scorers=("reward", "reward"))
