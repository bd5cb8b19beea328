from types import SimpleNamespace

import jax.numpy as jnp

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.algorithms.ppo_ptx import PPOPtxConfig, PretrainingMix, prompts_and_pretraining
from jaxrlhf.algorithms.sft import sft_loss
from jaxrlhf.experience import Sequences


def test_the_term_is_the_likelihood_of_demonstrations():
    rows = Sequences(tokens=jnp.zeros((2, 3), jnp.int32), mask=jnp.ones((2, 3), bool), response=jnp.ones((2, 1), bool))
    term = PretrainingMix(coef=0.25).term(rows)
    assert term.loss is sft_loss and term.batch["sequences"] is rows
    assert term.weight == 0.25 and term.name == "pretraining"


def test_rows_are_prompts_and_demonstrations():
    config = PPOPtxConfig(pretraining=PretrainingMix(batch_size=32, max_new_tokens=7))
    want = {"prompts": Rows("prompts"), "pretraining": Rows("demonstrations", 7, 32, "pretraining")}
    assert prompts_and_pretraining(config) == want
    assert prompts_and_pretraining(SimpleNamespace(pretraining=config.pretraining)) == want
