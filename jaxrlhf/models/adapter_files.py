"""Adapters as files, in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

They hold no weight of the model that they adapt.

Reference:
    https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrlhf.models.architecture import CHECKPOINT_NAMES, Weight, checkpoint_name, is_weight
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig, declare_adapters
from jaxrlhf.models.params import Params, shardings_of, with_layers
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.writing import replacing

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_LETTERS = {"down": "A", "up": "B"}
_HEAD = _PREFIX + checkpoint_name("value_head")


def save_adapters(params: Params, config: ModelConfig, lora: LoRAConfig, folder: Path, *, base: str = "") -> None:
    """Write adapters, with layers as a list or stacked, as PEFT loads them, made or replaced in `folder`. `base` is the
    folder of the model that they adapt, for PEFT to find it; empty if unknown."""
    leaves = jax.tree_util.tree_leaves_with_path(with_layers(jax.tree.map(np.asarray, params), stacked=False))
    tensors = {_name(path): np.ascontiguousarray(weight.astype(np.float32).T) for path, weight in leaves}
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.head == "scalar" else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _target_modules(lora),
        "modules_to_save": ["score"] if "value_head" in params else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_tensors(folder / WEIGHTS, tensors, {CONFIG: fields})


def write_tensors(path: Path, tensors: dict[str, np.ndarray], beside: Mapping[str, Any]) -> None:
    """Write a safetensors file as PyTorch's libraries do, and JSON files beside it: name -> fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
        for name, fields in beside.items():
            path.with_name(name).write_text(json.dumps(fields, indent=2) + "\n")
            shutil.copymode(path.with_name(name), partial)  # safetensors makes files that only their owner can read


def check_adapters(folder: Path, config: ModelConfig, lora: LoRAConfig) -> None:
    """A folder holds adapters of this rank, scale and targets, for a model of these sizes."""
    try:
        fields = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: must hold {CONFIG} and {WEIGHTS}. Got {error}.") from error
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(_target_modules(lora))}
    got = {name: fields.get(name) for name in wanted}
    if isinstance(got["target_modules"], list):
        got["target_modules"] = sorted(got["target_modules"])
    if got != wanted:
        raise ValueError(
            f"{folder}: adapters must be those that the config describes, {wanted}. Got {got}. Set lora so."
        )
    try:
        with safe_open(folder / WEIGHTS, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: must be a file of safetensors. Got {error}.") from error
    leaves = jax.tree_util.tree_leaves_with_path(declare_adapters(config, lora), is_leaf=is_weight)
    expected = {_name(path): weight.shape[::-1] for path, weight in leaves}
    if _HEAD not in shapes:
        expected.pop(_HEAD, None)  # it starts anew
    if shapes != expected:
        differing = sorted(n for n in shapes.keys() | expected.keys() if shapes.get(n) != expected.get(n))
        first = differing[0]
        raise ValueError(
            f"{folder / WEIGHTS}: must hold the adapters that the model and lora declare. Got {shapes.get(first)} for "
            f"{first}, which should be {expected.get(first)}; {len(differing)} differ."
        )


def load_adapters(folder: Path, config: ModelConfig, lora: LoRAConfig, layout: Layout) -> Params:
    """Saved adapters in float32, layers as a list, each part on its devices. A missing scalar head is zeros."""
    check_adapters(folder, config, lora)
    with safe_open(folder / WEIGHTS, "numpy") as file:
        names = set(file.keys())

        def load(path: KeyPath, weight: Weight, sharding: NamedSharding) -> jax.Array:
            name, array = _name(path), np.zeros(weight.shape, np.float32)
            if name in names:
                array = np.ascontiguousarray(file.get_tensor(name).T).astype(np.float32)
            return jax.make_array_from_callback(weight.shape, sharding, array.__getitem__, dtype=array.dtype)

        declared = declare_adapters(config, lora)
        shardings = shardings_of(declared, layout)
        return jax.tree_util.tree_map_with_path(load, declared, shardings, is_leaf=is_weight)


def _name(path: KeyPath) -> str:
    """A weight's name in a file, from its path in the tree with layers as a list."""
    if len(path) == 1:
        return _HEAD
    module = checkpoint_name(path[2].key, path[1].idx).removesuffix("weight")
    return f"{_PREFIX}{module}lora_{_LETTERS[path[3].key]}.weight"


def _target_modules(lora: LoRAConfig) -> list[str]:
    return [CHECKPOINT_NAMES[target].split(".")[1] for target in lora.targets]
