"""One run, from its config to its results.

jaxrlhf train --config NAME_OR_PATH [--set a.b=c ...] [--dry-run] [--preview N]
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import shutil
import sys
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

import jax

import jaxrlhf
from jaxrlhf.checkpoint.manifest import find_damage
from jaxrlhf.checkpoint.store import CheckpointError
from jaxrlhf.config.excerpts import with_excerpt
from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.configured.rows import Tables, load_tables
from jaxrlhf.execution.function_threads import any_left_behind
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.forecast_errors import Comparison, compare
from jaxrlhf.observe.metrics import TrainingError, read_metrics
from jaxrlhf.observe.step_timers import time_rows
from jaxrlhf.observe.trackers import import_mlflow, import_wandb
from jaxrlhf.observe.utilization import utilization_line
from jaxrlhf.planner.memory_forecast import MemoryForecast
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.planner.plans.saved_plan import plan_text
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.require import errors_as
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.checkpoints import check_checkpoint
from jaxrlhf.run.compilation_cache import complaints_said_once
from jaxrlhf.run.find_plan import FoundPlan, find_plan, is_planned
from jaxrlhf.run.interruption import RunStopped, StopRequest
from jaxrlhf.run.memory_remedies import OutOfMemoryError, check_room, forecast_step
from jaxrlhf.run.resume_point import ResumePoint, find_resume_point, newest_position, set_aside, what_is_kept
from jaxrlhf.run.row_preview import preview
from jaxrlhf.run.run_folder import RunFolder, RunFolderError, check_run_folder, collect_versions
from jaxrlhf.run.step_draft import draft_step
from jaxrlhf.run.trainer import Outcome, Trainer
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.processes import join, rendezvous_of
from jaxrlhf.writing import UnwritableError

MEMORY_FRACTION = "0.9"
"""The fraction of a GPU's memory that a run reserves by default. Plans assume it."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="jaxrlhf train", description="Train a language model from feedback.")
    parser.add_argument("--config", metavar="NAME_OR_PATH", help="a shipped config's name, or a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value, as in steps=20"
    )
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="go on with a run: the same as --set resume=...; a run's folder has its config",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print graph and plan, and stop")
    parser.add_argument(
        "--preview", type=int, metavar="N", help="print the first N rows as the model will see them, and stop"
    )
    parser.add_argument(
        "--processes",
        choices=("auto",),
        help="join the processes that SLURM, Open MPI or Kubernetes started, one a node, as JAX detects them; where "
        "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID are set, this is not needed",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0; 1 after an error that the user can fix; 143 or 130 if the run was asked
    to stop by SIGTERM or Ctrl-C, and has saved. It can then be resumed with `--resume auto`.
    """
    options = parser().parse_args(arguments)
    console, channel = Console(), Channel()
    try:
        config = _read_options(options)
        if options.preview is not None:
            with errors_as(InputError):
                preview(config, options.preview, console)
            return 0
        channel = start(config, detect=options.processes == "auto")
        console = Console(quiet=not channel.is_first)
        run = prepare(config, console, channel)
        if not options.dry_run:
            execute(run, console, owns_process=True)
        channel.close()
    except RunStopped as stopped:
        console.line(f"{stopped} Start it again with --resume auto to go on.")
        channel.close()
        return stopped.exit_status
    except BaseException as error:
        expected = isinstance(error, (*EXPECTED, KeyboardInterrupt))
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        message = (str(error) or "Interrupted.") if expected else None
        # of several processes, all have this error, or it ends the others too
        if channel.count == 1 or channel.is_shared(error) or isinstance(error, TrainingError):
            if message is not None and channel.is_first:
                of_config = isinstance(error, InputError)
                console.error(with_excerpt(message, *_config_of(options)) if of_config else message)
            channel.close()
        else:
            channel.abort(error, status=status, message=message)
        if not expected:
            raise
        return status
    return 0


class InputError(ValueError):
    """Config, data and plan do not fit together."""


EXPECTED = (InputError, RewardError, TrainingError, CheckpointError, UnwritableError, OutOfMemoryError)
"""Errors that the user can fix."""


def read(name_or_path: str, overrides: Sequence[str]) -> RunConfig:
    """The run that a config describes. Raises InputError if it is invalid."""
    with errors_as(InputError):
        return load_run(name_or_path, overrides)


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked run that is ready to start."""

    assembly: Assembly
    resume: ResumePoint | None
    """The run and checkpoint to resume; None for a new run."""
    channel: Channel = dataclasses.field(default_factory=Channel)
    """The channel to the other processes of the run."""


def start(config: RunConfig, *, detect: bool = False) -> Channel:
    """Starts JAX with the devices of a config, and joins the other processes of the run, if there are any. `detect`:
    those of a launcher, as JAX detects them. Raises InputError if that is not possible.
    """
    if gc.get_threshold() in ((700, 10, 10), (2000, 10, 10)):  # Python's own, up to 3.12 and in 3.13
        gc.set_threshold(50_000, 20, 50)  # tracing makes objects by the million, few of them garbage
    with errors_as(InputError):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)  # before JAX has devices
        mesh.skip_cuda_check_without_gpu()
        rendezvous = rendezvous_of(os.environ, detect=detect)
        count = (rendezvous.count or 1) if rendezvous is not None else 1
        if config.num_virtual_devices is not None:
            if config.num_virtual_devices % count:
                raise ValueError(
                    f"devices: the processes of a run share its virtual devices evenly. Got {config.devices} for "
                    f"{count} processes. Use a multiple."
                )
            mesh.use_virtual_cpu_devices(config.num_virtual_devices // count)
        if config.compilation_cache:
            jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).expanduser()))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        if rendezvous is not None:
            join(rendezvous)
    return Channel.open()


def prepare(config: RunConfig, console: Console, channel: Channel | None = None) -> Run:
    """Checks a run and prints its roles and plans. Compiles and writes nothing. Raises InputError if something does not
    fit, OutOfMemoryError if that is the memory.

    `channel` is the result of `start`. None means that JAX is started here, in this process alone.
    """
    channel = channel or start(config)

    def find() -> tuple[ResumePoint | None, Tables]:
        check_run_folder(Path(config.output.folder), config.name)
        if config.output.wandb is not None:
            import_wandb()
        if config.output.mlflow is not None:
            import_mlflow()
        return find_resume_point(config), load_tables(config)

    def plan() -> FoundPlan:
        return find_plan(draft, resumed=resume.folder.planned if resume is not None else None, say=console.line)

    def check() -> Assembly:
        assembly = assemble(
            config, mesh.num_devices(), mesh.devices_per_process(), draft=draft, saved=found.saved if found else None
        )
        if resume is not None and resume.position is not None:
            check_checkpoint(resume, assembly)
        return assembly

    with errors_as(InputError):
        resume, tables = channel.share(find)  # rows are read once, and sent to the other processes
        draft = channel.together(lambda: draft_step(config, tables=tables))
        found = channel.share(plan) if is_planned(draft) else None  # searches with a time limit differ
        assembly = channel.together(check)
        memory = channel.share(lambda: forecast_step(assembly))  # of the first process's machine
    _print_assembly(assembly, memory, console)
    of_memory = channel.share(lambda: check_room(assembly, memory))
    of_plan = found.notes if found is not None else ()
    of_resuming = resume.notes if resume is not None else ()
    for note in (*assembly.warnings, *of_memory, *of_plan, *of_resuming):
        console.line(f"Note: {note}")
    return Run(assembly, resume, channel)


def execute(run: Run, console: Console, *, owns_process: bool = False) -> Outcome:
    """Executes a prepared run, in a folder of its own or in that of the run that it resumes.

    If it `owns_process`, Ctrl-C may end the process to stop the run at once. Otherwise it raises KeyboardInterrupt.
    Raises one of `EXPECTED` if the run could not continue, and RunStopped if it was asked to stop, and has saved.
    """
    started = time.perf_counter()
    resume, channel = run.resume, run.channel
    config = run.assembly.config
    if resume is None or resume.is_branch:
        folder = channel.share(lambda: RunFolder.create(Path(config.output.folder), config.name))
    else:
        folder = resume.folder
    try:
        end = functools.partial(_end_at_once, console=console, channel=channel) if owns_process else None
        stop = StopRequest(console.line, end)
        with contextlib.ExitStack() as held, stop, complaints_said_once(console.line):
            channel.share(lambda: _take_over(run, folder, held))
            outcome = Trainer(run.assembly, folder, console, resume=resume, stop=stop, channel=channel).run()
            compared, started_at = None, resume.steps_done if resume is not None else None
            if channel.is_first and run.assembly.saved is not None:  # the first step of every start compiles
                compared = compare(run.assembly.saved, read_metrics(folder.metrics), after=(started_at or 0) + 1)
            if channel.is_first:
                forecast = {"forecast": compared.to_json()} if compared is not None else {}
                folder.write_json("outcome.json", outcome.to_json() | forecast)
    except RunFolderError as error:
        raise InputError(str(error)) from error
    except UnwritableError as error:
        raise UnwritableError(f"{error} {what_is_kept(folder)}") from error
    except BaseException as error:
        console.line(f"The run stopped. What it wrote until then is in {folder.path}")
        if isinstance(error, RewardError) and error.__cause__ is not None and channel.is_first:
            raise _with_traceback(error, folder) from error
        raise
    if channel.is_first:
        _print_outcome(outcome, console, time.perf_counter() - started, compared)
    return outcome


def _with_traceback(error: RewardError, folder: RunFolder) -> RewardError:
    """An error of a reward function that names the file with its whole traceback."""
    assert error.__cause__ is not None
    try:
        folder.reward_error.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
    except OSError as why:
        return RewardError(f"{error} Its traceback could not be written: {why}.")
    return RewardError(f"{error} The whole traceback is in {folder.reward_error}")


def _end_at_once(status: int, *, console: Console, channel: Channel) -> None:
    """Ends this process from another thread than the main one, which may be doing anything.

    The interpreter is not shut down, since that removes devices and threads under programs that still run. Nothing is
    lost: lines of metrics are in their files, and a checkpoint is complete or does not exist.
    """
    console.release()
    channel.abort(KeyboardInterrupt(), status=status, message="Interrupted.")
    _exit_now(status)


def _exit_now(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave(status: int) -> None:
    """Ends the process after `main`; without shutting down the interpreter if an abandoned function still runs."""
    if any_left_behind():
        if jax.process_count() > 1:
            jax.distributed.shutdown()
        _exit_now(status)
    sys.exit(status)


def _take_over(run: Run, folder: RunFolder, held: contextlib.ExitStack) -> None:
    """Locks a run's folder as long as `held` is open, and writes the description of the run to it."""
    held.enter_context(folder.locked())
    resume = run.resume
    for path in resume.damaged if resume is not None else ():
        if path.exists() and find_damage(path):  # no other process has set it aside
            set_aside(path)
    if resume is not None and not resume.is_branch and newest_position(folder) != resume.position:
        raise RunFolderError(
            f"{folder.path}: must stand where it did when it was looked at, {resume.position or 'at its start'}. Got "
            f"{newest_position(folder)}: another process went on with it. Start again."
        )
    folder.become_latest()
    _write_assembly(run, folder)


def _read_options(options: argparse.Namespace) -> RunConfig:
    """The config that the command line names, with its overrides."""
    config, overrides = _config_of(options)
    if config is None:
        raise InputError(
            "--config: required, unless --resume names the folder of a run or a checkpoint in one. Got "
            f"{f'--resume {options.resume}' if options.resume else 'neither'}."
        )
    return read(config, overrides)


def _config_of(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The config that the command line names, or that of the run that it resumes, and what is laid over it."""
    overrides = [*options.set, *([f"resume={json.dumps(options.resume)}"] if options.resume else [])]
    if options.config is not None or not options.resume:
        return options.config, overrides
    folder = Path(options.resume)
    configs = (path / "config.yaml" for path in (folder, *folder.parents[:3]))  # a run's folder, or a checkpoint in it
    return next((str(path) for path in configs if path.is_file()), None), overrides


def _print_assembly(assembly: Assembly, memory: MemoryForecast, console: Console) -> None:
    count = mesh.num_devices()
    console.line(f"{count} device{'s' if count > 1 else ''} of kind {mesh.device_kind()}")
    for line in assembly.tables.columns_read():
        console.line(line)
    console.table("Roles", assembly.role_rows())
    for name, phase in assembly.phases.items():
        models = {role: x.model for role, x in phase.roles.items() if isinstance(x, ModelRole)}
        console.table(f"Plan of the {name}", plan_rows(phase.plan, phase.graph, models))
    if memory.rows:
        console.table(f"Memory of the step's calls, {memory.unit} on each device", memory.rows)
        for line in memory.lines:
            console.line(line)


def _write_assembly(run: Run, folder: RunFolder) -> None:
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


def _print_outcome(outcome: Outcome, console: Console, seconds: float, compared: Comparison | None) -> None:
    folder = outcome.folder
    if outcome.samples:
        console.samples("Samples", outcome.samples)
    console.header(f"Done in {seconds:.0f} s")
    if outcome.rewards:
        console.curve("reward", outcome.rewards)
    if outcome.evaluations:
        first, last = outcome.evaluations[0][1], outcome.evaluations[-1][1]
        for name in (name for name in first if name.startswith("eval/") and name in last):
            console.line(f"{name}: {first[name]:.3f} before, {last[name]:.3f} after")
    if outcome.best is not None and outcome.best[0] < outcome.steps:
        console.line(f"best after {outcome.best[0]} steps: {outcome.best[1]:.3f}")
    records = read_metrics(folder.metrics)
    console.table("Where the time went", time_rows(records))
    if busy := utilization_line(records):
        console.line(busy)
    if compared is not None and compared.steps:
        of_steps = f"median of {compared.steps} step{'s' if compared.steps > 1 else ''}"
        console.table(f"Predicted and measured, {of_steps}", compared.rows())
    elif compared is not None:
        console.line("No step was measured beside the predictions: the first one of every start compiles.")
    written = {"metrics": folder.metrics, "samples": folder.samples, "checkpoints": folder.checkpoints}
    if folder.timeline.exists():
        written["timeline"] = folder.timeline
    console.where({**written, **outcome.shown_at, "all": folder.path})


class _CallableModule(types.ModuleType):
    """Keeps `jaxrlhf.train(...)` callable after an import of this module, which takes the name in the package."""

    __call__ = staticmethod(jaxrlhf.train)


if __name__ == "__main__":
    leave(main())
sys.modules[__name__].__class__ = _CallableModule
