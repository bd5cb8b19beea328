"""Hugging Face checkpoints of the families in `models.families`, read and written without torch or transformers.

A checkpoint is a folder with a config.json and its weights in model.safetensors, or in several files that
model.safetensors.index.json lists. Their matrices are [out, in], ours [in, out]; embeddings are the same in both.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath, SequenceKey

from jaxrlhf.models.architecture import LAYERS, Weight, checkpoint_name, declare, is_weight
from jaxrlhf.models.array_pieces import file_rows, make_array
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import CONFIG, GENERATION, Origin, exported_config, read_json, stated_precision
from jaxrlhf.models.params import Params, shardings_of
from jaxrlhf.models.weight_files import (
    READABLE,
    SHARD_BYTES,
    Dtype,
    Index,
    OneProcess,
    Processes,
    Source,
    WeightFiles,
    first_of,
    open_weights,
    write_weights,
)
from jaxrlhf.sharding.layout import Layout


def read_origin(folder: Path) -> Origin:
    """Reads the files beside a model's weights; their precision is read from them where config.json says none."""
    fields = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    precision = stated_precision(fields)
    if not precision:
        embedding = open_weights(folder).tensors.get(checkpoint_name("embedding"))
        precision = {"BF16": "bfloat16", "F16": "float16"}.get(embedding.dtype if embedding else "", "float32")
    return Origin(fields, generation, precision)


def check_params(folder: Path, config: ModelConfig) -> None:
    """A checkpoint holds the weights that a config declares. Reads names, shapes and dtypes only."""
    _check_weights(open_weights(folder), config)


def holds_value_head(folder: Path) -> bool:
    """True if a checkpoint has a scalar head."""
    return checkpoint_name("value_head") in open_weights(folder).tensors


def load_params(
    folder: Path,
    config: ModelConfig,
    layout: Layout | None = None,
    *,
    stacked: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Params:
    """The weights of a checkpoint, layers as a list or stacked.

    With a layout, each process reads only what its devices hold, in slices that go to one device each: beside what is
    on the devices, host memory has one of them. Without, all go to JAX's default device, one weight at a time. A scalar
    head that the checkpoint lacks is zeros; a language-model head that the config has no use for is left out. Raises
    ValueError if weight files are missing or unreadable, or do not hold exactly the weights that the config declares.
    """
    declared, dtype = declare(config, stacked=stacked), jax.dtypes.canonicalize_dtype(dtype)
    files = open_weights(folder)
    _check_weights(files, config)

    def load(path: KeyPath, weight: Weight, sharding: NamedSharding | None = None) -> jax.Array:
        def read(index: Index) -> np.ndarray:
            sizes = [len(range(*each.indices(size))) for each, size in zip(index, weight.shape, strict=True)]
            array = np.zeros(sizes, dtype)
            if stacked and path[0].key == LAYERS:
                for number, of_layer in zip(range(*index[0].indices(weight.shape[0])), array, strict=True):
                    _read_into(of_layer, index[1:], files, (path[0], SequenceKey(number), path[1]), config)
            else:
                _read_into(array, index, files, path, config)
            return array

        if sharding is None:
            return jnp.asarray(read(tuple(map(slice, weight.shape))))
        return make_array(weight.shape, sharding, read, dtype)

    shardings = () if layout is None else (shardings_of(declared, layout),)
    return jax.tree_util.tree_map_with_path(load, declared, *shardings, is_leaf=is_weight)


def _read_into(array: np.ndarray, index: Index, files: WeightFiles, path: KeyPath, config: ModelConfig) -> None:
    """Reads a slice of the weight at a path, with layers as a list. One that is not in the files is left as it is."""
    tensor = files.tensors.get(_tensor_name(path, config))
    if tensor is not None:
        tensor.read_into(*((array.T, index[::-1]) if _is_transposed(path) else (array, index)))


def save_params(
    params: Params,
    config: ModelConfig,
    folder: Path,
    *,
    dtype: Dtype,
    end_id: int | None = None,
    pad_id: int | None = None,
    origin: Origin | None = None,
    processes: Processes | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint that transformers loads, made or replaced in `folder`: its weights in one file, or in several
    and their index, then generation_config.json and, last of all, config.json.

    A few megabytes at a time pass through host memory. A folder in which this was interrupted has no config.json.
    Without an origin, the architecture is the first of `models.families` that has the config's variants; ValueError if
    none has them all.

    Args:
        params: With layers as a list or stacked, in any layout. They are not changed meanwhile.
        end_id: The token at which transformers stops generating, unless told otherwise.
        pad_id: The token by which transformers finds the end of a padded sequence that it scores.
        origin: What the folder says that the weights came from: it is said again.
        processes: The processes that have `params`, all of which call this; the first one writes. None means this
            process alone.
        shard_bytes: The most bytes of a weight file.
    """
    said = exported_config(config, dtype, end_id=end_id, pad_id=pad_id, origin=origin)
    processes = processes or OneProcess()
    sources = {}
    for path, declared in jax.tree_util.tree_leaves_with_path(declare(config), is_leaf=is_weight):
        array, layer = _at(path, params)
        transposed = _is_transposed(path)
        sources[_tensor_name(path, config)] = Source(
            declared.shape[::-1] if transposed else declared.shape,
            functools.partial(file_rows, array, layer, jnp.dtype(dtype), processes, transposed=transposed),
        )
    processes.share(lambda: _clear(folder))
    write_weights(folder, sources, dtype, processes=processes, shard_bytes=shard_bytes)
    processes.share(lambda: _write_json(folder, said))


def _clear(folder: Path) -> None:
    """Makes the folder, or removes a checkpoint that is there, config.json first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / CONFIG, folder / GENERATION, *folder.glob("model*.safetensors*")):
        old.unlink(missing_ok=True)


def _write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name in sorted(files, key=lambda name: name == CONFIG):
        (folder / name).write_text(json.dumps(files[name], indent=2) + "\n")


def _check_weights(files: WeightFiles, config: ModelConfig) -> None:
    """The files hold what the config declares, in its shapes, and nothing else that would go unused."""
    leaves = jax.tree_util.tree_flatten_with_path(declare(config), is_leaf=is_weight)[0]
    shapes = {_tensor_name(path, config): w.shape[::-1] if _is_transposed(path) else w.shape for path, w in leaves}
    head, scalar = checkpoint_name("lm_head"), checkpoint_name("value_head")
    tensors = files.tensors
    missing = [name for name in shapes if name not in tensors and name != scalar]
    if missing:
        raise ValueError(
            f"{files.place(missing[0])}: every weight that the config declares must be there. Missing: "
            f"{first_of(missing)}. Give the config of this checkpoint, or download it again."
        )
    unused = {head} if config.tie_embeddings or config.head == "scalar" else set()
    # rotary frequencies, which old checkpoints store, follow from the config
    derived = [name for name in tensors if name.endswith("rotary_emb.inv_freq")]
    superfluous = [name for name in tensors if name not in {*shapes, *unused, *derived}]
    if superfluous:
        raise ValueError(
            f"{files.place(superfluous[0])}: the config must declare every weight that is there. Got also: "
            f"{first_of(superfluous)}. Give the config of this checkpoint, with the head that it has."
        )
    for name, shape in shapes.items():
        if name not in tensors:
            continue
        found = tensors[name]
        if found.shape != shape:
            raise ValueError(
                f"{found.file}: {name}: must have shape {list(shape)} by the config. Got {list(found.shape)}. Give the "
                "config of this checkpoint."
            )
        if found.dtype not in READABLE:
            raise ValueError(
                f"{found.file}: {name}: weights must be in floating point of 16 bits or more. Got {found.dtype}. "
                "Use the checkpoint that this one was quantized from."
            )
    embedding = checkpoint_name("embedding")
    if not config.has_tied_head or head not in tensors:
        return
    pairs = zip(tensors[head].chunks(), tensors[embedding].chunks(), strict=True)
    if tensors[head].shape != tensors[embedding].shape or not all(np.array_equal(*pair) for pair in pairs):
        raise ValueError(
            f"{tensors[head].file}: {head}: must equal {embedding}, since the config ties them. Got other numbers. Set "
            "tie_word_embeddings to false in config.json."
        )


def _at(path: KeyPath, params: Params) -> tuple[jax.Array | np.ndarray, int | None]:
    """A weight by its path in the tree with layers as a list, of params with layers as a list or stacked; with its
    number, if it is one of several in an array."""
    if len(path) == 1:
        return params[path[0].key], None
    layers, number, name = params[LAYERS], path[1].idx, path[2].key
    return (layers[name], number) if isinstance(layers, dict) else (layers[number][name], None)


def _tensor_name(path: KeyPath, config: ModelConfig) -> str:
    """A weight's name in a checkpoint, from its path in the tree with layers as a list."""
    return checkpoint_name(path[-1].key, path[1].idx if len(path) > 1 else None, norms=config.norms)


def _is_transposed(path: KeyPath) -> bool:
    return path[-1].key != "embedding"
