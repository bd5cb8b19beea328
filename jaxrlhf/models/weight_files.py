"""The weight files of a checkpoint, in the format of safetensors: read slice by slice, written piece by piece.

    length of the header (8 bytes), header (JSON: tensor -> dtype, shape, place), the bytes of all tensors

The library's own functions map a whole file into memory, where its pages stay beside the arrays made of them, and write
tensors that all are in memory. Here both ways go through buffers of bounded size.

Reference:
    https://huggingface.co/docs/safetensors/index#format
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrlhf.brief import brief
from jaxrlhf.models.config_json import read_json, stated
from jaxrlhf.name_rules import check_file_name

T = TypeVar("T")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 16 * 2**20
"""The most bytes that are read or written at once."""
SHARD_BYTES = 5 * 10**9
"""The most bytes of a weight file, but for one that holds a single larger tensor."""
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""The dtypes of weights that can be read, by the names in a header."""
READABLE = tuple(_DTYPES)
Dtype = Literal["float32", "bfloat16"]
_WRITTEN: Mapping[Dtype, tuple[str, Any]] = {"float32": ("F32", np.float32), "bfloat16": ("BF16", ml_dtypes.bfloat16)}
Index = tuple[slice, ...]

# -- reading -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """The place of its first byte in the file."""

    def read_into(self, target: np.ndarray, index: Index) -> None:
        """Reads a slice into an array of its shape, in the array's dtype. The slice has no steps."""
        bounds = [each.indices(size)[:2] for each, size in zip(index, self.shape, strict=True)]
        (start, stop), others = bounds[0], bounds[1:]
        dtype, width = np.dtype(_DTYPES[self.dtype]), math.prod(self.shape[1:])
        # of matrices, only the columns of the slice; beyond two dims whole rows
        first, last = others[0] if len(others) == 1 else (0, width)
        rows = max(1, CHUNK_BYTES // max(1, (last - first) * dtype.itemsize))
        with self.file.open("rb", buffering=0) as file:
            for begin in range(start, stop, rows):
                end = min(begin + rows, stop)
                chunk = np.empty((end - begin, last - first), dtype)
                pieces = [chunk] if last - first == width else list(chunk)
                for number, piece in enumerate(pieces):
                    file.seek(self.offset + ((begin + number) * width + first) * dtype.itemsize)
                    self._fill(file, piece)
                if len(others) != 1:
                    chunk = chunk.reshape((end - begin, *self.shape[1:]))[(slice(None), *index[1:])]
                target[begin - start : end - start] = chunk

    def _fill(self, file: IO[bytes], piece: np.ndarray) -> None:
        rest = piece.reshape(-1).view(np.uint8).data
        while rest:
            count = file.readinto(rest)  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise ValueError(f"{self.file}: must not change while it is read. Got a shorter file.")
            rest = rest[count:]

    def chunks(self) -> Iterator[np.ndarray]:
        """The tensor from its first row to the last, some rows at a time."""
        rows = max(1, CHUNK_BYTES // max(1, math.prod(self.shape[1:]) * 4))
        for begin in range(0, self.shape[0], rows):
            chunk = np.empty((min(rows, self.shape[0] - begin), *self.shape[1:]), np.float32)
            self.read_into(chunk, (slice(begin, begin + len(chunk)), *map(slice, self.shape[1:])))
            yield chunk


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder's weight files, by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    listed: Mapping[str, str]
    """Tensor -> file, by the folder's index; empty without one."""

    def place(self, name: str) -> str:
        """The file where a tensor is, or should be."""
        if name in self.tensors:
            return str(self.tensors[name].file)
        return str(self.folder / self.listed[name]) if name in self.listed else str(self.folder)


def open_weights(folder: Path) -> WeightFiles:
    """Reads the headers of a folder's weight files. Raises ValueError if a file is missing or not whole."""
    listed: dict[str, str] = {}
    if (folder / WEIGHTS).exists():
        names = [WEIGHTS]
    elif (folder / INDEX).exists():
        listed = _listed_files(folder / INDEX)
        names = sorted(set(listed.values()))
    else:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise ValueError(
            f"{folder}: must hold {WEIGHTS} or {INDEX}. Got {', '.join(found) or 'no files'}. Weights in another "
            "format are converted by transformers: from_pretrained, then save_pretrained."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in names:
        if not (folder / file).exists():
            held = [name for name, there in listed.items() if there == file]
            raise ValueError(
                f"{folder / file}: must be a whole safetensors file. Got none, though {INDEX} lists {first_of(held)} "
                "in it. Download it again."
            )
        for name, tensor in _read_header(folder / file).items():
            if name not in tensors or listed.get(name) == file:
                tensors[name] = tensor
    return WeightFiles(folder, tensors, listed)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked by the library."""
    try:
        with safe_open(path, framework="numpy"):
            pass
        return _parse_header(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: must be a whole safetensors file. Got {_missing_bytes(path) or error}. Download it again."
        ) from error


def _parse_header(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(length))
    return {
        name: StoredTensor(path, each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
        for name, each in fields.items()
        if name != "__metadata__"
    }


def _missing_bytes(path: Path) -> str:
    """The tensors that a truncated file lacks, in words; empty if it is damaged in another way."""
    try:
        there, size = _parse_header(path), path.stat().st_size
        ends = {name: x.offset + math.prod(x.shape) * np.dtype(_DTYPES[x.dtype]).itemsize for name, x in there.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError):
        return ""
    lacking = [name for name, end in ends.items() if end > size]
    return f"{size:,} of {max(ends.values()):,} bytes, without the end of {first_of(lacking)}" if lacking else ""


def _listed_files(index: Path) -> dict[str, str]:
    """Tensor -> weight file by an index, all of them in its folder. There they may be links to anywhere, as in the
    cache of huggingface_hub."""
    listed = stated(index, read_json(index), "weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(
            f"{index}: weight_map: must be tensors and their files. Got {brief(listed)}. Download it again."
        )
    for name in listed.values():
        check_file_name(name, f"{index}: weight_map", example="model-00001-of-00002.safetensors")
    return listed


def first_of(names: list[str]) -> str:
    """The first names of many, in words."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# -- writing -----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Processes(Protocol):
    """The processes that write together, as `execution.process_channel.Channel` connects them."""

    @property
    def is_first(self) -> bool:
        """True in the process that writes."""
        ...

    def share(self, make: Callable[[], T]) -> T:
        """Calls `make` in the first process, and returns its result, or raises its error, in all."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in the first, which go to nobody else."""
        ...


class OneProcess:
    """A process that writes alone."""

    is_first = True

    def share(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, value: Any) -> list[Any]:
        return [value]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to be written."""

    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[np.ndarray | None]]
    """Yields its rows in order, in the dtype that is written; None in all processes but the first. Every process takes
    the same number of chunks."""


def write_weights(
    folder: Path, sources: Mapping[str, Source], dtype: Dtype, *, processes: Processes, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes model.safetensors, or several files and their index where the weights are more than `shard_bytes`.

    Every process calls it. A process has one chunk in host memory: the next one is taken when all have heard that the
    last one is written. An error in writing is raised in every process.
    """
    itemsize = np.dtype(_WRITTEN[dtype][1]).itemsize
    sizes = {name: math.prod(source.shape) * itemsize for name, source in sources.items()}
    shards = _shards(sizes, shard_bytes)
    files = {
        WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors": names
        for number, names in enumerate(shards, 1)
    }
    for file, names in files.items():
        _write_file(folder / file, {name: sources[name] for name in names}, dtype, processes)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        processes.share(lambda: _write_index(folder / INDEX, index))


def _write_index(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Consecutive names of at most so many bytes, or a single larger one."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def _write_file(path: Path, sources: Mapping[str, Source], dtype: Dtype, processes: Processes) -> None:
    named, stored = _WRITTEN[dtype]
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in sources.items():
        begin, end = end, end + math.prod(source.shape) * np.dtype(stored).itemsize
        fields[name] = {"dtype": named, "shape": list(source.shape), "data_offsets": [begin, end]}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") if processes.is_first else open(os.devnull, "wb") as file:

        def write(chunk: np.ndarray | None) -> None:
            assert chunk is not None and chunk.dtype == stored
            file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)

        def close() -> None:
            assert file.tell() == 8 + len(header) + end, (path, file.tell(), end)
            file.flush()
            os.fsync(file.fileno())

        processes.share(lambda: file.write(len(header).to_bytes(8, "little") + header))
        for source in sources.values():
            for chunk in source.chunks():
                processes.share(lambda chunk=chunk: write(chunk))
        processes.share(close)
