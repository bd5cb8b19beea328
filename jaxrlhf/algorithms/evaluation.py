"""Evaluation by samples: responses, by default greedy ones, and their scores. Nothing is trained."""

import dataclasses
from typing import Any

from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.require import require


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Settings of an evaluation."""

    sampling: Sampling = Sampling(temperature=0.0)
    scorers: tuple[str, ...] = ("reward",)
    """Roles whose `scores` are asked."""

    def __post_init__(self) -> None:
        each_once = len(set(self.scorers)) == len(self.scorers)
        require(each_once, "evaluation.scorers", "must name each role once", self.scorers)


def evaluation_step(roles: Any, state: Any, prompts: Prompts, config: EvaluationConfig) -> tuple[dict[str, Any], Any]:
    """Responses to the prompts, and every scorer's scores of them."""
    rollout = roles.actor.generate(prompts, config.sampling)
    scores = {name: getattr(roles, name).scores(rollout) for name in config.scorers}
    return {"rollout": rollout, "scores": scores}, state
