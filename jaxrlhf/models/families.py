"""The families of Hugging Face's models: what the architecture that a config.json names implies.

A family is an entry of `FAMILIES`. Its weights and mathematics are variants of `ModelConfig`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxrlhf.models.config import Head, ModelConfig

LM, SCALAR = "ForCausalLM", "ForSequenceClassification"


@dataclasses.dataclass(frozen=True)
class Family:
    """Settings that an architecture implies by its name, or by leaving a field of config.json out."""

    model_type: str
    variant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ModelConfig that its name implies."""
    num_kv_heads: int | None = None
    """Default of config.json's field. None means one per query head."""
    head_dim: int | None = None
    """Default of config.json's field. None means hidden_size / num_heads."""
    norm_eps: float = 1e-6
    """Default of config.json's field."""
    window: Literal["none", "all layers", "by flag"] = "none"
    """Layers that a `sliding_window` applies to: none; all; or, if `use_sliding_window` is true, those from
    `max_window_layers` on. Where `layer_types` are given, those that they name."""


FAMILIES: Mapping[str, Family] = {
    "Llama": Family("llama"),
    "Mistral": Family("mistral", num_kv_heads=8, window="all layers"),
    "Qwen2": Family("qwen2", {"attention_bias": True}, num_kv_heads=32, window="by flag"),
    "Qwen3": Family("qwen3", {"qk_norm": True}, num_kv_heads=32, head_dim=128, window="by flag"),
    "Olmo2": Family("olmo2", {"norms": "after", "qk_norm": True, "qk_norm_over": "projection"}, norm_eps=1e-5),
}
"""Name of the architecture, without what kind of head it has -> family."""


def family_of(where: Path, fields: Mapping[str, Any], head: Head) -> Family:
    """The family of a config.json, from which some head is to be read."""
    architecture = (fields.get("architectures") or [None])[0]
    known = {stem + suffix: family for stem, family in FAMILIES.items() for suffix in (LM, SCALAR)}
    if architecture not in known:
        raise ValueError(
            f"{where}: architectures: must begin with one that is supported. Got {architecture!r}. Supported: "
            f"{', '.join(known)}."
        )
    if head != "scalar" and architecture.endswith(SCALAR):
        raise ValueError(
            f"{where}: architectures: a language-model head is asked for, so the checkpoint must have one. "
            f"Got {architecture!r}. Load it with a scalar head, or use a checkpoint of "
            f"{architecture.removesuffix(SCALAR) + LM}."
        )
    return known[architecture]


def family_that_has(config: ModelConfig) -> str:
    """The name of the first family that has the variants of a model and no others. Raises ValueError if none has."""
    variant = _variant(config)
    slides = "none" if not config.sliding_window else "some layers" if config.layer_types else "all layers"
    windows = {"none": ("none", "all layers", "by flag"), "all layers": ("all layers", "by flag")}
    for name, family in FAMILIES.items():
        if family.variant == variant and family.window in windows.get(slides, ("by flag",)):
            return name
    got = [*variant, *([] if slides == "none" else [f"sliding_window in {slides}"])]
    known = [f"{name} has {', '.join([*family.variant]) or 'none'}" for name, family in FAMILIES.items()]
    raise ValueError(
        f"export: a family of checkpoints must have the variants of the model and no others. Got {', '.join(got)}. "
        f"Known: {'; '.join(known)}. Train a model that has those of one of them to export it."
    )


def _variant(config: ModelConfig) -> dict[str, Any]:
    """The fields by which families differ, where they are not those of most."""
    named = (field for family in FAMILIES.values() for field in family.variant)
    return {field: x for field in named if (x := getattr(config, field)) != getattr(ModelConfig, field)}
