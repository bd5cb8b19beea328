"""The words that completion offers, printed as JSON: options of commands, keys of configs and their values."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.commands.command_line import COMMANDS, module_of
from jaxrlhf.config.reading import FORM, INLINE, Stated
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.data.config import TASKS
from jaxrlhf.models.config import PRESETS
from jaxrlhf.rewards.built_in import VERIFIERS

SHORT_FORMS = {
    "model": [],
    "algorithm": list(ALGORITHMS),
    "plan": ["auto"],
    "devices": ["auto", "cpu:8"],
    "resume": ["never", "auto"],
    "data.task": list(TASKS),
    "roles.*.model": list(PRESETS),
    "roles.*.model.preset": list(PRESETS),
    "roles.*.function": list(VERIFIERS),
}
"""Keys and values that the types of a config do not tell."""


def words() -> dict[str, Any]:
    """Options by command, and keys by algorithm, those of all of them under ''."""
    keys = {"": dict(keys_below(RunConfig)) | SHORT_FORMS}
    keys |= {name: dict(keys_below(algorithm.config, "settings")) for name, algorithm in ALGORITHMS.items()}
    options = {name: [*options_of(module_of(command).parser())] for name, command in COMMANDS.items()}
    return {"options": options, "keys": keys}


def options_of(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    """The options and arguments of a command line, as `add_argument` takes them."""
    for action in (action for action in parser._actions if action.dest != "help"):
        added: dict[str, Any] = {"names": list(action.option_strings) or [action.dest], "help": action.help}
        if action.nargs == 0:
            yield {**added, "action": "store_true"}
            continue
        added["action"] = "append" if isinstance(action.default, list) and action.nargs is None else "store"
        yield (
            added
            | ({"choices": list(action.choices)} if action.choices else {})
            | ({"nargs": action.nargs} if action.nargs is not None else {})
        )


def keys_below(hint: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Dotted keys of a type, with the values that they may have if these are few; `*` stands for a name."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        for field in (field for field in dataclasses.fields(hint) if field.init and field.name != "shares"):
            kind = field.metadata[FORM][0] if FORM in field.metadata else hints[field.name]
            inner = path if INLINE in field.metadata else f"{path}.{field.name}" if path else field.name
            yield from keys_below(kind, inner)
    elif origin is Stated:
        yield from keys_below(options[0], path)
    elif origin in (typing.Union, types.UnionType):
        for option in options:
            yield from keys_below(option, path) if option is not type(None) else [(path, ["null"])]
    elif isinstance(origin, type) and issubclass(origin, Mapping) and dataclasses.is_dataclass(options[1]):
        yield from keys_below(options[1], f"{path}.*")
    else:
        literal = [str(option) for option in options] if origin is Literal else []
        yield path, ["true", "false"] if hint is bool else literal


if __name__ == "__main__":
    print(json.dumps(words()))
