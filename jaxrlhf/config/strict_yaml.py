"""YAML without its traps: duplicate keys, `on` for true, `010` for 8, `1e-3` for text.

Only plain data: mappings with text for keys, lists, text, numbers, true, false and null. Numbers are those of YAML 1.2,
so `1e-3` is a float, and `010`, `1:30` and dates are text. Errors are: a key given twice; an unquoted `yes`, `no`, `on`
or `off`, which YAML 1.1 takes for true and false; and aliases of aliases that stand for millions of values. `parse`
reads back the output of `to_text`.
"""

import functools
import re
from typing import Any, NoReturn

import yaml

from jaxrlhf.brief import brief, cut

MAX_NODES = 100_000
"""The most keys and values of a text; those of an alias count at each use."""


class ConfigError(ValueError):
    """An error in a configuration, described to its author."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012
    yaml_constructors = {None: yaml.SafeLoader.construct_undefined}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what either the loader above or one of YAML 1.1 would not read as text."""


_FLOAT = r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
# The order decides: _FLOAT matches integers too.
for _kind, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", "tTfFyYnNoO"),
    ("int", "[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list(_first))


def _refuse(node: yaml.Node, problem: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    text = loader.construct_scalar(node)
    if text.lower() not in ("true", "false"):
        _refuse(node, f"{cut(text)} is ambiguous in YAML. Write true or false, or '{cut(text)}' in quotes for text")
    return text.lower() == "true"


def _mapping(loader: _Loader, node: yaml.Node) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        _refuse(node, "expected a mapping")
    mapping = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            _refuse(key_node, f"a key must be text. Got {brief(key)}. Put it in quotes")
        if key in mapping:
            _refuse(key_node, f"key {brief(key)} is given twice. Remove one")
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


for _kind, _construct in (
    ("bool", _bool),
    ("int", _Loader.construct_yaml_int),
    ("float", _Loader.construct_yaml_float),
    ("null", _Loader.construct_yaml_null),
    ("str", _Loader.construct_scalar),
    ("seq", functools.partial(_Loader.construct_sequence, deep=True)),
    ("map", _mapping),
):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _construct)  # pyright: ignore[reportArgumentType]


def parse(text: str, *, where: str) -> Any:
    """The value of a YAML text. Raises ConfigError, which begins with `where`, its line and its column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (num_nodes := _num_nodes(node, {})) > MAX_NODES:
            raise ConfigError(
                f"{where}: must hold at most {MAX_NODES:,} keys and values, aliases written out. Got {num_nodes:,}. "
                "Leave aliases of aliases out."
            )
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{place}: {cut(str(error.problem or error.context))}.") from error
    except (yaml.YAMLError, ValueError) as error:  # characters that YAML does not allow; a number of 5000 digits
        raise ConfigError(f"{where}: not valid YAML: {cut(str(error))}.") from error
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply.") from None


def compose(text: str) -> yaml.Node | None:
    """The nodes of a YAML text, with their places; None if it is empty or not valid."""
    try:
        return _Loader(text).get_single_node()
    except (yaml.YAMLError, RecursionError):
        return None


def _num_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of nodes below a node, including itself. `known`: the numbers of nodes counted before, by id."""
    if id(node) not in known:
        known[id(node)] = 0  # for a node inside of itself, which is refused later
        inner = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in inner)
    return known[id(node)]


def to_text(tree: Any) -> str:
    """Plain data as YAML, in the order of its keys. Non-ASCII characters are escaped, since PyYAML would lose a
    next-line character."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=120)
