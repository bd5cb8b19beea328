"""Hugging Face checkpoints of the families in `models.families`, read and written without torch or transformers.

A checkpoint is a folder with a config.json and its weights in model.safetensors, or in several files that
model.safetensors.index.json lists. Their matrices are [out, in], ours [in, out]; embeddings are the same in both.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath
from safetensors import SafetensorError, safe_open

from jaxrlhf.brief import brief
from jaxrlhf.models.adapter_files import write_tensors
from jaxrlhf.models.architecture import LAYERS, Weight, checkpoint_name, declare, is_weight
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import CONFIG, GENERATION, Origin, exported_config, read_json, stated, stated_precision
from jaxrlhf.models.params import Params, shardings_of
from jaxrlhf.name_rules import check_file_name
from jaxrlhf.sharding.layout import Layout

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_origin(folder: Path) -> Origin:
    """Reads the files beside a model's weights; their precision is read from them where config.json says none."""
    fields = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    precision = stated_precision(fields)
    if not precision:
        name = checkpoint_name("embedding")
        with _open_weights(folder) as files:
            stored = files[name].get_slice(name).get_dtype() if name in files else ""
        precision = {"BF16": "bfloat16", "F16": "float16"}.get(stored, "float32")
    return Origin(fields, generation, precision)


def check_params(folder: Path, config: ModelConfig) -> None:
    """A checkpoint holds the weights that a config declares. Reads names, shapes and dtypes only."""
    with _open_weights(folder) as files:
        _check_weights(folder, files, config)


def holds_value_head(folder: Path) -> bool:
    """True if a checkpoint has a scalar head."""
    with _open_weights(folder) as files:
        return checkpoint_name("value_head") in files


def load_params(folder: Path, config: ModelConfig, layout: Layout | None = None) -> Params:
    """The weights of a checkpoint in float32, layers as a list.

    One weight at a time passes through host memory. With a layout, each goes to its devices in parts, so that none
    ever lies on one device whole; without, all go to JAX's default device. A scalar head that the checkpoint lacks is
    zeros; a language-model head that the config has no use for is left out. Raises ValueError if weight files are
    missing or unreadable, or do not hold exactly the weights that the config declares.
    """
    declared = declare(config)
    with _open_weights(folder) as files:
        _check_weights(folder, files, config)

        def load(path: KeyPath, weight: Weight, sharding: NamedSharding | None = None) -> jax.Array:
            name = _tensor_name(path, config)
            if name in files:
                tensor = files[name].get_tensor(name)
                array = np.ascontiguousarray(tensor.T if _is_transposed(path) else tensor).astype(np.float32)
            else:
                array = np.zeros(weight.shape, np.float32)
            if sharding is None:
                return jnp.asarray(array)
            return jax.make_array_from_callback(weight.shape, sharding, array.__getitem__, dtype=array.dtype)

        shardings = () if layout is None else (shardings_of(declared, layout),)
        return jax.tree_util.tree_map_with_path(load, declared, *shardings, is_leaf=is_weight)


def save_params(
    params: Params,
    config: ModelConfig,
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    end_id: int | None = None,
    pad_id: int | None = None,
    origin: Origin | None = None,
) -> None:
    """Write a checkpoint that transformers loads: config.json and model.safetensors, made or replaced in `folder`.

    Host memory holds the whole model in `dtype` meanwhile. Without an origin, the architecture is the first of
    `models.families` that has the config's variants; ValueError if none has them all.

    Args:
        params: With layers as a list or stacked, in any layout whose devices this process can reach.
        end_id: The token at which transformers stops generating, unless told otherwise.
        pad_id: The token by which transformers finds the end of a padded sequence that it scores.
        origin: What the folder says that the weights came from: it is said again.
    """
    said = exported_config(config, dtype, end_id=end_id, pad_id=pad_id, origin=origin)
    tensors = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(declare(config), is_leaf=is_weight):
        weight = _at(path, params)
        # turned and cast where it lies: an array keeps a host copy of itself once it was asked for one
        exported = (weight.T if _is_transposed(path) else weight).astype(dtype)
        tensors[_tensor_name(path, config)] = np.ascontiguousarray(exported)  # as it is written
    write_tensors(folder / _WEIGHTS, tensors, said)


@contextlib.contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """The name of every tensor in the folder's weight files, and the open file that holds it."""
    if (folder / _WEIGHTS).exists():
        paths = [folder / _WEIGHTS]
    elif (folder / _INDEX).exists():
        paths = [folder / name for name in _listed_files(folder / _INDEX)]
    else:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise ValueError(
            f"{folder}: must hold {_WEIGHTS} or {_INDEX}. Got {', '.join(found) or 'no files'}. Weights in another "
            "format are converted by transformers: from_pretrained, then save_pretrained."
        )
    files = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path}: must be a whole safetensors file. Got {error}. Download it again."
                ) from error
            files |= dict.fromkeys(file.keys(), file)
        yield files


def _listed_files(index: Path) -> list[str]:
    """The weight files that an index lists, all of them in its folder. There they may be links to anywhere, as in the
    cache of huggingface_hub."""
    listed = stated(index, read_json(index), "weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(
            f"{index}: weight_map: must be tensors and their files. Got {brief(listed)}. Download it again."
        )
    for name in listed.values():
        check_file_name(name, f"{index}: weight_map", example="model-00001-of-00002.safetensors")
    return sorted(set(listed.values()))


def _check_weights(folder: Path, files: dict[str, Any], config: ModelConfig) -> None:
    """The files hold what the config declares, in its shapes, and nothing else that would go unused."""
    leaves = jax.tree_util.tree_flatten_with_path(declare(config), is_leaf=is_weight)[0]
    shapes = {_tensor_name(path, config): w.shape[::-1] if _is_transposed(path) else w.shape for path, w in leaves}
    head, scalar = checkpoint_name("lm_head"), checkpoint_name("value_head")
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
    embedding = checkpoint_name("embedding")
    both = (head, embedding) if config.has_tied_head and head in files else ()
    if both and not np.array_equal(*(files[name].get_tensor(name) for name in both)):
        raise ValueError(
            f"{folder}: {head}: must equal {embedding}, since the config ties them. Got other numbers. Set "
            "tie_word_embeddings to false in config.json."
        )


def _at(path: KeyPath, params: Params) -> jax.Array | np.ndarray:
    """A weight by its path in the tree with layers as a list, of params with layers as a list or stacked."""
    if len(path) == 1:
        return params[path[0].key]
    layers, number, name = params[LAYERS], path[1].idx, path[2].key
    return layers[name][number] if isinstance(layers, dict) else layers[number][name]


def _tensor_name(path: KeyPath, config: ModelConfig) -> str:
    """A weight's name in a checkpoint, from its path in the tree with layers as a list."""
    return checkpoint_name(path[-1].key, path[1].idx if len(path) > 1 else None, norms=config.norms)


def _is_transposed(path: KeyPath) -> bool:
    return path[-1].key != "embedding"


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
