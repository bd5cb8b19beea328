"""Expands short forms in the tree of a config: `model: FOLDER`, presets, `plan: auto`, `devices_memory: 20 GB`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.plan_config import expand_plan
from jaxrlhf.config.reading import ConfigError, Stated, build, to_tree
from jaxrlhf.models.config import PRESETS, ModelConfig

RANDOM = "random"
"""The `init` of weights that are drawn at random."""
MODEL = "model"
"""The key of a config that names the folder from which all roles start that have no other origin."""
_ORIGINS = ("init", "function", "weighted_sum", "shares", "average")
"""Keys of a role that determine its kind or the origin of its weights."""


def expand(tree: dict[str, Any], where: str) -> None:
    """Expands all short forms in the tree of a run, in place. A ConfigError begins with `where` and names the key."""
    _expand_model(tree, where)
    _expand_presets(tree, where)
    expand_plan(tree, where)
    _expand_memory(tree, where)
    if isinstance(tree.get("staleness"), int):
        tree["staleness"] = {"steps": tree["staleness"]}


def in_full(path: Sequence[str], value: Any) -> Any:
    """The mapping that a short form at some keys stands for, so that `--set` can change a key of it.

    >>> in_full(["devices_memory"], "20 GB"), in_full(["roles", "actor", "model"], "tiny")
    ({'device': '20 GB', 'host': '20 GB'}, {'preset': 'tiny'})
    """
    if isinstance(value, str) and list(path) == ["devices_memory"]:
        return {"device": value, "host": value}
    if isinstance(value, str) and len(path) == 3 and path[0] == "roles" and path[2] == "model":
        return {"preset": value}
    return value


def stated_model(model: ModelConfig | Mapping[str, Any] | str) -> Stated[ModelConfig]:
    """The fields of a model that Python states: all of a `ModelConfig`; a preset, by its name or with other keys.

    >>> stated_model({"preset": "tiny", "num_layers": 4})["num_layers"]
    4
    """
    if isinstance(model, Stated):
        return model
    given = {"preset": model} if isinstance(model, str) else dict(to_tree(model))
    preset = given.pop("preset", None)
    if preset is not None and preset not in PRESETS:
        raise ValueError(
            f"model.preset: must be one of {', '.join(PRESETS)}. Got {brief(preset)}."
            f"{did_you_mean(str(preset), PRESETS)}"
        )
    fields = {**PRESETS[preset], **given} if preset is not None else given
    return build(Stated[ModelConfig], to_tree(fields), "RoleConfig", "model")


def _expand_model(tree: dict[str, Any], where: str) -> None:
    """`model: FOLDER` becomes the `init` of every role that has a model and no origin."""
    if (folder := tree.pop(MODEL, None)) in (None, ""):
        return
    if not isinstance(folder, str):
        raise ConfigError(
            f"{where}: {MODEL}: must be a folder in Hugging Face's format, which roles start from. Got {brief(folder)}."
        )
    roles = tree.get("roles")
    named = [role for role in (roles.values() if isinstance(roles, dict) else ()) if isinstance(role, dict)]
    starting = [role for role in named if not any(role.get(key) for key in _ORIGINS)]
    if not starting:
        raise ConfigError(
            f"{where}: {MODEL}: a role must start from it. Got {brief(folder)}, and every role says itself what it is "
            f"or starts from. Leave `init` out of one, or leave {MODEL} out."
        )
    for role in starting:
        role["init"] = folder


def _expand_presets(tree: dict[str, Any], where: str) -> None:
    """`model: tiny` and `model: {preset: tiny, num_layers: 4}` become the fields of a model; all of them for random
    weights."""
    roles = tree.get("roles")
    for name, role in roles.items() if isinstance(roles, dict) else ():
        model = role.get("model") if isinstance(role, dict) else None
        if isinstance(model, str):
            model = {"preset": model}
        if isinstance(model, dict) and "preset" in model:
            preset = model["preset"]
            if not isinstance(preset, str) or preset not in PRESETS:
                raise ConfigError(
                    f"{where}: roles.{name}.model.preset: must be one of {', '.join(PRESETS)}. Got {brief(preset)}."
                    f"{did_you_mean(str(preset), PRESETS)}"
                )
            model = {**PRESETS[preset], **{key: value for key, value in model.items() if key != "preset"}}
        if isinstance(model, dict):
            role["model"] = model if role.get("init", RANDOM) != RANDOM else {**to_tree(ModelConfig()), **model}


def _expand_memory(tree: dict[str, Any], where: str) -> None:
    """`devices_memory: 20 GB` becomes `{device: 20 GB, host: 20 GB}`."""
    size = tree.get("devices_memory")
    if isinstance(size, int | float):
        raise ConfigError(
            f"{where}: devices_memory: must be a size, as 20 GB, or {{device: 20 GB, host: 12 GB}}. Got {brief(size)}. "
            "Write its unit."
        )
    if isinstance(size, str):
        tree["devices_memory"] = in_full(["devices_memory"], size)
