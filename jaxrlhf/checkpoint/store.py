"""Checkpoints in a folder: arrays in any layout, and a little plain data, saved together by Orbax.

A checkpoint appears under its number in one move when all of it is on disk, with a manifest that tells whether it is
still whole. A partly written one has another name, is never read, and is removed by the next writer.

On CPUs arrays are written from their own memory, and saving returns when they are on the disk: a copy would double
their memory, and writing in the background would take the cores of the run. From other devices they are copied to host
memory and written in the background, by threads of low priority.
"""

import concurrent.futures
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from jaxrlhf.checkpoint.manifest import TEMPORARY, write_manifest
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.mesh import everywhere, platform
from jaxrlhf.writing import writing

T = TypeVar("T")
_NICENESS = 10
"""Niceness of the threads that write in the background."""


class CheckpointError(ValueError):
    """A checkpoint that does not exist, is damaged, or is not of this run."""


class CheckpointStore(contextlib.AbstractContextManager["CheckpointStore"]):
    """The checkpoints in a folder, by the number of steps or updates done.

    Args:
        keep: The number of newest checkpoints to keep. The one with the best value is kept too.
        read_only: Nothing is changed in the folder, to which another process may be writing.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False) -> None:
        self._folder = folder.absolute()
        self._saving = 0
        self.writes_beside = platform() != "cpu"
        """True if saving returns before everything is on the disk."""
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints", initializer=_lower_priority)
        newest = checkpoint_managers.LatestN(n=keep)
        best = checkpoint_managers.BestN(get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            best_fn=_rank,  # without it, values are not written
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
        )
        # by default, each replica writes a slice, for which a program is compiled for every shape and device
        whole_shards = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole_shards))
        handlers = {
            # compression makes weights a tenth smaller, for three times the CPU time and a copy in memory
            "arrays": ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def save(self, number: int, arrays: Any, meta: Mapping[str, Any], *, value: float | None = None) -> None:
        """Saves a pytree of arrays and plain JSON data, or raises UnwritableError, also for the save before. The arrays
        may be donated as soon as this returns. The one with the highest value, its quality, is kept; of equals, the
        first.
        """
        self.wait()
        self._saving = number
        metrics = {"value": value, "number": number}
        arrays = reallocate(arrays, _spread(arrays)) if jax.process_count() > 1 else arrays
        whole = ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(dict(meta)))
        self._write(lambda: self._manager.save(number, args=whole, metrics=metrics, force=True))
        if not self.writes_beside:
            self.wait()

    def meta(self, number: int) -> dict[str, Any]:
        """The plain data of a checkpoint."""
        with self._reading(number):
            return self._manager.restore(number, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def arrays(self, number: int) -> dict[str, str]:
        """The dtype and shape of every array by its path, `roles/actor/params/layers/0/query`. Reads no array."""
        if number not in (there := sorted(self._manager.all_steps())):
            got = ", ".join(map(str, there)) or "none"
            raise CheckpointError(f"{self._folder}: has no complete checkpoint {number}. Got {got}.")
        with self._reading(number):
            saved = self._manager.item_metadata(number)["arrays"]
        return _shapes(saved.tree if hasattr(saved, "tree") else saved)

    def restore(self, number: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays, sharded as in `like`, a tree of `jax.ShapeDtypeStruct`, and the plain data, checked as by
        `check`.
        """
        self.check(number, like)
        final = jax.tree.map(lambda x: x.sharding, like)
        read_as = _spread(like) if jax.process_count() > 1 else final
        wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), like, read_as)
        how = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
        with self._reading(number):
            restored = self._manager.restore(number, args=ocp.args.Composite(arrays=how))["arrays"]
        return reallocate(restored, final) if jax.process_count() > 1 else restored, self.meta(number)

    def check(self, number: int, like: Any) -> None:
        """Raises CheckpointError unless a checkpoint has the arrays of `like`, with shapes and dtypes."""
        there, wanted = self.arrays(number), _shapes(like)
        if there == wanted:
            return
        differing = sorted({name for name, _ in there.items() ^ wanted.items()})
        name = differing[0]
        raise CheckpointError(
            f"{self._folder / str(number)}: must hold the arrays of this run's roles and algorithm. "
            f"{len(differing)} differ, first {name}: Got {there.get(name, 'none')} for {wanted.get(name, 'none')}. "
            "Resume with the config that it was saved with."
        )

    def wait(self) -> None:
        """Waits until everything is on disk, or raises UnwritableError."""
        self._write(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._writer.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Raises Orbax's errors about a damaged checkpoint as a CheckpointError in one line."""
        try:
            yield
        except Exception as error:
            what = str(error).strip().partition("\n")[0][:200]
            raise CheckpointError(
                f"{self._folder / str(number)}: must be a whole checkpoint. Got {type(error).__name__} on reading it: "
                f"{what}. Resume from another one: --resume {self._folder}/<number>."
            ) from error

    def _write(self, work: Callable[[], T]) -> T:
        """Calls Orbax to write. Threads that it starts inherit the priority of the calling thread."""
        with writing(self._folder / str(self._saving), ValueError, RuntimeError):  # TensorStore's
            return self._writer.submit(work).result() if self.writes_beside else work()

    def _seal(self) -> None:
        """Adds the manifest to a complete checkpoint, before it gets its name."""
        if jax.process_index() == 0:
            (folder,) = self._folder.glob(f"{self._saving}.{TEMPORARY}*")
            write_manifest(folder)


def _is_untold(record: logging.LogRecord) -> bool:
    """False for Orbax's log of a failed save, with a traceback for each thread, since `save` or `wait` raises the
    error; and for its log of waiting for a save."""
    said = record.exc_info or str(record.msg).startswith("Waiting for previous save")
    return not (said and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_is_untold)


def checkpoint_numbers(folder: Path) -> list[int]:
    """The numbers of the complete checkpoints in a folder, ascending. Changes nothing."""
    if not folder.is_dir():
        return []
    # Orbax renames a checkpoint to its number when it is complete
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def _spread(tree: Any) -> Any:
    """Shardings over all devices of all processes, which write a checkpoint together: arrays are split along the first
    dim that the number of devices divides, or replicated."""
    mesh = everywhere()

    def sharding(x: Any) -> NamedSharding:
        split = next((dim for dim, size in enumerate(x.shape) if size and size % mesh.size == 0), None)
        axes = () if split is None else (*[None] * split, *mesh.axis_names)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


def _lower_priority() -> None:
    """Sets the niceness of the calling thread: on Linux, every thread has its own."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _rank(metrics: Any) -> Any:
    """A sort key of checkpoints: the best has the highest value, and of equals the lowest number. Without values it is
    the newest, which is kept anyway."""
    value, number = metrics["value"], metrics["number"]
    return (-math.inf, number) if value is None else (value, -number)


def _shapes(tree: Any) -> dict[str, str]:
    """Path -> dtype and shape, the same for any kind of container."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
