"""The checkpoints of a run: their contents, and when one is due.

    checkpoints/warm_start/<updates>   the actor in its warm start
    checkpoints/frozen/0               sets of weights that never change, once
    checkpoints/steps/<steps>          sets of weights that change, with optimizers and older versions that
                                       are still to be read, and the state of the algorithm

Layers are saved in the form in which they rest, stacked or as a list, and restored in the layout and form of the
resumed run. The data position and all noise follow from the seed and the number of steps, so they are not saved.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.checkpoint.store import CheckpointError, CheckpointStore, checkpoint_numbers
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.models.params import LayerForm
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import weight_sets
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.run.assembly import Assembly, Phase
from jaxrlhf.run.first_weights import home_layout
from jaxrlhf.run.resume_point import FROZEN, ResumePoint
from jaxrlhf.run.run_folder import RunFolder


class Checkpoints:
    """Saves a run to its folder, in a subfolder for each phase and one for frozen weights."""

    def __init__(self, assembly: Assembly, folder: RunFolder, channel: Channel) -> None:
        self._assembly, self._folder, self._channel = assembly, folder, channel
        self._output = assembly.config.output
        self._stores: dict[str, CheckpointStore] = {}
        self._saved_at = time.monotonic()

    def is_due(self, done: int) -> bool:
        """Returns whether a checkpoint is due after `done` steps, regardless of the clock."""
        every = self._output.checkpoint_every
        return done == self._assembly.config.steps or bool(every and done % every == 0)

    def minutes_are_over(self) -> bool:
        """Returns whether a checkpoint is due by the clock."""
        minutes = self._output.checkpoint_minutes
        return bool(minutes) and time.monotonic() - self._saved_at >= 60 * minutes

    def save_steps(self, done: int, executor: Executor, state: Any, *, value: float | None = None) -> None:
        """Saves the run after `done` steps. `value` is the quality of the policy: the best checkpoint is kept."""
        phase = self._assembly.train
        frozen = weight_sets_of(phase, changing=False)
        if frozen and FROZEN not in self._stores:
            store = self._store(FROZEN)
            if not checkpoint_numbers(self._folder.checkpoints / FROZEN):
                store.save(0, _arrays(phase, executor, frozen, ()), {})
                store.wait()  # it must be complete before a checkpoint that needs it
        self._save("steps", done, phase, executor, state, value)

    def save_warm_start(self, done: int, executor: Executor, state: Any) -> None:
        """Saves the warm start after `done` updates."""
        assert self._assembly.warm_start is not None
        self._save("warm_start", done, self._assembly.warm_start, executor, state)

    def start_over(self) -> None:
        """Removes the saved frozen weights: a run without a saved step makes its weights again."""
        self._channel.share(lambda: shutil.rmtree(self._folder.checkpoints / FROZEN, ignore_errors=True))

    def drop_warm_start(self) -> None:
        """Removes the checkpoints of the warm start, if there are any, once there is a later one."""
        folder = self._folder.checkpoints / "warm_start"
        if not self._channel.share(folder.exists):
            return
        self.wait()
        if "warm_start" in self._stores:
            self._stores.pop("warm_start").close()
        self._channel.share(lambda: shutil.rmtree(folder, ignore_errors=True))

    def wait(self) -> None:
        """Waits until everything is on disk."""
        for store in self._stores.values():
            store.wait()

    @property
    def are_being_written(self) -> bool:
        """True if a checkpoint may still be being written."""
        return any(store.writes_beside for store in self._stores.values())

    def close(self) -> None:
        with contextlib.ExitStack() as stores:  # closes all, also if one fails
            for store in self._stores.values():
                stores.callback(store.close)

    def _save(
        self, subfolder: str, done: int, phase: Phase, executor: Executor, state: Any, value: float | None = None
    ) -> None:
        sets = weight_sets_of(phase, changing=True)
        versions = {name: executor.weights.version(name) for name in sets}
        meta = {"seed": self._assembly.config.seed, "data": self._data, "versions": versions}
        self._store(subfolder).save(done, _arrays(phase, executor, sets, state), meta, value=value)
        self._saved_at = time.monotonic()

    @functools.cached_property
    def _data(self) -> str:
        return self._assembly.tables.digest()

    def _store(self, subfolder: str) -> CheckpointStore:
        if subfolder not in self._stores:
            keep = self._output.keep_checkpoints
            self._stores[subfolder] = CheckpointStore(self._folder.checkpoints / subfolder, keep=keep)
        return self._stores[subfolder]


def weight_sets_of(phase: Phase, *, changing: bool) -> list[str]:
    """The sets of weights that are trained, or are moving averages of trained ones; or else those that never change."""
    return [name for name, each in weight_sets(_models(phase)).items() if each.rests_in_float32 == changing]


def _models(phase: Phase) -> dict[str, ModelRole]:
    return {name: role for name, role in phase.roles.items() if isinstance(role, ModelRole)}


def restore(point: ResumePoint, phase: Phase, executor: Executor) -> Any:
    """Restores all sets of weights of a phase from a checkpoint. Returns the algorithm's state."""
    states = []
    for folder, sets, state in _parts(point, phase):
        with CheckpointStore(folder.parent, read_only=True) as store:
            held, meta = store.restore(int(folder.name), _abstract(store, folder, phase, executor.weights, sets, state))
        for name in sets:
            version = meta.get("versions", {}).get(name, 0)
            executor.weights.restore(name, home_layout(phase, name), held["roles"][name], version)
        states.append(held["algorithm"])
    return states[0]


def check_checkpoint(point: ResumePoint, assembly: Assembly) -> None:
    """Raises CheckpointError unless a checkpoint has the data and the arrays of this run. Reads no array."""
    phase = assembly.train if point.steps_done is not None else assembly.warm_start
    if phase is None:
        raise CheckpointError(
            f"resume: {point.checkpoint} is of a warm start, so the config must have one. Got none. Add warm_start."
        )
    weights = WeightStore(_models(phase))
    for folder, sets, state in _parts(point, phase):
        with CheckpointStore(folder.parent, read_only=True) as store:
            data = store.meta(int(folder.name)).get("data")
            if folder == point.checkpoint and data != assembly.tables.digest():
                raise CheckpointError(
                    f"resume: must go on with the data and tokenizer of {point.folder.path}: its rows, in their order. "
                    "Got other rows. Give it the same files, or start a new run with resume=never."
                )
            store.check(int(folder.name), _abstract(store, folder, phase, weights, sets, state))


def _parts(point: ResumePoint, phase: Phase) -> list[tuple[Path, list[str], Any]]:
    """The folders that a phase is restored from, with the sets of weights and the state in each."""
    parts = [(point.checkpoint, weight_sets_of(phase, changing=True), phase.first_state)]
    if frozen := weight_sets_of(phase, changing=False):
        parts.append((point.folder.checkpoints / FROZEN / "0", frozen, ()))
    return parts


def _arrays(phase: Phase, executor: Executor, sets: list[str], state: Any) -> dict[str, Any]:
    anywhere = home_layout(phase, sets[0]).replicated
    roles = {name: executor.weights.state(name) for name in sets}
    return {"roles": roles, "algorithm": reallocate(state, anywhere)}


def _abstract(
    store: CheckpointStore, folder: Path, phase: Phase, weights: WeightStore, sets: list[str], state: Any
) -> dict[str, Any]:
    """Shapes and dtypes of what `_arrays` saved, with the shardings in which this run restores it."""
    anywhere, saved = home_layout(phase, sets[0]).replicated, store.arrays(int(folder.name))
    homes = {name: home_layout(phase, name) for name in sets}
    roles = {
        name: weights.abstract_state(
            name, homes[name], saved=_saved_form(saved, name), older=_names(saved, f"roles/{name}/older/")
        )
        for name in sets
    }
    on_all = functools.partial(jax.ShapeDtypeStruct, sharding=anywhere)
    return {"roles": roles, "algorithm": jax.tree.map(lambda x: on_all(jnp.shape(x), jnp.asarray(x).dtype), state)}


def _saved_form(saved: Iterable[str], name: str) -> LayerForm | None:
    """The form of a set's layers in a checkpoint, from the paths of its arrays; None if it does not have the set."""
    names = _names(saved, f"roles/{name}/params/layers/")
    return ("list" if "0" in names else "stacked") if names else None


def _names(saved: Iterable[str], folder: str) -> list[str]:
    """The names in a folder of the paths of a checkpoint's arrays."""
    return sorted({path.removeprefix(folder).split("/")[0] for path in saved if path.startswith(folder)})
