"""From a config to a checked run: JAX is started, data is read, the step is traced and planned. Nothing is compiled."""

import dataclasses
import gc
import os
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrlhf.checkpoint.store import CheckpointError
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.configured.rows import Tables, load_tables
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.metrics import TrainingError
from jaxrlhf.observe.trackers import import_mlflow, import_wandb
from jaxrlhf.planner.memory_forecast import MemoryForecast
from jaxrlhf.require import errors_as
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.run.checkpoints import check_checkpoint
from jaxrlhf.run.find_plan import FoundPlan, find_plan, is_planned
from jaxrlhf.run.memory_remedies import OutOfMemoryError, check_room, forecast_step
from jaxrlhf.run.resume_point import ResumePoint, find_resume_point
from jaxrlhf.run.run_folder import check_run_folder
from jaxrlhf.run.step_draft import draft_step
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.processes import join, rendezvous_of
from jaxrlhf.writing import UnwritableError

MEMORY_FRACTION = "0.9"
"""The fraction of a GPU's memory that a run reserves by default. Plans assume it."""


class InputError(ValueError):
    """Config, data and plan do not fit together."""


EXPECTED = (InputError, RewardError, TrainingError, CheckpointError, UnwritableError, OutOfMemoryError)
"""Errors that the user can fix."""


@dataclasses.dataclass(frozen=True)
class CheckedRun:
    """A checked run that is ready to start."""

    assembly: Assembly
    resume: ResumePoint | None
    """The run and checkpoint to resume; None for a new run."""
    channel: Channel
    """The channel to the other processes of the run."""
    memory: MemoryForecast
    """The forecast of the step's calls."""
    plan_notes: tuple[str, ...] = ()
    """Notes for the user on the plan that was found."""

    def notes(self) -> list[str]:
        """All notes for the user. Raises OutOfMemoryError if the devices have too little memory."""
        of_memory = self.channel.share(lambda: check_room(self.assembly, self.memory))
        of_resuming = self.resume.notes if self.resume is not None else ()
        return [*self.assembly.warnings, *of_memory, *self.plan_notes, *of_resuming]


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


def check_run(config: RunConfig, channel: Channel | None, *, say: Callable[[str], None]) -> CheckedRun:
    """Checks a run. Compiles and writes nothing. Raises InputError if something does not fit.

    Args:
        channel: The result of `start`. None means that JAX is started here, in this process alone.
        say: Is told of the search for a plan.
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
        return find_plan(draft, resumed=resume.folder.planned if resume is not None else None, say=say)

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
    return CheckedRun(assembly, resume, channel, memory, tuple(found.notes) if found is not None else ())
