from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params, init_params, param_shardings
from jaxrlhf.programs.optimizer import (
    OptimizerState,
    apply_gradient,
    init_optimizer,
    learning_rate,
    optimizer_shardings,
    round_at_random,
)
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimizerConfig(learning_rate=1.0), {0: 1.0, 9: 1.0, 50: 1.0}),
        (OptimizerConfig(learning_rate=1.0, warmup_updates=4), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 1.0}),
        (OptimizerConfig(learning_rate=2.0, schedule="linear", final_fraction=0.5), {0: 2.0, 5: 1.5, 10: 1.0, 99: 1.0}),
        (OptimizerConfig(learning_rate=1.0, schedule="cosine"), {0: 1.0, 5: 0.5, 10: 0.0}),
        (
            OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_updates=2),
            {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5, 10: 0},
        ),
        (OptimizerConfig(learning_rate=1.0, schedule="cosine", final_fraction=0.2), {5: 0.6, 10: 0.2}),
    ],
)
def test_learning_rate(config, expected):
    rate = learning_rate(config, num_updates=10)
    for update, value in expected.items():
        np.testing.assert_allclose(rate(jnp.int32(update)), value, atol=1e-6)


def test_updates_are_those_of_adamw_with_a_clipped_gradient():
    config = OptimizerConfig(learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3, max_grad_norm=1.0)
    reference = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3)
    )
    params = expected = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[0.5]])}
    state, expected_state = init_optimizer(config, params), reference.init(expected)
    gradients = [
        {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[0.0]])},
        {"a": jnp.array([0.1, 0.2]), "b": jnp.array([[0.3]])},
    ]
    for gradient, norm in zip(gradients, (5.0, np.sqrt(0.14)), strict=True):
        params, state, metrics = apply_gradient(config, 10, params, state, gradient)
        updates, expected_state = reference.update(gradient, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        np.testing.assert_allclose(metrics["lr"], 0.1)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), params, expected)
    assert state.num_updates == 2


def test_a_gradient_is_not_clipped_at_zero():
    config = OptimizerConfig(max_grad_norm=0.0, eps=1e3, learning_rate=1.0)  # so large an eps makes steps proportional
    params = {"a": jnp.zeros(1)}
    step = [
        apply_gradient(config, 1, params, init_optimizer(config, params), {"a": jnp.array([g])})[0]["a"]
        for g in (1.0, 9.0)
    ]
    np.testing.assert_allclose(step[1] / step[0], 9.0, rtol=0.02)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_moments_lie_as_their_weights(scan_layers, state_dtype):
    model = ModelConfig(**{**vars(MODEL), "scan_layers": scan_layers})
    layout = Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2))
    config = OptimizerConfig(state_dtype=state_dtype)
    params = abstract_params(model, stacked=scan_layers)
    shardings = optimizer_shardings(config, params, param_shardings(model, layout, stacked=scan_layers), layout)
    state = jax.eval_shape(lambda p: init_optimizer(config, p), params)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    weights = param_shardings(model, layout, stacked=scan_layers)
    assert jax.tree.leaves(shardings.adamw.mu) == jax.tree.leaves(shardings.adamw.nu) == jax.tree.leaves(weights)
    assert shardings.num_updates == layout.replicated
    assert {moment.dtype for moment in jax.tree.leaves((state.adamw.mu, state.adamw.nu))} == {jnp.dtype(state_dtype)}


def test_a_tiny_learning_rate_still_moves_weights():
    params = init_params(MODEL, jax.random.key(0))
    config = OptimizerConfig(learning_rate=1e-3)
    moved, _, _ = apply_gradient(config, 1, params, init_optimizer(config, params), jax.tree.map(jnp.ones_like, params))
    assert all(bool(jnp.all(x != y)) for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True))


def test_numbers_are_rounded_to_a_neighbour_and_on_average_to_themselves():
    x = jnp.array([1.0 + 2**-9, -1.0 - 2**-9, 3e-12 * (1 + 2**-10), 1e-30, 0.0, jnp.inf, jnp.nan], jnp.float32)
    rounded = np.asarray(jax.vmap(lambda count: round_at_random(x, count))(jnp.arange(4096)), np.float32)
    assert set(rounded[:, 0]) == {1.0, 1.0 + 2**-7} and set(rounded[:, 1]) == {-1.0, -1.0 - 2**-7}
    np.testing.assert_allclose(rounded[:, :4].mean(0), x[:4], rtol=3 * 2**-8 / 2 / np.sqrt(4096))  # 3 standard errors
    assert np.all(rounded[:, 4] == 0) and np.all(np.isposinf(rounded[:, 5])) and np.all(np.isnan(rounded[:, 6]))
    exact = jnp.array([1.0, -0.5, 2**-126], jnp.float32)
    np.testing.assert_array_equal(round_at_random(exact, jnp.int32(7)).astype(jnp.float32), exact)


def moments(state: OptimizerState) -> Any:
    return state.adamw


def test_a_second_moment_in_bfloat16_follows_small_changes():
    """With beta2 = 0.999 an update changes it by a thousandth at most, which rounding to nearest would lose."""
    config = OptimizerConfig(beta2=0.999, state_dtype="bfloat16")
    params = {"a": jnp.zeros(512)}
    gradient = {"a": jnp.linspace(0.5, 2.0, 512)}
    step = jax.jit(lambda params, state: apply_gradient(config, 1, params, state, gradient)[:2])
    state, exact = init_optimizer(config, params), init_optimizer(OptimizerConfig(beta2=0.999), params)
    in_float32 = jax.jit(
        lambda params, state: apply_gradient(
            OptimizerConfig(beta2=0.999, max_grad_norm=1.0), 1, params, state, gradient
        )
    )
    nearest = np.zeros(512, jnp.bfloat16)
    for _ in range(1000):
        _, state = step(params, state)
        _, exact, _ = in_float32(params, exact)
        clipped = np.asarray(gradient["a"]) / (np.linalg.norm(gradient["a"]) + 1e-6)
        nearest = (0.999 * nearest.astype(np.float32) + 0.001 * clipped**2).astype(jnp.bfloat16)
    ratio = np.asarray(moments(state).nu["a"], np.float32) / np.asarray(moments(exact).nu["a"])
    assert abs(ratio.mean() - 1) < 0.01 and ratio.std() < 0.1
    stalled = nearest.astype(np.float32) / np.asarray(moments(exact).nu["a"])
    assert stalled.mean() < 0.6, "what rounding to nearest would have come to"


def test_bfloat16_moments_do_not_depend_on_the_form_of_layers():
    config = OptimizerConfig(state_dtype="bfloat16")
    params = {"layers": [jnp.ones((3, 4)), 2 * jnp.ones((3, 4))]}
    gradient = {"layers": [jax.random.normal(jax.random.key(i), (3, 4)) for i in range(2)]}
    norm = jnp.float32(1.0)
    _, apart, _ = apply_gradient(config, 1, params, init_optimizer(config, params), gradient, norm)
    stacked, stacked_gradient = ({"layers": jnp.stack(each["layers"])} for each in (params, gradient))
    _, together, _ = apply_gradient(config, 1, stacked, init_optimizer(config, stacked), stacked_gradient, norm)
    for name in ("mu", "nu"):
        listed, in_one = (getattr(moments(each), name)["layers"] for each in (apart, together))
        np.testing.assert_array_equal(jnp.stack(listed), in_one)
