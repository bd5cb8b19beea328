from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import init_params, param_shardings
from jaxrlhf.models.stage_weights import fill, join, part_of, pick, pick_virtual, seen_from, whole_of
from jaxrlhf.models.transformer import hidden_states
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=5, num_heads=2, num_kv_heads=2, head="both"
)
STAGES = Layout.over(tuple(range(8)), Strategy(pipeline=2, data=2, tensor=2))


@pytest.fixture(scope="module")
def params():
    return jax.device_put(init_params(CONFIG, jax.random.key(0)), param_shardings(CONFIG, STAGES))


def names(tree) -> set[str]:
    return {jax.tree_util.keystr(path[:2], simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_every_weight_is_on_one_stage(params):
    first, last = (pick(params, stage, 5, STAGES) for stage in range(2))
    assert names(first) == {"embedding", "layers0", "layers1", "layers2"}
    assert names(last) == {"layers3", "layers4", "final_norm", "lm_head", "value_head"}
    for stage, tree in enumerate((first, last)):
        devices = set(STAGES.stage(stage).mesh.devices.flat)
        assert all(x.sharding.device_set == devices for x in jax.tree.leaves(tree))
    joined = join([first, last], 5, STAGES)
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(params), strict=True))


def test_chunks_go_round_over_the_stages(params):
    layout = Layout.over((0, 1), Strategy(pipeline=2, chunks=2))
    assert names(pick(params, 0, 5, layout)) == {"embedding", "layers0", "layers1", "layers3"}
    parts = [pick_virtual(params, stage, 5, 4) for stage in range(4)]
    assert names(parts[0]) == {"embedding", "layers0", "layers1"} and names(parts[2]) == {"layers3"}
    assert names(fill([parts[0], parts[2]])) == names(pick(params, 0, 5, layout))
    whole = fill(parts)
    assert all(a is b for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True))


def test_a_counter_is_seen_by_every_stage():
    count = jax.device_put(jnp.int32(7), STAGES.replicated)
    state = {"count": count, "mu": {"embedding": jax.device_put(jnp.ones(2), STAGES.stage(0).replicated)}}
    parts = [pick(state, stage, 5, STAGES) for stage in range(2)]
    assert [set(part["count"].sharding.device_set) for part in parts] == [
        set(STAGES.stage(stage).mesh.devices.flat) for stage in range(2)
    ]
    joined = join(parts, 5, STAGES)
    assert joined["count"].sharding == STAGES.replicated and int(joined["count"]) == 7
    assert parts[1]["mu"]["embedding"] is None and joined["mu"]["embedding"] is state["mu"]["embedding"]


def test_parts_of_arrays_share_their_memory():
    def pointers(array):
        return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}

    rows = jax.device_put(np.arange(8 * 3).reshape(8, 3), STAGES.rows)
    own = seen_from(rows, STAGES.stage(1).rows)
    assert pointers(own).items() <= pointers(rows).items() and np.array_equal(own, rows)
    group = STAGES.data_group(1).stage(1)
    part = part_of(rows, (4, 3), group.rows)  # of the second data group, on the second stage
    assert np.array_equal(part, np.arange(8 * 3).reshape(8, 3)[4:])
    assert pointers(part).items() <= pointers(rows).items()
    halves = [part_of(rows, (4, 3), STAGES.data_group(g).stage(0).rows) for g in range(2)]
    both = whole_of(halves, NamedSharding(STAGES.stage(0).mesh, PartitionSpec(("data", "fsdp"))))
    assert np.array_equal(both, rows) and pointers(both).items() <= pointers(rows).items()


def test_stages_one_after_another_are_the_model(params):
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 6)), jnp.int32)
    mask_BT = jnp.arange(6)[None] >= jnp.array([0, 2, 1, 0])[:, None]
    x: Any = tokens_BT
    for stage in range(3):
        layout = Layout.over((stage,), Strategy())
        own = jax.device_put(pick_virtual(jax.device_get(params), stage, 5, 3), layout.replicated)
        run = jax.jit(lambda own, x, stage=stage, layout=layout: hidden_states(
            own, x, mask_BT, CONFIG, layout, wanted=3, stage=stage, num_stages=3
        ))  # fmt: skip
        x = jax.device_get(run(own, jax.device_put(x, layout.replicated)))
    whole = jax.tree.map(jnp.asarray, jax.device_get(params))
    expected = hidden_states(whole, tokens_BT, mask_BT, CONFIG, Layout.over((0,), Strategy()), wanted=3)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)
