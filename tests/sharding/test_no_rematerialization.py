"""XLA warns where it can only move an array between two ways of splitting it by copying the whole onto every device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrlhf.experience import Sequences
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import abstract_params, param_shardings
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat, Strategy

WARNING = "Involuntary full rematerialization"
LAYOUT = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    logits_chunk_tokens=16,
)
SHARDINGS = param_shardings(CONFIG, LAYOUT)
B, T, R = 8, 10, 6


@pytest.fixture(autouse=True)
def compile_anew():
    """A program from the compilation cache has nothing to warn of."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is read once, by the first compilation
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def compile_gradient(remat: Remat) -> jax.stages.Compiled:
    """A gradient as a train call takes it: weights and their gradients rest split."""

    def aval(dtype, *shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=LAYOUT.rows)

    def loss(params, sequences):
        outputs = policy_outputs(params, sequences, CONFIG, LAYOUT, remat=remat)
        return (outputs.logprobs * jnp.arange(R)[None] + outputs.entropy).sum()

    def gradient(params, sequences):
        grads = jax.grad(loss)(params, sequences)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, SHARDINGS)

    def at_rest(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(at_rest, abstract_params(CONFIG), SHARDINGS)
    sequences = Sequences(tokens=aval(jnp.int32, B, T), mask=aval(jnp.bool, B, T), response=aval(jnp.bool, B, R))
    return jax.jit(gradient).lower(params, sequences).compile()


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_gradients_of_policy_outputs(capfd, remat):
    compiled = compile_gradient(remat)
    assert WARNING not in capfd.readouterr().err
    trees = (compiled.output_shardings, SHARDINGS, abstract_params(CONFIG))
    for given, sharding, x in zip(*map(jax.tree.leaves, trees), strict=True):
        assert given.is_equivalent_to(sharding, len(x.shape))
        assert math.prod(given.shard_shape(x.shape)) == math.prod(x.shape) // (4 if len(x.shape) == 2 else 1)


def test_the_warning_is_seen_where_weights_are_not_gathered(capfd, monkeypatch):
    monkeypatch.setattr(Layout, "at_use", lambda self, weight, axes: weight)
    compile_gradient("none")
    assert WARNING in capfd.readouterr().err
