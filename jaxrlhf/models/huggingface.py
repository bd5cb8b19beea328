"""Hugging Face checkpoints of Llama, Mistral, Qwen 2 and Qwen 3, read and written without torch or transformers.

A checkpoint is a folder with a config.json and its weights in model.safetensors, or in several files that
model.safetensors.index.json lists. Their matrices are [out, in], ours [in, out]; embeddings are the same in both.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrlhf.models.config import Head, ModelConfig, RopeScaling
from jaxrlhf.models.params import Params, Weight, declare, shardings_of
from jaxrlhf.sharding.layout import Layout

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LM, _SCALAR = "ForCausalLM", "ForSequenceClassification"
_SIZES = {  # field of ModelConfig -> field of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "value_head": "score.weight",
}
_NAMES_IN_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """What an architecture means by its name alone, or by leaving a field of config.json out."""

    model_type: str
    attention_bias: bool = False
    qk_norm: bool = False
    num_kv_heads: int | None = None
    """None is one a query head."""
    head_dim: int | None = None
    """None is hidden_size / num_heads."""
    window: Literal["none", "all layers", "by flag"] = "none"
    """Whether `sliding_window` counts: never, in every layer, or where `use_sliding_window` says so."""


_FAMILIES: Mapping[str, _Family] = {
    "Llama": _Family("llama"),
    "Mistral": _Family("mistral", num_kv_heads=8, window="all layers"),
    "Qwen2": _Family("qwen2", attention_bias=True, num_kv_heads=32, window="by flag"),
    "Qwen3": _Family("qwen3", qk_norm=True, num_kv_heads=32, head_dim=128, window="by flag"),
}


def read_config(folder: Path, *, head: Head = "lm") -> ModelConfig:
    """The architecture that a folder's config.json describes; how to compute (dtype, attention ...) is left as default.

    Raises:
        ValueError: config.json is missing or malformed, or describes what this transformer does not compute.
    """
    where = folder / _CONFIG
    fields = _read_json(where)
    family = _family(where, fields, head)
    if "quantization_config" in fields:
        raise ValueError(
            f"{where}: quantization_config: weights must be in floating point. Got {fields['quantization_config']}. "
            "Use the checkpoint that this one was quantized from."
        )
    for field, supported in {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}.items():
        _require(where, field, supported, fields.get(field, supported))
    if not family.attention_bias:  # where it can be chosen, it puts a bias on the output projection too
        _require(where, "attention_bias", False, fields.get("attention_bias", False))
    sizes = {ours: _stated(where, fields, theirs) for ours, theirs in _SIZES.items()}
    _require_full_attention(where, fields, family, sizes)
    rope_theta, rope_scaling = _rope(where, fields)
    head_dim = fields.get("head_dim") or family.head_dim or 0
    if "num_key_value_heads" in fields:
        num_kv_heads = fields["num_key_value_heads"] or sizes["num_heads"]
    else:
        num_kv_heads = family.num_kv_heads or sizes["num_heads"]
    return ModelConfig(
        **sizes,
        num_kv_heads=num_kv_heads,
        head_dim=0 if head_dim * sizes["num_heads"] == sizes["hidden_size"] else head_dim,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=fields.get("tie_word_embeddings", False),
        head=head,
    )


def check_params(folder: Path, config: ModelConfig) -> None:
    """A checkpoint holds the weights that a config declares. Reads names, shapes and dtypes only.

    Raises:
        ValueError: As `load_params`.
    """
    with contextlib.ExitStack() as stack:
        _check_weights(folder, _open_weights(folder, stack), config)


def holds_value_head(folder: Path) -> bool:
    """Whether a checkpoint has a scalar head."""
    with contextlib.ExitStack() as stack:
        return _NAMES["value_head"] in _open_weights(folder, stack)


def load_params(folder: Path, config: ModelConfig, layout: Layout | None = None) -> Params:
    """The weights of a checkpoint in float32, layers as a list.

    One weight at a time passes through host memory. With a layout, each goes to its devices in parts, so that none
    ever lies on one device whole; without, all go to JAX's default device. A scalar head that the checkpoint lacks is
    zeros; a language-model head that the config has no use for is left out.

    Raises:
        ValueError: Weight files are missing or unreadable, or do not hold exactly the weights that the config declares.
    """
    declared = declare(config)
    with contextlib.ExitStack() as stack:
        files = _open_weights(folder, stack)
        _check_weights(folder, files, config)

        def load(path: Any, weight: Weight, sharding: NamedSharding | None = None) -> jax.Array:
            name = _tensor_name(path)
            if name in files:
                tensor = files[name].get_tensor(name)
                array = np.ascontiguousarray(tensor.T if _is_transposed(path) else tensor).astype(np.float32)
            else:
                array = np.zeros(weight.shape, np.float32)
            if sharding is None:
                return jnp.asarray(array)
            return jax.make_array_from_callback(
                weight.shape, sharding, lambda index: array[index], dtype=np.dtype(np.float32)
            )

        shardings = () if layout is None else (shardings_of(declared, layout),)
        return jax.tree_util.tree_map_with_path(load, declared, *shardings, is_leaf=_is_weight)


def save_params(
    params: Params,
    config: ModelConfig,
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    end_id: int | None = None,
    pad_id: int | None = None,
) -> None:
    """Write a checkpoint that transformers loads: config.json and model.safetensors, made or replaced in `folder`.

    Host memory holds the whole model in `dtype` meanwhile. The architecture is the family that has the config's biases
    and norms: Qwen2, Qwen3 or else Llama.

    Args:
        params: With layers as a list or stacked, in any layout whose devices this process can reach.
        end_id: The token at which transformers stops generating, unless told otherwise.
        pad_id: The token by which transformers finds the end of a padded sequence that it scores.

    Raises:
        ValueError: No family has the config's combination of biases and norms.
    """
    fields = _config_fields(config, dtype, end_id, pad_id)
    tensors = {}
    for path, weight in jax.tree_util.tree_flatten_with_path(params)[0]:
        if isinstance(params["layers"], dict) and len(path) == 2:
            for i in range(config.num_layers):
                in_layer = (path[0], jax.tree_util.SequenceKey(i), path[1])
                tensors[_tensor_name(in_layer)] = _exported(in_layer, weight[i], dtype)
        else:
            tensors[_tensor_name(path)] = _exported(path, weight, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_WEIGHTS}.partial"  # so that an interrupted run leaves no half-written weights behind
    save_file(tensors, partial, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    shutil.copymode(folder / _CONFIG, partial)  # safetensors makes files that only their owner can read
    os.replace(partial, folder / _WEIGHTS)


def _family(where: Path, fields: dict[str, Any], head: Head) -> _Family:
    architecture = (fields.get("architectures") or [None])[0]
    known = {stem + suffix: family for stem, family in _FAMILIES.items() for suffix in (_LM, _SCALAR)}
    if architecture not in known:
        raise ValueError(
            f"{where}: architectures: must begin with one that is supported. Got {architecture!r}. Supported: "
            f"{', '.join(known)}."
        )
    if head != "scalar" and architecture.endswith(_SCALAR):
        raise ValueError(
            f"{where}: architectures: a language-model head is asked for, so the checkpoint must have one. "
            f"Got {architecture!r}. Load it with a scalar head, or use a checkpoint of "
            f"{architecture.removesuffix(_SCALAR) + _LM}."
        )
    return known[architecture]


def _require_full_attention(where: Path, fields: dict[str, Any], family: _Family, sizes: dict[str, int]) -> None:
    """A window that no sequence outgrows, or that no layer uses, is none."""
    if family.window == "none":
        return
    by_flag = family.window == "by flag"
    window = fields.get("sliding_window", 4096)
    if window is None or (by_flag and not fields.get("use_sliding_window", False)):
        return
    num_layers, most = sizes["num_layers"], sizes["max_position_embeddings"]
    num_full = fields.get("max_window_layers", 28) if by_flag else 0
    layer_types = fields.get("layer_types")
    slides = num_full < num_layers if layer_types is None else any(kind != "full_attention" for kind in layer_types)
    if slides and window < most:
        raise ValueError(
            f"{where}: sliding_window: only full attention is supported. Got a window of {window} with "
            f"max_position_embeddings={most}. Set max_position_embeddings to {window}: shorter sequences do not "
            "outgrow the window."
        )


def _rope(where: Path, fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary positions, as written by transformers 5 (`rope_parameters`) or before (`rope_theta`, `rope_scaling`)."""
    field = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.get(field) or {}
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"{where}: {field}: the type must be 'default' or 'llama3', the same in all layers. Got {rope}. Use a "
            "checkpoint without other scaling; several families scale positions only in their long-context variants."
        )
    _require(where, f"{field}.partial_rotary_factor", 1.0, rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return theta, None
    return theta, RopeScaling(
        **{f.name: _stated(where, rope, f.name, inside=f"{field}.") for f in dataclasses.fields(RopeScaling)}
    )


def _require(where: Path, field: str, supported: Any, value: Any) -> None:
    if value != supported:
        raise ValueError(
            f"{where}: {field}: only {json.dumps(supported)} is supported. Got {json.dumps(value)}. Use a checkpoint "
            "of another model: these weights would compute something else here."
        )


def _stated(where: Path, fields: dict[str, Any], field: str, *, inside: str = "") -> Any:
    if fields.get(field) is None:
        raise ValueError(f"{where}: {inside}{field}: must be given. Got {', '.join(fields) or 'nothing'}. Add it.")
    return fields[field]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: a checkpoint must have this file. Got none. Give the folder into which the model was downloaded."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON. Got {error}. Download it again.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must be a JSON object. Got {type(fields).__name__}. Download it again.")
    return fields


def _open_weights(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The name of every tensor in the folder's weight files, and the open file that holds it."""
    if (folder / _WEIGHTS).exists():
        paths = [folder / _WEIGHTS]
    elif (folder / _INDEX).exists():
        names = _stated(folder / _INDEX, _read_json(folder / _INDEX), "weight_map").values()
        paths = [folder / name for name in sorted(set(names))]
    else:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise ValueError(
            f"{folder}: must hold {_WEIGHTS} or {_INDEX}. Got {', '.join(found) or 'no files'}. Weights in another "
            "format are converted by transformers: from_pretrained, then save_pretrained."
        )
    files = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: must be a whole safetensors file. Got {error}. Download it again.") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _check_weights(folder: Path, files: dict[str, Any], config: ModelConfig) -> None:
    """The files hold what the config declares, in its shapes, and nothing else that would go unused."""
    leaves = jax.tree_util.tree_flatten_with_path(declare(config), is_leaf=_is_weight)[0]
    shapes = {_tensor_name(path): w.shape[::-1] if _is_transposed(path) else w.shape for path, w in leaves}
    head, scalar = _NAMES["lm_head"], _NAMES["value_head"]
    missing = [name for name in shapes if name not in files and name != scalar]
    if missing:
        raise ValueError(
            f"{folder}: every weight that the config declares must be there. Missing: {_first(missing)}. "
            "Give the config of this checkpoint, or download it again."
        )
    unused = {head} if config.tie_embeddings or config.head == "scalar" else set()
    # rotary frequencies, which old checkpoints store, follow from the config
    derived = [name for name in files if name.endswith("rotary_emb.inv_freq")]
    superfluous = [name for name in files if name not in {*shapes, *unused, *derived}]
    if superfluous:
        raise ValueError(
            f"{folder}: the config must declare every weight that is there. Got also: {_first(superfluous)}. "
            "Give the config of this checkpoint, with the head that it has."
        )
    for name, shape in shapes.items():
        if name not in files:
            continue
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ValueError(
                f"{folder}: {name}: must have shape {list(shape)} by the config. Got {found.get_shape()}. Give the "
                "config of this checkpoint."
            )
        if found.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise ValueError(
                f"{folder}: {name}: weights must be in floating point of 16 bits or more. Got {found.get_dtype()}. "
                "Use the checkpoint that this one was quantized from."
            )
    embedding = _NAMES["embedding"]
    both_heads = config.head != "scalar" and config.tie_embeddings and head in files
    if both_heads and not np.array_equal(files[head].get_tensor(head), files[embedding].get_tensor(embedding)):
        raise ValueError(
            f"{folder}: {head}: must equal {embedding}, since the config ties them. Got other numbers. Set "
            "tie_word_embeddings to false in config.json."
        )


def _config_fields(config: ModelConfig, dtype: str, end_id: int | None, pad_id: int | None) -> dict[str, Any]:
    stem = "Qwen3" if config.qk_norm else "Qwen2" if config.attention_bias else "Llama"
    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "attention_bias and qk_norm: a checkpoint of Qwen2 has the one, of Qwen3 the other. Got both. Train a "
            "model that has one of them to export it."
        )
    fields = {
        "architectures": [stem + (_SCALAR if config.head == "scalar" else _LM)],
        "model_type": _FAMILIES[stem].model_type,
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # the spelling of transformers 4, which 5 reads too
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        # Llama means tokens 1 and 2 where these are left out
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    if config.head == "scalar":
        fields |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # how many outputs the head has
    return fields


def _exported(path: Any, weight: jax.Array | np.ndarray, dtype: str) -> np.ndarray:
    # turned and cast where it lies: an array keeps a host copy of itself once it was asked for one
    return np.ascontiguousarray((weight.T if _is_transposed(path) else weight).astype(dtype))  # as it is written


def _tensor_name(path: Any) -> str:
    """What a weight is called in a checkpoint, from its path in the tree with layers as a list."""
    if len(path) == 1:
        return _NAMES[path[0].key]
    return f"model.layers.{path[1].idx}.{_NAMES_IN_LAYER[path[2].key]}"


def _is_transposed(path: Any) -> bool:
    return path[-1].key != "embedding"


def _is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
