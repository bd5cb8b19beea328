"""A config and a reward function to start from.

jaxrlhf init [FOLDER] [--algorithm grpo] [--model FOLDER_OR_SIZE] [--data FILE] [--devices auto]
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.prompt import Prompt

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.commands.first_config import ALGORITHMS, First, config_text, reward_text
from jaxrlhf.config import strict_yaml
from jaxrlhf.config.schema import build_run
from jaxrlhf.data.columns import KNOWN, settle_columns, value_at
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.files import Row, read_rows
from jaxrlhf.models.config import PRESETS
from jaxrlhf.name_rules import check_file_name
from jaxrlhf.observe.console import Console
from jaxrlhf.writing import UnwritableError, writing

CONFIG, REWARD = "run.yaml", "reward.py"
_NEEDS = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "reward_model": ("chosen", "rejected")}
"""Offline algorithm -> columns that its rows must have."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxrlhf init",
        description=f"Write {CONFIG} and {REWARD} to start from. On a terminal and without options, it asks.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(), help="by default, this one")
    parser.add_argument("--algorithm", metavar="NAME", help=f"one of {', '.join(ALGORITHMS)} (default: grpo)")
    parser.add_argument(
        "--model",
        metavar="FOLDER|SIZE",
        help=f"a folder in Hugging Face's format, or random weights: {', '.join(PRESETS)}",
    )
    parser.add_argument("--data", metavar="FILE", help="rows as JSON lines or parquet; otherwise the task arithmetic")
    parser.add_argument(
        "--columns", metavar="MEANING=COLUMN", nargs="+", default=[],
        help=f"columns whose names do not say what they are: {', '.join(KNOWN)}",
    )  # fmt: skip
    parser.add_argument("--devices", metavar="auto|cpu:N", help="default: auto")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 1 after an error that the user can fix."""
    options = parser().parse_args(arguments)
    console = Console()
    chosen = (options.algorithm, options.model, options.data, options.devices)
    if not any(chosen) and not options.columns and sys.stdin.isatty():
        ask(options)
    try:
        first = plan_first(options)
        written = write(first, options.folder, force=options.force)
    except (ValueError, UnwritableError) as error:
        console.error(str(error))
        return 1
    if first.columns:
        console.line(first.columns)
    for path, text in written:
        console.line(f"{text}: {path}")
    command = f"jaxrlhf train --config {shlex.quote(str(options.folder / CONFIG))}"
    console.header("Next")
    for extra in (" --dry-run", " --preview 3", ""):
        console.line(f"    {command}{extra}")
    return 0


def ask(options: argparse.Namespace) -> None:
    """Asks for what the command line leaves open."""
    options.algorithm = Prompt.ask("Algorithm", choices=list(ALGORITHMS), default="grpo")
    options.model = Prompt.ask(
        "Model: a folder in Hugging Face's format, or a size with random weights", default="tiny"
    )
    options.data = Prompt.ask("Data: a file of rows, or nothing for the task arithmetic", default="") or None


def plan_first(options: argparse.Namespace) -> First:
    """What the files are written for. Raises ValueError if an option does not hold."""
    algorithm, model, devices = options.algorithm or "grpo", options.model or "tiny", options.devices or "auto"
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"--algorithm: must be one of {', '.join(ALGORITHMS)}. Got {brief(algorithm)}. Others start from a shipped "
            f"config: `base: NAME` in a file.{did_you_mean(algorithm, ALGORITHMS)}"
        )
    is_preset = model in PRESETS
    if not is_preset and not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"--model: must be a folder with a config.json, or one of {', '.join(PRESETS)}. Got {brief(model)}."
            f"{did_you_mean(model, PRESETS)}"
        )
    name = options.folder.resolve().name or "first_run"
    check_file_name(name, "FOLDER", example="my_run")
    data, columns, rows = None, "", []
    if options.data:
        rows = read_rows("--data", options.data)
        data, columns = _settle(options, rows)
        _check_columns(algorithm, data, rows)
    elif options.columns:
        raise ValueError(f"--columns: are those of --data. Got {options.columns[0]} without it. Add --data FILE.")
    prompt = "" if data is None else data.text_column or data.prompt_column
    return First(
        name, algorithm, model, is_preset, devices, str(options.folder / REWARD), data, columns,
        rows=len(rows) if rows else 10_000,
        has_answer=data is None or has(data, rows, "answer"),
        has_completion=data is None or any(has(data, rows, what) for what in ("completion", "chosen")),
        has_long_prompts=any(len(str(value_at(row.columns, prompt)).encode()) > 512 for row in rows),
        has_template=not is_preset and _has_template(Path(model)),
    )  # fmt: skip


def has(data: DataConfig, rows: Sequence[Row], what: str) -> bool:
    """Some row has a column of this meaning."""
    name = getattr(data, f"{what}_column")
    return bool(name) and any(value_at(row.columns, name) is not None for row in rows)


def write(first: First, folder: Path, *, force: bool) -> list[tuple[Path, str]]:
    """Writes the files. Returns their paths, and what they are. Raises ValueError if one is there, unless `force`, or
    if the config would be invalid."""
    config, reward = folder / CONFIG, folder / REWARD
    text = config_text(first, shlex.quote(str(config)))
    build_run(strict_yaml.parse(text, where=str(config)), where="init")
    files = [(config, text, "Config")]
    if first.is_scored:
        files.append((reward, reward_text(first, str(config)), "Reward function"))
    for path, _, _ in files:
        if path.exists() and not force:
            raise ValueError(f"{path}: must be new. Got a file that is there. Name another FOLDER, or add --force.")
    for path, content, _ in files:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return [(path, what) for path, _, what in files]


def _settle(options: argparse.Namespace, rows: Sequence[Row]) -> tuple[DataConfig, str]:
    """The data with its columns recognized, and these in words."""
    named = {}
    for text in options.columns:
        what, equals, column = text.partition("=")
        if what not in KNOWN or not equals:
            raise ValueError(
                f"--columns: must be MEANING=COLUMN, with a meaning of {', '.join(KNOWN)}. Got {brief(text)}."
                f"{did_you_mean(what, KNOWN)}"
            )
        named[f"{what}_column"] = column
    try:
        return settle_columns(DataConfig(path=options.data, **named), rows)
    except ValueError as error:
        raise ValueError(f"--data: {error} Here: --columns MEANING=COLUMN.") from error


def _check_columns(algorithm: str, data: DataConfig, rows: Sequence[Row]) -> None:
    """Checks that the rows have what the algorithm learns from."""
    needed = _NEEDS.get(algorithm, ("prompt",))
    is_whole = algorithm == "sft" and (data.text_column or data.chat == "messages" or has(data, rows, "chosen"))
    missing = [what for what in needed if not has(data, rows, what)]
    if missing and not is_whole:
        there = ", ".join(dict.fromkeys(name for row in rows for name in row.columns)) or "none"
        raise ValueError(
            f"--data: {algorithm} needs rows with {' and '.join(needed)}. Got the columns {there}. Say which is "
            f"which, as in --columns {missing[0]}=COLUMN, or choose another algorithm."
        )


def _has_template(folder: Path) -> bool:
    """A model's folder brings a chat template."""
    settings = folder / "tokenizer_config.json"
    try:
        said = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError as error:
        raise ValueError(f"--model: {settings} must be JSON. Got {error}.") from error
    return bool(said.get("chat_template")) or (folder / "chat_template.jinja").is_file()


if __name__ == "__main__":
    sys.exit(main())
