"""One run, from its config to its results.

python -m jaxrlhf.train --config NAME_OR_PATH [--set a.b=c ...] [--dry-run]
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrlhf.call_graph import GraphError
from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.planner.plan import plan_rows
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.runtime.assembly import Assembly, assemble
from jaxrlhf.runtime.console import Console
from jaxrlhf.runtime.metrics import TrainingError
from jaxrlhf.runtime.run_folder import RunFolder, collect_versions
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
        run(load_run(options.config, options.set), console, dry_run=options.dry_run)
    except (ValueError, GraphError, RewardError, TrainingError, FileNotFoundError) as error:
        if os.environ.get("JAXRLHF_TRACEBACK"):
            raise
        console.error(str(error))
        return 1
    return 0


def run(config: RunConfig, console: Console, *, dry_run: bool = False) -> Outcome | None:
    """Everything behind the command line. A dry run returns None.

    Raises:
        ValueError: The config, the data or the plan has something wrong; nothing was written.
        RewardError, TrainingError: The run could not go on.
    """
    started = time.perf_counter()
    _start_jax(config)
    assembly = assemble(config, mesh.num_devices())
    _print_assembly(assembly, console)
    if dry_run:
        return None
    if config.resume != "never":  # before `latest` comes to mean the new run
        assembly = dataclasses.replace(
            assembly, config=dataclasses.replace(config, resume=str(Path(config.resume).resolve()))
        )
    folder = RunFolder.create(Path(config.output.folder), config.name)
    _write_assembly(assembly, folder)
    trainer = Trainer(assembly, folder, console)
    outcome = trainer.run()
    _print_outcome(outcome, trainer, folder, console, time.perf_counter() - started)
    return outcome


def _start_jax(config: RunConfig) -> None:
    if config.num_virtual_devices is not None:
        mesh.use_virtual_cpu_devices(config.num_virtual_devices)
    if config.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _print_assembly(assembly: Assembly, console: Console) -> None:
    for name, phase in assembly.phases.items():
        console.table(f"Plan of the {name}", plan_rows(phase.plan, phase.graph))
    for warning in assembly.warnings:
        console.line(f"Note: {warning}")


def _write_assembly(assembly: Assembly, folder: RunFolder) -> None:
    folder.write_text("config.yaml", dump_yaml(assembly.config))
    folder.write_json("graph.json", {name: phase.graph.to_rows() for name, phase in assembly.phases.items()})
    folder.write_json("plan.json", {name: phase.plan.to_json() for name, phase in assembly.phases.items()})
    folder.write_json("versions.json", collect_versions())


def _print_outcome(outcome: Outcome, trainer: Trainer, folder: RunFolder, console: Console, seconds: float) -> None:
    console.header(f"Done in {seconds:.0f} s")
    console.curve("reward", trainer.rewards)
    if outcome.evaluations:
        first, last = outcome.evaluations[0][1], outcome.evaluations[-1][1]
        for name in first:
            if name != "eval/seconds":
                console.line(f"{name}: {first[name]:.3f} before, {last[name]:.3f} after")
    console.where(
        {"metrics": folder.metrics, "samples": folder.samples, "timeline": folder.timeline, "all": folder.path}
    )


if __name__ == "__main__":
    sys.exit(main())
