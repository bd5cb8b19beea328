"""GGUF files of Llama, Qwen 2 and Qwen 3: types of tensors, what becomes of their numbers, and what is refused."""

import sys

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import read_config
from jaxrlhf.models.gguf_files import TENSOR_TYPES, Dtype, gguf_config, read_gguf, save_gguf_model
from jaxrlhf.models.huggingface import save_params
from tests.gguf_models import Parts, parts_of
from tests.random_weights import params_of

SMALL = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, norm_eps=1e-6,
    rope_theta=5e5,
)  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
LARGEST_ERRORS = {
    "F32": 0, "F16": 2**-11, "BF16": 2**-8,
    "Q8_0": 1 / 127, "Q5_1": 2 / 31, "Q5_0": 1 / 8, "Q4_1": 2 / 15, "Q4_0": 1 / 4,
}  # fmt: skip
"""Type -> the largest error of a number, as a fraction of the largest of its row: the width of a step."""


@pytest.fixture
def parts(tmp_path) -> Parts:
    return written_parts(tmp_path, SMALL, "llama")


def written_parts(tmp_path, config: ModelConfig, architecture: str) -> Parts:
    folder = tmp_path / "from"
    save_params(params_of(config), config, folder, dtype="float32")
    return parts_of(folder, architecture)


def convert(path, folder, dtype: Dtype = "float32"):
    file = read_gguf(path)
    save_gguf_model(file, gguf_config(file), folder, dtype=dtype, ids=IDS)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_tensors_of_every_type_are_near_what_they_were_made_from(parts, kind, tmp_path):
    path = parts.write(tmp_path / "model.gguf", matrices=kind)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} == {kind, "F32"}
    converted = convert(path, tmp_path / "to")
    exact = load_file(tmp_path / "from" / "model.safetensors")
    assert converted.keys() == exact.keys()
    for name, array in exact.items():
        assert converted[name].dtype == np.float32
        largest = np.abs(array).max(-1, keepdims=True) * (LARGEST_ERRORS[kind] if array.ndim == 2 else 0)
        errors = np.abs(converted[name] - array)
        assert np.all(errors <= largest), name
        if kind != "F32" and array.ndim == 2:  # and they were rounded
            assert errors.max() > largest.max() / 100


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("llama", {}),
        ("llama", {"tie_embeddings": True, "head_dim": 24}),
        ("qwen2", {"attention_bias": True}),
        ("qwen3", {"qk_norm": True, "head_dim": 24, "num_kv_heads": 4}),
    ],
)
def test_every_weight_has_its_place(architecture, variant, tmp_path):
    config = ModelConfig(**{**vars(SMALL), **variant})
    converted = convert(written_parts(tmp_path, config, architecture).write(tmp_path / "m.gguf"), tmp_path / "to")
    assert read_config(tmp_path / "to") == config
    exact = load_file(tmp_path / "from" / "model.safetensors")
    assert converted.keys() == exact.keys()
    for name, array in exact.items():
        np.testing.assert_array_equal(converted[name], array, err_msg=name)


def test_bfloat16_rounds(parts, tmp_path):
    path = parts.write(tmp_path / "model.gguf")
    rounded = convert(path, tmp_path / "to", dtype="bfloat16")
    for name, array in load_file(tmp_path / "from" / "model.safetensors").items():
        np.testing.assert_array_equal(rounded[name], array.astype(jnp.bfloat16))


def test_a_type_that_is_not_read_is_named_with_its_tensor(parts, tmp_path):
    path = parts.write(tmp_path / "model.gguf")
    data = path.read_bytes()
    kind = gguf.GGMLQuantizationType
    where = data.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8  # after the dims
    assert data[where] == kind.F32
    path.write_bytes(data[:where] + bytes([kind.Q8_1]) + data[where + 1 :])
    with pytest.raises(
        ValueError,
        match=r"model.gguf: blk.1.ffn_up.weight: its type must be one that is read\. Got Q8_1\. Known: F32, F16, BF16, "
        r"Q8_0, Q5_0, Q5_1, Q4_0, Q4_1\. Use a file of this model with other types\.",
    ):
        read_gguf(path)


@pytest.mark.parametrize(
    ("content", "got"),
    [(b"", "empty"), (b"no GGUF file at all, but text", "magic"), ("first half", ""), ("no such file", "No such file")],
)
def test_a_file_that_is_not_whole_is_refused(parts, content, got, tmp_path):
    path = parts.write(tmp_path / "model.gguf")
    if content == "no such file":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if isinstance(content, str) else content)
    with pytest.raises(
        ValueError, match=rf"model.gguf: must be a whole GGUF file\. Got: .*{got}.*\. Download it again"
    ):
        read_gguf(path)


def test_without_the_package_it_says_what_to_install(parts, tmp_path, monkeypatch):
    path = parts.write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf\. Got none\. Run: pip install 'jaxrlhf\[gguf\]'\."):
        read_gguf(path)


LEFT_OUT = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": "two"}, r"llama.block_count: must be a whole number. Got 'two'\. Download it again"),
        ({"llama.block_count": LEFT_OUT}, r"llama.block_count: must be a whole number. Got none\."),
        ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv: must be a whole number. Got \[2, 2\]"),
        ({"llama.attention.head_count": 0}, r"llama.attention.head_count: must be at least 1\. Got 0\."),
        ({"llama.attention.head_count": 3}, r"its sizes must be those of a model\. Got: num_kv_heads: must divide"),
        ({"llama.rope.dimension_count": 8}, r"rope.dimension_count: must be 16, the size of a head\. Got 8\."),
        ({"llama.rope.scaling.type": "yarn"}, r"llama.rope.scaling.type: only 'none' and Llama 3's .* Got 'yarn'\."),
        ({"llama.block_count": 3}, r"blk.2.attn_k.weight: its shape must be \[32, 64\] .* Got no such tensor\. Use a"),
        ({"llama.feed_forward_length": 97}, r"ffn_down.weight: its shape must be \[64, 97\] .* Got \[64, 96\]\."),
    ],
)
def test_metadata_that_does_not_fit_is_refused(parts, change, message, tmp_path):
    parts.metadata |= change
    parts.metadata = {key: value for key, value in parts.metadata.items() if value is not LEFT_OUT}
    file = read_gguf(parts.write(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"model.gguf: .*" + message):
        gguf_config(file)


def test_other_architectures_are_refused(parts, tmp_path):
    parts.architecture = "gemma2"
    file = read_gguf(parts.write(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"general.architecture: must be one .* Got 'gemma2'. Supported: llama, qwen2"):
        gguf_config(file)


def test_a_tensor_that_the_model_has_no_use_for_is_refused(parts, tmp_path):
    parts.tensors["blk.0.ffn_gate_inp.weight"] = np.zeros((4, 64), np.float32)  # of a mixture of experts
    file = read_gguf(parts.write(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"blk.0.ffn_gate_inp.weight: .* no such tensor .* Got \[4, 64\]"):
        gguf_config(file)


def test_rotary_factors_of_another_scaling_are_refused(parts, tmp_path):
    parts.tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    file = read_gguf(parts.write(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"rope_freqs.weight: must hold the factors .* RopeScaling\(.* Got \["):
        gguf_config(file)
