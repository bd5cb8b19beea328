import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import init_params
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weights import WeightStore
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=2, dtype="bfloat16", scan_layers=True
)
TRAIN = Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2))
GENERATE = Layout.over((4, 5), Strategy(data=2))
ROLES = {"actor": ModelRole(MODEL, OptimizerConfig(), 1), "reference": ModelRole(MODEL)}


@pytest.fixture
def store():
    store = WeightStore(ROLES)
    for role in ROLES:
        store.initialize(role, TRAIN, jax.random.key(0))
    return store


def test_copies_are_in_the_compute_precision_and_in_the_form_that_is_asked_for(store):
    expected = init_params(MODEL, jax.random.key(0))
    for role in ROLES:
        params, moved = store.for_inference(role, GENERATE, stacked=False)
        assert moved
        assert isinstance(params["layers"], list) and len(params["layers"]) == MODEL.num_layers
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
        assert {d.id for x in jax.tree.leaves(params) for d in x.devices()} == {4, 5}
        np.testing.assert_array_equal(
            np.asarray(params["layers"][1]["query"]), np.asarray(expected["layers"][1]["query"].astype(jnp.bfloat16))
        )
        stacked, _ = store.for_inference(role, GENERATE, stacked=True)
        assert stacked["layers"]["query"].shape == (2, 16, 16)


def test_a_copy_is_made_once_and_dropped_with_its_version(store):
    first, _ = store.for_inference("actor", GENERATE, stacked=False)
    again, moved = store.for_inference("actor", GENERATE, stacked=False)
    assert again is first and not moved

    params, optimizer, moved = store.take_for_training("actor", TRAIN)
    assert not moved and {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    new = jax.tree.map(lambda x: x + 1, params)
    store.trained("actor", TRAIN, new, optimizer)
    assert store.version("actor") == 1 and store.version("reference") == 0

    after, moved = store.for_inference("actor", GENERATE, stacked=False)
    assert moved
    np.testing.assert_allclose(
        np.asarray(after["final_norm"], np.float32), np.asarray(first["final_norm"], np.float32) + 1
    )


def test_training_elsewhere_moves_master_weights_and_optimizer(store):
    other = Layout.over((6, 7), Strategy(data=2))
    params, optimizer, moved = store.take_for_training("actor", other)
    assert moved
    assert {d.id for x in jax.tree.leaves((params, optimizer)) for d in x.devices()} == {6, 7}
    with pytest.raises(AssertionError, match="already being trained"):
        store.take_for_training("actor", other)


def test_a_snapshot_shares_nothing_with_its_role(store):
    layout, snapshot = store.snapshot("actor")
    assert layout == TRAIN
    params, _, _ = store.take_for_training("actor", TRAIN)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(snapshot))


def test_state_and_restore(store):
    state = jax.tree.map(jnp.copy, store.state("actor"))
    params, optimizer, _ = store.take_for_training("actor", TRAIN)
    store.trained("actor", TRAIN, jax.tree.map(lambda x: x * 0, params), optimizer)
    store.restore("actor", TRAIN, state, version=7)
    assert store.version("actor") == 7
    jax.tree.map(np.testing.assert_array_equal, store.state("actor"), state)
    assert set(store.state("reference")) == {"params"}


@pytest.mark.parametrize("role", ROLES)
def test_the_abstract_state_is_that_of_the_arrays(store, role):
    def same(abstract, array):
        assert (abstract.shape, abstract.dtype) == (array.shape, array.dtype)
        assert abstract.sharding.is_equivalent_to(array.sharding, array.ndim)

    jax.tree.map(same, store.abstract_state(role, TRAIN), store.state(role))
