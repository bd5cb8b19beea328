"""Short ways to write parts of a config, spelled out: `model: FOLDER`, presets, `plan: auto`, `devices_memory: 20 GB`.

They work on trees, before a tree becomes dataclasses.
"""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError, to_tree
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.suggest import did_you_mean

OFFLOAD, FUSE = "offload", "fuse"
"""The keys of a plan that are no call: roles that rest in host memory, and train calls that run as one pipeline."""
PLANNED, FROM_FILE, DEFAULT = "auto", "file", "default"
"""Keys of a plan: whether the calls that it does not name are planned for, the file that it is read from, and what
calls get that it does not name where they are not planned for."""
PLAN_FORMS: dict[str, tuple[type, str]] = {
    OFFLOAD: (tuple, "a list of roles"),
    FUSE: (tuple, "a list of two train calls"),
    PLANNED: (bool, "true or false"),
    FROM_FILE: (str, "the path of a plan"),
}
"""Keys of a plan that are no call -> what stands under them."""
RANDOM = "random"
"""The `init` of weights that are drawn at random."""
MODEL = "model"
"""The key of a config that names the folder which all roles start from that have no other origin."""
_ORIGINS = ("init", "function", "weighted_sum", "shares", "average")
"""Keys of a role that say what it is, or where its weights come from."""


def spell_out(tree: dict[str, Any], where: str) -> None:
    """Replaces everything short in the tree of a run by what it stands for.

    Raises:
        ConfigError: It is of a form that it cannot have. Says `where` the tree came from, and the key.
    """
    _start_from_model(tree, where)
    _fill_presets(tree, where)
    _spell_plan_out(tree, where)
    _join_plan_names(tree)
    _check_plan_forms(tree, where)
    _spell_memory_out(tree, where)


def _start_from_model(tree: dict[str, Any], where: str) -> None:
    """`model: FOLDER` becomes the `init` of every role that has a model and says nothing of where it comes from."""
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


def _fill_presets(tree: dict[str, Any], where: str) -> None:
    """`model: tiny` and `model: {preset: tiny, num_layers: 4}` become the fields of a model: all of them, where its
    weights are random."""
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


def _spell_plan_out(tree: dict[str, Any], where: str) -> None:
    """`plan: auto` becomes `plan: {auto: true}`, and `plan: path/to/plan.json` becomes `plan: {file: ...}`."""
    plan = tree.get("plan")
    if plan == PLANNED:
        tree["plan"] = {PLANNED: True}
    elif isinstance(plan, str):
        if not plan.endswith(".json"):
            raise ConfigError(
                f"{where}: plan: must be a mapping of calls to placements, {PLANNED}, or the path of a plan, which "
                f"ends in .json. Got {brief(plan)}.{did_you_mean(plan, [PLANNED])}"
            )
        tree["plan"] = {FROM_FILE: plan}


def _spell_memory_out(tree: dict[str, Any], where: str) -> None:
    """`devices_memory: 20 GB` becomes `{device: 20 GB, host: 20 GB}`."""
    size = tree.get("devices_memory")
    if isinstance(size, int | float):
        raise ConfigError(
            f"{where}: devices_memory: must be a size, as 20 GB, or {{device: 20 GB, host: 12 GB}}. Got {brief(size)}. "
            "Write its unit."
        )
    if isinstance(size, str):
        tree["devices_memory"] = {"device": size, "host": size}


def _check_plan_forms(tree: Mapping[str, Any], where: str) -> None:
    """Checks the form of plan entries that are no calls."""
    plan = tree.get("plan")
    for key, (form, what) in PLAN_FORMS.items():
        if not isinstance(plan, dict) or key not in plan:
            continue
        given = plan[key]
        if isinstance(given, list | tuple) if form is tuple else isinstance(given, form):
            continue
        remedy = ""
        if form is tuple:
            remedy = f" Write {f'[{given}]' if isinstance(given, str) else '[] for none'}."
        raise ConfigError(f"{where}: plan.{key}: must be {what}. Got {brief(given)}.{remedy}")


def _join_plan_names(tree: dict[str, Any]) -> None:
    """`plan: {actor: {train: ...}}`, as `--set plan.actor.train.data=2` makes it, becomes `plan: {actor.train: ..}`.

    Both ways of writing may stand side by side; what is written later goes over what was there.
    """
    plan = tree.get("plan")
    if not isinstance(plan, dict):
        return
    joined: dict[str, Any] = {}
    for name, entry in plan.items():
        is_role = isinstance(entry, dict) and entry and all(isinstance(value, dict) for value in entry.values())
        entries = {f"{name}.{method}": placement for method, placement in entry.items()} if is_role else {name: entry}
        for call, placement in entries.items():
            before = joined.get(call)
            if isinstance(before, dict) and isinstance(placement, dict):
                placement = {**before, **placement}
            joined[call] = placement
    tree["plan"] = joined
