"""Reallocation moves every bit to where it belongs, over all ways there are, and says what it cannot do."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.reshard import exchange
from jaxrlhf.reshard import reallocate as module
from jaxrlhf.reshard.reallocate import in_buckets, reallocate, signature_of, transfer_method
from tests.reshard.layouts import LAYOUTS, PAIRS, assert_holds, mesh, place, shardings, values
from tests.reshard.staged import STAGED_PAIRS, check_moves
from tests.subprocesses import run_processes


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Moves as if the devices had memory of their own."""
    caches = (transfer_method, in_buckets)
    monkeypatch.setattr(module, "host_memory_is_theirs", lambda devices: False)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("source", LAYOUTS)
def test_there_and_back_between_all_layouts(source):
    expected = values()
    tree = place(expected, shardings(source))
    for target in LAYOUTS:
        there = reallocate(tree, shardings(target))
        assert_holds(there, target, expected)
        assert_holds(reallocate(there, shardings(source)), source, expected)
        assert_holds(tree, source, expected)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_the_ways_of_accelerators(source, target, as_on_accelerators):
    expected = values()
    tree = place(expected, shardings(source))
    assert_holds(reallocate(tree, shardings(target)), target, expected)
    assert_holds(tree, source, expected)


def ways(source: str, target: str) -> dict[str, str | None]:
    tree = place(values(), shardings(source))
    return {
        key: transfer_method(signature_of(array, shardings(target)[key])) for key, array in tree.items() if array.size
    }


def test_which_way_is_taken(as_on_accelerators):
    assert set(ways("fsdp", "fsdp").values()) == {None}
    assert ways("fsdp", "data")["weight"] == "jit"  # a gather
    assert ways("data", "fsdp")["weight"] == "jit"  # a part of what is there
    assert ways("fsdp", "tensor")["weight"] == "jit"  # from rows to columns
    assert ways("fsdp", "data_tensor")["weight"] == "exchange"  # XLA would copy the whole array everywhere
    assert ways("upper", "fsdp")["step"] == "shards"
    assert ways("one", "another")["weight"] == "shards"
    assert ways("reversed", "fsdp")["weight"] == "exchange"


def test_which_way_is_taken_on_a_processor():
    assert set(ways("fsdp", "data_tensor").values()) <= {None, "host"}


def test_what_lies_right_is_returned_as_it_is():
    tree = place(values(), shardings("fsdp"))
    same = reallocate(tree, shardings("fsdp"))
    assert all(same[key] is tree[key] for key in tree if tree[key].size)
    assert reallocate(tree["weight"], shardings("fsdp")["weight"], donate=True) is tree["weight"]
    assert not tree["weight"].is_deleted()


def test_one_sharding_for_all_and_arrays_of_the_host():
    replicated = NamedSharding(mesh("middle"), PartitionSpec())
    numbers = {"numpy": np.arange(6).reshape(2, 3), "jax": jnp.arange(3.0), "python": 2.5}
    moved = reallocate(numbers, replicated)
    assert all(array.sharding == replicated for array in moved.values())
    assert jax.tree.map(lambda x: x.tolist(), moved) == {
        "numpy": [[0, 1, 2], [3, 4, 5]], "jax": [0.0, 1.0, 2.0], "python": 2.5
    }  # fmt: skip


@pytest.mark.parametrize("accelerators", [False, True])
def test_results_live_on_when_sources_are_given_up(accelerators, request):
    if accelerators:
        request.getfixturevalue("as_on_accelerators")
    expected = values()
    for source, target in [("fsdp", "data_tensor"), ("data", "fsdp"), ("fsdp", "reversed"), ("data", "lower")]:
        tree = place(expected, shardings(source))
        moved = reallocate(tree, shardings(target), donate=True)
        stayed = {key for key in tree if moved[key].sharding.is_equivalent_to(shardings(source)[key], tree[key].ndim)}
        assert {key for key in tree if tree[key].is_deleted()} == {key for key in tree if tree[key].size} - stayed
        assert_holds(moved, target, expected)


def test_what_stays_is_named_as_the_target_says():
    """Processes that have none of an array know it by its name alone."""
    tree = {"whole": jnp.arange(4.0)}
    here = NamedSharding(mesh("lower"), PartitionSpec())
    there = NamedSharding(mesh("lower"), PartitionSpec(None))
    placed = jax.device_put(tree["whole"], here)
    moved = reallocate(placed, there, donate=True)
    assert moved.sharding == there != here and not placed.is_deleted()
    same = [a.data.unsafe_buffer_pointer() for a in placed.addressable_shards]
    assert same == [a.data.unsafe_buffer_pointer() for a in moved.addressable_shards]
    assert reallocate(placed, here) is placed


def test_an_array_that_is_there_twice_is_given_up_once():
    expected = values()["weight"]
    array = place(expected, shardings("fsdp")["weight"])
    target, other = shardings("lower")["weight"], shardings("upper")["weight"]
    moved = reallocate([array, array, array], [target, other, target], donate=True, bucket_bytes=1)
    assert array.is_deleted()
    assert moved[0] is moved[2]
    assert all((np.asarray(each) == expected).all() for each in moved)
    # Where it is also to stay, it stays.
    array = place(expected, shardings("fsdp")["weight"])
    kept, gone = reallocate([array, array], [shardings("fsdp")["weight"], target], donate=True)
    assert kept is array and not array.is_deleted() and (np.asarray(gone) == expected).all()


def test_buckets_are_bounded_and_lack_nothing():
    like = [jnp.zeros((16, 16), jnp.float32)] * 5
    tree = [*like, jnp.zeros((64, 64), jnp.float32), jnp.zeros((16, 16), jnp.int32), *like]
    tree = jax.device_put(tree, NamedSharding(mesh("fsdp"), PartitionSpec("fsdp")))
    target = NamedSharding(mesh("lower"), PartitionSpec("fsdp"))
    signatures = tuple(signature_of(array, target) for array in tree)
    buckets = in_buckets(signatures, 4096)
    assert sorted(i for bucket in buckets for i in bucket.members) == list(range(len(tree)))
    sizes = [sum(signatures[i].nbytes for i in bucket.members) for bucket in buckets]
    assert all(size <= 4096 or len(bucket.members) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    # Like arrays side by side, so that buckets are alike: 4 + 4 + 2, then the large one, then the last.
    assert [bucket.members for bucket in buckets] == [(0, 1, 2, 3), (4, 7, 8, 9), (10, 11), (5,), (6,)]


def test_at_most_so_many_buckets_are_under_way(monkeypatch, as_on_accelerators):
    events = []
    move, wait = module._carry_out, jax.block_until_ready
    monkeypatch.setattr(module, "_carry_out", lambda *args: events.append(1) or move(*args))
    monkeypatch.setattr(jax, "block_until_ready", lambda x: events.append(-1) or wait(x))
    tree = [place(values()["weight"], shardings("fsdp")["weight"]) for _ in range(6)]
    reallocate(tree, shardings("lower")["weight"], bucket_bytes=1)
    assert events.count(1) == 6
    assert max(itertools.accumulate(events)) == module.BUCKETS_IN_FLIGHT


def test_programs_are_cached(as_on_accelerators):
    tree = place(values(), shardings("fsdp"))
    reallocate(tree, shardings("regrouped"))
    misses = exchange.exchange_program.cache_info().misses
    reallocate(place(values(1), shardings("fsdp")), shardings("regrouped"))
    assert exchange.exchange_program.cache_info().misses == misses


def test_host_memory(as_on_accelerators):
    expected = values()
    resting = {key: s.with_memory_kind("pinned_host") for key, s in shardings("middle").items()}
    for source in ("middle", "fsdp"):
        rested = reallocate(place(expected, shardings(source)), resting)
        assert all(array.sharding == resting[key] for key, array in rested.items())
        assert_holds(reallocate(rested, shardings("middle")), "middle", expected)
        assert_holds(reallocate(rested, shardings("tensor")), "tensor", expected)


def test_what_cannot_be_split_is_refused():
    tree = {"layers": [{"query": np.zeros((12, 10), np.float32)}]}
    with pytest.raises(
        ValueError,
        match=r"^layers\.0\.query: dim 1 must be a multiple of 8, the degree of fsdp x tensor, over which it is "
        r"split\. Got 10 in shape \(12, 10\)\. Use a degree that divides it, or pad it\.$",
    ):
        reallocate(tree, NamedSharding(mesh("reversed"), PartitionSpec(None, ("fsdp", "tensor"))))
    with pytest.raises(ValueError, match=r"^array: .* must not name more dims than the array has\. Got shape \(4,\)\."):
        reallocate(np.zeros(4), NamedSharding(mesh("fsdp"), PartitionSpec(None, "fsdp")))
    with pytest.raises(ValueError, match=r"^a: needs a sharding to go to\. Got 'fsdp'\."):
        reallocate({"a": np.zeros(4)}, {"a": "fsdp"})


def test_between_the_stages_of_pipelines():
    for source, target in STAGED_PAIRS:
        check_moves(source, target)


def test_between_stages_as_on_accelerators(as_on_accelerators):
    for source, target in (("one_stage", "two"), ("two", "chunks"), ("chunks", "upper"), ("four", "one_stage")):
        check_moves(source, target, donate=True)


def test_between_processes():
    run_processes("tests.reshard.run_processes", 2)
