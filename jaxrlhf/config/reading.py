"""Strict reading of configs: YAML files and `--set a.b=c` into frozen dataclasses.

    name or path --find_config--> file --read_config--> tree --apply_overrides--> tree --build--> dataclass

A tree is plain data: nested mappings of text to values. The types of a dataclass' fields say which values are valid:
other dataclasses, int, float, str, bool, Literal, Any, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `Mapping[str, X]`;
`Mapping[int, X]`, whose keys are written as text; `X | Y`, which is Y for values of the form of Y and else X; and
`Stated[X]`, some of the fields of a dataclass X. A field whose metadata has `INLINE` or `FORM` is written differently.
Lists become tuples and mappings FrozenDicts, so that a configuration is immutable and hashable. Every error is a
ConfigError that names file and key:

    configs/x.yaml: plan.calls.actor.train.tensor: expected an integer. Got 'two'. Write a whole number such as 2.
"""

import collections.abc
import copy
import dataclasses
import functools
import importlib.resources
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from flax.core import FrozenDict

from jaxrlhf.brief import brief, cut, did_you_mean
from jaxrlhf.config import strict_yaml
from jaxrlhf.config.strict_yaml import ConfigError

T = TypeVar("T")
Tree = dict[str, Any]


class Stated(FrozenDict[str, Any], Generic[T]):
    """The fields of a dataclass that a config states, each of its type. The others come from elsewhere."""


INLINE = "inline"
"""In the metadata of a field with a dataclass: its keys are written among those of the outer one."""
FORM = "form"
"""In the metadata of a field that is written as another type: that type, a function from it to the value, which may
raise ValueError, and the inverse function."""

_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("expected true or false", "Write true or false."),
    int: ("expected an integer", "Write a whole number such as 2."),
    float: ("expected a number", "Write a number such as 0.1."),
    str: ("expected text", "Put text that YAML takes for something else in quotes."),
}
"""Type of a scalar -> the rule, and how to write it."""


def find_config(name_or_path: str | Path, *, beside: Path | None = None) -> Path:
    """The file of a configuration: a path with a folder or the suffix .yaml, or else the name of a shipped config.

    A relative path starts at the folder `beside`, by default the working directory.
    """
    text = str(name_or_path)
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        path = (beside or Path()) / path
        if not os.path.isfile(path):  # a Path would raise where the name is too long for any file
            raise ConfigError(
                f"{cut(shown_path(path))}: no such file. Give a path, or one of: {', '.join(sorted(_shipped()))}."
            )
        return path
    shipped = _shipped()
    if text not in shipped:
        known = ", ".join(sorted(shipped)) or "none"
        raise ConfigError(
            f"Unknown config {brief(text)}. Known: {known}; or a path ending in .yaml.{did_you_mean(text, shipped)}"
        )
    return shipped[text]


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file."""
    where = shown_path(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: must be UTF-8 text. Got the byte {error.object[error.start]:#04x}.") from error
    tree = strict_yaml.parse(text, where=where)
    if not isinstance(tree, dict):
        raise _error(where, "", "expected a mapping", tree, "Write `key: value` lines.")
    return tree


def read_config(
    name_or_path: str | Path, *, adapt: Callable[[Tree, Tree, str], Tree] = lambda below, above, where: below
) -> tuple[Tree, str]:
    """The tree of a configuration merged over its `base`, and the name of its source for error messages. `adapt`, a
    function of the tree of a base, the tree over it and the source of the base, returns the tree to use for the base.
    """
    trees, paths = [], [find_config(name_or_path)]
    while len(trees) < len(paths):
        path = paths[-1]
        if path.resolve() in (earlier.resolve() for earlier in paths[:-1]):
            chain = " -> ".join(map(shown_path, paths))
            raise ConfigError(f"{shown_path(paths[-2])}: base: must not lead back to itself. Got {chain}.")
        trees.append(read_yaml(path))
        base = trees[-1].pop("base", None)
        if isinstance(base, str):
            paths.append(find_config(base, beside=path.parent))
        elif base is not None:
            raise _error(shown_path(path), "base", "expected the name of a config or a path", base, "")
    merged = trees.pop()
    for tree, base in zip(trees[::-1], paths[:0:-1], strict=True):
        merged = merge(adapt(merged, tree, shown_path(base)), tree)
    return merged, " over ".join(map(shown_path, paths))


def known_part(cls: type[Any], tree: Tree) -> tuple[Tree, list[str]]:
    """The part of a tree for which a dataclass has fields, and the other keys: `update.clip`."""
    hints = typing.get_type_hints(cls)
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    known, unknown = {}, [key for key in tree if key not in fields]
    for key in (key for key in tree if key in fields):
        known[key] = tree[key]
        is_union = typing.get_origin(hints[key]) in (typing.Union, types.UnionType)
        options = typing.get_args(hints[key]) if is_union else (hints[key],)
        inner = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if isinstance(inner, type) and isinstance(tree[key], dict):
            known[key], more = known_part(inner, tree[key])
            unknown += [f"{key}.{name}" for name in more]
    return known, unknown


def apply_overrides(
    tree: Tree, overrides: Sequence[str], *, in_full: Callable[[Sequence[str], Any], Any] = lambda path, value: value
) -> Tree:
    """A copy of `tree` with each `a.b=value` set, the value read as YAML. Missing mappings are created. `in_full`: keys
    and a value there -> the mapping that it is short for, so that a key of that can be set."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.split(".")
        if not (equals and text.strip() and all(key.strip() == key != "" for key in keys)):
            raise ConfigError(f"--set: expected key.key=value. Got {brief(override)}. Write null or '' for no value.")
        value = strict_yaml.parse(text, where=f"--set {dotted}")
        inner = tree
        for depth, key in enumerate(keys[:-1], start=1):
            if inner.get(key) is None:
                inner[key] = {}
            inner[key] = in_full(keys[:depth], inner[key])
            inner = inner[key]
            if not isinstance(inner, dict):
                raise _error(f"--set {dotted}", "", f"{'.'.join(keys[:depth])} has no keys", inner, "Set it whole.")
        inner[keys[-1]] = value
    return tree


def to_tree(value: Any) -> Any:
    """A dataclass as plain data with all defaults, from which `build` makes an equal one."""
    if dataclasses.is_dataclass(value):
        tree: Tree = {}
        for field in (field for field in dataclasses.fields(value) if field.init):
            item = getattr(value, field.name)
            written = field.metadata[FORM][2](item) if FORM in field.metadata else to_tree(item)
            tree |= written if INLINE in field.metadata else {field.name: written}
        return tree
    if isinstance(value, Mapping):
        return {str(key): to_tree(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_tree(item) for item in value]
    return value


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The values of a tree that are not mappings, by dotted keys."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {k: v for key, item in tree.items() for k, v in leaves(item, _join(path, key)).items()}


def dump_yaml(value: Any) -> str:
    """A dataclass as YAML that `read_yaml` and `build` read back."""
    return strict_yaml.to_text(to_tree(value))


def build(hint: Any, value: Any, where: str, path: str = "") -> Any:
    """A value of type `hint`, such as an instance of a dataclass, from a tree.

    Errors name the source of the tree, `where`, and keys, which begin with `path` if the tree is a part of the source.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        make = functools.partial(hint, **_build_fields(hint, value, where, path, all_of_them=True))
        return _make(make, where, path, [field.name for field in dataclasses.fields(hint) if field.init])
    if hint in _SCALARS:
        return _build_scalar(hint, value, where, path)
    if hint is Any:
        return _frozen(value)
    if origin is Literal:
        for option in options:
            if type(option) is type(value) and option == value:
                return option
        listed = ", ".join(str(option) for option in options)
        suggestion = did_you_mean(value, [o for o in options if isinstance(o, str)]) if isinstance(value, str) else ""
        raise _error(where, path, f"expected one of {listed}", value, suggestion.strip())
    if origin in (typing.Union, types.UnionType) and len(options) == 2 and type(None) in options:
        (given,) = (option for option in options if option is not type(None))
        return None if value is None else build(given, value, where, path)
    if origin in (typing.Union, types.UnionType) and type(None) not in options:
        form = tuple if isinstance(value, list) else type(value)
        alike = (option for option in options if (typing.get_origin(option) or option) is form)
        return build(next(alike, options[0]), value, where, path)
    if origin in (list, tuple):
        return _build_list(origin, options, value, where, path)
    if origin in (dict, collections.abc.Mapping) and options[0] in (str, int):
        return _build_mapping(options[0], options[1], value, where, path)
    if origin is Stated:
        return Stated(_build_fields(options[0], value, where, path, all_of_them=False))
    raise TypeError(
        f"{path}: no config can hold a field of type {hint}. Declare it as bool, int, float, str, a Literal, a frozen "
        "dataclass, one of these or None, or a tuple or mapping of them."
    )


def _make(make: Callable[[], Any], where: str, path: str, fields: Collection[str]) -> Any:
    """The result of a call. A ValueError of it, which may begin with one of some fields, gets its place in the tree."""
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{where}: {_located(str(error), path, fields)}") from error


def keys_of(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a dataclass in a config, including those of inline fields."""
    keys: dict[str, dataclasses.Field[Any]] = {}
    for field in (field for field in dataclasses.fields(cls) if field.init):
        keys |= keys_of(typing.get_type_hints(cls)[field.name]) if INLINE in field.metadata else {field.name: field}
    return keys


def _build_fields(cls: Any, value: Any, where: str, path: str, *, all_of_them: bool) -> dict[str, Any]:
    """The fields of a dataclass that a tree has. `all_of_them`: fields without a default are required."""
    known, hints, tree = keys_of(cls), typing.get_type_hints(cls), _mapping(value, where, path)
    for key in tree:
        if key not in known:
            raise ConfigError(
                f"{_place(where, path)}: unknown key {brief(key)}. Known: {', '.join(known) or 'none'}."
                f"{did_you_mean(key, known)}"
            )
    arguments = {}
    for field in (field for field in dataclasses.fields(cls) if field.init):
        name, default = field.name, field.default
        if INLINE in field.metadata:
            inner = keys_of(hints[name])
            part = {key: item for key, item in tree.items() if key in inner}
            arguments[name] = build(hints[name], part, where, path)
        elif name in tree:
            item = tree[name]
            if dataclasses.is_dataclass(default) and isinstance(item, Mapping):  # merged over the default
                item = merge(to_tree(default), dict(item))
            inner, read, _ = field.metadata.get(FORM, (hints[name], None, None))
            built = build(inner, item, where, _join(path, name))
            if read is not None:
                keys = keys_of(inner) if isinstance(inner, type) and dataclasses.is_dataclass(inner) else ()
                built = _make(functools.partial(read, built), where, _join(path, name), keys)
            arguments[name] = built
        elif all_of_them and default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_place(where, _join(path, name))}: required. Got nothing. Write `{name}: ...`.")
    return arguments


def _located(message: str, path: str, fields: Collection[str]) -> str:
    """The message of a dataclass' own error with its place in the tree.

    Such a message may begin with a field, `top_k: must ...` or `weighted_sum.short: must ...`, or with the section too,
    `sampling.top_k: must ...`, with which `path` ends already.
    """
    section = path.rpartition(".")[2]
    if section and message.startswith((f"{section}.", f"{section}:")):
        return path + message.removeprefix(section)
    if message.partition(":")[0].partition(".")[0] in fields:
        return _join(path, message)
    return f"{path}: {message}" if path else message


def _build_list(origin: type, options: tuple[Any, ...], value: Any, where: str, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        example = f"[{cut(value)}]" if isinstance(value, str) else "[a, b]"
        raise _error(where, path, "expected a list", value, f"Write {example}.")
    if origin is list or options[1:] == (...,):
        options = options[:1] * len(value)
    if len(value) != len(options):
        raise _error(where, path, f"expected a list of {len(options)}", value, "")
    return tuple(build(option, value[i], where, f"{path}[{i}]") for i, option in enumerate(options))


def _build_scalar(hint: type, value: Any, where: str, path: str) -> Any:
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if hint is int and type(value) is int and abs(value) >= 2**63:
        raise _error(where, path, "expected an integer of 64 bits", value, "")
    if type(value) is hint and value == value:  # NaN is refused
        return value
    rule, remedy = _SCALARS[hint]
    if hint is int and isinstance(value, float) and value.is_integer():
        remedy = f"Write {int(value)}."
    raise _error(where, path, rule, value, remedy)


def _build_mapping(kind: type, hint: Any, value: Any, where: str, path: str) -> FrozenDict[Any, Any]:
    """A mapping from text, or from integers, which are text in a config."""
    texts = {str(key): item for key, item in value.items()} if kind is int and isinstance(value, Mapping) else value
    built = {}
    for key, item in _mapping(texts, where, path).items():
        if kind is int and re.fullmatch("0|[1-9][0-9]{0,17}", key) is None:
            raise _error(where, path, "a key must be an integer from 0 on", key, "Write a whole number in quotes.")
        built[kind(key)] = build(hint, item, where, _join(path, key))
    return FrozenDict(built)


def _mapping(value: Any, where: str, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(where, path, "expected a mapping", value, "Write `key: value` lines.")
    for key in value:
        if not isinstance(key, str):
            raise _error(where, path, "a key must be text", key, "Put it in quotes.")
    return value


def _frozen(value: Any) -> Any:
    """Plain data made hashable: mappings as FrozenDict, lists as tuples."""
    if isinstance(value, Mapping):
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def merge(below: Tree, above: Tree) -> Tree:
    """`above` over `below`: mappings merge, anything else replaces."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _shipped() -> dict[str, Path]:
    """The files of the configs in the package, by name."""
    folder = Path(str(importlib.resources.files("jaxrlhf"))) / "configs"
    return {path.stem: path for path in folder.glob("*.yaml")}


def shown_path(path: str | Path) -> str:
    """A path for error messages, relative to the working directory if it is inside."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _place(where: str, path: str) -> str:
    return f"{where}: {path}" if path else where


def _error(where: str, path: str, rule: str, got: object, remedy: str) -> ConfigError:
    shown = "null" if got is None else brief(got)
    return ConfigError(f"{_place(where, path)}: {rule}. Got {shown}. {remedy}".rstrip())
