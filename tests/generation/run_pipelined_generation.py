"""One of several processes that generate in one pipeline. Arguments: COORDINATOR NUM_PROCESSES INDEX."""

import sys

import jax

from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.generation.pipelined_cases import (
    abstract_ring,
    assert_same,
    in_slots,
    model,
    on_one_device,
    on_stages,
    over,
    pipelined,
    sampling,
)

coordinator, num_processes, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // num_processes)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes, index)

config, drawn = model(3, tie_embeddings=True), sampling(num_samples=2)
slots = Slots(4, prefill_rows=1, prefill_tokens=3, shared_prompts=4)
every_stage_in_one = over(Strategy(pipeline=2, data=2, tensor=2))
every_stage_in_both = Layout.over((0, 4, 1, 5), Strategy(pipeline=2, tensor=2))
for layout in (every_stage_in_one, every_stage_in_both):
    for rollout in (on_stages(config, drawn, 0.8, layout), in_slots(config, drawn, layout, slots)):
        own = jax.tree.map(lambda x: x.addressable_shards[0].data, rollout)
        assert_same(jax.device_get(own), on_one_device(config, drawn, 0.8))

# A process that owns no device of a layout has its arrays without data.
elsewhere = Layout.over((0, 1), Strategy(pipeline=2))
weights = pipelined(config, elsewhere)
assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights) == abstract_ring(config, elsewhere)
assert all(bool(x.addressable_shards) == (index == 0) for x in jax.tree.leaves(weights))
