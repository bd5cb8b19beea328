"""Weights over the stages of pipelines: the same numbers as anywhere else, each on the devices of its stage."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.config.schema import AverageConfig, OptimizerConfig
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface import load_params, save_params
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.models.params import LayerForm, abstract_params, init_params, param_shardings, with_layers
from jaxrlhf.programs.optimizer import init_optimizer
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_forms import stage_program, without_stages
from jaxrlhf.reshard.offload import rests_on_host
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.subprocesses import run_processes

MODEL = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=5, num_heads=2, num_kv_heads=2, tie_embeddings=True,
    dtype="bfloat16", scan_layers=True,
)  # fmt: skip
PIPELINED = Layout.over((0, 1, 2, 3), Strategy(pipeline=2, fsdp=2))
DEEPER = Layout.over((4, 5, 6, 7), Strategy(pipeline=4))
CHUNKED = Layout.over((2, 3), Strategy(pipeline=2, chunks=2))
FLAT = Layout.over((0, 1), Strategy(fsdp=2))
NAMES = {PIPELINED: "two stages", DEEPER: "four stages", CHUNKED: "two chunks", FLAT: "no stages"}
STAGES = {PIPELINED: (0, 0, 0, 1, 1), DEEPER: (0, 0, 1, 2, 3), CHUNKED: (0, 0, 1, 0, 1)}
"""Layer -> stage."""
LORA = LoRAConfig(rank=2, targets=("query", "down"))
ROLES = {
    "actor": ModelRole(MODEL, OptimizerConfig(), 1),
    "reference": ModelRole(MODEL),
    "slow": ModelRole(MODEL, average=AverageConfig(of="actor", decay=0.75)),
}
ADAPTED = {"actor": ModelRole(MODEL, OptimizerConfig(), 1, lora=LORA, base="actor.base")}


@functools.cache
def first_numbers(kind):
    """The first weights of a set: noise, also where a model starts with zeros or ones."""
    leaves, structure = jax.tree.flatten(kind.abstract())
    rng = np.random.default_rng(0)
    return structure.unflatten([rng.normal(size=x.shape).astype(np.float32) for x in leaves])


def filled(layout, roles=ROLES):
    store = WeightStore(roles)
    for name, kind in store.sets.items():
        numbers = with_layers(first_numbers(kind), stacked=kind.resting_form(layout) == "stacked")
        store.load(name, layout, jax.tree.map(jax.device_put, on_host(numbers), kind.shardings(layout)))
    return store


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def as_list(params):
    return with_layers(on_host(params), stacked=False)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, as_list(got), as_list(want))


def devices_of(tree):
    return {device.id for x in jax.tree.leaves(tree) for device in x.devices()}


def assert_on_stages(params, layout):
    """Every weight is on the devices of its stage, and nowhere else."""
    stages = [set(layout.stage(i).devices) for i in range(layout.strategy.pipeline)]
    assert devices_of(params["embedding"]) == stages[0]
    assert devices_of(params["final_norm"]) == stages[-1]
    for layer, stage in zip(params["layers"], STAGES[layout], strict=True):
        assert devices_of(layer) == stages[stage]


@pytest.mark.parametrize("layout", [DEEPER, CHUNKED], ids=NAMES.get)
def test_first_weights_are_the_same_numbers_on_any_stages(layout):
    store = WeightStore({"reference": ROLES["reference"]})
    store.initialize("reference", layout, jax.random.key(0))
    params = store.state("reference")["params"]
    assert_on_stages(params, layout)
    flat = WeightStore({"reference": ROLES["reference"]})
    flat.initialize("reference", FLAT, jax.random.key(0))
    assert_same(params, flat.state("reference")["params"])


def test_the_whole_model_is_never_on_one_device():
    def memory_of_second_stage(num_stages):
        model = dataclasses.replace(MODEL, num_layers=2 * num_stages)
        layout = Layout.over(tuple(range(num_stages)), Strategy(pipeline=num_stages))
        make = functools.partial(init_params, model)
        program = stage_program(layout, 1, make, param_shardings(model, layout))
        return program.lower(jax.random.key(0)).compile().memory_analysis()

    few, many = memory_of_second_stage(3), memory_of_second_stage(6)
    layer = 4 * sum(x.size for x in jax.tree.leaves(abstract_params(MODEL)["layers"][0]))
    assert few.output_size_in_bytes <= 2 * layer + 8 * 2 * 9, "two layers, and where each array is"
    assert many.output_size_in_bytes == few.output_size_in_bytes
    assert many.temp_size_in_bytes == few.temp_size_in_bytes, "nothing of the other stages is drawn"


COPIES: list[tuple[Layout, LayerForm]] = [
    (FLAT, "list"),
    (FLAT, "stacked"),
    (PIPELINED, "list"),
    (DEEPER, "list"),
    (CHUNKED, "list"),
]


@pytest.mark.parametrize("home", [FLAT, PIPELINED, CHUNKED], ids=NAMES.get)
def test_a_copy_is_the_same_in_every_form(home):
    store = filled(home)
    want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), as_list(store.state("actor")["params"]))
    for layout, layers in COPIES:
        for role in ("actor", "reference"):
            params, received = store.for_inference(role, layout, layers=layers)
            assert (received is None) == (layout == home)
            assert isinstance(params["layers"], dict) == (layers == "stacked")
            assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
            assert devices_of(params) == set(layout.devices)
            assert_same(params, want)
            if layout.is_pipelined:
                assert_on_stages(params, layout)


def test_generation_reads_every_stage_in_one_array():
    store, lists = filled(FLAT), as_list(filled(FLAT).for_inference("actor", FLAT, layers="list")[0])
    for layout, stages in ((PIPELINED, [[0, 1, 2], [3, 4]]), (DEEPER, [[0, 1], [2], [3], [4]])):
        ring, received = store.for_inference("actor", layout, layers="ring")
        assert received
        assert devices_of(ring) == set(layout.devices)
        for name in ("embedding", "final_norm"):
            np.testing.assert_array_equal(np.asarray(ring[name]), lists[name])
        for stage, numbers in enumerate(stages):
            for slot, number in enumerate(numbers):
                for name, weight in lists["layers"][number].items():
                    np.testing.assert_array_equal(np.asarray(ring["layers"][slot][name][stage]), weight)
        again, received = store.for_inference("actor", layout, layers="ring")
        assert again is ring and received is None


def test_a_ring_has_its_adapters_added_in():
    store = filled(PIPELINED, ADAPTED)
    merged, _ = store.for_inference("actor", PIPELINED, layers="list", merged=True)
    store.pin("actor", PIPELINED, layers="ring")
    ring, received = store.for_inference("actor", PIPELINED, layers="ring")
    # one stage each lacks the embedding, of which its two devices want half, and the other one the last norm
    assert received == 2 * (2 * 8 * 16 // 2 + 2 * 8)
    np.testing.assert_array_equal(np.asarray(ring["layers"][1]["query"][1]), np.asarray(merged["layers"][4]["query"]))
    assert store.for_inference("actor", PIPELINED, layers="ring") == (ring, None)
    params, optimizer, _ = store.take_for_training("actor", PIPELINED)
    store.trained("actor", PIPELINED, jax.tree.map(lambda x: x + 1, params), optimizer)
    before, _ = store.for_inference("actor", PIPELINED, layers="ring", version=0)
    after, _ = store.for_inference("actor", PIPELINED, layers="ring")
    assert_same(before, ring)
    assert (np.asarray(after["layers"][0]["down"]) != np.asarray(ring["layers"][0]["down"])).any()


def test_what_is_received_is_what_moves():
    store = filled(PIPELINED)
    _, received = store.for_inference("actor", CHUNKED, layers="list")
    split, whole = 4 * 8 * 8 + 3 * 8 * 8, 2 * 8  # numbers of a layer that fsdp halves, and of its norms
    first = 16 * 8 + 3 * (split + whole)  # device 2: the embedding and layers 0, 1 and 3
    second = 2 * (split + whole) + 8  # device 3: layers 2 and 4, and the last norm
    there = (split // 2 + whole) + (split // 2 + whole + 8)  # their halves of layers 3 and 4, and norms
    assert received == 2 * (first + second - there)


@pytest.mark.parametrize("target", [FLAT, DEEPER, CHUNKED], ids=NAMES.get)
def test_training_goes_on_in_another_layout(target):
    store = filled(PIPELINED)
    before = on_host(store.state("actor"))
    params, optimizer, received = store.take_for_training("actor", target)
    assert received
    assert isinstance(params["layers"], dict) == (target == FLAT)
    assert optimizer.num_updates.sharding.is_fully_replicated and devices_of(optimizer.num_updates) == set(
        target.devices
    )
    for moment in ("mu", "nu"):
        assert jax.tree.map(lambda x: x.sharding, getattr(optimizer.adamw, moment)) == jax.tree.map(
            lambda x: x.sharding, params
        )
    params = jax.tree.map(lambda x: x + 1, params)
    optimizer = jax.tree.map(lambda x: x + 2, optimizer)
    store.trained("actor", target, params, optimizer)
    back, optimizer, _ = store.take_for_training("actor", PIPELINED)
    assert_on_stages(back, PIPELINED)
    assert_same(back, jax.tree.map(lambda x: x + 1, before["params"]))
    want = jax.tree.map(lambda x: x + 2, before["optimizer"])
    jax.tree.map(np.testing.assert_array_equal, on_host(optimizer), want)


def test_an_average_follows_from_any_layout_to_stages():
    store = filled(PIPELINED)
    first = as_list(store.state("slow")["params"])
    params, optimizer, _ = store.take_for_training("actor", FLAT)
    store.trained("actor", FLAT, jax.tree.map(lambda x: x + 1, params), optimizer)
    assert store.version("slow") == 1
    now = store.state("slow")["params"]
    assert_on_stages(now, PIPELINED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b + 0.25, rtol=1e-6, atol=1e-6), as_list(now), first)


def test_a_snapshot_shares_nothing():
    store = filled(PIPELINED)
    layout, snapshot = store.snapshot("actor")
    assert layout == PIPELINED
    want = on_host(snapshot)
    params, _, _ = store.take_for_training("actor", PIPELINED)
    jax.tree.map(lambda x: x.delete(), params)
    assert_same(snapshot, want)
    assert_on_stages(snapshot, PIPELINED)


@pytest.mark.parametrize("role", ["actor", "reference"])
def test_what_was_saved_in_one_form_is_restored_in_another(role):
    state = jax.tree.map(jnp.copy, filled(PIPELINED).state(role))
    flat = filled(FLAT)
    abstract = flat.abstract_state(role, FLAT, saved="list")
    flat.restore(role, FLAT, _read(state, abstract), version=3)
    assert flat.version(role) == 3 and isinstance(flat.state(role)["params"]["layers"], dict)
    assert_same(flat.state(role)["params"], state["params"])

    stacked = jax.tree.map(jnp.copy, flat.state(role))
    back = filled(PIPELINED)
    abstract = back.abstract_state(role, PIPELINED, saved="stacked")
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(abstract)} == {4}, "over the same devices"
    back.restore(role, PIPELINED, _read(stacked, abstract), version=3)
    jax.tree.map(np.testing.assert_array_equal, on_host(back.state(role)), on_host(state))
    assert_on_stages(back.state(role)["params"], PIPELINED)


def _read(state, abstract):
    """What a checkpoint gives that was asked for it so."""
    return jax.tree.map(lambda x, like: jax.device_put(np.asarray(x), like.sharding), state, abstract)


def test_layouts_without_stages_have_the_same_devices():
    assert without_stages(PIPELINED, MODEL) == Layout.over((0, 1, 2, 3), Strategy(fsdp=4))
    narrow = dataclasses.replace(MODEL, hidden_size=6, num_heads=3, num_kv_heads=3)
    assert without_stages(DEEPER, narrow) == Layout.over((4, 5, 6, 7), Strategy(data=4))
    assert without_stages(CHUNKED, MODEL) == Layout.over((2, 3), Strategy(fsdp=2))


def test_stages_rest_on_the_host_and_come_back():
    store = filled(PIPELINED)
    for role in ("actor", "reference"):
        want = on_host(store.for_inference(role, PIPELINED, layers="list")[0])
        assert rests_on_host(store.offload(role))
        trains = role == "actor"
        coming = store.prefetch(role, PIPELINED, layers="list", for_training=trains)
        assert coming is not None
        assert store.prefetch(role, PIPELINED, layers="list", for_training=trains) is None
        params, _ = store.for_inference(role, PIPELINED, layers="list")
        assert_same(params, want)
        assert_on_stages(params, PIPELINED)


@pytest.mark.parametrize("layout", [PIPELINED, CHUNKED], ids=NAMES.get)
def test_adapters_are_merged_on_their_stages(layout):
    store, flat = filled(layout, ADAPTED), filled(FLAT, ADAPTED)
    for each, form in ((store, layout), (flat, FLAT)):
        params, optimizer, _ = each.take_for_training("actor", form)
        each.trained("actor", form, jax.tree.map(lambda x: x + 1, params), optimizer)
    beside, _ = store.for_inference("actor", layout, layers="list")
    assert_on_stages(beside, layout)
    merged, _ = store.for_inference("actor", layout, layers="list", merged=True)
    assert_on_stages(merged, layout)
    want, _ = flat.for_inference("actor", FLAT, layers="list", merged=True)
    got, want = as_list(merged), as_list(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.01, atol=1e-6), got, want)
    again, received = store.for_inference("actor", layout, layers="list", merged=True)
    assert again is merged and received is None
    adapted, _ = store.adapted_by("actor", layout)
    assert adapted is not None
    assert adapted["layers"][0]["query"] is beside["layers"][0]["query"].weight


@pytest.mark.parametrize("layout", [FLAT, PIPELINED, CHUNKED], ids=NAMES.get)
def test_the_abstract_state_is_that_of_the_arrays(layout):
    store = filled(layout)
    for role in ROLES:

        def same(abstract, array):
            assert (abstract.shape, abstract.dtype) == (array.shape, array.dtype)
            assert abstract.sharding.is_equivalent_to(array.sharding, array.ndim)

        jax.tree.map(same, store.abstract_state(role, layout), store.state(role))


def test_a_checkpoint_is_read_onto_its_stages(tmp_path):
    params = init_params(MODEL, jax.random.key(1))
    save_params(params, MODEL, tmp_path, dtype="float32")
    loaded = load_params(tmp_path, MODEL, PIPELINED)
    assert_same(loaded, params)
    assert_on_stages(loaded, PIPELINED)
    save_params(loaded, MODEL, tmp_path / "again", dtype="float32")
    assert_same(load_params(tmp_path / "again", MODEL), params)


def test_the_optimizer_starts_on_the_stages():
    store = filled(PIPELINED)
    optimizer = store.state("actor")["optimizer"]
    want = init_optimizer(OptimizerConfig(), as_list(store.state("actor")["params"]))
    jax.tree.map(np.testing.assert_array_equal, on_host(optimizer), on_host(want))
    assert_on_stages(optimizer.adamw.mu, PIPELINED)
    assert devices_of(optimizer.num_updates) == {0, 1, 2, 3}


def test_stages_in_two_processes():
    run_processes("tests.execution.run_weights", 2)
