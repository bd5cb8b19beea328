"""One of several processes that reallocate between layouts: run_processes.py COORDINATOR NUM_PROCESSES INDEX."""

import sys

import jax

from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import traffic, traffic_of
from tests.reshard.layouts import PAIRS, assert_holds, described, grid, place, shardings, values
from tests.reshard.staged import check_moves

coordinator, num_processes, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 8 // num_processes)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, num_processes, index)

expected = values()
for source, target in PAIRS[::2] + PAIRS[5::4]:
    tree = place(expected, shardings(source))
    assert_holds(reallocate(tree, shardings(target)), target, expected)
    # A process is a node of four devices.
    counted = traffic_of(tree, shardings(target))
    by_arithmetic = traffic(described(), grid(source), grid(target), node_size=4)
    assert list(counted.received_bytes.values()) == list(by_arithmetic.received_bytes.values())
    assert counted[2:] == by_arithmetic[2:], (source, target)

# There and back, giving up the sources, in buckets smaller than the tree.
tree = place(expected, shardings("fsdp"))
there = reallocate(tree, shardings("middle"), donate=True, bucket_bytes=1024)
assert all(array.is_deleted() for array in tree.values() if array.size)
assert_holds(reallocate(there, shardings("fsdp"), donate=True, bucket_bytes=1024), "fsdp", expected)

# What every process has by itself goes onto any devices.
placed = reallocate(expected, shardings("upper"))
assert_holds(placed, "upper", expected)
assert_holds(reallocate(jax.tree.map(jax.numpy.asarray, expected), shardings("fsdp")), "fsdp", expected)

# Between host memory and devices.
resting = {key: s.with_memory_kind("pinned_host") for key, s in shardings("fsdp").items()}
rested = reallocate(place(expected, shardings("tensor")), resting)
assert all(array.sharding.memory_kind == "pinned_host" for array in rested.values())
assert_holds(reallocate(rested, shardings("fsdp")), "fsdp", expected)

# A model between the stages of pipelines.
for source, target in (
    ("one_stage", "two"),
    ("two", "four"),
    ("four", "chunks"),
    ("chunks", "upper"),
    ("upper", "two"),
):
    check_moves(source, target, donate=True)
