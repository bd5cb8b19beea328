"""One run, from its config to its results.

python -m jaxrlhf.train --config NAME_OR_PATH [--set a.b=c ...] [--dry-run] [--preview N]
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxrlhf
from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.execution.function_threads import any_left_behind
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import TrainingError
from jaxrlhf.require import errors_as
from jaxrlhf.run.checked_run import EXPECTED, CheckedRun, InputError, check_run, start
from jaxrlhf.run.interruption import RunStopped
from jaxrlhf.run.open_run import OpenRun
from jaxrlhf.run.outcome import Outcome
from jaxrlhf.run.printing import print_run
from jaxrlhf.run.row_preview import preview


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0; 1 after an error that the user can fix; 143 or 130 if the run was
    asked to stop by SIGTERM or Ctrl-C, and has saved. It can then be resumed with `--resume auto`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxrlhf.train", description="Train a language model from feedback."
    )
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
    options = parser.parse_args(arguments)
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
                console.error(message)
            channel.close()
        else:
            channel.abort(error, status=status, message=message)
        if not expected:
            raise
        return status
    return 0


def read(name_or_path: str, overrides: Sequence[str]) -> RunConfig:
    """The run that a config describes. Raises InputError if it is invalid."""
    with errors_as(InputError):
        return load_run(name_or_path, overrides)


def prepare(config: RunConfig, console: Console, channel: Channel | None = None) -> CheckedRun:
    """Checks a run and prints its roles and plans. Compiles and writes nothing. Raises as `check_run`.

    `channel` is the result of `start`. None means that JAX is started here, in this process alone.
    """
    run = check_run(config, channel, say=console.line)
    print_run(run, console)
    return run


def execute(run: CheckedRun, console: Console, *, owns_process: bool = False) -> Outcome:
    """Executes a prepared run, in a folder of its own or in that of the run that it resumes.

    If it `owns_process`, Ctrl-C may end the process to stop the run at once. Otherwise it raises KeyboardInterrupt.
    Raises one of `EXPECTED` if the run could not continue, and RunStopped if it was asked to stop, and has saved.
    """
    started = time.perf_counter()
    end = functools.partial(_end_at_once, console=console, channel=run.channel) if owns_process else None
    opened = OpenRun(run, console)
    with contextlib.closing(opened), opened.listening(end) as trainer:
        trainer.train(run.assembly.config.steps)
        opened.finish_if_done()
    opened.print_outcome(time.perf_counter() - started)
    assert opened.outcome is not None
    return opened.outcome


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


def _leave(status: int) -> None:
    """Ends the process after `main`; without shutting down the interpreter if an abandoned function still runs."""
    if any_left_behind():
        if jax.process_count() > 1:
            jax.distributed.shutdown()
        _exit_now(status)
    sys.exit(status)


def _read_options(options: argparse.Namespace) -> RunConfig:
    """The config that the command line names, with its overrides."""
    overrides = [*options.set, *([f"resume={json.dumps(options.resume)}"] if options.resume else [])]
    if options.config is not None:
        return read(options.config, overrides)
    folder = Path(options.resume or "")
    for path in (folder, *folder.parents[:3]):  # a run's folder, or a checkpoint in it
        if options.resume and (path / "config.yaml").is_file():
            return read(str(path / "config.yaml"), overrides)
    raise InputError(
        "--config: required, unless --resume names the folder of a run or a checkpoint in one. Got "
        f"{f'--resume {options.resume}' if options.resume else 'neither'}."
    )


class _CallableModule(types.ModuleType):
    """Keeps `jaxrlhf.train(...)` callable after an import of this module, which takes the name in the package."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return jaxrlhf.__getattr__("train")(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(jaxrlhf.__getattr__("train"))


if __name__ == "__main__":
    _leave(main())
sys.modules[__name__].__class__ = _CallableModule
