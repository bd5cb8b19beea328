"""Completion of command lines in bash, zsh and fish, by argcomplete.

A shell starts `jaxrlhf` with `_ARGCOMPLETE` in its environment when the user presses Tab. The options of commands and
the keys of configs are those of the code; to collect them takes JAX, a second or two. So a process of its own does it
once for each state of the package (`completion_words.py`), and a file keeps them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter
from argcomplete.shell_integration import shellcode

from jaxrlhf import __version__
from jaxrlhf.commands.command_line import COMMANDS
from jaxrlhf.config import strict_yaml

PACKAGE = Path(__file__).parents[1]
CACHE = "~/.cache/jaxrlhf/completion.json"
ROLES = ("actor", "critic", "reference", "reward")
"""The roles of a config that cannot be read."""
CALLS = ("actor.generate", "actor.train", "critic.train", "critic.values", "reference.logprobs", "reward.scores")
Words = dict[str, Any]
"""The output of `completion_words.py`: options of commands; keys of configs with the values they may have."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxrlhf completion", description="Print what makes a shell complete the command line of jaxrlhf."
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    options = parser().parse_args(arguments)
    print(shellcode(["jaxrlhf"], shell=options.shell))
    return 0


def complete() -> NoReturn:
    """Answers the shell that asks what may follow on its command line, and ends the process."""
    argcomplete.autocomplete(parser_of(known_words()))
    raise SystemExit(1)  # the shell did not ask


def known_words() -> Words:
    """The words of this state of the package, from the file that keeps them if they are there."""
    path = Path(CACHE).expanduser()
    state = [__version__, str(PACKAGE), max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py"))]
    try:
        kept = json.loads(path.read_text())
        if kept["state"] == state:
            return kept["words"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, or of another version
    environment = {name: value for name, value in os.environ.items() if name != "_ARGCOMPLETE"}
    command = [sys.executable, "-m", "jaxrlhf.commands.completion_words"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    words = json.loads(done.stdout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"state": state, "words": words}))
        partial.replace(path)
    except OSError:
        pass  # they are collected again at the next Tab
    return words


def parser_of(words: Words) -> argparse.ArgumentParser:
    """The command line of all commands, for completion alone."""
    top = argparse.ArgumentParser(prog="jaxrlhf")
    top.add_argument("--version", action="store_true")
    below = top.add_subparsers()
    completers: dict[str, Callable[..., Iterable[str]]] = {
        "--config": _configs,
        "--set": lambda prefix, parsed_args, **_: settings(prefix, words["keys"], getattr(parsed_args, "config", None)),
        "--resume": lambda prefix, **_: [x for x in ("auto", *_runs(prefix)) if x.startswith(prefix)],
        "--measured": _runs,
        "--lengths": _runs,
        "run": _runs,
        "runs": _runs,
        "--model": DirectoriesCompleter(),
    }
    for name, options in words["options"].items():
        command = below.add_parser(name, help=COMMANDS[name].summary)
        for names, given in ((option.pop("names"), option) for option in options):
            added = command.add_argument(*names, **given)
            if "choices" not in given and given["action"] != "store_true":
                found = next((completers[name] for name in names if name in completers), FilesCompleter())
                added.completer = found  # pyright: ignore[reportAttributeAccessIssue]
    return top


def settings(prefix: str, keys: dict[str, dict[str, list[str]]], config: str | None) -> list[str]:
    """Completions of `--set`: keys up to their next dot where they are many, then `key=`, then values.

    `keys`: keys of all runs, with `*` for a name, and, under the name of each algorithm, keys of its settings.
    """
    roles, algorithm = names_in(config)
    known: dict[str, list[str]] = {}
    for key, values in {**keys[""], **keys.get(algorithm, {})}.items():
        names = roles if key.startswith("roles.*") else CALLS if key.startswith("plan.calls.*") else ("*",)
        known |= {key.replace("*", name, 1): values for name in names}
    dotted, equals, _ = prefix.partition("=")
    if equals:
        return [f"{dotted}={value}" for value in known.get(dotted, ()) if f"{dotted}={value}".startswith(prefix)]
    fitting = [key for key in known if key.startswith(prefix) and "*" not in key]
    while True:
        parts = {key[: end + 1] if (end := key.find(".", len(prefix))) >= 0 else f"{key}=" for key in fitting}
        only = next(iter(parts)) if len(parts) == 1 else ""
        if not only.endswith("."):
            return sorted(parts)
        prefix = only


def names_in(config: str | None) -> tuple[tuple[str, ...], str]:
    """The roles and the algorithm that a config and its bases name."""
    roles: dict[str, None] = {}
    algorithm, name, folder, seen = "", config, Path(), 0
    while name and seen < 10:
        seen += 1
        path = folder / name if name.endswith((".yaml", ".yml")) else PACKAGE / "configs" / f"{name}.yaml"
        try:
            tree = strict_yaml.parse(path.read_text(encoding="utf-8"), where=str(path))
        except (OSError, ValueError):
            break
        if not isinstance(tree, dict):
            break
        if isinstance(tree.get("roles"), dict):
            roles |= dict.fromkeys(map(str, tree["roles"]))
        algorithm = algorithm or str(tree.get("algorithm") or "")
        name, folder = tree.get("base"), path.parent
        name = name if isinstance(name, str) else None
    return tuple(roles) or ROLES, algorithm or "ppo"


def _configs(prefix: str, **_: Any) -> Iterator[str]:
    yield from sorted(path.stem for path in (PACKAGE / "configs").glob(f"{prefix}*.yaml") if "/" not in prefix)
    yield from FilesCompleter(("yaml", "yml"))(prefix)


def _runs(prefix: str, **_: Any) -> list[str]:
    """The folders of runs, and below one that is written out, its checkpoints."""
    folder = Path(os.path.dirname(prefix))
    patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
    runs = [str(path.parent) for pattern in patterns for path in sorted(folder.glob(pattern))]
    inside = [run for run in runs if f"{prefix}/".startswith(f"{run}/")]
    checkpoints = [str(path) for run in inside for path in sorted(Path(run).glob("checkpoints/steps/*"))]
    return [path for path in (*runs, *checkpoints) if path.startswith(prefix)]
