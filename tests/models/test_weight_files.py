"""Weight files are read in slices and written in pieces, by one process or two, in the memory of a piece."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrlhf.models import array_pieces, weight_files
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import read_config
from jaxrlhf.models.huggingface import check_params, load_params, save_params
from jaxrlhf.models.params import init_params, param_shardings, with_layers
from jaxrlhf.models.weight_files import StoredTensor, open_weights
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.subprocesses import run_processes

MODEL = ModelConfig(vocab_size=24, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=2)
SPLIT = Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2))
WHOLE_BYTES = 4 * sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))))


@pytest.fixture
def params() -> Any:
    return init_params(MODEL, jax.random.key(0))


@pytest.fixture
def folder(params, tmp_path) -> Path:
    """Several files of at most 4 kB, as transformers names them."""
    save_params(params, MODEL, tmp_path / "model", dtype="float32", shard_bytes=4000)
    return tmp_path / "model"


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """A few rows at a time, and not always the same number."""
    for module in (weight_files, array_pieces):
        monkeypatch.setattr(module, "CHUNK_BYTES", 200)


def test_files_are_of_bounded_size_and_the_index_says_where_each_tensor_is(params, folder, tmp_path):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 11)]
    assert index["metadata"]["total_size"] == WHOLE_BYTES
    stored = {path.name: load_file(path) for path in files}
    assert {name: file for file, tensors in stored.items() for name in tensors} == index["weight_map"]
    assert all(sum(x.nbytes for x in tensors.values()) <= 4000 for tensors in stored.values())
    assert not (folder / "model.safetensors").exists()

    save_params(params, MODEL, folder, dtype="float32")  # over the older ones
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    chex.assert_trees_all_equal(
        load_file(folder / "model.safetensors"), {name: x for tensors in stored.values() for name, x in tensors.items()}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stacked", [False, True])
def test_round_trip_in_pieces(params, dtype, stacked, small_chunks, tmp_path):
    shardings = param_shardings(MODEL, SPLIT, stacked=stacked)
    placed = jax.device_put(with_layers(params, stacked=stacked), shardings)
    save_params(placed, MODEL, tmp_path, dtype=dtype, shard_bytes=5000)
    wanted = jax.tree.map(lambda x: x.astype(dtype), with_layers(params, stacked=stacked))
    loaded = load_params(tmp_path, MODEL, SPLIT, stacked=stacked, dtype=jnp.dtype(dtype))
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    chex.assert_trees_all_equal(loaded, wanted)
    chex.assert_trees_all_equal(
        load_params(tmp_path, MODEL), jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), params)
    )


def test_from_pinned_host_memory(params, folder, tmp_path):
    shardings = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), param_shardings(MODEL, SPLIT))
    save_params(jax.device_put(params, shardings), MODEL, tmp_path / "again", dtype="float32", shard_bytes=4000)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_devices_read_each_slice_once(params, folder, monkeypatch):
    """Those that hold the same share one reading; slices are no larger than a shard."""
    read, original = [], StoredTensor.read_into

    def counted(self: StoredTensor, target: np.ndarray, index: Any) -> None:
        read.append(target.nbytes)
        original(self, target, index)

    monkeypatch.setattr(StoredTensor, "read_into", counted)
    loaded = load_params(folder, MODEL, Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2)))
    chex.assert_trees_all_equal(loaded, params)
    assert sum(read) == sum(
        len({str(shard.index) for shard in x.addressable_shards}) * x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves(loaded)
    )
    assert max(read) == max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(loaded))


@pytest.mark.parametrize("stored", ["F64", "F16", "BF16"])
def test_other_precisions(stored, params, tmp_path):
    save_params(params, MODEL, tmp_path, dtype="float32")
    path = tmp_path / "model.safetensors"
    dtype = weight_files._DTYPES[stored]
    save_file({name: x.astype(dtype) for name, x in load_file(path).items()}, path)
    wanted = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params)
    chex.assert_trees_all_equal(load_params(tmp_path, MODEL, SPLIT), wanted)


def test_a_damaged_folder_is_named_with_file_and_tensor(folder):
    first, second = (folder / f"model-0000{i}-of-00010.safetensors" for i in (1, 2))
    whole = second.read_bytes()
    second.write_bytes(whole[:-10])
    last = list(json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")]))[-1]
    with pytest.raises(
        ValueError, match=rf"{second}: must be a whole .* Got \S+ of \S+ bytes, without the end of {last}"
    ):
        check_params(folder, MODEL)
    second.write_bytes(whole[:20])
    with pytest.raises(
        ValueError, match=rf"{second}: must be a whole safetensors file. Got Error .* Download it again"
    ):
        check_params(folder, MODEL)
    second.unlink()
    message = rf"{second}: must be a whole .* Got none, though \S+ lists model\S+, .* and 1 more in it"
    with pytest.raises(ValueError, match=message):
        check_params(folder, MODEL)
    shutil.copy(first, second)
    with pytest.raises(ValueError, match=rf"{second}: every weight .* must be there. Missing: model\S+, "):
        check_params(folder, MODEL)


def test_a_file_with_more_or_others_is_named(folder):
    path = folder / "model-00002-of-00010.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    for change, message in (
        ({"model.layers.9.mlp.up_proj.weight": np.zeros(8)}, "the config must declare every weight"),
        ({name: tensors[name].astype(np.int32)}, f"{name}: weights must be in floating point of 16 bits .* Got I32"),
        ({name: tensors[name][:-1]}, f"{name}: must have shape .* by the config"),
    ):
        save_file(tensors | change, path)
        with pytest.raises(ValueError, match=f"{path}: {message}"):
            check_params(folder, MODEL)


def test_a_file_that_shrinks_while_it_is_read(folder):
    name = "model.embed_tokens.weight"
    tensor = open_weights(folder).tensors[name]
    os.truncate(tensor.file, tensor.offset + 100)
    with pytest.raises(ValueError, match=r"must not change while it is read. Got a shorter file"):
        tensor.read_into(np.empty(tensor.shape, np.float32), tuple(map(slice, tensor.shape)))


def test_an_interrupted_checkpoint_is_none(params, folder, monkeypatch):
    """Whatever was there before, and wherever it ends."""

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weight_files, "_write_index", fails)
    with pytest.raises(OSError, match="disk full"):
        save_params(params, MODEL, folder, dtype="float32", shard_bytes=4000)
    with pytest.raises(ValueError, match=r"config.json: a checkpoint must have this file"):
        read_config(folder)


def test_two_processes(folder, params, tmp_path, monkeypatch):
    """Each reads what its devices hold, and they write the same files together."""
    monkeypatch.setenv("CHECKPOINT", str(folder))
    monkeypatch.setenv("WRITTEN", str(tmp_path))
    run_processes("tests.models.run_weight_files", 2)
    for layout in ("split", "stages"):
        for path in folder.iterdir():
            assert path.read_bytes() == (tmp_path / layout / path.name).read_bytes()
