import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.models.architecture import Weight
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.models.params import abstract_params, param_shardings
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

LAYOUT = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))


def spec(*entries) -> PartitionSpec:
    return PartitionSpec(*entries)


EXPECTED = {
    "embedding": spec("tensor", "fsdp"),
    "lm_head": spec("fsdp", "tensor"),
    "value_head": spec("fsdp", None),
    "final_norm": spec(None),
    "attention_norm": spec(None),
    "mlp_norm": spec(None),
    "query_norm": spec(None),
    "key_norm": spec(None),
    "query": spec("fsdp", "tensor"),
    "key": spec("fsdp", "tensor"),
    "value": spec("fsdp", "tensor"),
    "query_bias": spec("tensor"),
    "key_bias": spec("tensor"),
    "value_bias": spec("tensor"),
    "output": spec("tensor", "fsdp"),
    "gate": spec("fsdp", "tensor"),
    "up": spec("fsdp", "tensor"),
    "down": spec("tensor", "fsdp"),
    "attention_output_norm": spec(None),
    "mlp_output_norm": spec(None),
}
"""How every weight rests."""
UNEVEN = {name: spec(("fsdp", "tensor"), None) for name in ("key", "value")}
UNEVEN |= {name: spec(None) for name in ("key_bias", "value_bias")}
"""How those rest whose one head `tensor` does not divide."""


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_weight_of_every_preset(preset, stacked):
    seen = set()
    for variant in ({}, {"head": "scalar", "attention_bias": True, "qk_norm": True}):
        config = ModelConfig(**(dict(PRESETS[preset]) | variant))
        shapes = jax.tree.leaves(abstract_params(config, stacked=stacked))
        shardings = jax.tree_util.tree_leaves_with_path(param_shardings(config, LAYOUT, stacked=stacked))
        for (path, sharding), aval in zip(shardings, shapes, strict=True):
            name = path[-1].key
            layers = (None,) if stacked and path[0].key == "layers" else ()
            expected = EXPECTED | (UNEVEN if config.num_kv_heads == 1 else {})
            assert sharding == NamedSharding(LAYOUT.mesh, spec(*layers, *expected[name])), (name, sharding)
            sharding.shard_shape(aval.shape)  # raises where a shard is no whole number of entries
            seen.add(name)
    missing = {"lm_head"} if PRESETS[preset].get("tie_embeddings") else set()
    missing |= set() if PRESETS[preset].get("norms") else {"attention_output_norm", "mlp_output_norm"}
    assert seen == set(EXPECTED) - missing


def test_heads_are_repeated_side_by_side_and_a_vocabulary_is_padded():
    layout = Layout.over((0, 1, 2, 3), Strategy(tensor=4))
    heads = Weight((4, 6), ("embed", "kv_heads"), heads=2)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    used = jax.jit(lambda x: layout.at_use(x, heads))(jax.device_put(x, layout.weight(heads)))
    first, second = x[:, :3], x[:, 3:]
    np.testing.assert_array_equal(used, np.concatenate([first, first, second, second], axis=1))
    assert [shard.data.shape for shard in used.addressable_shards] == [(4, 3)] * 4
    vocab = Weight((6, 4), ("vocab", "embed"))
    used = jax.jit(lambda x: layout.at_use(x, vocab))(jax.device_put(x.reshape(6, 4), layout.weight(vocab)))
    np.testing.assert_array_equal(used, np.pad(x.reshape(6, 4), ((0, 2), (0, 0))))
    np.testing.assert_array_equal(layout.at_use(used, vocab), used, err_msg="what is ready stays")


def test_rows_are_split_over_data_and_fsdp():
    x = jax.device_put(np.arange(8 * 3).reshape(8, 3), LAYOUT.rows)
    boxes = {shard.device.id: shard.index[0] for shard in x.addressable_shards}
    assert boxes == {i: slice(i // 2 * 2, i // 2 * 2 + 2) for i in range(8)}
    assert all(shard.data.shape == (2, 3) for shard in x.addressable_shards)
    assert jax.device_put(np.arange(3), LAYOUT.replicated).sharding.is_fully_replicated


def test_constraints():
    x = np.zeros((8, 4), np.float32)

    @jax.jit
    def constrained(x):
        tree = LAYOUT.constrain_rows({"a": x, "b": x[:, 0]})
        return (
            LAYOUT.at_use(x, Weight((8, 4), ("embed", "mlp"))),
            LAYOUT.activation(x, ("batch", "vocab")),
            tree["a"],
            tree["b"],
        )

    at_use, activation, rows, row = constrained(x)
    for array, expected in [
        (at_use, spec(None, "tensor")),
        (activation, spec(("data", "fsdp"), "tensor")),
        (rows, spec(("data", "fsdp"))),
        (row, spec(("data", "fsdp"))),
    ]:
        assert array.sharding.is_equivalent_to(NamedSharding(LAYOUT.mesh, expected), array.ndim)


def test_one_device_is_left_alone():
    one = Layout.over((3,), Strategy())
    x = np.zeros((3, 5))
    assert one.activation(x, ("batch", "vocab")) is x  # pyright: ignore[reportArgumentType]
    assert one.at_use(x, Weight((3, 5), ("embed", "mlp"))) is x  # pyright: ignore[reportArgumentType]
    assert one.devices == one.own_devices == (3,)


def test_unknown_names_are_errors_on_one_device_too():
    one = Layout.over((0,), Strategy())
    with pytest.raises(ValueError, match="Did you mean 'batch'"):
        one.activation(np.zeros((3, 5)), ("batches", "vocab"))  # pyright: ignore[reportArgumentType]


def test_equal_layouts_are_one_key():
    strategy = Strategy(data=2, fsdp=2, tensor=2)
    assert hash(Layout.over(tuple(range(8)), strategy)) == hash(LAYOUT)
    assert Layout.over(tuple(range(8)), strategy) == LAYOUT != Layout.over(tuple(range(8)), Strategy(data=8))
