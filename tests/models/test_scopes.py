"""Every matrix product and collective of a model has a name by which profiles read."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.models import heads
from jaxrlhf.models.architecture import JOINED, MATRICES
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params
from jaxrlhf.planner.compiled.hlo import scopes
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import abstract_ring
from tests.random_weights import params_of

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2, num_kv_heads=2, head="both"
)
ATTENTION = {"scores", "weighted_values", "output"}
APART, TOGETHER = ({*names, "down"} | ATTENTION for names in (MATRICES, JOINED))
LAST_APART = TOGETHER | {*JOINED["query_key_value"]}
"""The last layer has queries of the columns that are wanted alone."""


def names(function, *arguments) -> set[str]:
    """The innermost scopes of a program's products and collectives."""
    text = jax.jit(function).lower(*arguments).as_text("hlo", debug_info=True)
    lines = [x for x in text.splitlines() if re.search(r" (dot|all-reduce|all-gather|collective-permute)\(", x)]
    found = [re.search(r'op_name="([^"]*)"', line) for line in lines]
    assert lines and all(found)
    return {[scope for scope in scopes(match[1]) if "->" not in scope][-2] for match in found if match}  # no einsums


def arguments(rows: int) -> tuple[Prompts, jax.Array, jax.Array]:
    tokens, ids = jnp.zeros((rows, 4), jnp.int32), jnp.arange(rows)
    prompts = Prompts(tokens, tokens == 0, ids, ids.astype(jnp.uint32))
    return prompts, jnp.zeros(3, jnp.uint32), jnp.float32(1)


@pytest.mark.parametrize(("tensor", "products"), [(1, LAST_APART), (2, APART)])
def test_passes_over_sequences(tensor, products):
    layout = Layout.over(tuple(range(tensor)), Strategy(tensor=tensor))
    rollout = jax.eval_shape(
        functools.partial(generate, sampling=Sampling(max_new_tokens=3), config=CONFIG, layout=layout),
        abstract_params(CONFIG), *arguments(2),
    )  # fmt: skip

    def loss(params, rollout):
        outputs = heads.INFERENCE_OUTPUTS["policy_and_values"](params, rollout, CONFIG, layout)
        return outputs.logprobs.sum() + outputs.values.sum()

    assert names(jax.grad(loss), abstract_params(CONFIG), rollout) == products | {"logits", "value_head"}


def test_generation():
    sampling, one, two = Sampling(max_new_tokens=3), Strategy(), Strategy(pipeline=2)
    run = functools.partial(generate, sampling=sampling, config=CONFIG, layout=Layout.over((0,), one))
    assert names(run, params_of(CONFIG), *arguments(2)) == TOGETHER | {"key", "value", "logits"}
    layout = Layout.over((0, 1), two)
    run = functools.partial(generate, sampling=sampling, config=CONFIG, layout=layout)
    sends = {"send", "is_running"}
    assert names(run, abstract_ring(CONFIG, layout), *arguments(2)) == TOGETHER | {"logits"} | sends
