"""Checkpoints of a run: arrays in whatever layout they are, and a little plain data, saved by Orbax as one whole."""

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp


class CheckpointError(ValueError):
    """A checkpoint that is not there, or not of this run."""


def checkpoints_of(run_folder: Path) -> Path:
    """Where the checkpoints of another run are.

    Raises:
        CheckpointError: The folder is not that of a run, or the run left no complete checkpoint.
    """
    folder = run_folder / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"resume: must be the folder of a run, with checkpoints in it. Got {str(run_folder)!r}.")
    with CheckpointStore(folder) as store:
        if store.latest() is None:
            raise CheckpointError(f"resume: {folder} has no complete checkpoint. Start with resume=never.")
    return folder


def check_resume(run_folder: Path, *, steps: int, seed: int) -> None:
    """A run of so many steps can go on from the newest checkpoint of another.

    Raises:
        CheckpointError: There is none, it has a different seed, or nothing is left to do.
    """
    with CheckpointStore(checkpoints_of(run_folder)) as store:
        done = store.latest()
        assert done is not None
        meta = store.meta(done)
    if done >= steps:
        raise CheckpointError(
            f"resume: {run_folder} has done {done} steps, so steps must be more. Got {steps}. Raise it."
        )
    if meta["seed"] != seed:
        raise CheckpointError(
            f"resume: must go on with the seed of {run_folder}, {meta['seed']}, which decides data and noise. Got "
            f"{seed}."
        )


class CheckpointStore:
    """The checkpoints in a folder, numbered by the steps that were done. Saving goes on beside the run."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        # by default each replica writes a slice, and a slicing program is compiled for every shape and device
        whole_shards = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole_shards))
        handlers = {
            "arrays": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
            "meta": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Steps done at the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, steps_done: int, arrays: Any, meta: dict[str, Any]) -> None:
        """Save a pytree of arrays and plain JSON data. The arrays may be donated as soon as this returns."""
        self._manager.save(
            steps_done, args=ocp.args.Composite(arrays=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta))
        )

    def meta(self, steps_done: int) -> dict[str, Any]:
        """The plain data of a checkpoint."""
        return self._manager.restore(steps_done, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, steps_done: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays, laid out as `like` says (`jax.ShapeDtypeStruct` with shardings), and the plain data.

        Raises:
            CheckpointError: There is no such checkpoint, or its arrays have another structure, shape or dtype.
        """
        if steps_done not in self._manager.all_steps():
            raise CheckpointError(
                f"{self._folder}: has no complete checkpoint of {steps_done} steps. Got "
                f"{sorted(self._manager.all_steps()) or 'none'}."
            )
        meta = self.meta(steps_done)
        self._check(steps_done, like)
        how = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        restored = self._manager.restore(steps_done, args=ocp.args.Composite(arrays=how))
        return restored["arrays"], meta

    def wait(self) -> None:
        """Until everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, steps_done: int, like: Any) -> None:
        """Every array that is wanted is there, as it is wanted, and no other."""
        saved = self._manager.item_metadata(steps_done)["arrays"]
        there, wanted = _shapes(saved.tree if hasattr(saved, "tree") else saved), _shapes(like)
        if there == wanted:
            return
        differing = sorted({name for name, _ in there.items() ^ wanted.items()})
        name = differing[0]
        raise CheckpointError(
            f"{self._folder}, {steps_done} steps: must hold the arrays of this run's roles and algorithm. "
            f"{len(differing)} differ, first {name}: Got {there.get(name, 'none')} for {wanted.get(name, 'none')}. "
            "Resume with the config that it was saved with."
        )


def _shapes(tree: Any) -> dict[str, str]:
    """Path -> dtype and shape, the same for any kind of container."""
    return {
        "/".join(str(_key_name(key)) for key in path): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _key_name(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
