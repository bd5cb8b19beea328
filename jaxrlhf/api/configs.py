"""Configs in Python: read from YAML or plain data, with keywords laid over them, and written."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.api.keys import Config, RunKeys, with_keys
from jaxrlhf.api.rows import rows_of, splits_of, write_rows
from jaxrlhf.brief import brief
from jaxrlhf.config.algorithm_loading import for_another_algorithm, load_algorithm
from jaxrlhf.config.reading import Tree, dump_yaml, merge, to_tree
from jaxrlhf.config.reading import read_config as read_tree
from jaxrlhf.config.schema import EvaluationRunConfig, RunConfig, build_run
from jaxrlhf.importing import name_of
from jaxrlhf.models.config import PRESETS, SIZES
from jaxrlhf.require import errors_as
from jaxrlhf.rewards.built_in import VERIFIERS
from jaxrlhf.run.checked_run import InputError
from jaxrlhf.writing import write_atomically

_FOLLOWERS: dict[str, Tree] = {
    "critic": {"init": "actor", "head": "scalar", "optimizer": {}},
    "cost_critic": {"init": "actor", "head": "scalar", "optimizer": {}},
    "reference": {"init": "actor"},
}
"""Roles that a run without a config has by itself, if its algorithm needs them."""


@with_keys
def read_config(config: Config | None = None, **keys: Unpack[RunKeys]) -> RunConfig:
    """The config of a run, checked and with all defaults. Devices and data are not looked at.

    Args:
        config: The name of a shipped config, a YAML file, a mapping, or a config. None means that the keys say all.
        keys: Keys of the config, laid over it.

    Raises:
        InputError: A key is unknown, a value has another type, or values do not fit together.

    Example:
        >>> config = rl.read_config("ppo_arithmetic", steps=20)
        >>> config.steps, config.settings.gae_lambda
        (20, 0.95)
    """
    with errors_as(InputError):
        return run_config(config, keys)


def write_config(config: RunConfig, path: str | os.PathLike[str]) -> Path:
    """Writes a config with all of its defaults to a YAML file, from which `read_config` makes an equal one.

    Raises:
        UnwritableError: The file cannot be written.

    Example:
        >>> path = rl.write_config(rl.read_config("rloo_arithmetic"), folder / "rloo.yaml")
        >>> rl.read_config(path) == rl.read_config("rloo_arithmetic")
        True
    """
    write_atomically(Path(path), dump_yaml(config))
    return Path(path)


def run_config(config: Config | None, keys: RunKeys | Mapping[str, Any]) -> RunConfig:
    """The config of a run from a config and the keys over it. Rows in them are written to files."""
    notes: list[str] = []
    if isinstance(config, RunConfig) and not keys:
        return config
    tree, where = _tree(config, dict(keys), notes)
    write_rows(tree)
    return build_run(tree, where=where, notes=notes)


def _tree(config: Config | None, keys: dict[str, Any], notes: list[str]) -> tuple[Tree, str]:
    """The tree of a config with keys over it, and its name for error messages."""
    if isinstance(config, str | os.PathLike):
        given: Tree = {"base": os.fspath(config)}
    else:
        given = _plain(config if config is not None else {})
    name = _name(keys.get("algorithm", given.get("algorithm", "ppo")))
    data, reward = keys.pop("data", None), keys.pop("reward", None)
    short = {name: _plain(keys.pop(name)) for name in ("model", "optimizer", "sampling") if name in keys}
    given = merge(given, _plain(keys))
    base, where = given.pop("base", None), "config"
    if base is not None:
        adapt = functools.partial(for_another_algorithm, notes=notes)
        below, where = read_tree(base, adapt=adapt)
        above, given = given, merge(adapt(below, given, where), given)
        where = f"{where} with other keys" if above or data is not None or reward is not None or short else where
    if data is not None:
        given["data"] = _data(given, data)
    given["roles"] = dict(given.get("roles") or (_roles(given) if base is None else {}))
    if reward is not None:
        given["roles"]["reward"] = _reward(reward)
    given["roles"] = {name: role for name, role in given["roles"].items() if role is not None}
    if "model" in short:
        _put_model(given, short["model"])
    for role in _trained(given["roles"]) if "optimizer" in short else ():
        role["optimizer"] = merge(role.get("optimizer") or {}, short["optimizer"])
    if "sampling" in short:
        given["settings"] = merge(given.get("settings") or {}, {"sampling": short["sampling"]})
    if base is None and "name" not in given:
        given["name"] = name
    return given, where


def _plain(value: Any) -> Any:
    """Plain data of dataclasses and mappings, with functions and paths in it replaced by their names. Tables stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Algorithm):
        return _plain(to_tree(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list) and rows_of(value) is None:
        return [_plain(item) for item in value]
    if isinstance(value, Algorithm):
        return name_of(value, f"Algorithm({value.step.__name__})")
    return name_of(value) if callable(value) else value


def _name(algorithm: Any) -> str:
    """The name of a run that has none: that of its algorithm."""
    algorithm = algorithm.step if isinstance(algorithm, Algorithm) else algorithm
    return algorithm.__name__ if callable(algorithm) else str(algorithm).rpartition(":")[2]


def _data(tree: Tree, data: Any) -> Tree:
    """The `data` of a config with other rows. Of rows in one table, as many are held out as the evaluation needs."""
    if dataclasses.is_dataclass(data):
        return _plain(data)
    splits = splits_of(data)
    if splits is None and isinstance(data, Mapping):
        given = {str(key): _plain(value) for key, value in data.items()}
    else:
        given = splits or {"path": os.fspath(data) if isinstance(data, os.PathLike) else data}
    if "path" not in given:
        return {**(tree.get("data") or {}), **given}
    if not isinstance(given["path"], str) and rows_of(given["path"]) is None and not _is_paths(given["path"]):
        raise InputError(
            "data: must be rows (a list of dicts, a DataFrame, a Dataset), a file of rows, or keys of `data`. Got "
            f"{brief(given['path'])}."
        )
    if rows_of(given["path"]) is not None and not {"eval_rows", "eval_path"} & given.keys():
        evaluation, num = tree.get("evaluation"), EvaluationRunConfig().num_prompts
        given["eval_rows"] = evaluation.get("num_prompts", num) if isinstance(evaluation, Mapping) else 0
    return {key: x for key, x in (tree.get("data") or {}).items() if key not in ("task", "eval_path")} | given


def _is_paths(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)


def _reward(reward: Any) -> Tree:
    """The role of a reward: a function or its name, the folder of a model, or a role."""
    if isinstance(reward, str | os.PathLike):
        name = os.fspath(reward)
        is_function = name in VERIFIERS or (":" in name and not os.path.isdir(name))
        return {"function": name} if is_function else {"init": name, "head": "scalar"}
    return _plain(reward) if isinstance(reward, Mapping) or dataclasses.is_dataclass(reward) else {
        "function": name_of(reward)
    }  # fmt: skip


def _roles(tree: Tree) -> Tree:
    """The roles of a run that names none: those that its algorithm needs and that follow from the actor."""
    algorithm = str(tree.get("algorithm", "ppo"))
    needed = load_algorithm(algorithm).roles or ("actor",)
    first = "actor" if "actor" in needed else needed[0]
    roles: Tree = {first: {"optimizer": {}} if first == "actor" else {"optimizer": {}, "head": "scalar"}}
    roles |= {name: dict(_FOLLOWERS[name]) for name in needed if name in _FOLLOWERS}
    if algorithm == "ppo_shared":
        roles["critic"] = {"shares": "actor"}
    return roles


def _trained(roles: Tree) -> list[Tree]:
    """The roles that are trained; the actor, if none is yet."""
    named = [role for role in roles.values() if isinstance(role, dict)]
    return [role for role in named if role.get("optimizer") is not None] or [roles["actor"]]


def _put_model(tree: Tree, model: Any) -> None:
    """Makes the actor, or else the first trained role, start from a model."""
    roles = tree["roles"]
    first = roles["actor"] if "actor" in roles else _trained(roles)[0]
    if isinstance(model, Mapping) or model in PRESETS:
        tree["model"] = ""
        first.pop("init", None)
        own = model if isinstance(model, Mapping) else {"preset": model}
        if first.get("head") is not None:
            own = {**own, "head": first.pop("head")}
        first["model"] = dict(own)
        return
    tree["model"] = model
    first.pop("init", None)
    stated = first.get("model")
    if isinstance(stated, str) or (isinstance(stated, dict) and {"preset", *SIZES} & stated.keys()):
        del first["model"]  # the sizes of another model
