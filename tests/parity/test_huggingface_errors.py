"""Folders in Hugging Face's format: reading config.json in all its forms, and refusing what cannot be read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrlhf.models.config import FULL, SLIDING, ModelConfig, RopeScaling
from jaxrlhf.models.config_json import read_config
from jaxrlhf.models.huggingface import load_params, save_params
from jaxrlhf.models.params import init_params

SMALL = ModelConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1)
OLD_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "hidden_act": "left out"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
FIVE_LAYERS = {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(5)],
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 64}
SCALING = RopeScaling(4.0, 1.0, 2.0, 64)
YARN = LLAMA3 | {"rope_type": "yarn"}


def write_config(folder: Path, fields: dict[str, Any]) -> Path:
    fields = {key: value for key, value in fields.items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"num_kv_heads": 4, "head_dim": 0, "rope_theta": 1e4, "rope_scaling": None}),
        ({"rms_norm_eps": "left out"}, {"norm_eps": 1e-6}),
        ({"head_dim": 8}, {"head_dim": 0}),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"num_key_value_heads": 2}, {"num_kv_heads": 2}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 2e4, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            {"rope_theta": 2e4, "rope_scaling": SCALING},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
            {"rope_theta": 5e5, "rope_scaling": SCALING},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": SCALING},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": None}),
        (MISTRAL | {"num_attention_heads": 8, "sliding_window": None}, {"num_kv_heads": 8}),
        (MISTRAL | {"num_key_value_heads": 2, "sliding_window": 256}, {"num_kv_heads": 2, "windows": (None, None)}),
        (
            MISTRAL | {"num_key_value_heads": 2},
            {"sliding_window": 4096, "windows": (None, None)},
        ),  # no sequence outgrows it
        (
            MISTRAL | {"num_key_value_heads": 2, "sliding_window": 64},
            {"sliding_window": 64, "layer_types": (), "windows": (64, 64)},
        ),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 64}, {"attention_bias": True, "qk_norm": False}),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64}, {"sliding_window": 0}),  # from layer 28 on
        (
            QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            {"layer_types": ("full_attention", "sliding_attention"), "windows": (None, 64)},
        ),
        (
            QWEN3 | FIVE_LAYERS | {"use_sliding_window": True, "sliding_window": 64},
            {"layer_types": ("sliding_attention", "full_attention"), "windows": (64, None, 64, None, 64)},
        ),
        (QWEN3, {"head_dim": 128, "qk_norm": True}),
        ({"sliding_window": 64}, {"num_layers": 2}),  # means nothing to Llama
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "gelu_pytorch_tanh"}),
        (
            {"rope_theta": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_theta": 2e4, "rope_scaling": RopeScaling(8.0, type="linear")},
        ),
        (
            OLMO2 | {"rms_norm_eps": "left out"},
            {"norms": "after", "qk_norm": True, "qk_norm_over": "projection", "norm_eps": 1e-5, "num_kv_heads": 4},
        ),
        (
            GEMMA3,  # what is left out
            {
                "head_dim": 256,
                "num_kv_heads": 4,
                "query_pre_attn_scalar": 0.0,
                "activation": "gelu_pytorch_tanh",
                "tie_embeddings": True,
                "rope_theta": 1e6,
                "rope_local_theta": 1e4,
                "sliding_window": 4096,
                "norms": "both",
                "norm_plus_one": True,
                "scale_embeddings": True,
                "layer_types": (*[SLIDING] * 5, FULL),
            },
        ),
        (
            GEMMA3
            | {  # as transformers 4 wrote it
                "head_dim": 16,
                "query_pre_attn_scalar": 24,
                "sliding_window": 64,
                "sliding_window_pattern": 2,
                "rope_theta": 1e5,
                "rope_local_base_freq": 500.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "head_dim": 16,
                "query_pre_attn_scalar": 24.0,
                "layer_types": (SLIDING, FULL),
                "rope_theta": 1e5,
                "rope_local_theta": 500.0,
                "rope_scaling": RopeScaling(8.0, type="linear"),
            },
        ),
        (GEMMA3 | {"sliding_window_pattern": 1}, {"sliding_window": 0, "layer_types": ()}),
    ],
    ids=str,
)
def test_read_config(fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, OLD_LLAMA | fields))
    assert {key: getattr(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            r"architectures: must begin .* Got 'GemmaForCausalLM'. Supported: Llama",
        ),
        ({"hidden_act": "relu2"}, r'hidden_act: must be one of silu, gelu_pytorch_tanh. Got "relu2"'),
        ({"mlp_bias": True}, r"mlp_bias: only false is supported. Got true"),
        ({"attention_bias": True}, r"attention_bias: only false is supported. Got true"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: only 1.0 is supported. Got 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters.partial_rotary_factor: only 1.0"),
        ({"hidden_size": "left out"}, r"config.json: hidden_size: must be given. Got architectures, vocab_size, "),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: weights must be .* Got {'bits': 4}"),
        ({"rope_scaling": YARN}, r"rope_scaling: the type must be one of default, llama3, linear, .* Got {.*'yarn'}"),
        ({"rope_parameters": YARN}, r"rope_parameters: the type must be .* Got {.*'yarn'}"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters: .*, the same in all layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling.low_freq_factor: must be given"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.factor: must be given"),
        (OLMO2 | {"attention_bias": True}, r"attention_bias: only false is supported. Got true"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, r"final_logit_softcapping: only null is supported. Got 30.0"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: only null is supported. Got 50.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, r"use_bidirectional_attention: only false is supported"),
        (GEMMA3 | {"hidden_activation": "relu2"}, r'hidden_activation: must be one of silu, gelu_\w+. Got "relu2"'),
        (GEMMA3 | {"sliding_window": None}, r"sliding_window: must be at least 1. Got null"),
        (GEMMA3 | {"sliding_window_pattern": 0}, r"sliding_window_pattern: must be at least 1. Got 0"),
        (GEMMA3 | {"query_pre_attn_scalar": "256"}, r'query_pre_attn_scalar: must be a number. Got "256"'),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4}}},
            r'rope_parameters.sliding_attention.rope_type: only "default" is supported. Got "linear"',
        ),
        (
            GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"rope_parameters.full_attention: the type must be one of default, llama3, linear",
        ),
        (GEMMA3 | {"rope_parameters": {"full_attention": 1e6}}, r"rope_parameters.full_attention: must be an object"),
        (MISTRAL | {"sliding_window": 0}, r"sliding_window: must be at least 1. Got 0"),
        (
            QWEN3 | {"use_sliding_window": True, "layer_types": ["full_attention", "chunked"]},
            r'layer_types: must be one of full_attention, sliding_attention for each of 2 layers. Got "chunked"',
        ),
        (
            QWEN3 | {"use_sliding_window": True, "layer_types": ["full_attention"]},
            r"layer_types: must be one of .* for each of 2 layers. Got 1 of them",
        ),
        (QWEN2 | {"use_sliding_window": "yes"}, r'use_sliding_window: must be true or false. Got "yes"'),
        ({"num_key_value_heads": 3}, r"config.json: num_key_value_heads: must divide"),
        ({"num_hidden_layers": "thirty"}, r'config.json: num_hidden_layers: must be a whole number. Got "thirty"'),
        ({"num_hidden_layers": -1}, r"config.json: num_hidden_layers: must be at least 1. Got -1"),
        ({"head_dim": 8.5}, r"head_dim: must be a whole number or null. Got 8.5"),
        ({"rms_norm_eps": None}, r"rms_norm_eps: must be a number. Got null"),
        ({"rms_norm_eps": -1}, r"config.json: rms_norm_eps: must be finite and positive. Got -1"),
        ({"rope_theta": "big"}, r'rope_theta: must be a number. Got "big"'),
        ({"rope_scaling": [1]}, r"rope_scaling: must be an object or null. Got \[1\]"),
        ({"tie_word_embeddings": "no"}, r'tie_word_embeddings: must be true or false. Got "no"'),
        ({"architectures": "LlamaForCausalLM"}, r'architectures: must be a list. Got "LlamaForCausalLM"'),
        (MISTRAL | {"sliding_window": "64"}, r"sliding_window: must be a whole number or null"),
    ],
    ids=str,
)
def test_config_errors(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(write_config(tmp_path, OLD_LLAMA | fields))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"config.json: a checkpoint must have this file. Got none."),
        ("{", r"config.json: must be JSON. Got Expecting"),
        ("[]", r"config.json: must be a JSON object. Got list."),
    ],
)
def test_config_file_errors(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def drop(tensors: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


GATES = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("gate", "up")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: drop(t, "model.norm.weight"), r"Missing: model.norm.weight. Give"),
        (lambda t: drop(t, *GATES), r"Missing: (\S+_proj.weight,? ){3}and 1 more. Give"),
        (lambda t: drop(t, "lm_head.weight"), r"Missing: lm_head.weight"),
        (lambda t: t | {"model.layers.0.self_attn.o_proj.bias": np.zeros(8)}, r"Got also: \S+0.self_attn.o_proj.bias"),
        (
            lambda t: t | {"model.layers.2.mlp.up_proj.weight": np.zeros(8)},
            r"Got also: model.layers.2.mlp.up_proj.weight",
        ),
        (lambda t: t | {"score.weight": np.zeros((1, 8))}, r"Got also: score.weight"),
        (
            lambda t: t | {"model.layers.1.mlp.up_proj.weight": np.zeros((8, 12))},
            r"model.layers.1.mlp.up_proj.weight: must have shape \[12, 8\] by the config. Got \[8, 12\]",
        ),
        (
            lambda t: t | {"model.embed_tokens.weight": np.zeros((17, 8))},
            r"model.embed_tokens.weight: must have shape \[16, 8\] by the config. Got \[17, 8\]",
        ),
        (lambda t: t | {"model.norm.weight": np.zeros(8, np.int8)}, r"model.norm.weight: weights must be in .* Got I8"),
    ],
)
def test_weight_errors(change: Any, message: str, tmp_path: Path) -> None:
    save_params(init_params(SMALL, jax.random.key(0)), SMALL, tmp_path, dtype="float32")
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path, SMALL)


def test_weights_that_follow_from_others_may_be_there(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, tie_embeddings=True)
    params = init_params(config, jax.random.key(0))
    save_params(params, config, tmp_path, dtype="float32")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_file(tensors | frequencies | {"lm_head.weight": embedding}, path)
    chex.assert_trees_all_equal(load_params(tmp_path, config), params)
    save_file(tensors | {"lm_head.weight": embedding + 1}, path)
    with pytest.raises(ValueError, match=r"lm_head.weight: must equal model.embed_tokens.weight, .* Set tie_word"):
        load_params(tmp_path, config)


def test_weight_file_errors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"must hold model.safetensors or .*index.json. Got pytorch_model.bin."):
        load_params(tmp_path, SMALL)
    with pytest.raises(ValueError, match=r"must hold model.safetensors or .*. Got no files."):
        load_params(tmp_path / "nowhere", SMALL)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"model.safetensors: must be a whole safetensors file. Got Error .* Download"):
        load_params(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        (dict(attention_bias=True, qk_norm=True), "attention_bias, qk_norm"),
        (dict(sliding_window=4, layer_types=(FULL, SLIDING)), "sliding_window in some layers"),
        (dict(norms="after", query_pre_attn_scalar=9.0), "norms, query_pre_attn_scalar"),
    ],
)
def test_save_errors(fields: dict[str, Any], got: str, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, **fields)
    message = f"export: a family .* Got {got}. Known: Llama has none; .*; Qwen2 has attention_bias; .* Train a model"
    with pytest.raises(ValueError, match=message):
        save_params(init_params(config, jax.random.key(0)), config, tmp_path, dtype="float32")
