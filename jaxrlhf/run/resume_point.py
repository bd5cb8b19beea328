"""Resuming: the run and the checkpoint that `resume` names, and checks that the run may continue from there.

    resume: never          a new run
    resume: auto           the newest run of this config in output.folder, from its newest checkpoint, or a new run
    resume: runs/x         that run, in the same folder, from its newest checkpoint
    resume: runs/x/checkpoints/steps/40
                           a new run, from that checkpoint

A run that is resumed in its folder writes the same files as an undisturbed run: records from after the checkpoint are
dropped, and written again. Damaged newest checkpoints are set aside, and the run resumes from the newest whole one.
"""

import dataclasses
import glob
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxrlhf.brief import brief
from jaxrlhf.checkpoint.manifest import find_damage
from jaxrlhf.checkpoint.store import CheckpointError, checkpoint_numbers
from jaxrlhf.config.reading import ConfigError, leaves, to_tree
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.require import errors_as
from jaxrlhf.run.run_folder import RunFolder

CheckpointPhase = Literal["warm_start", "steps"]
PHASES: tuple[CheckpointPhase, ...] = ("warm_start", "steps")
"""The phases of a run that have checkpoints, in order."""
FROZEN = "frozen"
"""The folder of weights that never change, which are saved once."""

_INESSENTIAL = ("resume", "output", "compilation_cache", "devices", "devices_memory", "plan", "evaluation", "steps")
"""Keys that do not change the results of the steps of a run."""
_DECISIVE = ("seed", "algorithm", "batch_size")
"""Keys that determine the rows and the noise of a step. They must not change when a run is resumed."""


@dataclasses.dataclass(frozen=True)
class Position:
    """The progress of a run."""

    phase: CheckpointPhase
    done: int
    """Updates of the warm start, or steps."""

    def covers(self, record: Mapping[str, Any]) -> bool:
        """Returns whether a record of metrics or samples was written up to this position."""
        if "warm_start/step" in record:
            return self.phase == "steps" or record["warm_start/step"] <= self.done
        return self.phase == "steps" and record["step"] <= self.done

    def checkpoint(self, folder: RunFolder) -> Path:
        """The folder of the checkpoint here, in the folder of the run."""
        return folder.checkpoints / self.phase / str(self.done)

    def __str__(self) -> str:
        return f"{self.done} steps" if self.phase == "steps" else f"{self.done} updates of the warm start"


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """A run to resume, and the checkpoint."""

    folder: RunFolder
    position: Position | None
    """The position of the checkpoint. None means that there is none yet, and the run starts over."""
    is_branch: bool = False
    """True for a new run that starts from here, in a folder of its own."""
    notes: tuple[str, ...] = ()
    """Notes on differences between the run's config and the present one, and on damaged checkpoints."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints that are not whole, to be set aside."""

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        assert self.position is not None
        return self.position.checkpoint(self.folder)

    @property
    def steps_done(self) -> int | None:
        """The steps done at the checkpoint; None if there is none, or one of the warm start."""
        return self.position.done if self.position is not None and self.position.phase == "steps" else None


def newest_position(folder: RunFolder) -> Position | None:
    """The newest complete checkpoint of a run."""
    return next(iter(_positions(folder)), None)


def _positions(folder: RunFolder) -> list[Position]:
    """The complete checkpoints of a run, the newest first."""
    there = [Position(phase, n) for phase in PHASES for n in checkpoint_numbers(folder.checkpoints / phase)]
    return there[::-1]


def set_aside(damaged: Path) -> None:
    """Renames a damaged checkpoint, so that no run resumes from it and nothing is lost."""
    names = (f"{damaged.name}.damaged{f'-{i}' if i > 1 else ''}" for i in itertools.count(1))
    damaged.rename(next(path for name in names if not (path := damaged.with_name(name)).exists()))


def _check_frozen(folder: RunFolder) -> None:
    """Checks that the saved frozen weights, which every checkpoint needs, are whole."""
    path = folder.checkpoints / FROZEN / "0"
    if damage := find_damage(path):
        raise CheckpointError(
            f"resume: {path} must be whole, since every checkpoint of the run needs it. Got damage: {damage}. Bring it "
            "back from a copy, or start a new run with resume=never."
        )


def what_is_kept(folder: RunFolder) -> str:
    """A sentence about the newest checkpoint of a run that failed, and how to resume from it."""
    position = newest_position(folder)
    if position is None:
        return "No checkpoint was saved before; started again with --resume auto, the run starts over."
    checkpoint = position.checkpoint(folder)
    return f"Kept: {checkpoint}, after {position}. Start again with --resume auto to go on from there."


def find_resume_point(config: RunConfig) -> ResumePoint | None:
    """The run that `resume` names; None for a new run. Raises CheckpointError if there is no such run or checkpoint, or
    it cannot be resumed under this config."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return _find_newest(config)
    path = Path(config.resume)
    is_branch = path.parent.name in PHASES and path.parent.parent.name == "checkpoints"
    folder = RunFolder(path.resolve().parents[2] if is_branch else path.resolve())
    there = _config_of(folder)
    point = _named_checkpoint(folder, there, config, path) if is_branch else _newest_point(folder, there, config)
    for key in _DECISIVE:
        before, now = getattr(there, key), getattr(config, key)
        if before != now:
            raise CheckpointError(
                f"resume: must go on with the {key} of {folder.path}, {before}, which decides data and noise. Got "
                f"{now}."
            )
    done = point.steps_done or 0
    if done > config.steps and is_branch:
        raise CheckpointError(f"resume: {path} has done more than steps={config.steps}. Raise it.")
    if done > config.steps:
        raise CheckpointError(
            f"resume: {path} has done {done} steps, so steps must be at least that. Got {config.steps}. Raise it, or "
            "name an earlier checkpoint of it."
        )
    return point


def _named_checkpoint(folder: RunFolder, there: RunConfig, config: RunConfig, path: Path) -> ResumePoint:
    position = next((x for x in _positions(folder) if (x.phase, str(x.done)) == (path.parent.name, path.name)), None)
    if position is None:
        there_are = ", ".join(map(str, checkpoint_numbers(path.parent))) or "none"
        raise CheckpointError(f"resume: must be a complete checkpoint. Got {brief(str(path))}. There: {there_are}.")
    if damage := find_damage(path):
        raise CheckpointError(f"resume: {path} must be whole. Got damage: {damage}. Name another one of {path.parent}.")
    _check_frozen(folder)
    return ResumePoint(folder, position, True, _differences(there, config))


def _find_newest(config: RunConfig) -> ResumePoint | None:
    """The newest run of this config, if there is one."""
    configs = Path(config.output.folder).glob(f"{glob.escape(config.name)}-*/config.yaml")
    for path in sorted(configs, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        folder = RunFolder(path.parent.resolve())
        try:
            there = _config_of(folder)
        except CheckpointError:  # of another version, so not a run of this config
            continue
        if not _differences(there, config, leave_out=_INESSENTIAL):
            return _newest_point(folder, there, config)
    return None


def _newest_point(folder: RunFolder, there: RunConfig, config: RunConfig) -> ResumePoint:
    """The newest whole checkpoint of a run, if it has any."""
    folder.check_free()
    damaged: dict[Path, str] = {}
    for position in _positions(folder):
        checkpoint = position.checkpoint(folder)
        if damage := find_damage(checkpoint):
            damaged[checkpoint] = damage
            continue
        _check_frozen(folder)
        notes = (
            f"{path} is damaged: {damage}. It is set aside under another name, and the run goes on from {position}."
            for path, damage in damaged.items()
        )
        return ResumePoint(folder, position, False, (*notes, *_differences(there, config)), tuple(damaged))
    if damaged:
        raise CheckpointError(
            f"resume: {folder.checkpoints} must have a whole checkpoint. Got damaged ones: "
            f"{', '.join(f'{path} ({damage})' for path, damage in damaged.items())}. Bring one back from a copy, or "
            "start a new run with resume=never."
        )
    return ResumePoint(folder, None, False, _differences(there, config))


def _config_of(folder: RunFolder) -> RunConfig:
    """The config of a run."""
    if not os.path.isfile(folder.config):  # a Path would raise where the name is too long for any file
        raise CheckpointError(
            f"resume: must be never, auto, the folder of a run or a checkpoint in one. Got {brief(str(folder.path))}."
        )
    with errors_as(CheckpointError, "resume: the config of the run must still be valid. Got ", ConfigError):
        return load_run(folder.config)


def _differences(there: RunConfig, config: RunConfig, *, leave_out: tuple[str, ...] = ("resume",)) -> tuple[str, ...]:
    """The keys whose values differ, as 'key: value there, value now'."""
    before, now = (leaves({k: v for k, v in to_tree(c).items() if k not in leave_out}) for c in (there, config))
    return tuple(
        f"{key}: {before.get(key, 'not set')} in the run, {now.get(key, 'not set')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    )
