"""One run, from its config to its results.

python -m jaxrlhf.train --config NAME_OR_PATH [--set a.b=c ...] [--dry-run]
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrlhf.checkpoint.store import CheckpointError, check_resume
from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.data.tokenizer import JSONTokenizer
from jaxrlhf.planner.plan import plan_rows
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.runtime.assembly import Assembly, assemble
from jaxrlhf.runtime.console import Console
from jaxrlhf.runtime.metrics import TrainingError, read_metrics
from jaxrlhf.runtime.run_folder import RunFolder, check_run_folder, collect_versions
from jaxrlhf.runtime.stages import time_rows
from jaxrlhf.runtime.trainer import Outcome, Trainer
from jaxrlhf.sharding import mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, or 1 after an error that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrlhf.train", description="Train a language model from feedback."
    )
    parser.add_argument(
        "--config", required=True, metavar="NAME_OR_PATH", help="a shipped config's name, or a YAML file"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a value, as in steps=20"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print graph and plan, and stop")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        assembly = prepare(read(options.config, options.set), console)
        if options.dry_run:
            return 0
        execute(assembly, console)
    except (InputError, RewardError, TrainingError, CheckpointError) as error:
        console.error(str(error))
        return 1
    except KeyboardInterrupt:
        console.error("Interrupted.")
        return 130
    return 0


class InputError(ValueError):
    """Config, data and plan do not fit together."""


def read(name_or_path: str, overrides: Sequence[str]) -> RunConfig:
    """The run that a config describes.

    Raises:
        InputError: The config has something wrong.
    """
    try:
        return load_run(name_or_path, overrides)
    except ValueError as error:
        raise InputError(str(error)) from error


def prepare(config: RunConfig, console: Console) -> Assembly:
    """Check a run and print what it is going to do. Compiles and writes nothing.

    Raises:
        InputError: Something in config, data or plan does not fit.
    """
    try:
        _start_jax(config)
        if config.resume != "never":
            check_resume(Path(config.resume), steps=config.steps, seed=config.seed)
        check_run_folder(Path(config.output.folder), config.name)
        assembly = assemble(config, mesh.num_devices())
    except ValueError as error:
        raise InputError(str(error)) from error
    _print_assembly(assembly, console)
    return assembly


def execute(assembly: Assembly, console: Console) -> Outcome:
    """Run what was prepared, in a folder of its own.

    Raises:
        RewardError, TrainingError, CheckpointError: The run could not go on.
    """
    started = time.perf_counter()
    config = assembly.config
    if config.resume != "never":  # before `latest` comes to mean the new run
        config = dataclasses.replace(config, resume=str(Path(config.resume).resolve()))
        assembly = dataclasses.replace(assembly, config=config)
    folder = RunFolder.create(Path(config.output.folder), config.name)
    try:
        _write_assembly(assembly, folder)
        outcome = Trainer(assembly, folder, console).run()
    except BaseException:
        console.line(f"The run stopped. What it wrote until then is in {folder.path}")
        raise
    _print_outcome(outcome, folder, console, time.perf_counter() - started)
    return outcome


def _start_jax(config: RunConfig) -> None:
    if config.num_virtual_devices is not None:
        mesh.use_virtual_cpu_devices(config.num_virtual_devices)
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _print_assembly(assembly: Assembly, console: Console) -> None:
    console.line(f"{mesh.num_devices()} devices of kind {mesh.device_kind()}")
    console.table("Roles", assembly.role_rows())
    for name, phase in assembly.phases.items():
        console.table(f"Plan of the {name}", plan_rows(phase.plan, phase.graph))
    for warning in assembly.warnings:
        console.line(f"Note: {warning}")


def _write_assembly(assembly: Assembly, folder: RunFolder) -> None:
    folder.write_text("config.yaml", dump_yaml(assembly.config))
    folder.write_json("graph.json", {name: phase.graph.to_rows() for name, phase in assembly.phases.items()})
    folder.write_json("plan.json", {name: phase.plan.to_json() for name, phase in assembly.phases.items()})
    folder.write_json("versions.json", collect_versions())
    if isinstance(assembly.table.tokenizer, JSONTokenizer):
        assembly.table.tokenizer.save(folder.path / "tokenizer.json")


def _print_outcome(outcome: Outcome, folder: RunFolder, console: Console, seconds: float) -> None:
    console.samples("Samples", outcome.samples)
    console.header(f"Done in {seconds:.0f} s")
    console.curve("reward", outcome.rewards)
    if outcome.evaluations:
        first, last = outcome.evaluations[0][1], outcome.evaluations[-1][1]
        for name in (name for name in first if name != "timing_s/testing"):
            console.line(f"{name}: {first[name]:.3f} before, {last[name]:.3f} after")
    console.table("Where the time went", time_rows(read_metrics(folder.metrics)))
    written = {"metrics": folder.metrics, "samples": folder.samples, "checkpoints": folder.checkpoints}
    if folder.timeline.exists():
        written["timeline"] = folder.timeline
    console.where(written | {"all": folder.path})


if __name__ == "__main__":
    sys.exit(main())
