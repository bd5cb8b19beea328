"""GGUF files of Llama, Qwen 2 and Qwen 3, as llama.cpp has them: sizes as a config, weights as a checkpoint.

A GGUF file holds metadata under names such as `llama.block_count`, and tensors, many of them quantized. Its matrices
are [out, in], as in Hugging Face's checkpoints. In files of Llama, the rows of query and key are in another order
(`_halves`). Reading needs the package `gguf`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, tree_leaves_with_path

from jaxrlhf.brief import brief
from jaxrlhf.models.adapter_files import write_tensors
from jaxrlhf.models.architecture import checkpoint_name, declare, is_weight
from jaxrlhf.models.config import ModelConfig, RopeScaling
from jaxrlhf.models.config_json import CONFIG, GENERATION, exported_config
from jaxrlhf.models.layers import scale_frequencies
from jaxrlhf.models.weight_files import WEIGHTS

Dtype = Literal["float32", "bfloat16"]

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1")
"""Types of tensors that are read, by the names that ggml gives them."""

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}
"""`general.architecture` -> fields of ModelConfig that it implies."""

_NAMES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    # in blk.<number>
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
"""Our weights -> their modules in GGUF files. A bias has the module of its weight."""
_ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which rotary frequencies are divided: Llama 3's scaling, whose settings are not stored."""
_FREQUENCY_FACTORS = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every Llama from 3.1 on."""


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A file that was opened: its metadata in memory, its tensors on the disk."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """Name -> tensor, as the package `gguf` describes it: `tensor_type`, `data`, `shape` in reverse."""

    def stated(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata. Raises ValueError if it is of another kind, or missing without a default."""
        value = self.metadata.get(key, default)
        if not isinstance(value, kind):
            raise ValueError(
                f"{self.path}: {key}: must be {_words(kind)}. Got {'none' if value is None else brief(value)}. "
                "Download it again, or use another file of this model."
            )
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file. Raises ValueError if it is not a whole one, or a tensor has a type that is not read."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"{path}: reading a GGUF file needs the package gguf. Got none. Run: pip install 'jaxrlhf[gguf]'."
        ) from error
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # the library raises whatever its arrays and enums do
        raise ValueError(f"{path}: must be a whole GGUF file. Got: {error}. Download it again.") from error
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in TENSOR_TYPES:
            raise ValueError(
                f"{path}: {tensor.name}: its type must be one that is read. Got {tensor.tensor_type.name}. Known: "
                f"{', '.join(TENSOR_TYPES)}. Use a file of this model with other types."
            )
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The config of a file's model. Raises ValueError if it is of another architecture, or the file does not hold
    exactly the weights of such a model."""
    architecture = file.stated("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture: must be one that is supported. Got {architecture!r}. Supported: "
            f"{', '.join(ARCHITECTURES)}. Use a model of these families."
        )

    def number(key: str, default: int | None = None) -> int:
        value = file.stated(f"{architecture}.{key}", int, default)
        if value < 1:
            raise ValueError(f"{file.path}: {architecture}.{key}: must be at least 1. Got {value}. Download it again.")
        return value

    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {architecture}.{key}: must be {head_dim}, the size of a head. Got {number(key)}. "
                "Use another model."
            )
    theta = float(file.stated(f"{architecture}.rope.freq_base", float, 10000.0))
    # a float32 as the shortest text that means it: 1e-05, not 9.999999747378752e-06
    norm_eps = float(str(np.float32(file.stated(f"{architecture}.attention.layer_norm_rms_epsilon", float))))
    rope_scaling = _rope_scaling(file, architecture, theta, head_dim)
    try:
        config = ModelConfig(
            vocab_size=len(file.stated("tokenizer.ggml.tokens", list)),
            hidden_size=hidden_size,
            intermediate_size=number("feed_forward_length"),
            num_layers=number("block_count"),
            num_heads=num_heads,
            num_kv_heads=number("attention.head_count_kv", num_heads),
            head_dim=0 if head_dim * num_heads == hidden_size else head_dim,
            max_position_embeddings=number("context_length"),
            rope_theta=theta,
            rope_scaling=rope_scaling,
            norm_eps=norm_eps,
            tie_embeddings=_gguf_name("lm_head") not in file.tensors,
            **ARCHITECTURES[architecture],
        )
    except ValueError as error:
        raise ValueError(f"{file.path}: its sizes must be those of a model. Got: {error}") from error
    _check_tensors(file, config)
    return config


def save_gguf_model(
    file: GGUFFile, config: ModelConfig, folder: Path, *, dtype: Dtype, ids: Mapping[str, int | None]
) -> None:
    """Writes the weights and config.json of a file's model, made or replaced in `folder`.

    float32 holds every number of the file exactly. Host memory holds the whole model in `dtype` meanwhile.

    Args:
        ids: The special tokens: bos_token_id, eos_token_id, pad_token_id.
    """
    is_llama = file.metadata["general.architecture"] == "llama"
    heads = {"query": config.num_heads, "key": config.num_kv_heads} if is_llama else {}
    tensors = {}
    for path, _ in tree_leaves_with_path(declare(config), is_leaf=is_weight):
        name, layer = _weight(path)
        array = _numbers(file.tensors[_gguf_name(name, layer)])
        if name in heads:
            array = _halves(array, heads[name])
        tensors[checkpoint_name(name, layer)] = np.ascontiguousarray(array.astype(jnp.dtype(dtype)))
    said = exported_config(config, dtype, end_id=ids["eos_token_id"], pad_id=ids["pad_token_id"], origin=None)
    write_tensors(folder / WEIGHTS, tensors, {CONFIG: {**said[CONFIG], **ids}, GENERATION: ids})


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows of a query or key as Hugging Face's Llama has them.

    Rotary positions turn pairs of a head's numbers. llama.cpp turns neighbors, 2i and 2i + 1; Hugging Face i and
    i + h / 2, so that its files hold all first ones of the pairs, then all second ones.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _numbers(tensor: Any) -> np.ndarray:
    """A tensor in float32."""
    import gguf

    return gguf.dequantize(tensor.data, tensor.tensor_type)


def _rope_scaling(file: GGUFFile, architecture: str, theta: float, head_dim: int) -> RopeScaling | None:
    """Llama 3's scaling, if the file divides rotary frequencies by factors that are those of such a scaling."""
    kind = file.stated(f"{architecture}.rope.scaling.type", str, "none")
    if kind != "none":
        raise ValueError(
            f"{file.path}: {architecture}.rope.scaling.type: only 'none' and Llama 3's factors are supported. Got "
            f"{kind!r}. Use another model."
        )
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = _numbers(file.tensors[_ROPE_FACTORS])
    original = file.stated(f"{architecture}.rope.scaling.original_context_length", int, 8192)
    factor, (low, high) = max(1.0, float(factors.max())), _FREQUENCY_FACTORS
    scaling = RopeScaling(factor, low, high, original_max_position_embeddings=original)
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    expected = np.asarray(frequency / scale_frequencies(frequency, scaling))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(
            f"{file.path}: {_ROPE_FACTORS}: must hold the factors of Llama 3's scaling, {scaling}. Got "
            f"{brief(factors.tolist())}. Use another model."
        )
    return scaling


def _check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """The file holds the weights of the config, in its shapes, and nothing else."""
    expected = {
        _gguf_name(*_weight(path)): weight.shape if _weight(path)[0] == "embedding" else weight.shape[::-1]
        for path, weight in tree_leaves_with_path(declare(config), is_leaf=is_weight)
    }
    found = {name: tuple(tensor.shape.tolist()[::-1]) for name, tensor in file.tensors.items()}
    found.pop(_ROPE_FACTORS, None)
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{file.path}: {name}: its shape must be {_shape(expected.get(name))} by the file's metadata. Got "
                f"{_shape(found.get(name))}. Use a file of Llama, Qwen 2 or Qwen 3 that is whole: `llama-gguf-split "
                "--merge` joins parts."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else str(list(shape))


def _weight(path: KeyPath) -> tuple[str, int | None]:
    """The name and the layer of a weight, by its path in the tree."""
    return path[-1].key, path[1].idx if len(path) > 1 else None


def _gguf_name(name: str, layer: int | None = None) -> str:
    module, kind = _NAMES[name.removesuffix("_bias")], "bias" if name.endswith("_bias") else "weight"
    return f"{module}.{kind}" if layer is None else f"blk.{layer}.{module}.{kind}"


def _words(kind: type | tuple[type, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "text", list: "a list", bool: "true or false"}
    return " or ".join(words[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
