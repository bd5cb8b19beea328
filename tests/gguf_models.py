"""GGUF files for tests, written by the package gguf, and a model's forward pass as llama.cpp computes it.

Letters: T positions, V vocabulary.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.models.config_json import read_config

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"


@dataclasses.dataclass
class Parts:
    """What a GGUF file is written from. Tests change it before they write it."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def write(self, path: Path, *, matrices: str = "F32") -> Path:
        """Writes the file, with all matrices in a type of tensors."""
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
        kind = gguf.GGMLQuantizationType[matrices]
        for name, array in self.tensors.items():
            if array.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def parts_of(folder: Path, architecture: str, *, tokenizer: Tokenizer | None = None) -> Parts:
    """A checkpoint as llama.cpp's converter has it. Without a tokenizer, tokens are numbers."""
    config = read_config(folder)
    metadata = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        array = np.asarray(array, np.float32)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = _permuted(array, config.num_heads if "q_proj" in name else config.num_kv_heads)
        tensors[_gguf_name(name)] = array
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        metadata["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
        frequency = config.rope_theta ** (-np.arange(0, config.head_size, 2) / config.head_size)
        tensors["rope_freqs.weight"] = np.array([_factor(f, scaling) for f in frequency], np.float32)
    return Parts(
        architecture,
        {f"{architecture}.{key}": value for key, value in metadata.items()} | _vocabulary(tokenizer, config.vocab_size),
        tensors,
    )


def _vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    special = {"bos": 1, "eos": 1, "padding": 0}
    said = {f"tokenizer.ggml.{name}_token_id": number for name, number in special.items()}
    if tokenizer is None:
        tokens, merges, control = [f"t{number}" for number in range(vocab_size)], ["t 1"], (0, 1)
    else:
        fields = json.loads(tokenizer._backend.to_str())
        vocabulary = fields["model"]["vocab"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
        merges = [" ".join(merge) for merge in fields["model"]["merges"]]
        control = [token["id"] for token in fields["added_tokens"]]
    types = [3 if i in control else 5 if token.startswith("[PAD") else 1 for i, token in enumerate(tokens)]
    return said | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": TEMPLATE,
    }


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{_LAYER[rest]}.{kind}"


def _permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """As `permute` in llama.cpp's convert_hf_to_gguf.py."""
    size = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, size, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _factor(frequency: float, scaling: Any) -> float:
    """As `generate_extra_tensors` of Llama 3 there."""
    wavelength = 2 * np.pi / frequency
    original = scaling.original_max_position_embeddings
    if wavelength < original / scaling.high_freq_factor:
        return 1.0
    if wavelength > original / scaling.low_freq_factor:
        return scaling.factor
    smooth = original / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def llama_logits(path: Path, tokens_T: list[int]) -> np.ndarray:
    """The logits [T, V] of a Llama, from its GGUF file, in float32 on numpy: rotary positions turn the neighbors
    (x_2i, x_2i+1), as the file's rows are ordered for."""
    reader = gguf.GGUFReader(path)
    said = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if field.types}
    weights = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    return _forward(said, weights, tokens_T)


def _forward(said: Mapping[str, Any], weights: Mapping[str, np.ndarray], tokens_T: list[int]) -> np.ndarray:
    num_heads, num_kv_heads = said["attention.head_count"], said["attention.head_count_kv"]
    T, eps = len(tokens_T), said["attention.layer_norm_rms_epsilon"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        size = x.shape[-1]
        frequency = said["rope.freq_base"] ** (-np.arange(0, size, 2) / size)
        frequency /= weights.get("rope_freqs.weight", 1.0)
        angle = np.arange(T)[:, None, None] * frequency
        cos, sin, even, odd = np.cos(angle), np.sin(angle), x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape).astype(np.float32)

    x = weights["token_embd.weight"][tokens_T]
    future = np.triu(np.full((T, T), -np.inf, np.float32), 1)
    for layer in range(said["block_count"]):
        read = norm(x, f"blk.{layer}.attn_norm")
        query, key, value = (read @ weights[f"blk.{layer}.attn_{name}.weight"].T for name in "qkv")
        query = rotated(query.reshape(T, num_heads, -1))
        key, value = (part.reshape(T, num_kv_heads, -1) for part in (key, value))
        key, value = (part.repeat(num_heads // num_kv_heads, axis=1) for part in (rotated(key), value))
        scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(query.shape[-1]).astype(np.float32) + future
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attended = np.einsum("hts,shd->thd", shares, value).reshape(T, -1)
        x = x + attended @ weights[f"blk.{layer}.attn_output.weight"].T
        read = norm(x, f"blk.{layer}.ffn_norm")
        gate, up = (read @ weights[f"blk.{layer}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"blk.{layer}.ffn_down.weight"].T
    return norm(x, "output_norm") @ weights.get("output.weight", weights["token_embd.weight"]).T
