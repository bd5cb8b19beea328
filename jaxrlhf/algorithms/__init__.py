"""The algorithms: pure functions of arrays, and the step functions that say which role computes what."""

from jaxrlhf.algorithms.algorithm import Algorithm, demonstrations
from jaxrlhf.algorithms.ppo import PPOConfig, ppo_state, ppo_step
from jaxrlhf.algorithms.sft import SFTConfig, sft_state, sft_step

ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(ppo_step, PPOConfig, ppo_state, roles=("actor", "critic", "reference", "reward")),
    "sft": Algorithm(sft_step, SFTConfig, sft_state, roles=("actor",), data=demonstrations),
}
"""Every algorithm by the name that a config calls it."""
