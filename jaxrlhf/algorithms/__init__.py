"""The algorithms: pure functions of arrays, and the step functions that say which role computes what."""

from jaxrlhf.algorithms.algorithm import Algorithm, demonstrations, no_state, preferences
from jaxrlhf.algorithms.dapo import DAPOConfig, dapo_step
from jaxrlhf.algorithms.dpo import DPOConfig, dpo_evaluation, dpo_step
from jaxrlhf.algorithms.grpo import DrGRPOConfig, GRPOConfig, dr_grpo_step, grpo_step
from jaxrlhf.algorithms.gspo import GSPOConfig, gspo_step
from jaxrlhf.algorithms.policy import policy_state
from jaxrlhf.algorithms.ppo import PPOConfig, ppo_step
from jaxrlhf.algorithms.ppo_ptx import PPOPtxConfig, ppo_ptx_step, prompts_and_pretraining
from jaxrlhf.algorithms.ppo_shared import PPOSharedConfig, ppo_shared_step
from jaxrlhf.algorithms.reinforce_plus_plus import ReinforcePlusPlusConfig, reinforce_plus_plus_step
from jaxrlhf.algorithms.remax import ReMaxConfig, remax_step
from jaxrlhf.algorithms.reward_model import RewardModelConfig, reward_model_evaluation, reward_model_step
from jaxrlhf.algorithms.rloo import RLOOConfig, rloo_step
from jaxrlhf.algorithms.safe_rlhf import SafeRLHFConfig, safe_rlhf_state, safe_rlhf_step
from jaxrlhf.algorithms.sft import SFTConfig, sft_evaluation, sft_step

ACTOR_CRITIC = ("actor", "critic", "reference", "reward")
REFERENCED = ("actor", "reference", "reward")

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(ppo_step, PPOConfig, policy_state, roles=ACTOR_CRITIC),
    "ppo_ptx": Algorithm(ppo_ptx_step, PPOPtxConfig, policy_state, roles=ACTOR_CRITIC, data=prompts_and_pretraining),
    "ppo_shared": Algorithm(ppo_shared_step, PPOSharedConfig, policy_state, roles=ACTOR_CRITIC),
    "safe_rlhf": Algorithm(
        safe_rlhf_step, SafeRLHFConfig, safe_rlhf_state, (*ACTOR_CRITIC, "cost", "cost_critic"), prompts_and_pretraining
    ),
    "remax": Algorithm(remax_step, ReMaxConfig, policy_state, roles=REFERENCED),
    "rloo": Algorithm(rloo_step, RLOOConfig, policy_state, roles=REFERENCED),
    "reinforce_plus_plus": Algorithm(reinforce_plus_plus_step, ReinforcePlusPlusConfig, policy_state, roles=REFERENCED),
    "grpo": Algorithm(grpo_step, GRPOConfig, policy_state, roles=REFERENCED),
    "dr_grpo": Algorithm(dr_grpo_step, DrGRPOConfig, no_state, roles=("actor", "reward")),
    "dapo": Algorithm(dapo_step, DAPOConfig, no_state, roles=("actor", "reward")),
    "gspo": Algorithm(gspo_step, GSPOConfig, no_state, roles=("actor", "reward")),
    "sft": Algorithm(sft_step, SFTConfig, no_state, ("actor",), data=demonstrations, evaluation=sft_evaluation),
    "reward_model": Algorithm(
        reward_model_step,
        RewardModelConfig,
        no_state,
        ("reward",),
        data=preferences,
        evaluation=reward_model_evaluation,
    ),
    "dpo": Algorithm(
        dpo_step, DPOConfig, no_state, ("actor", "reference"), data=preferences, evaluation=dpo_evaluation
    ),
}
"""Every algorithm by the name that a config calls it."""
