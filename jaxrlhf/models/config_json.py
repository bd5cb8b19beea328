"""The config.json of the families in `models.families`: read as a model, and written for one."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrlhf.models.config import (
    ACTIVATIONS,
    FULL,
    LAYER_TYPES,
    ROPE_NUMBERS,
    ROPE_TYPES,
    SLIDING,
    Head,
    LayerType,
    ModelConfig,
    RopeScaling,
    RopeType,
)
from jaxrlhf.models.families import FAMILIES, SCALAR, Family, architecture_of, family_of, family_that_has, with_head

CONFIG, GENERATION = "config.json", "generation_config.json"
_SIZES = {  # field of ModelConfig -> field of config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_THEIRS = {**_SIZES, "num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"}
"""Field of ModelConfig -> field of config.json, where they differ."""
_ONE_OUTPUT: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""Fields that tell transformers that a scalar head has one output."""
_WHOLE, _NUMBER = ((int,), "a whole number"), ((int, float), "a number")
_WHOLE_OR_NULL = ((int, type(None)), "a whole number or null")
_OBJECT_OR_NULL = ((dict, type(None)), "an object or null")
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "architectures": ((list, type(None)), "a list"),
    **dict.fromkeys([*_SIZES.values(), "max_window_layers", "sliding_window_pattern"], _WHOLE),
    **dict.fromkeys(["num_key_value_heads", "head_dim", "sliding_window"], _WHOLE_OR_NULL),
    **dict.fromkeys(["rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"], _NUMBER),
    **dict.fromkeys(["tie_word_embeddings", "use_sliding_window"], ((bool,), "true or false")),
    **dict.fromkeys(["rope_scaling", "rope_parameters"], _OBJECT_OR_NULL),
    "layer_types": ((list, type(None)), "a list or null"),
}
"""Field of config.json -> its allowed types, and their name in errors."""


def read_config(folder: Path, *, head: Head = "lm") -> ModelConfig:
    """The architecture of a folder's config.json. Settings of the computation (dtype, attention ...) keep defaults.

    Raises ValueError if config.json is missing or malformed, or describes a model that is not supported.
    """
    where = folder / CONFIG
    fields = read_json(where)
    _check_types(where, fields, _TYPES)
    family = family_of(where, fields, head)
    if "quantization_config" in fields:
        raise ValueError(
            f"{where}: quantization_config: weights must be in floating point. Got {fields['quantization_config']}. "
            "Use the checkpoint that this one was quantized from."
        )
    for field, supported in {"mlp_bias": False, "partial_rotary_factor": 1.0, **family.refused}.items():
        _require(where, field, supported, fields.get(field, supported))
    activation = fields.get(family.activation_field, family.activation)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{where}: {family.activation_field}: must be one of {', '.join(ACTIVATIONS)}. Got "
            f"{json.dumps(activation)}. Use a checkpoint of another model: these weights would compute something else "
            "here."
        )
    if not family.variant.get("attention_bias"):  # where it can be chosen, it puts a bias on the output projection too
        _require(where, "attention_bias", False, fields.get("attention_bias", False))
    sizes = {ours: stated(where, fields, theirs) for ours, theirs in _SIZES.items()}
    sliding_window, layer_types = _windows(where, fields, family, sizes["num_layers"])
    rope_theta, rope_scaling, rope_local_theta = _rope(where, fields, family)
    head_dim = fields.get("head_dim") or family.head_dim or 0
    head_size = head_dim or sizes["hidden_size"] // max(sizes["num_heads"], 1)
    scalar = fields.get("query_pre_attn_scalar", 256) if "query_pre_attn_scalar" in family.more else head_size
    num_kv_heads = fields.get("num_key_value_heads", family.num_kv_heads) or sizes["num_heads"]
    try:
        return ModelConfig(
            **sizes,
            num_kv_heads=num_kv_heads,
            head_dim=0 if head_dim * sizes["num_heads"] == sizes["hidden_size"] else head_dim,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rope_local_theta=rope_local_theta,
            query_pre_attn_scalar=0.0 if scalar == head_size else float(scalar),
            activation=activation,
            sliding_window=sliding_window,
            layer_types=layer_types,
            norm_eps=fields.get("rms_norm_eps", family.norm_eps),
            tie_embeddings=fields.get("tie_word_embeddings", family.tied),
            head=head,
            **family.variant,
        )
    except ValueError as error:
        field, _, rule = str(error).partition(":")
        raise ValueError(f"{where}: {_THEIRS.get(field, field)}:{rule} Download it again.") from error


def _check_types(
    where: Path, fields: Mapping[str, Any], types: Mapping[str, tuple[tuple[type, ...], str]], *, inside: str = ""
) -> None:
    for field, (allowed, words) in types.items():
        if field in fields and type(fields[field]) not in allowed:
            raise ValueError(
                f"{where}: {inside}{field}: must be {words}. Got {json.dumps(fields[field])[:100]}. Download it again."
            )


@dataclasses.dataclass(frozen=True)
class Origin:
    """The files beside a model's weights. They are exported again with weights that came from there."""

    fields: Mapping[str, Any]
    """Fields of config.json."""
    generation: Mapping[str, Any]
    """Fields of generation_config.json; empty if there is none."""
    precision: str
    """Precision of the weights: 'bfloat16', 'float32' ..."""


def stated_precision(fields: Mapping[str, Any]) -> str:
    """The precision that a config.json gives for its weights; empty if it gives none."""
    said = fields.get("dtype") or fields.get("torch_dtype")  # as transformers 5 calls it, and as 4 did
    return said if isinstance(said, str) else ""


def exported_config(
    config: ModelConfig, precision: str, *, end_id: int | None, pad_id: int | None, origin: Origin | None
) -> dict[str, dict[str, Any]]:
    """The files beside a model's weights of some precision: file -> fields. Fields of an origin are kept where they
    still hold. `end_id` ends a text, and `pad_id` pads it where the origin names no such token."""
    if origin is None:
        return {CONFIG: _config_fields(config, precision, end_id, pad_id)}
    architecture, *others = origin.fields["architectures"]
    spelled = [key for key in ("dtype", "torch_dtype") if key in origin.fields] or ["torch_dtype"]
    fields = {
        **_with_end(origin.fields, end_id),
        "architectures": [with_head(architecture, config.head), *others],
        **dict.fromkeys(spelled, precision),
    }
    if fields.get("pad_token_id") is None:
        fields["pad_token_id"] = pad_id
    if config.head == "scalar":
        return {CONFIG: fields if architecture.endswith(SCALAR) else fields | _ONE_OUTPUT}
    return {CONFIG: fields} | ({GENERATION: _with_end(origin.generation, end_id)} if origin.generation else {})


def _with_end(fields: Mapping[str, Any], end_id: int | None) -> dict[str, Any]:
    """Fields whose `eos_token_id`, if they have one, includes the token that ends a text, first if it was missing."""
    ends = fields.get("eos_token_id", end_id)
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_id is None or end_id in known:
        return dict(fields)
    return {**fields, "eos_token_id": [end_id, *known] if known else end_id}


def _windows(where: Path, fields: dict[str, Any], family: Family, num_layers: int) -> tuple[int, tuple[LayerType, ...]]:
    """The window of the model, 0 if it has none, and the layers that slide, as `ModelConfig` has them."""
    window = fields.get("sliding_window", 4096)
    by_flag = family.window == "by flag"
    if family.window == "none" or (by_flag and not fields.get("use_sliding_window", False)):
        return 0, ()
    if family.window == "by pattern":
        every = fields.get("sliding_window_pattern", 6)
        if every < 1:
            raise ValueError(f"{where}: sliding_window_pattern: must be at least 1. Got {every}. Download it again.")
        usual = [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
    else:
        num_full = fields.get("max_window_layers", 28) if by_flag else 0
        usual = [FULL if i < num_full else SLIDING for i in range(num_layers)]
    kinds: list[Any] = fields.get("layer_types") or usual
    unknown = [kind for kind in kinds if kind not in LAYER_TYPES]
    if unknown or len(kinds) != num_layers:
        got = json.dumps(unknown[0]) if unknown else f"{len(kinds)} of them"
        raise ValueError(
            f"{where}: layer_types: must be one of {', '.join(LAYER_TYPES)} for each of {num_layers} layers. Got "
            f"{got}. Use a checkpoint without layers of other types."
        )
    if SLIDING not in kinds or (window is None and family.window != "by pattern"):
        return 0, ()
    if window is None or window < 1:
        raise ValueError(f"{where}: sliding_window: must be at least 1. Got {json.dumps(window)}. Download it again.")
    return window, () if FULL not in kinds else _repeated(kinds)


def _repeated(kinds: list[LayerType]) -> tuple[LayerType, ...]:
    """The shortest list that gives these when it is repeated."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:length])


def _rope(where: Path, fields: dict[str, Any], family: Family) -> tuple[float, RopeScaling | None, float]:
    """Rotary positions, as written by transformers 5 (`rope_parameters`) or before (`rope_theta`, `rope_scaling`):
    theta, scaling, and the theta of sliding layers, 0 if they have none of their own."""
    field = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope, local_theta = fields.get(field) or {}, 0.0
    if family.rope_local_theta:
        local_theta = fields.get("rope_local_base_freq", family.rope_local_theta)
        if not rope.keys().isdisjoint(LAYER_TYPES):
            _check_types(where, rope, dict.fromkeys(LAYER_TYPES, _OBJECT_OR_NULL), inside=f"{field}.")
            local = rope.get(SLIDING) or {}
            _check_types(where, local, {"rope_theta": _NUMBER}, inside=f"{field}.{SLIDING}.")
            _require(where, f"{field}.{SLIDING}.rope_type", "default", local.get("rope_type", "default"))
            local_theta, rope = local.get("rope_theta", local_theta), rope.get(FULL) or {}
            field = f"{field}.{FULL}"
    _check_types(where, rope, dict.fromkeys(["rope_theta", *ROPE_NUMBERS], _NUMBER), inside=f"{field}.")
    theta = float(rope.get("rope_theta", fields.get("rope_theta", family.rope_theta)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *ROPE_TYPES) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"{where}: {field}: the type must be one of default, {', '.join(ROPE_TYPES)}, the same in all layers. Got "
            f"{rope}. Use a checkpoint without other scaling; several families scale positions only in their "
            "long-context variants."
        )
    _require(where, f"{field}.partial_rotary_factor", 1.0, rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        return theta, None, float(local_theta)
    try:
        scaling = {name: stated(where, rope, name, inside=f"{field}.") for name in _numbers_of(kind)}
        return theta, RopeScaling(**scaling, type=kind), float(local_theta)
    except ValueError as error:
        raise ValueError(f"{where}: {field}.{error} Download it again.") from error


def _numbers_of(kind: RopeType) -> tuple[str, ...]:
    """The numbers that a scaling of rotary frequencies has."""
    return ROPE_NUMBERS if kind == "llama3" else ROPE_NUMBERS[:1]


def _require(where: Path, field: str, supported: Any, value: Any) -> None:
    if value != supported:
        raise ValueError(
            f"{where}: {field}: only {json.dumps(supported)} is supported. Got {json.dumps(value)}. Use a checkpoint "
            "of another model: these weights would compute something else here."
        )


def stated(where: Path, fields: dict[str, Any], field: str, *, inside: str = "") -> Any:
    if fields.get(field) is None:
        raise ValueError(f"{where}: {inside}{field}: must be given. Got {', '.join(fields) or 'nothing'}. Add it.")
    return fields[field]


def read_json(path: Path) -> dict[str, Any]:
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


def _config_fields(config: ModelConfig, dtype: str, end_id: int | None, pad_id: int | None) -> dict[str, Any]:
    name = family_that_has(config)
    family = FAMILIES[name]
    fields = {
        "architectures": [architecture_of(name, config.head)],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        family.activation_field: config.activation,
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
    if family.window != "none":
        fields |= _window_fields(config, family)
    if family.rope_local_theta:
        fields["rope_local_base_freq"] = config.rope_local_theta or config.rope_theta
    if "query_pre_attn_scalar" in family.more:
        scalar = config.query_pre_attn_scalar or config.head_size
        fields["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
    if (scaling := config.rope_scaling) is not None:
        numbers = {name: getattr(scaling, name) for name in _numbers_of(scaling.type)}
        fields["rope_scaling"] = {"rope_type": scaling.type, **numbers}
    if config.head == "scalar":
        fields |= _ONE_OUTPUT
    return fields


def _window_fields(config: ModelConfig, family: Family) -> dict[str, Any]:
    fields: dict[str, Any] = {"sliding_window": config.sliding_window or None}
    if family.window == "all layers":
        return fields
    kinds = [SLIDING if config.slides(i) else FULL for i in range(config.num_layers)]
    num_full = kinds.index(SLIDING) if SLIDING in kinds else config.num_layers
    if family.window == "by pattern":
        return {**fields, "layer_types": kinds}
    flags = {"use_sliding_window": config.sliding_window > 0, "max_window_layers": num_full}
    return {**fields, **flags, "layer_types": kinds}
