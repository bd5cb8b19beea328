import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.algorithms.algorithm import Rows
from jaxrlhf.algorithms.ppo_ptx import PPOPtxConfig, PretrainingMix, prompts_and_pretraining
from jaxrlhf.algorithms.sft import SupervisedUpdate, sft_loss
from jaxrlhf.call_graph import GraphError
from jaxrlhf.experience import Sampling, Sequences, Term
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import SMALL_MODEL, small_run


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


SAMPLING = Sampling(max_new_tokens=4)


def reported(algorithm: str, **config) -> set[str]:
    """The metrics of a run's step."""
    results = assemble(small_run(algorithm, **config), 1, 1).train.graph.results[0]
    return set(flatten(jax.tree.map(lambda _: 0.0, results)))


def demonstrations(roles, prompts):
    """A batch of the actor's own responses, without what sampling recorded."""
    rollout = roles.actor.generate(prompts, SAMPLING)
    return {"sequences": Sequences(tokens=rollout.tokens, mask=rollout.mask, response=rollout.response)}


def two_pupils(roles, state, prompts, config):
    """Two roles, each of which learns the same twice, the second time under one name."""
    batch = demonstrations(roles, prompts)
    terms = (Term(sft_loss, batch), Term(sft_loss, batch, weight=0.5, name="again"))
    return {name: getattr(roles, name).train(terms, SupervisedUpdate()) for name in ("actor", "pupil")}, state


def one_name_twice(roles, state, prompts, config):
    term = Term(sft_loss, demonstrations(roles, prompts), name="again")
    return {"actor": roles.actor.train((term, term), SupervisedUpdate())}, state


def test_metrics_of_a_term_stand_under_its_role_and_its_name():
    assert "actor/pretraining/loss" in reported("ppo_ptx")
    roles = {"pupil": {"model": SMALL_MODEL, "optimizer": {"learning_rate": 1e-3}}}
    names = reported(f"{__file__}:two_pupils", roles=roles)
    assert {"actor/loss", "actor/again/loss", "pupil/loss", "pupil/again/loss"} <= names


def test_terms_of_one_name_are_refused():
    rule = "the metrics of its terms must have names of their own. Got again twice. Give a Term a name"
    with pytest.raises(GraphError, match=rf"^train\(sft_loss \+ sft_loss\): {re.escape(rule)}"):
        reported(f"{__file__}:one_name_twice")
