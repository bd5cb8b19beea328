"""From a config to its roles: models, functions and sums, checked against one another."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RANDOM, RoleConfig, RunConfig
from jaxrlhf.configured.function_roles import function_role
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.models.adapter_files import check_adapters
from jaxrlhf.models.architecture import checkpoint_name, num_parameters
from jaxrlhf.models.config import CHOSEN, Head, ModelConfig
from jaxrlhf.models.config_json import Origin
from jaxrlhf.models.config_json import read_config as read_folder
from jaxrlhf.models.huggingface import check_params, read_origin
from jaxrlhf.programs.roles import ModelRole, Role, WeightedSumRole
from jaxrlhf.programs.weight_sets import BASE
from jaxrlhf.require import errors_as

MAX_PARAMETERS = 10**14
"""A bound that no model reaches, which catches mistakes."""


def configured_models(config: RunConfig, *, on_cpu: bool) -> dict[str, ModelConfig]:
    """The model of each role: that of the role or folder from which it starts, overridden by the config. Raises
    ConfigError or ValueError if a role has no model, or one that it cannot have. `on_cpu`: the devices are CPUs. On
    others, a folder in bfloat16 computes in bfloat16 by default."""
    check_origins(config)
    for name in config.roles:
        chain = [name]
        while (source := config.roles[chain[-1]].init) in config.roles:
            chain.append(source)
            if source in chain[:-1]:
                raise ConfigError(
                    f"roles.{name}.init: roles must not start from each other in a circle. Got {' -> '.join(chain)}."
                )

    def model_of(name: str) -> ModelConfig:
        role, where = config.roles[name], f"roles.{name}"
        if other := _other(role):
            return model_of(other)
        source = config.roles.get(role.init)
        if source is not None and not _has_model(source):
            what = "function" if source.function else "weighted_sum"
            raise ConfigError(f"{where}.init: '{role.init}' is a {what} and has no weights to start from.")
        if source is not None and _other(source):
            raise ConfigError(
                f"{where}.init: '{role.init}' has no first weights of its own. Start from '{_other(source)}', whose "
                "weights it reads."
            )
        stated = role.stated
        head = stated.get("head", "lm")
        if role.head is not None and head not in ("lm", role.head):
            raise ConfigError(f"{where}.head: must be that of its model, {head}. Got {role.head}. Say it once.")
        if role.init == RANDOM:
            model = ModelConfig(**stated)
        elif source is not None:
            model = _laid_over(stated, model_of(role.init), where, f"the role '{role.init}'")
        else:
            folder = Path(role.init)
            found = read_folder(folder, head=role.head or head)
            # bfloat16 if the folder's is, except on CPUs, where it is slower
            in_bfloat16 = not on_cpu and read_origin(folder).precision == "bfloat16"
            found = dataclasses.replace(found, dtype="bfloat16" if in_bfloat16 else "float32")
            model = _laid_over(stated, found, where, role.init)
        return model if role.head is None else dataclasses.replace(model, head=role.head)

    for name, role in config.roles.items():
        _check_other(config, name, role)
    models = {name: model_of(name) for name, role in config.roles.items() if _has_model(role)}
    for role in config.roles.values():  # a shared trunk also gets the head of the role that shares it
        if role.shares and models[role.shares].head != (role.head or "scalar"):
            models[role.shares] = dataclasses.replace(models[role.shares], head="both")
    models = {name: models[_other(config.roles[name]) or name] for name in models}
    for name, model in models.items():
        role, lora = config.roles[name], config.roles[name].lora
        _check_size(f"roles.{name}.model", model)
        if role.init not in (RANDOM, *config.roles):
            check_params(Path(role.init), model)
        if lora is not None and lora.init:
            check_adapters(Path(lora.init), model, lora)
    return models


def check_origins(config: RunConfig) -> None:
    """Raises ConfigError if a role has no model, or an `init` that is neither a role nor a folder. Reads no data."""
    for name, role in config.roles.items():
        where = f"roles.{name}"
        if not _has_model(role) or _other(role):
            continue
        if role.init == RANDOM and role.model is None:
            raise ConfigError(
                f"{where}: a role needs a model, a function, a weighted_sum, or an init to take its model from. Got "
                "none. Set `model` to the folder that all such roles start from, as in --set model=FOLDER."
            )
        # a Path would raise where the name is too long for any file
        if role.init not in (RANDOM, *config.roles) and not os.path.isdir(role.init):
            raise ConfigError(
                f"{where}.init: must be random, another role or a folder with a checkpoint. Got {brief(role.init)}, "
                "which is no folder. Download a model of a hub first, and name its folder here or in `model`. Roles: "
                f"{', '.join(config.roles)}.{did_you_mean(role.init, config.roles)}"
            )


def precision_notes(config: RunConfig, models: Mapping[str, ModelConfig]) -> list[str]:
    """Notes on roles that start from a folder in bfloat16 without a compute precision in the config."""
    notes = []
    for name, model in models.items():
        role = config.roles[name]
        told = role.init in (RANDOM, *config.roles) or "dtype" in role.stated
        if not told and read_origin(Path(role.init)).precision == "bfloat16":
            why = "as that is" if model.dtype == "bfloat16" else "as is usual on CPUs, while that is in bfloat16"
            start = f"{name} starts from {role.init} and computes in {model.dtype}, {why}."
            notes.append(f"{start} To change that, set roles.{name}.model.dtype.")
    return notes


def origins(config: RunConfig) -> dict[str, Origin]:
    """The settings of the folders from which the weights of exported roles come, by role."""
    found = {}
    for name in config.output.export:
        source = _other(config.roles[name]) or name
        while (init := config.roles[source].init) in config.roles:
            source = init
        if init != RANDOM:
            found[name] = read_origin(Path(init))
    return found


def check_roles(config: RunConfig, needed: tuple[str, ...], models: Mapping[str, ModelConfig]) -> None:
    """Checks that the roles of an algorithm exist, that each role is of one kind, and that sums are of scorers."""
    for name in needed:
        if name not in config.roles:
            raise ConfigError(
                f"roles: {config.algorithm} needs a role '{name}'. Got {', '.join(config.roles) or 'none'}."
                f"{did_you_mean(name, config.roles)}"
            )
    for name, role in config.roles.items():
        has_model = role.model is not None or role.optimizer is not None or role.init != RANDOM or _other(role)
        kinds = {"function": role.function, "weighted_sum": role.weighted_sum is not None, "a model": has_model}
        if len(said := [kind for kind, is_said in kinds.items() if is_said]) > 1:
            raise ConfigError(
                f"roles.{name}: a role is a function, a weighted_sum or a model. Got {' and '.join(said)}. Keep one."
            )
        _check_sum(config, name, models)
    if config.warm_start is not None and "actor" not in models:
        raise ConfigError("warm_start: trains the role 'actor'. Got none with a model.")


def describe(name: str, role: ModelRole, roles: Mapping[str, RoleConfig]) -> str:
    """The origin of a role's weights, in words."""
    if role.view is not None:
        return f"shares {role.weights}"
    average = f"average of {role.average.of}" if role.average is not None else ""
    if role.lora is None:
        return average or role.weights or roles[name].init
    base = f"rank {role.lora.rank} on {role.base}"
    if average:
        return f"{base}, {average}"
    adapters = f"{role.lora.init}, " if role.lora.init else ""
    return f"{adapters}{base}{f' ({roles[name].init})' if role.base == name + BASE else ''}"


def check_vocabulary(
    models: Mapping[str, ModelConfig],
    table: PromptTable,
    roles: Mapping[str, RoleConfig],
    own: Mapping[str, Tokenizer] = MappingProxyType({}),
) -> None:
    """Checks that every model has an embedding for every token. `own`: the tokenizers of roles that have their own."""
    for name, model in models.items():
        tokenizer = own.get(name, table.tokenizer)
        if tokenizer.vocab_size > model.vocab_size:
            folder = roles[name].init
            if folder not in (RANDOM, *roles):
                raise ConfigError(
                    f"roles.{name}.init: {checkpoint_name('embedding')} in {folder} must have a row for every token of "
                    f"{tokenizer.name}, {tokenizer.vocab_size}. Got {model.vocab_size}. One of the two "
                    "is of another model: leave tokenizer out to use that of the folder, or download the folder again."
                )
            raise ConfigError(
                f"roles.{name}.model.vocab_size: must hold the tokenizer's vocabulary, {tokenizer.vocab_size} "
                f"({tokenizer.name}). Got {model.vocab_size}. Raise it, or use another tokenizer."
            )


def make_role(
    name: str, roles: Mapping[str, RoleConfig], models: Mapping[str, ModelConfig], table: PromptTable
) -> Role:
    """The role that a checked config asks for."""
    role = roles[name]
    if role.function:
        return function_role(name, role, table)
    if role.weighted_sum is not None:
        return WeightedSumRole(role.weighted_sum)
    made = ModelRole(models[name], role.optimizer)
    if owner := _other(role):
        lora, base = roles[owner].lora, _base(owner, roles, models) if roles[owner].lora is not None else ""
        if role.average is not None:
            return dataclasses.replace(made, average=role.average, lora=lora, base=base)
        return dataclasses.replace(made, weights=owner, lora=lora, base=base, view=role.head or "scalar")
    if role.lora is not None:
        return dataclasses.replace(made, lora=role.lora, base=_base(name, roles, models))
    source = roles.get(role.init)
    if role.optimizer is None and source is not None and source.lora is not None:
        base = _base(role.init, roles, models)
        if _holds(models[base.removesuffix(BASE)], models[name], models[name].head):
            return dataclasses.replace(made, weights=base)  # frozen weights need no copy
    return made


def _base(name: str, roles: Mapping[str, RoleConfig], models: Mapping[str, ModelConfig]) -> str:
    """The base weights of a role's adapters: its own set, or that of the adapted role from which it starts."""
    source = roles.get(roles[name].init)
    if source is not None and source.lora is not None:
        base = _base(roles[name].init, roles, models)
        if _holds(models[base.removesuffix(BASE)], models[name], "lm" if models[name].head != "scalar" else None):
            return base
    return name + BASE


def _holds(model: ModelConfig, reader: ModelConfig, head: Head | None) -> bool:
    """Returns whether the base weights of a model's adapters are those that another model reads: in the same precision
    and form, and with its head (None means without a head)."""
    same = (model.dtype, model.scan_layers) == (reader.dtype, reader.scan_layers)
    return same and (head is None or (head == "lm" and model.head in ("lm", "both")))


def _other(role: RoleConfig) -> str:
    """The role whose weights a role reads or follows."""
    return role.shares or (role.average.of if role.average is not None else "")


def _check_other(config: RunConfig, name: str, role: RoleConfig) -> None:
    """Checks that a role that reads or averages another's weights has no other settings, and the other has weights."""
    other, where = _other(role), f"roles.{name}.{'shares' if role.shares else 'average.of'}"
    if not other:
        return
    if other not in config.roles or other == name:
        known = [each for each in config.roles if each != name]
        raise ConfigError(
            f"{where}: must be another role. Got {brief(other)}. Roles: {', '.join(known)}.{did_you_mean(other, known)}"
        )
    source = config.roles[other]
    if not _has_model(source) or _other(source):
        raise ConfigError(f"{where}: must be a role with weights of its own. Got '{other}', which has none.")
    fields = ["model", "init", "optimizer", "lora", "average" if role.shares else "head"]
    if said := [field for field in fields if getattr(role, field) not in (None, RANDOM)]:
        raise ConfigError(
            f"roles.{name}: its weights are those of '{other}', with all that they are. Got also {', '.join(said)}. "
            "Remove it."
        )
    if role.shares and role.head == "lm" and source.head != "scalar":
        raise ConfigError(
            f"{where}: is for a second head beside that of '{other}'. Got lm, which '{other}' has itself: the role "
            f"would change with it. For its weights as they started, set roles.{name} to {{init: {other}}}."
        )
    if role.average is not None and source.optimizer is None:
        raise ConfigError(f"{where}: must be a role that is trained. Got '{other}', which has no optimizer.")


def _laid_over(stated: Mapping[str, Any], model: ModelConfig, where: str, source: str) -> ModelConfig:
    """The model of existing weights with the settings that a config may choose."""
    chosen = {field: value for field, value in stated.items() if field in CHOSEN}
    for field, value in stated.items():
        there = model.head_size if field == "head_dim" else getattr(model, field)
        if field == "max_position_embeddings" and value < there:
            chosen[field] = value  # the weights also serve for shorter sequences
        elif field not in CHOSEN and value != there and not (field == "head_dim" and value == 0):
            free = ", ".join([*CHOSEN, "a smaller max_position_embeddings"])
            raise ConfigError(
                f"{where}.model.{field}: must be that of {source}, {brief(there)}, since its weights start from there. "
                f"Got {brief(value)}. Leave it out (where a preset or a base config says it, set {where}.model to null "
                f"first); free to choose are {free}."
            )
    with errors_as(ConfigError, f"{where}.model."):
        return dataclasses.replace(model, **chosen)


def _has_model(role: RoleConfig) -> bool:
    return not role.function and role.weighted_sum is None


def _check_size(where: str, model: ModelConfig) -> None:
    """Checks that the sizes of a model are possible, before its shapes are computed."""
    for field, most in {"num_layers": 10_000, "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}.items():
        if getattr(model, field) > most:
            raise ConfigError(f"{where}.{field}: must be at most {most:,}. Got {getattr(model, field)}.")
    if num_parameters(model) > MAX_PARAMETERS:
        raise ConfigError(
            f"{where}: must have at most {MAX_PARAMETERS:,} parameters. Got {num_parameters(model):,}. Lower its sizes."
        )


def _check_sum(config: RunConfig, name: str, models: Mapping[str, ModelConfig]) -> None:
    """Checks that the parts of a sum are roles that score, and that it does not contain itself."""

    def visit(name: str, above: tuple[str, ...]) -> None:
        where = f"roles.{name}.weighted_sum"
        for part in config.roles[name].weighted_sum or {}:
            if part not in config.roles:
                raise ConfigError(
                    f"{where}: must be of roles of the run. Got {brief(part)}. Roles: {', '.join(config.roles)}."
                    f"{did_you_mean(part, config.roles)}"
                )
            if part in (*above, name):
                chain = " -> ".join((*above, name, part))
                raise ConfigError(f"{where}: roles must not add each other up in a circle. Got {chain}.")
            if part in models and models[part].head != "scalar":
                raise ConfigError(
                    f"{where}: must be of roles that score: functions, sums and models with a scalar head. Got "
                    f"{brief(part)}, a language model. Set roles.{part}.head to scalar, or leave it out."
                )
            visit(part, (*above, name))

    visit(name, ())
