"""The algorithms: pure functions of arrays, and the step functions that say which role computes what."""

from jaxrlhf.algorithms.algorithm import Algorithm, demonstrations, preferences
from jaxrlhf.algorithms.dpo import DPOConfig, dpo_evaluation, dpo_state, dpo_step
from jaxrlhf.algorithms.ppo import PPOConfig, ppo_state, ppo_step
from jaxrlhf.algorithms.reward_model import (
    RewardModelConfig,
    reward_model_evaluation,
    reward_model_state,
    reward_model_step,
)
from jaxrlhf.algorithms.sft import SFTConfig, sft_evaluation, sft_state, sft_step

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(ppo_step, PPOConfig, ppo_state, roles=("actor", "critic", "reference", "reward")),
    "sft": Algorithm(sft_step, SFTConfig, sft_state, ("actor",), data=demonstrations, evaluation=sft_evaluation),
    "reward_model": Algorithm(
        reward_model_step,
        RewardModelConfig,
        reward_model_state,
        roles=("reward",),
        data=preferences,
        evaluation=reward_model_evaluation,
    ),
    "dpo": Algorithm(
        dpo_step, DPOConfig, dpo_state, ("actor", "reference"), data=preferences, evaluation=dpo_evaluation
    ),
}
"""Every algorithm by the name that a config calls it."""
