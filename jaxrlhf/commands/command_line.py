"""The console command `jaxrlhf`: finds a command by its name, and starts its module.

Nothing else is imported before, neither JAX nor numpy, so that `jaxrlhf --help` answers at once.
"""

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxrlhf import __version__
from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.huge_pages import restart_with_huge_pages


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its module, which has `main(arguments) -> int` and `parser()`, and what it does in a line."""

    module: str
    summary: str


COMMANDS = {
    "init": Command("jaxrlhf.commands.init", "write a config and a reward function to start from"),
    "doctor": Command("jaxrlhf.commands.doctor", "check this machine and installation for runs"),
    "train": Command("jaxrlhf.train", "train a language model from feedback, or go on with a run"),
    "plan": Command("jaxrlhf.plan", "find the fastest plan of a run, for a cluster that need not be there"),
    "calibrate": Command("jaxrlhf.calibrate", "measure this machine for the plans of a run"),
    "timeline": Command("jaxrlhf.timeline", "draw the timeline of a run"),
    "report": Command("jaxrlhf.report", "write a page about a run, or several side by side"),
    "completion": Command("jaxrlhf.commands.completion", "print the completion for a shell: bash, zsh or fish"),
    "convert": Command("jaxrlhf.commands.convert", "GGUF file or checkpoint to a folder in Hugging Face's format"),
}
"""The commands by name, in the order of `--help`."""


def parser() -> argparse.ArgumentParser:
    """The command line up to the name of a command."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{command.summary}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="jaxrlhf",
        usage="jaxrlhf COMMAND [OPTIONS]",
        description="Reinforcement learning from feedback for language models, planned and run as one JAX program.",
        epilog="\n".join(["commands:", *lines, "", "jaxrlhf COMMAND --help shows the options of a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxrlhf {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=argparse.SUPPRESS)
    return parser


def find_command(arguments: Sequence[str]) -> Command:
    """The command that a command line names first. Exits with 0 after `--help` and `--version`, and with 2 if there is
    no such command."""
    top = parser()
    if not arguments:
        top.print_help(sys.stderr)
        raise SystemExit(2)
    name = arguments[0]
    if name.startswith("-"):
        top.parse_args(arguments[:1])
        top.error(f"a command must come first. Got {brief(name)}. Known: {', '.join(COMMANDS)}.")
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"Error: Unknown command {brief(name)}. Known: {known}.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    return COMMANDS[name]


def module_of(command: Command) -> Any:
    """The module of a command, imported."""
    return importlib.import_module(command.module)


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes a command in this process, as it is. Returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return module_of(find_command(arguments)).main(arguments[1:])


def run() -> NoReturn:
    """The process of the console command. It starts once more with huge pages where its command wants them, and ends as
    the module by itself would."""
    if "_ARGCOMPLETE" in os.environ:
        module_of(COMMANDS["completion"]).complete()
    command = find_command(sys.argv[1:])
    restart_with_huge_pages(command.module)
    module = module_of(command)
    leave: Callable[[int], NoReturn] = getattr(module, "leave", sys.exit)
    leave(module.main(sys.argv[2:]))
