import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.architecture import Weight
from jaxrlhf.reshard.offload import rests_on_host, to_device_memory, to_host_memory
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

LAYOUT = Layout.over((2, 3, 0, 1), Strategy(fsdp=2, tensor=2))
SCALAR = jax.device_put(jnp.float32(0.1), LAYOUT.replicated)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_to_the_host_and_back_is_bitwise(dtype):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)) * 100, dtype)
    tree = {"split": jax.device_put(values, LAYOUT.weight(Weight((4, 6), ("embed", "mlp")))), "scalar": SCALAR}
    resting = to_host_memory(tree)
    assert rests_on_host(resting) and not rests_on_host(tree)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(resting)} == {"pinned_host"}
    back = to_device_memory(resting)
    for was, now in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert now.sharding == was.sharding and now.dtype == was.dtype
        np.testing.assert_array_equal(np.asarray(now), np.asarray(was))


def test_what_is_there_is_left_as_it_is():
    tree = {"scalar": SCALAR}
    resting = to_host_memory(tree)
    assert to_device_memory(tree)["scalar"] is SCALAR
    assert to_host_memory(resting)["scalar"] is resting["scalar"]
