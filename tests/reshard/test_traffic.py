"""Traffic is what the programs of a reallocation move, and arithmetic finds the same without devices."""

import collections
import itertools
import time

import jax
import numpy as np
import pytest

from jaxrlhf.reshard import reallocate as module
from jaxrlhf.reshard.exchange import exchange_program
from jaxrlhf.reshard.moves import Grid
from jaxrlhf.reshard.reallocate import in_buckets, signature_of
from jaxrlhf.reshard.traffic import DescribedArray, describe, traffic, traffic_of
from tests.reshard.layouts import LAYOUTS, PAIRS, described, grid, place, shardings, values


@pytest.mark.parametrize("source", LAYOUTS)
def test_arithmetic_finds_what_the_arrays_say(source):
    tree = place(values(), shardings(source))
    for target in LAYOUTS:
        counted = traffic_of(tree, shardings(target))
        by_arithmetic = traffic(described(), grid(source), grid(target), node_size=8)
        assert counted == by_arithmetic, target
        assert counted.moved_bytes == sum(counted.sent_bytes.values()) == sum(counted.received_bytes.values())
        holders = [sum(x.nbytes for s in x.addressable_shards) for x in place(values(), shardings(target)).values()]
        assert sum(holders) >= counted.moved_bytes


def permuted(jaxpr) -> collections.Counter:
    """(from, to) -> bytes, of all `ppermute` of a program."""
    links = collections.Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            aval = equation.invars[0].aval
            for link in equation.params["perm"]:
                links[link] += aval.size * aval.dtype.itemsize
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                links += permuted(inner)
    return links


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_programs_move_what_the_plan_says(source, target, monkeypatch):
    """Every array by an exchange; its collectives, as they are traced, are what is counted."""
    monkeypatch.setattr(module, "transfer_method", lambda signature: "exchange")
    in_buckets.cache_clear()
    tree = {key: array for key, array in place(values(), shardings(source)).items() if array.size}
    tree["twin"] = tree["weight"] + 0
    targets = shardings(target)
    targets = {key: targets["weight" if key == "twin" else key] for key in tree}
    keys = sorted(tree)
    sent, received = collections.Counter(), collections.Counter()
    for bucket in in_buckets(tuple(signature_of(tree[key], targets[key]) for key in keys), 2**30):
        n = len(bucket.devices)
        shards = [tree[keys[i]].sharding.shard_shape(tree[keys[i]].shape) for i in bucket.members]
        avals = [
            jax.ShapeDtypeStruct((n * s[0], *s[1:]) if s else (), tree[keys[i]].dtype)
            for i, s in zip(bucket.members, shards, strict=True)
        ]
        program = exchange_program(bucket.lots, bucket.devices)
        for (sender, receiver), size in permuted(jax.make_jaxpr(program)(avals)).items():
            sent[bucket.devices[sender].id] += size
            received[bucket.devices[receiver].id] += size
    in_buckets.cache_clear()
    counted = traffic_of(tree, targets)
    assert {d: b for d, b in counted.sent_bytes.items() if b} == sent
    assert {d: b for d, b in counted.received_bytes.items() if b} == received


def test_by_hand():
    array = DescribedArray((8, 4), np.dtype(np.float32), ("fsdp",), ("tensor",))
    source = Grid((("fsdp", 4),), (0, 1, 2, 3))
    target = Grid((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    counted = traffic([array], source, target, node_size=2)
    # Half of 128 bytes for each; devices 0 and 3 hold a quarter of the whole in it, the others have to get all.
    assert counted.received_bytes == {0: 32, 1: 64, 2: 64, 3: 32}
    assert counted.sent_bytes == {0: 32, 1: 64, 2: 64, 3: 32}
    assert counted.local_bytes == 64
    assert (counted.within_nodes_bytes, counted.between_nodes_bytes) == (64, 128)


def test_a_hierarchy_reads_from_its_own_node():
    weights = describe([((64, 64), np.float32, ("embed", "heads"))])
    source = Grid((("data", 4), ("fsdp", 8), ("tensor", 1)), tuple(range(32)))
    target = Grid((("data", 16), ("fsdp", 1), ("tensor", 2)), tuple(range(32)))
    assert traffic(weights, source, target, node_size=8).between_nodes_bytes == 0


def test_thousands_of_devices():
    layer = [
        ((4096, 4096), np.float16, ("embed", "heads")),
        ((4096, 1024), np.float16, ("embed", "kv_heads")),
        ((4096, 14336), np.float16, ("embed", "mlp")),
        ((14336, 4096), np.float16, ("mlp", "embed")),
        ((4096,), np.float16, ("norm",)),
    ]
    weights = describe(itertools.chain.from_iterable(layer for _ in range(32)))
    devices = tuple(range(4096))
    source = Grid((("data", 64), ("fsdp", 8), ("tensor", 8)), devices)
    target = Grid((("data", 1024), ("fsdp", 1), ("tensor", 4)), devices)
    started = time.perf_counter()
    counted = traffic(weights, source, target, node_size=8)
    assert time.perf_counter() - started < 20  # 1 s on a quiet machine
    # Of its quarter of the matrices, a device holds one part in eight, at most half of which it may have to throw away.
    quarter = sum(np.prod(shape) * 2 for shape, _, axes in layer if axes != ("norm",)) * 32 // 4
    assert all(quarter * 15 // 16 <= b <= quarter for b in counted.received_bytes.values())
    assert counted.moved_bytes == sum(counted.sent_bytes.values())
