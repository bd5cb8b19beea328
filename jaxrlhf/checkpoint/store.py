"""Checkpoints in a folder: arrays in whatever layout they are, and a little plain data, saved by Orbax as one whole.

A checkpoint appears under its number in one move when all of it is on disk. What a kill leaves half written lies under
another name, is never read, and is removed by the next writer.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding.mesh import everywhere
from jaxrlhf.sharding.processes import process_count


class CheckpointError(ValueError):
    """A checkpoint that is not there, not of this run, or cannot be written."""


class CheckpointStore:
    """The checkpoints in a folder, numbered by what was done. Saving goes on beside the run.

    Args:
        keep: How many of the newest checkpoints stay; one of the best value stays beside them.
        read_only: Nothing is changed in the folder, which another process may be writing to.
    """

    def __init__(self, folder: Path, *, keep: int = 2, read_only: bool = False) -> None:
        self._folder = folder.absolute()
        newest = checkpoint_managers.LatestN(n=keep)
        best = checkpoint_managers.BestN(get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            best_fn=_rank,  # without it, values are not written
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
        )
        # by default each replica writes a slice, and a slicing program is compiled for every shape and device
        whole_shards = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole_shards))
        handlers = {
            "arrays": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
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
            CheckpointError: This one or the one before, whose writing went on in the background, cannot be written.
        """
        metrics = {"value": value, "number": number}
        arrays = reallocate(arrays, _spread(arrays)) if process_count() > 1 else arrays
        whole = ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(dict(meta)))
        try:
            self._manager.save(number, args=whole, metrics=metrics, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unwritten(error) from error

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
            CheckpointError: It cannot be written.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

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

    def _unwritten(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: a checkpoint must be writable. Got {type(error).__name__}: {error}. Make room or mend "
            "the file system, and resume from the newest complete one."
        )


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
