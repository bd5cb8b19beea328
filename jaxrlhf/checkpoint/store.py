"""Checkpoints in a folder: arrays in whatever layout they are, and a little plain data, saved by Orbax as one whole.

A checkpoint appears under its number in one move when all of it is on disk, with a manifest that tells whether it is
still whole. What a kill leaves half written lies under another name, is never read, and is removed by the next writer.

On CPUs arrays are written from where they lie, and saving takes until they are on the disk: a copy would take as much
memory as they do, and writing beside the run the cores that it runs on. From other devices they are copied to host
memory and written beside the run, by threads of low priority.
"""

import concurrent.futures
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from jaxrlhf.checkpoint.manifest import TEMPORARY, write_manifest
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.mesh import everywhere, platform
from jaxrlhf.sharding.processes import process_count, process_index
from jaxrlhf.writing import writing

T = TypeVar("T")
_NICENESS = 10
"""Niceness of the threads that write beside a run."""


class CheckpointError(ValueError):
    """A checkpoint that is not there, or not of this run."""


class CheckpointStore:
    """The checkpoints in a folder, numbered by what was done.

    Args:
        keep: How many of the newest checkpoints stay; one of the best value stays beside them.
        read_only: Nothing is changed in the folder, which another process may be writing to.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False) -> None:
        self._folder = folder.absolute()
        self._saving = 0
        self.writes_beside = platform() != "cpu"
        """Saving returns before everything is on the disk."""
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
        # by default each replica writes a slice, and a slicing program is compiled for every shape and device
        whole_shards = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole_shards))
        handlers = {
            # to zstd weights are noise: a tenth smaller, for three times the CPU time and a copy in memory
            "arrays": ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """The number of the newest complete checkpoint."""
        return self._manager.latest_step()

    def path(self, number: int) -> Path:
        """Where a checkpoint lies."""
        return self._folder / str(number)

    def save(self, number: int, arrays: Any, meta: Mapping[str, Any], *, value: float | None = None) -> None:
        """Save a pytree of arrays and plain JSON data. The arrays may be donated as soon as this returns.

        Args:
            value: How good it is: the checkpoint with the highest value is kept; of equals, the first.

        Raises:
            UnwritableError: This one cannot be written, or the one before, where that was written beside the run.
        """
        self.wait()
        self._saving = number
        metrics = {"value": value, "number": number}
        arrays = reallocate(arrays, _spread(arrays)) if process_count() > 1 else arrays
        whole = ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(dict(meta)))
        self._write(lambda: self._manager.save(number, args=whole, metrics=metrics, force=True))
        if not self.writes_beside:
            self.wait()

    def meta(self, number: int) -> dict[str, Any]:
        """The plain data of a checkpoint."""
        with self._reading(number):
            return self._manager.restore(number, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def arrays(self, number: int) -> dict[str, str]:
        """Path, as in `roles/actor/params/layers/0/query`, -> dtype and shape of every array. Reads none of them.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        if number not in self._manager.all_steps():
            raise CheckpointError(
                f"{self._folder}: has no complete checkpoint {number}. Got "
                f"{', '.join(map(str, sorted(self._manager.all_steps()))) or 'none'}."
            )
        with self._reading(number):
            saved = self._manager.item_metadata(number)["arrays"]
        return _shapes(saved.tree if hasattr(saved, "tree") else saved)

    def restore(self, number: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays, laid out as `like` says (`jax.ShapeDtypeStruct` with shardings), and the plain data.

        Raises:
            CheckpointError: There is no such checkpoint, or its arrays have another structure, shape or dtype.
        """
        self.check(number, like)
        several = process_count() > 1
        wanted = jax.tree.map(_laid_out, like, _spread(like)) if several else like
        how = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
        with self._reading(number):
            restored = self._manager.restore(number, args=ocp.args.Composite(arrays=how))["arrays"]
        if several:
            restored = reallocate(restored, jax.tree.map(lambda x: x.sharding, like))
        return restored, self.meta(number)

    def check(self, number: int, like: Any) -> None:
        """Asks that every array that is wanted is there, as it is wanted, and no other. Reads none of them.

        Raises:
            CheckpointError: One is not.
        """
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
        """Until everything is on disk.

        Raises:
            UnwritableError: It cannot be written.
        """
        self._write(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._writer.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """What Orbax says of a checkpoint that is damaged, in one line."""
        try:
            yield
        except Exception as error:
            what = str(error).strip().partition("\n")[0][:200]
            raise CheckpointError(
                f"{self._folder / str(number)}: must be a whole checkpoint. Got {type(error).__name__} on reading it: "
                f"{what}. Resume from another one: --resume {self._folder}/<number>."
            ) from error

    def _write(self, work: Callable[[], T]) -> T:
        """Has Orbax write. Threads that it starts have the priority of the one that it is called in."""
        with writing(self._folder / str(self._saving), ValueError, RuntimeError):  # TensorStore's
            return self._writer.submit(work).result() if self.writes_beside else work()

    def _seal(self) -> None:
        """Adds the manifest to a checkpoint of which everything is written, before it gets its name."""
        if process_index() == 0:
            (folder,) = self._folder.glob(f"{self._saving}.{TEMPORARY}*")
            write_manifest(folder)


class _Untold(logging.Filter):
    """Leaves out what Orbax logs of a failed save, with a traceback for each of its threads: `save` or `wait` raises
    it. And that a save was waited for."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.exc_info or str(record.msg).startswith("Waiting for previous save")
        return not (said and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_Untold())


def checkpoint_numbers(folder: Path) -> list[int]:
    """The numbers of the complete checkpoints in a folder, ascending, without touching anything."""
    if not folder.is_dir():
        return []
    # Orbax moves a checkpoint to its number when it is complete
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir())


def _spread(tree: Any) -> Any:
    """Shardings over all devices of all processes, which Orbax writes together: an array split along the first dim
    that all of them divide, or whole on every device."""
    mesh = everywhere()

    def sharding(x: Any) -> NamedSharding:
        split = next((dim for dim, size in enumerate(x.shape) if size and size % mesh.size == 0), None)
        axes = () if split is None else (*[None] * split, *mesh.axis_names)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(sharding, tree)


def _laid_out(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _lower_priority() -> None:
    """Sets the niceness of the calling thread: on Linux, every thread has its own."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _rank(metrics: Any) -> Any:
    """The higher, the better: by value, of equals the first; the newest, which stays anyway, if none has a value."""
    if metrics["value"] is None:
        return -math.inf, metrics["number"]
    return metrics["value"], -metrics["number"]


def _shapes(tree: Any) -> dict[str, str]:
    """Path -> dtype and shape, the same for any kind of container."""
    return {
        "/".join(str(_key_name(key)) for key in path): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _key_name(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
