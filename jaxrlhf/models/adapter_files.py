"""Adapters as files, in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

They hold no weight of the model that they adapt.

Reference:
    https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import MODULES, LoRAConfig, declare_adapters
from jaxrlhf.models.params import Params, Weight, shardings_of, with_layers
from jaxrlhf.sharding.layout import Layout

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LAYER, _HEAD = "base_model.model.model.layers.{}.{}.lora_{}.weight", "base_model.model.score.weight"


def save_adapters(params: Params, config: ModelConfig, lora: LoRAConfig, folder: Path, *, base: str = "") -> None:
    """Write adapters that PEFT loads, made or replaced in `folder`.

    Args:
        params: Adapters, with layers as a list or stacked.
        base: The folder of the model that they adapt, for PEFT to find it. Empty: nobody knows.
    """
    tensors = {}
    for i, layer in enumerate(with_layers(jax.tree.map(np.asarray, params), stacked=False)["layers"]):
        for target, weights in layer.items():
            for letter, name in (("A", "down"), ("B", "up")):
                key = _LAYER.format(i, MODULES[target], letter)
                tensors[key] = np.ascontiguousarray(weights[name].astype(np.float32).T)
    if "value_head" in params:
        tensors[_HEAD] = np.ascontiguousarray(np.asarray(params["value_head"], np.float32).T)
    fields = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.head == "scalar" else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [MODULES[target].split(".")[1] for target in lora.targets],
        "modules_to_save": ["score"] if "value_head" in params else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{WEIGHTS}.partial"  # so that an interrupted run leaves no half-written weights behind
    save_file(tensors, partial, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    shutil.copymode(folder / CONFIG, partial)  # safetensors makes files that only their owner can read
    os.replace(partial, folder / WEIGHTS)


def check_adapters(folder: Path, config: ModelConfig, lora: LoRAConfig) -> None:
    """A folder holds adapters of this rank, scale and targets, for a model of these sizes.

    Raises:
        ValueError: It does not.
    """
    try:
        fields = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: must hold {CONFIG} and {WEIGHTS}. Got {error}.") from error
    targets = sorted(MODULES[target].split(".")[1] for target in lora.targets)
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": targets}
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
    expected = {}
    map_paths(declare_adapters(config, lora), lambda name, weight: expected.update({name: weight.shape[::-1]}))
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
    """Saved adapters in float32, layers as a list, each part on its devices. A scalar head that is not there is zeros.

    Raises:
        ValueError: As `check_adapters`.
    """
    check_adapters(folder, config, lora)
    with safe_open(folder / WEIGHTS, "numpy") as file:
        names = set(file.keys())

        def load(name: str, weight: Weight, sharding: NamedSharding) -> jax.Array:
            array = np.zeros(weight.shape, np.float32)
            if name in names:
                array = np.ascontiguousarray(file.get_tensor(name).T).astype(np.float32)
            return jax.make_array_from_callback(
                weight.shape, sharding, lambda index: array[index], dtype=np.dtype(np.float32)
            )

        declared = declare_adapters(config, lora)
        return map_paths(declared, load, shardings_of(declared, layout))


def map_paths(declared: Any, function: Callable[..., Any], *more: Any) -> Any:
    """A function of every adapter's name in a file and its declaration, over the tree of them, and trees like it."""

    def named(path: Any, weight: Weight, *others: Any) -> Any:
        if len(path) == 1:
            return function(_HEAD, weight, *others)
        letter = {"down": "A", "up": "B"}[path[3].key]
        return function(_LAYER.format(path[1].idx, MODULES[path[2].key], letter), weight, *others)

    return jax.tree_util.tree_map_with_path(named, declared, *more, is_leaf=lambda x: isinstance(x, Weight))
