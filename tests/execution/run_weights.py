"""One of several processes that hold weights over stages: run_weights.py COORDINATOR NUM_PROCESSES INDEX."""

import functools
import sys
from typing import Any

import jax
import numpy as np

from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.models.params import LayerForm, with_layers
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.reshard.layouts import place

coordinator, num_processes, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // num_processes)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes, index)

MODEL = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=3, num_heads=2, num_kv_heads=2, tie_embeddings=True,
    scan_layers=True,
)  # fmt: skip
SPLIT = Layout.over(tuple(range(8)), Strategy(pipeline=2, fsdp=2, tensor=2))  # a stage in each process
DEEPER = Layout.over((4, 5), Strategy(pipeline=2))  # all in the second
FLAT = Layout.over((0, 1), Strategy(fsdp=2))  # all in the first
ROLES = {
    "actor": ModelRole(MODEL, OptimizerConfig(), 1, lora=LoRAConfig(rank=2, targets=("query",)), base="actor.base"),
    "critic": ModelRole(MODEL, OptimizerConfig(), 1),
    "slow": ModelRole(MODEL, average=AverageConfig(of="critic", decay=0.75)),
}


@functools.cache
def numbers(kind: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), kind.abstract())


def assert_holds(tree: Any, want: Any) -> None:
    def holds(array: jax.Array, value: np.ndarray) -> None:
        assert array.shape == value.shape
        assert len(array.addressable_shards) == len(array.sharding.addressable_devices)
        for shard in array.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), value[shard.index], rtol=1e-6, atol=1e-6)

    jax.tree.map(holds, tree, want)


store = WeightStore(ROLES)
for name, kind in store.sets.items():
    store.load(name, SPLIT, place(numbers(kind), kind.shardings(SPLIT)))
critic, base, adapters = (numbers(store.sets[name]) for name in ("critic", "actor.base", "actor"))
merged = {**base, "layers": []}
for layer, own in zip(base["layers"], adapters["layers"], strict=True):
    change = own["query"]["down"] @ own["query"]["up"] * LoRAConfig(rank=2).scale
    merged["layers"].append({**layer, "query": layer["query"] + change})

forms: list[tuple[Layout, LayerForm]] = [(SPLIT, "list"), (DEEPER, "list"), (FLAT, "list"), (FLAT, "stacked")]
for layout, layers in forms:
    assert_holds(
        store.for_inference("critic", layout, layers=layers)[0], with_layers(critic, stacked=layers == "stacked")
    )
    params, _ = store.for_inference("actor", layout, layers=layers, merged=True)
    assert_holds(params, with_layers(merged, stacked=layers == "stacked"))
for layout, second in ((SPLIT, [2, None]), (DEEPER, [2, None])):
    ring, received = store.for_inference("actor", layout, layers="ring")
    assert received is not None and (received > 0) == bool(layout.own_devices), "what every stage reads"
    assert_holds(ring["embedding"], merged["embedding"])
    pairs = list(zip([0, 1], second, strict=True))
    for slot, stages in zip(ring["layers"], pairs, strict=True):
        layers = [merged["layers"][0 if n is None else n] for n in stages]
        want = np.stack([layers[0]["query"], layers[1]["query"] * (stages[1] is not None)])
        assert_holds(slot["query"], want)

add = jax.jit(lambda x: x + 1)
for there in (FLAT, DEEPER, SPLIT):
    params, optimizer, _ = store.take_for_training("critic", there)
    params = jax.tree.map(lambda x: add(x) if x.sharding.addressable_devices else x, params)
    store.trained("critic", there, params, optimizer)
assert store.versions() == {"actor.base": 0, "actor": 0, "critic": 3, "slow": 3}
assert_holds(store.snapshot("critic")[1], jax.tree.map(lambda x: x + 3, critic))
# of averages that start equal: 0.25 of 1, then 0.75 of that and 0.25 of 2, then 0.75 of that and 0.25 of 3
assert_holds(store.state("slow")["params"], jax.tree.map(lambda x: x + 1.265625, critic))

store.offload("critic")
store.prefetch("critic", SPLIT, layers="list", for_training=True)
params, optimizer, received = store.take_for_training("critic", SPLIT)
assert received is None
assert_holds(params, jax.tree.map(lambda x: x + 3, critic))

store.initialize("critic", SPLIT, jax.random.key(0))
drawn = store.snapshot("critic")[1]
store.initialize("critic", FLAT, jax.random.key(0))
alike = store.for_inference("critic", SPLIT, layers="list")[0]
for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(alike), strict=True):
    for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))
