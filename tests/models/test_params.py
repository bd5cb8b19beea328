import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.architecture import declare, num_parameters
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.models.params import abstract_params, init_params, param_shardings, use, with_layers
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

CONFIG = ModelConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2)
SCALAR = dataclasses.replace(CONFIG, num_layers=1, head="scalar")
VARIANTS = [{}, {"head": "scalar"}, {"tie_embeddings": True}, {"attention_bias": True, "qk_norm": True, "head_dim": 10}]
KEY = jax.random.key(7)


@functools.cache
@jax.ensure_compile_time_eval()
def initial(config: ModelConfig = CONFIG):
    return jax.jit(init_params, static_argnums=0)(config, KEY)


# Table 1 of the appendix of ReaL (arXiv:2406.14088): parameters, with the output embedding and without
@pytest.mark.parametrize(
    ("preset", "total", "without_output_embedding"),
    [
        ("7b", 8030261248, 7504924672),
        ("13b", 14001525760, 13344855040),
        ("34b", 35321028608, 34270355456),
        ("70b", 70553706496, 69503033344),
    ],
)
def test_the_models_of_real(preset, total, without_output_embedding):
    config = ModelConfig(**PRESETS[preset])
    assert num_parameters(config) == total
    assert num_parameters(config, output_embedding=False) == without_output_embedding
    scalar = dataclasses.replace(config, head="scalar")
    assert num_parameters(scalar) == without_output_embedding + config.hidden_size


def test_tied_embeddings_are_counted_once():
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    assert num_parameters(tied) == num_parameters(tied, output_embedding=False) == num_parameters(CONFIG) - 32 * 96


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_follows_from_the_declaration(variant, stacked):
    config = dataclasses.replace(CONFIG, **variant)
    abstract = abstract_params(config, stacked=stacked)
    arrays = jax.eval_shape(lambda key: with_layers(init_params(config, key), stacked=stacked), KEY)
    assert arrays == abstract
    shardings = param_shardings(config, Layout.over((0,), Strategy()), stacked=stacked)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
    assert sum(x.size for x in jax.tree.leaves(abstract)) == num_parameters(config)
    bfloat16 = abstract_params(config, jnp.bfloat16, stacked=stacked)
    assert {x.dtype for x in jax.tree.leaves(bfloat16)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(abstract)} == {jnp.dtype(jnp.float32)}


def test_initial_weights_have_the_declared_spread():
    declared = declare(CONFIG)
    assert declared["layers"][0]["query"].stddev == 32**-0.5
    assert declared["layers"][0]["down"].stddev == pytest.approx(48**-0.5 / 4**0.5)
    for weight, array in zip(jax.tree.leaves(declared), jax.tree.leaves(initial()), strict=True):
        if weight.initializer == "normal":
            assert np.std(array) == pytest.approx(weight.stddev, rel=0.1)
            assert abs(np.mean(array)) < 0.1 * weight.stddev
        else:
            np.testing.assert_array_equal(array, 1.0 if weight.initializer == "ones" else 0.0)


def test_every_weight_has_noise_of_its_own():
    first, second = initial()["layers"]
    for a, b in [(first["query"], second["query"]), (first["gate"], first["up"]), (first["key"], first["value"])]:
        assert not np.isclose(a, b).any()


def test_noise_depends_on_the_path_alone():
    other = initial(SCALAR)
    np.testing.assert_array_equal(other["embedding"], initial()["embedding"])
    np.testing.assert_array_equal(other["layers"][0]["gate"], initial()["layers"][0]["gate"])


def test_a_scalar_head_starts_at_zero():
    np.testing.assert_array_equal(initial(SCALAR)["value_head"], np.zeros((32, 1), np.float32))


def test_initial_weights_do_not_depend_on_how_they_are_split():
    shardings = param_shardings(CONFIG, Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2)))
    split = jax.jit(init_params, static_argnums=0, out_shardings=shardings)(CONFIG, KEY)
    assert not split["embedding"].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, split, initial())


def test_stacked_is_the_stack_of_the_list():
    stacked = with_layers(initial(), stacked=True)
    assert stacked["embedding"] is initial()["embedding"]
    for name, stack in stacked["layers"].items():
        np.testing.assert_array_equal(stack, np.stack([layer[name] for layer in initial()["layers"]]))
    jax.tree.map(np.testing.assert_array_equal, with_layers(stacked, stacked=False), initial())
    assert with_layers(stacked, stacked=True) is stacked
    assert with_layers(initial(), stacked=False) is initial()


def test_use_computes_in_the_compute_precision():
    layout = Layout.over((0,), Strategy())
    used = jax.eval_shape(lambda params: use(params, declare(CONFIG), layout, jnp.bfloat16), abstract_params(CONFIG))
    assert used == abstract_params(CONFIG, jnp.bfloat16)
