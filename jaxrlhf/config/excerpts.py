"""The lines of a config that an error is about, to be shown below its message.

A message names a file with line and column, or a dotted key. The key is looked for where its value came from: on the
command line, else in the file that was named, else in the files that it is laid over.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from jaxrlhf.config import strict_yaml
from jaxrlhf.config.reading import ConfigError, find_config, shown_path

AROUND = 2
"""Lines before and after the one that is meant."""
WIDTH = 100
"""The most characters of a line."""
_MARKED = re.compile(r"(?P<where>.+?), line (?P<line>\d+), column (?P<column>\d+): ")
_KEY = re.compile(r"(?P<key>[^\W\d][\w.\[\]#-]*)(?:, in the [\w ]+)?: ")
_UNKNOWN = re.compile(r"unknown key '(?P<key>[^']+)'")
_FILES = (".json", ".jsonl", ".gz", ".parquet", ".py", ".yaml", ".yml")
"""What looks like a key and ends so is a file."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of a config."""

    where: str
    text: str
    root: yaml.Node | None
    """None if it is no valid YAML."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A key in a file, or the innermost section of it that is there."""

    depth: int
    """The parts of the key that lead there."""
    value: yaml.Node
    key: yaml.Node | None = None
    """None for the whole file, and for an item of a list."""


def with_excerpt(message: str, config: str | Path | None, overrides: Sequence[str]) -> str:
    """The message of an error in a config, and below it the lines that it is about, if it names a place in the config
    or in what `--set` lays over it."""
    sources = list(_sources(config)) if config is not None else []
    if lines := _at_mark(message, sources, overrides) or _at_key(message, sources, overrides):
        return "\n".join([message, "", *lines])
    return message


def _sources(config: str | Path) -> Iterator[Source]:
    """The file of a config and those of its bases, as far as they can be read."""
    name, beside = str(config), None
    for _ in range(20):
        try:
            path = find_config(name, beside=beside)
            text = path.read_text(encoding="utf-8")
        except (ConfigError, OSError, UnicodeDecodeError):
            return  # the message says so
        root = strict_yaml.compose(text)
        yield Source(shown_path(path), text, root)
        base = _find(root, ["base"]) if root is not None else None
        if base is None or not base.depth or not isinstance(base.value, yaml.ScalarNode):
            return
        name, beside = base.value.value, path.parent


def _at_mark(message: str, sources: Sequence[Source], overrides: Sequence[str]) -> list[str]:
    """The excerpt of a message that names line and column."""
    if (match := _MARKED.match(message)) is None:
        return []
    line, column = int(match["line"]), int(match["column"])
    for override in overrides:
        key, _, value = override.partition("=")
        if match["where"] == f"--set {key}":
            before = sum(len(each) + 1 for each in value.split("\n")[: line - 1])
            return _of_override(override, len(key) + 1 + before + column - 1, 1)
    for source in (source for source in sources if source.where == match["where"]):
        return _of_file(source, line - 1, column - 1, 1)
    return []


def _at_key(message: str, sources: Sequence[Source], overrides: Sequence[str]) -> list[str]:
    """The excerpts of a message that names a key: where it is set, or the section where it is missing."""
    key = _key_in(message, sources)
    parts = re.findall(r"[^.\[\]]+", key)
    if not parts or key.endswith(_FILES):
        return []
    lines: list[str] = []
    for override in reversed(overrides):
        name = override.partition("=")[0]
        if key == name or key.startswith((f"{name}.", f"{name}[")):
            return _of_override(override, 0, len(name))
        if name.startswith(f"{key}.") and not lines:
            lines = _of_override(override, 0, len(name))
    found = _in_files(sources, parts)
    if found is None or (found[1].depth < len(parts) and parts[0] == "roles" and parts[2:] == ["init"]):
        found = _in_files(sources, ["model"]) or found  # which stands for it
    if found is None:
        return lines
    source, place = found
    is_name = "unknown key" in message and place.depth == len(parts)
    is_value = place.key is None or (isinstance(place.value, yaml.ScalarNode) and not is_name)
    node = place.value if is_value else place.key
    assert node is not None
    start, end = node.start_mark, node.end_mark
    length = end.column - start.column if end.line == start.line else 1
    return [*lines, *_of_file(source, start.line, start.column, length)]


def _in_files(sources: Sequence[Source], parts: Sequence[str]) -> tuple[Source, Found] | None:
    """Where most of a key is found: of several files the first, which lies over the others."""
    found = [(source, _find(source.root, parts)) for source in sources if source.root is not None]
    best = max(found, key=lambda each: each[1].depth, default=None)
    return best if best is not None and best[1].depth else None


def _key_in(message: str, sources: Sequence[Source]) -> str:
    """The dotted key that a message is about, empty if it names none."""
    whole = " over ".join(source.where for source in sources)
    for where in (f"{whole} with --set: ", f"{whole}: ", *(f"{source.where}: " for source in sources)):
        if whole and message.startswith(where):
            message = message.removeprefix(where)
            break
    match = _KEY.match(message)
    rest = message[match.end() :] if match else message
    unknown = _UNKNOWN.match(rest)
    return ".".join(each["key"] for each in (match, unknown) if each is not None)


def _find(root: yaml.Node, parts: Sequence[str]) -> Found:
    """The place of a key below a node. A key of a mapping may have dots, as in `calls: {actor.train: ...}`."""
    best = Found(0, root)
    pairs: list[tuple[yaml.Node | None, yaml.Node, list[str]]] = []
    if isinstance(root, yaml.MappingNode):
        pairs = [(key, value, key.value.split(".")) for key, value in root.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(root, yaml.SequenceNode):
        pairs = [(None, value, [str(i)]) for i, value in enumerate(root.value)]
    for key, value, names in pairs:
        if list(parts[: len(names)]) == names:
            inner = _find(value, parts[len(names) :])
            if inner.depth + len(names) > best.depth:
                found = inner if inner.depth else Found(0, value, key)
                best = dataclasses.replace(found, depth=inner.depth + len(names))
    return best


def _of_file(source: Source, line: int, column: int, length: int) -> list[str]:
    """Numbered lines of a file, with a marker below the one that is meant."""
    lines = source.text.splitlines() or [""]
    line = min(line, len(lines) - 1)
    shown = range(max(0, line - AROUND), min(len(lines), line + AROUND + 1))
    left = max(0, column - WIDTH // 2) if len(lines[line]) > WIDTH else 0
    digits, excerpt = len(str(shown[-1] + 1)), [f"{source.where}, line {line + 1}, column {column + 1}"]
    for number in shown:
        mark = ">" if number == line else " "
        excerpt.append(f"{mark} {number + 1:>{digits}} | {_window(lines[number], left)}".rstrip())
        if number == line:
            marker = "^" * max(1, min(length, WIDTH, len(lines[line]) - column))
            excerpt.append(f"  {'':>{digits}} | {' ' * (column - left)}{marker}")
    return excerpt


def _of_override(override: str, start: int, length: int) -> list[str]:
    """What stands on the command line, with a marker below what is meant."""
    left = max(0, start - WIDTH // 2)
    return [
        "on the command line",
        f"> --set {_window(override, left)}",
        f"  {'':5} {' ' * (start - left)}{'^' * max(1, min(length, WIDTH - start + left))}",
    ]


def _window(text: str, left: int) -> str:
    """A part of a text in one line."""
    part = text[left : left + WIDTH].replace("\t", " ").replace("\n", " ")
    return part + ("..." if len(text) > left + WIDTH else "")
