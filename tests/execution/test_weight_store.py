import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.reshard.offload import rests_on_host
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


def test_a_copy_is_made_once_and_dropped_with_its_version(store):
    first, _ = store.for_inference("actor", GENERATE, layers="list")
    again, moved = store.for_inference("actor", GENERATE, layers="list")
    assert again is first and not moved

    params, optimizer, moved = store.take_for_training("actor", TRAIN)
    assert moved is None and {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    new = jax.tree.map(lambda x: x + 1, params)
    store.trained("actor", TRAIN, new, optimizer)
    assert store.version("actor") == 1 and store.version("reference") == 0

    after, moved = store.for_inference("actor", GENERATE, layers="list")
    assert moved is not None
    np.testing.assert_allclose(
        np.asarray(after["final_norm"], np.float32), np.asarray(first["final_norm"], np.float32) + 1
    )


def test_training_elsewhere_moves_master_weights_and_optimizer(store):
    other = Layout.over((6, 7), Strategy(data=2))
    params, optimizer, moved = store.take_for_training("actor", other)
    assert moved is not None
    assert {d.id for x in jax.tree.leaves((params, optimizer)) for d in x.devices()} == {6, 7}
    with pytest.raises(AssertionError, match="already being trained"):
        store.take_for_training("actor", other)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def test_a_role_that_is_never_trained_rests_on_the_host_and_comes_back(store):
    copies = [store.for_inference("reference", layout, layers="list")[0] for layout in (TRAIN, GENERATE)]
    expected, on_device = list(map(on_host, copies)), weakref.ref(copies[1]["final_norm"])
    moving = store.offload("reference")
    assert rests_on_host(moving)
    del copies
    assert on_device() is None, "nothing of the copy is left on the devices"
    assert store.offload("reference") is None, "what rests stays where it is"
    for layout, want in zip((TRAIN, GENERATE), expected, strict=True):
        coming = store.prefetch("reference", layout, layers="list", for_training=False)
        assert coming is not None
        assert store.prefetch("reference", layout, layers="list", for_training=False) is None
        params, moved = store.for_inference("reference", layout, layers="list")
        assert params is coming and not moved
        jax.tree.map(np.testing.assert_array_equal, on_host(params), want)
    assert store.offload("reference") is None
    other = Layout.over((6,), Strategy())
    elsewhere, _ = store.for_inference("reference", other, layers="list")
    jax.tree.map(np.testing.assert_array_equal, on_host(elsewhere), expected[0])
    del params, coming, elsewhere


def test_a_trained_role_rests_on_the_host_between_train_calls(store):
    expected, copy = on_host(store.state("actor")), store.for_inference("actor", GENERATE, layers="list")[0]
    assert rests_on_host(store.offload("actor"))
    assert store.offload("actor") is None
    again, _ = store.for_inference("actor", GENERATE, layers="list")
    assert again is not copy
    jax.tree.map(np.testing.assert_array_equal, on_host(again), on_host(copy))
    state = store.state("actor")
    assert not any(rests_on_host(x) for x in jax.tree.leaves(state)), "a checkpoint reads from devices"
    jax.tree.map(np.testing.assert_array_equal, on_host(state), expected)
    jax.tree.map(np.testing.assert_array_equal, on_host(store.snapshot("actor")[1]), expected["params"])

    assert store.prefetch("actor", TRAIN, layers="stacked", for_training=True) is not None
    assert store.prefetch("actor", TRAIN, layers="stacked", for_training=True) is None
    params, optimizer, _ = store.take_for_training("actor", TRAIN)
    jax.tree.map(np.testing.assert_array_equal, on_host({"params": params, "optimizer": optimizer}), expected)
    store.trained("actor", TRAIN, params, optimizer)
    store.offload("actor")
    params, optimizer, _ = store.take_for_training("actor", TRAIN)  # not prefetched
    jax.tree.map(np.testing.assert_array_equal, on_host({"params": params, "optimizer": optimizer}), expected)


def test_a_role_of_another_part_of_the_run_is_left_alone(store):
    assert store.offload("critic") is None


# Weights that roles share, adapt or follow

ADAPTED = {
    "actor": ModelRole(MODEL, OptimizerConfig(), 1, lora=LoRAConfig(rank=2), base="actor.base"),
    "reference": ModelRole(MODEL, weights="actor.base"),
    "slow": ModelRole(
        MODEL, lora=LoRAConfig(rank=2), base="actor.base", average=AverageConfig(of="actor", decay=0.75, every=2)
    ),
}


def fill(store: WeightStore) -> WeightStore:
    for name in store.sets:
        store.initialize(name, TRAIN, jax.random.key(0))
    return store


def train_once(store: WeightStore, change: float = 1.0) -> None:
    params, optimizer, _ = store.take_for_training("actor", TRAIN)
    store.trained("actor", TRAIN, jax.tree.map(lambda x: x + change, params), optimizer)


def test_adapters_are_trained_alone_and_the_reference_is_what_they_adapt():
    store = fill(WeightStore(ADAPTED))
    assert list(store.sets) == ["actor.base", "actor", "slow"]
    assert store.read_by("reference") == ("actor.base",) and store.owned_by("actor") == ("actor", "actor.base")
    assert set(store.state("actor")["params"]["layers"]) == set(LoRAConfig().targets)
    actor, _ = store.for_inference("actor", GENERATE, layers="list")
    reference, _ = store.for_inference("reference", GENERATE, layers="list")
    assert actor["layers"][0]["query"].weight is reference["layers"][0]["query"], "no copy"
    train_once(store)
    merged, _ = store.for_inference("actor", GENERATE, layers="list", merged=True)
    again, received = store.for_inference("actor", GENERATE, layers="list", merged=True)
    assert again is merged and received is None
    got, was = (np.asarray(x["layers"][0]["gate"], np.float32) for x in (merged, reference))
    adapter = store.for_inference("actor", GENERATE, layers="list")[0]["layers"][0]["gate"]
    change = np.asarray(adapter.down, np.float32) @ np.asarray(adapter.up, np.float32) * adapter.scale
    np.testing.assert_allclose(got, was + change, rtol=0.02, atol=0.02)
    assert store.for_inference("reference", GENERATE, layers="list")[0] is not None
    np.testing.assert_array_equal(
        np.asarray(store.for_inference("reference", GENERATE, layers="list")[0]["layers"][0]["gate"]), was
    )


def test_an_average_follows_every_other_version():
    store = fill(WeightStore(ADAPTED))
    first = on_host(store.state("slow")["params"])
    for _ in range(3):
        train_once(store)
    assert store.version("slow") == store.version("actor") == 3
    now = on_host(store.state("slow")["params"])  # after two train calls: 0.75 a + 0.25 (a + 2)
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, old + 0.5, rtol=1e-5, atol=1e-6), now, first)
    state = jax.tree.map(jnp.copy, store.state("slow"))
    store.restore("slow", TRAIN, state, version=3)
    jax.tree.map(np.testing.assert_array_equal, on_host(store.state("slow")["params"]), now)


def test_a_pinned_version_is_there_after_training():
    store = fill(WeightStore(ADAPTED))
    before = np.asarray(store.for_inference("actor", GENERATE, layers="list")[0]["layers"][0]["up"].up, np.float32)
    store.pin("actor", GENERATE, layers="list")
    train_once(store)
    pinned, _ = store.for_inference("actor", GENERATE, layers="list", version=0)
    present, _ = store.for_inference("actor", GENERATE, layers="list")
    np.testing.assert_array_equal(np.asarray(pinned["layers"][0]["up"].up, np.float32), before)
    np.testing.assert_allclose(np.asarray(present["layers"][0]["up"].up, np.float32), before + 1)
    store.unpin()
    with pytest.raises(KeyError):
        store.for_inference("actor", GENERATE, layers="list", version=0)


def test_what_a_role_owns_rests_on_the_host():
    store = fill(WeightStore(ADAPTED))
    expected = on_host(store.for_inference("actor", GENERATE, layers="list")[0])
    assert rests_on_host(store.offload("actor"))
    assert store.prefetch("actor", TRAIN, layers="stacked", for_training=True) is not None
    jax.tree.map(
        np.testing.assert_array_equal, on_host(store.for_inference("actor", GENERATE, layers="list")[0]), expected
    )


def test_a_layout_over_some_of_the_devices_shares_the_memory_of_a_copy(store):
    """The tail of a generation needs no weights brought to it, with the same parts on its devices."""
    wide, narrow, other = (
        Layout.over(devices, strategy)
        for devices, strategy in (
            ((4, 5, 6, 7), Strategy(data=2, tensor=2)),
            ((4, 5), Strategy(tensor=2)),
            ((4, 5), Strategy(data=2)),
        )
    )
    whole, _ = store.for_inference("actor", wide, layers="list")
    part, moved = store.for_inference("actor", narrow, layers="list", inside=wide)
    assert moved is None
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        at = {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
        assert {s.device.id: s.data.unsafe_buffer_pointer() for s in y.addressable_shards}.items() <= at.items()
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    elsewhere, moved = store.for_inference("actor", other, layers="list", inside=wide)
    assert moved is not None, "other parts of the weights"
    np.testing.assert_array_equal(np.asarray(elsewhere["final_norm"]), np.asarray(whole["final_norm"]))
    params, optimizer, _ = store.take_for_training("actor", TRAIN)
    store.trained("actor", TRAIN, jax.tree.map(lambda x: x + 1, params), optimizer)
    after, moved = store.for_inference("actor", narrow, layers="list", inside=wide)
    assert moved is not None, "a copy of an older version is gone with it"
    assert not np.array_equal(np.asarray(after["final_norm"]), np.asarray(part["final_norm"]))
