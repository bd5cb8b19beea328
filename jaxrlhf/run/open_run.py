"""A run whose folder is open: its lock, its trainer, and what is said when it ends."""

import contextlib
import dataclasses
import itertools
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrlhf.checkpoint.manifest import find_damage
from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.forecast_errors import Comparison, compare
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.planner.plans.saved_plan import plan_text
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.checked_run import CheckedRun, InputError
from jaxrlhf.run.compilation_cache import complaints_said_once
from jaxrlhf.run.interruption import StopRequest
from jaxrlhf.run.outcome import Outcome
from jaxrlhf.run.printing import print_outcome
from jaxrlhf.run.resume_point import newest_position, set_aside, what_is_kept
from jaxrlhf.run.run_folder import RunFolder, RunFolderError, collect_versions
from jaxrlhf.run.trainer import Trainer
from jaxrlhf.writing import UnwritableError


class OpenRun:
    """Executes a checked run, in a folder of its own or in that of the run that it resumes. The folder is locked until
    the run is finished or closed.

    All methods but `close` are called within `listening`. `pauses`: as of `Trainer`.
    """

    def __init__(self, run: CheckedRun, console: Console, *, pauses: bool = False) -> None:
        self._run, self._console, self._pauses = run, console, pauses
        self._resumed_at = run.resume.steps_done if run.resume is not None else None
        self._held = contextlib.ExitStack()
        self._trainer: Trainer | None = None
        self._compared: Comparison | None = None
        self.folder: RunFolder | None = None
        """None until it is first asked for."""
        self.outcome: Outcome | None = None
        """The results, once all steps are done and everything is written."""

    @contextlib.contextmanager
    def listening(self, end: Callable[[int], None] | None = None) -> Iterator[Trainer]:
        """Handles SIGTERM and Ctrl-C, and says of an error what the run has written. The first time, the folder and the
        trainer are made, and weights are loaded. `end`: as of `StopRequest`.

        Raises one of `EXPECTED` if the run cannot continue, and RunStopped if it was asked to stop, and has saved.
        """
        channel, console = self._run.channel, self._console
        folder = self.find_folder()
        try:
            with StopRequest(console.line, end) as stop, complaints_said_once(console.line):
                if self._trainer is not None:
                    self._trainer.listen(stop)
                else:
                    channel.share(self._take_over)
                    self._trainer = Trainer(
                        self._run.assembly, folder, console, resume=self._run.resume, stop=stop, channel=channel,
                        pauses=self._pauses,
                    )  # fmt: skip
                    self._trainer.start()
                yield self._trainer
        except RunFolderError as error:
            raise InputError(str(error)) from error
        except UnwritableError as error:
            raise UnwritableError(f"{error} {what_is_kept(folder)}") from error
        except BaseException as error:
            if self._trainer is None or self._trainer.is_closed:
                console.line(f"The run stopped. What it wrote until then is in {folder.path}")
            if isinstance(error, RewardError) and error.__cause__ is not None and channel.is_first:
                raise _with_traceback(error, folder) from error
            raise

    @property
    def trainer(self) -> Trainer | None:
        """None until the run first listens."""
        return self._trainer

    def finish_if_done(self) -> None:
        """After the last step, exports the weights, and writes the outcome to the folder."""
        trainer, folder, assembly = self._trainer, self.folder, self._run.assembly
        assert trainer is not None and folder is not None
        if trainer.done < assembly.config.steps or self.outcome is not None:
            return
        self.outcome = trainer.finish()
        if self._run.channel.is_first:
            if assembly.saved is not None:  # the first step of every start compiles
                self._compared = compare(
                    assembly.saved, read_metrics(folder.metrics), after=(self._resumed_at or 0) + 1
                )
            forecast = {"forecast": self._compared.to_json()} if self._compared is not None else {}
            folder.write_json("outcome.json", self.outcome.to_json() | forecast)
        self._held.close()

    def print_outcome(self, seconds: float) -> None:
        """Prints the results of a run that has taken so many seconds."""
        if self._run.channel.is_first and self.outcome is not None:
            print_outcome(self.outcome, self._console, seconds, self._compared)

    def close(self) -> None:
        """Closes what is open, and unlocks the folder."""
        with self._held:
            if self._trainer is not None:
                self._trainer.close()

    def find_folder(self) -> RunFolder:
        """The folder of the run, which is made unless it exists."""
        resume, config = self._run.resume, self._run.assembly.config
        if self.folder is None and resume is not None and not resume.is_branch:
            self.folder = resume.folder
        elif self.folder is None:
            self.folder = self._run.channel.share(lambda: RunFolder.create(Path(config.output.folder), config.name))
        return self.folder

    def _take_over(self) -> None:
        """Locks the folder, and writes the description of the run to it."""
        resume, folder = self._run.resume, self.folder
        assert folder is not None
        self._held.enter_context(folder.locked())
        for path in resume.damaged if resume is not None else ():
            if path.exists() and find_damage(path):  # no other process has set it aside
                set_aside(path)
        if resume is not None and not resume.is_branch and newest_position(folder) != resume.position:
            raise RunFolderError(
                f"{folder.path}: must stand where it did when it was looked at, {resume.position or 'at its start'}. "
                f"Got {newest_position(folder)}: another process went on with it. Start again."
            )
        folder.become_latest()
        _write_assembly(self._run, folder)


def _write_assembly(run: CheckedRun, folder: RunFolder) -> None:
    """Writes the description of a run to its folder. A config that has changed is kept beside the new one."""
    assembly = run.assembly
    # a run that is started from this file is a new one, unless the user's config says `auto`
    resume = "auto" if assembly.config.resume == "auto" else "never"
    text = dump_yaml(dataclasses.replace(assembly.config, resume=resume))
    if folder.config.exists() and folder.config.read_text(encoding="utf-8") != text:
        kept = next(name for i in itertools.count(1) if not (name := folder.path / f"config.{i}.yaml").exists())
        shutil.copyfile(folder.config, kept)
    folder.write_json("graph.json", {name: phase.graph.to_rows() for name, phase in assembly.phases.items()})
    folder.write_json("plan.json", {name: phase.plan.to_json() for name, phase in assembly.phases.items()})
    if assembly.saved is not None:
        folder.write_text(folder.planned.name, plan_text(assembly.saved))
    folder.write_json("versions.json", collect_versions())
    assembly.table.tokenizer.save(folder.path / "tokenizer.json")
    folder.write_text("config.yaml", text)  # last, since it makes the folder that of a run


def _with_traceback(error: RewardError, folder: RunFolder) -> RewardError:
    """An error of a reward function that names the file with its whole traceback."""
    assert error.__cause__ is not None
    try:
        folder.reward_error.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
    except OSError as why:
        return RewardError(f"{error} Its traceback could not be written: {why}.")
    return RewardError(f"{error} The whole traceback is in {folder.reward_error}")
