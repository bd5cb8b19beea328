"""The families of Hugging Face's models: what the architecture that a config.json names implies.

A family is an entry of `FAMILIES`. Its weights and mathematics are variants of `ModelConfig`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from jaxrlhf.models.config import Activation, Head, ModelConfig

LM, SCALAR = "ForCausalLM", "ForSequenceClassification"


@dataclasses.dataclass(frozen=True)
class Family:
    """Settings that an architecture implies by its name, or by leaving a field of config.json out."""

    model_type: str
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that its name implies."""
    more: frozenset[str] = frozenset()
    """Fields of ModelConfig that its config.json has fields for, beside those of all families."""
    scalar: str = ""
    """Its architecture with a scalar head, where the name is not formed as usual."""
    num_kv_heads: int | None = None
    """Default of config.json's field. None means one per query head."""
    head_dim: int | None = None
    """Default of config.json's field. None means hidden_size / num_heads."""
    norm_eps: float = 1e-6
    """Default of config.json's field, like the next ones."""
    tied: bool = False
    rope_theta: float = 1e4
    rope_local_theta: float = 0.0
    """Of sliding layers; 0 if they have none of their own."""
    activation_field: str = "hidden_act"
    activation: Activation = "silu"
    window: Literal["none", "all layers", "by flag", "by pattern"] = "none"
    """Layers that a `sliding_window` applies to: none; all; if `use_sliding_window` is true, those from
    `max_window_layers` on; or all but each last of `sliding_window_pattern`. Where `layer_types` are given, those that
    they name."""
    refused: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of config.json for mathematics that is not here, and the values that leave it out."""


FAMILIES: Mapping[str, Family] = {
    "Llama": Family("llama"),
    "Mistral": Family("mistral", num_kv_heads=8, window="all layers"),
    "Qwen2": Family("qwen2", {"attention_bias": True}, num_kv_heads=32, window="by flag"),
    "Qwen3": Family("qwen3", {"qk_norm": True}, num_kv_heads=32, head_dim=128, window="by flag"),
    "Olmo2": Family("olmo2", {"norms": "after", "qk_norm": True, "qk_norm_over": "projection"}, norm_eps=1e-5),
    "Gemma3": Family(
        "gemma3_text",
        {"norms": "both", "qk_norm": True, "norm_plus_one": True, "scale_embeddings": True},
        more=frozenset({"query_pre_attn_scalar", "rope_local_theta"}),
        scalar="Gemma3Text" + SCALAR,
        num_kv_heads=4,
        head_dim=256,
        tied=True,
        rope_theta=1e6,
        rope_local_theta=1e4,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        window="by pattern",
        refused={
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
    ),
}
"""Name of the architecture, without what kind of head it has -> family."""


def architecture_of(name: str, head: Head) -> str:
    """The architecture of a family with some head."""
    return (FAMILIES[name].scalar or name + SCALAR) if head == "scalar" else name + LM


_KNOWN: Mapping[str, str] = {
    architecture_of(name, head): name for name in FAMILIES for head in get_args(Head) if head != "both"
}
"""Architecture -> name of its family."""


def with_head(architecture: str, head: Head) -> str:
    """The architecture of the same family with some head."""
    return architecture_of(_KNOWN[architecture], head)


def family_of(where: Path, fields: Mapping[str, Any], head: Head) -> Family:
    """The family of a config.json, from which some head is to be read."""
    architecture: Any = (fields.get("architectures") or [None])[0]
    if architecture not in _KNOWN:
        raise ValueError(
            f"{where}: architectures: must begin with one that is supported. Got {architecture!r}. Supported: "
            f"{', '.join(_KNOWN)}."
        )
    if head != "scalar" and architecture.endswith(SCALAR):
        raise ValueError(
            f"{where}: architectures: a language-model head is asked for, so the checkpoint must have one. "
            f"Got {architecture!r}. Load it with a scalar head, or use a checkpoint of {with_head(architecture, 'lm')}."
        )
    return FAMILIES[_KNOWN[architecture]]


def family_that_has(config: ModelConfig) -> str:
    """The name of the first family that has the variants of a model and no others. Raises ValueError if none has."""
    variant = _variant(config)
    slides = "none" if not config.sliding_window else "some layers" if config.layer_types else "all layers"
    by_layer = ("by flag", "by pattern")
    windows = {"none": ("none", "all layers", *by_layer), "all layers": ("all layers", *by_layer)}
    more = {field for family in FAMILIES.values() for field in family.more if getattr(config, field)}
    for name, family in FAMILIES.items():
        if family.variant == variant and more <= family.more and family.window in windows.get(slides, by_layer):
            return name
    got = [*variant, *sorted(more), *([] if slides == "none" else [f"sliding_window in {slides}"])]
    known = [f"{name} has {', '.join([*family.variant]) or 'none'}" for name, family in FAMILIES.items()]
    raise ValueError(
        f"export: a family of checkpoints must have the variants of the model and no others. Got {', '.join(got)}. "
        f"Known: {'; '.join(known)}. Train a model that has those of one of them to export it."
    )


def _variant(config: ModelConfig) -> dict[str, Any]:
    """The fields by which families differ, where they are not those of most."""
    named = [field for family in FAMILIES.values() for field in family.variant]
    return {field: x for field in named if (x := getattr(config, field)) != getattr(ModelConfig, field)}
