"""From a config to its roles: their models, functions and sums, and whether they fit one another.

`roles` says what each kind of role can do.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrlhf.brief import brief
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import RoleConfig, RunConfig
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.models.adapter_files import check_adapters
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.huggingface import check_params
from jaxrlhf.models.huggingface import read_config as read_huggingface_config
from jaxrlhf.models.params import num_parameters
from jaxrlhf.runtime.roles import ModelRole, Role, WeightedSumRole
from jaxrlhf.runtime.scoring import function_role
from jaxrlhf.runtime.weight_sets import BASE
from jaxrlhf.suggest import did_you_mean

MAX_PARAMETERS = 10**14
"""What no model of any size has."""


def configured_models(config: RunConfig) -> dict[str, ModelConfig]:
    """Role -> model, with what comes from another role or from a checkpoint filled in.

    Raises:
        ConfigError or ValueError: A role has no model to take, or one that cannot be its own.
    """
    for name in config.roles:
        chain = [name]
        while (source := config.roles[chain[-1]].init) in config.roles:
            chain.append(source)
            if source in chain[:-1]:
                raise ConfigError(
                    f"roles.{name}.init: roles must not start from each other in a circle. Got {' -> '.join(chain)}."
                )

    def model_of(name: str) -> ModelConfig:
        role = config.roles[name]
        where = f"roles.{name}"
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
        if role.model is not None:
            model = role.model
            if role.head is not None and model.head not in ("lm", role.head):
                raise ConfigError(
                    f"{where}.head: must be that of its model, {model.head}. Got {role.head}. Say it once."
                )
        elif role.init in config.roles:
            model = model_of(role.init)
        elif role.init == "random":
            raise ConfigError(
                f"{where}: a role needs a model, a function, a weighted_sum, or an init to take its model from. Got "
                "none."
            )
        elif os.path.isdir(role.init):  # a Path would raise where the name is too long for any file
            return read_huggingface_config(Path(role.init), head=role.head or "lm")
        else:
            raise ConfigError(
                f"{where}.init: must be random, another role or a folder with a checkpoint. Got {brief(role.init)}. "
                f"Roles: {', '.join(config.roles)}.{did_you_mean(role.init, config.roles)}"
            )
        return model if role.head is None else dataclasses.replace(model, head=role.head)

    for name, role in config.roles.items():
        _check_other(config, name, role)
    models = {name: model_of(name) for name, role in config.roles.items() if _has_model(role)}
    for role in config.roles.values():  # a trunk gets the head that another role speaks by
        if role.shares and models[role.shares].head != (role.head or "scalar"):
            models[role.shares] = dataclasses.replace(models[role.shares], head="both")
    for name, role in config.roles.items():
        if other := _other(role):
            models[name] = models[other]
    for name, model in models.items():
        _check_size(f"roles.{name}.model", model)
    for name, model in models.items():
        if config.roles[name].init not in ("random", *config.roles):
            check_params(Path(config.roles[name].init), model)
    for name, model in models.items():
        source, lora = config.roles[name].init, config.roles[name].lora
        if lora is not None and lora.init:
            check_adapters(Path(lora.init), model, lora)
        if source in models and dataclasses.replace(models[source], head=model.head) != model:
            raise ConfigError(
                f"roles.{name}.model: must be that of '{source}' but for its head, since its weights start from "
                f"there. Got {model} and {models[source]}. Leave `model` out."
            )
    return models


def check_roles(config: RunConfig, needed: tuple[str, ...], models: Mapping[str, ModelConfig]) -> None:
    """Asks for the roles that an algorithm needs, each of them one kind of role, and sums of roles that score."""
    for name in needed:
        if name not in config.roles:
            raise ConfigError(
                f"roles: {config.algorithm} needs a role '{name}'. Got {', '.join(config.roles) or 'none'}."
                f"{did_you_mean(name, config.roles)}"
            )
    for name, role in config.roles.items():
        has_model = role.model is not None or role.optimizer is not None or role.init != "random" or bool(_other(role))
        said = {"function": bool(role.function), "weighted_sum": role.weighted_sum is not None, "a model": has_model}
        if sum(said.values()) > 1:
            got = " and ".join(what for what, is_said in said.items() if is_said)
            raise ConfigError(f"roles.{name}: a role is a function, a weighted_sum or a model. Got {got}. Keep one.")
        _check_sum(config, name, models)
    if config.warm_start is not None and "actor" not in models:
        raise ConfigError("warm_start: trains the role 'actor'. Got none with a model.")


def describe(name: str, role: ModelRole, roles: Mapping[str, RoleConfig]) -> str:
    """Where a role's weights come from, in words."""
    if role.view is not None:
        return f"shares {role.weights}"
    own = role.weights or roles[name].init
    if role.average is not None:
        own = f"average of {role.average.of}"
    if role.lora is None:
        return own
    base = f"rank {role.lora.rank} on {role.base}"
    if role.average is not None:
        return f"{base}, {own}"
    adapters = f"{role.lora.init}, " if role.lora.init else ""
    start = f" ({roles[name].init})" if role.base == name + BASE else ""
    return f"{adapters}{base}{start}"


def check_vocabulary(models: Mapping[str, ModelConfig], table: PromptTable) -> None:
    """Asks that every model has an embedding for every token."""
    for name, model in models.items():
        if table.tokenizer.vocab_size > model.vocab_size:
            raise ConfigError(
                f"roles.{name}.model.vocab_size: must hold the tokenizer's vocabulary, {table.tokenizer.vocab_size} "
                f"({table.tokenizer.name}). Got {model.vocab_size}. Raise it, or use another tokenizer."
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
        if _holds(models[base.removesuffix(BASE)], models[name].head):
            return dataclasses.replace(made, weights=base)  # what never changes needs no copy
    return made


def _base(name: str, roles: Mapping[str, RoleConfig], models: Mapping[str, ModelConfig]) -> str:
    """The set of weights that a role's adapters adapt: its own, or that of the adapted role which it starts from."""
    source = roles.get(roles[name].init)
    if source is not None and source.lora is not None:
        base = _base(roles[name].init, roles, models)
        if models[name].head == "scalar" or _holds(models[base.removesuffix(BASE)], "lm"):
            return base
    return name + BASE


def _holds(model: ModelConfig, head: Head) -> bool:
    """Whether the weights that a model's adapters adapt have a head."""
    return head == "lm" and model.head in ("lm", "both")


def _other(role: RoleConfig) -> str:
    """The role whose weights a role reads or follows."""
    return role.shares or (role.average.of if role.average is not None else "")


def _check_other(config: RunConfig, name: str, role: RoleConfig) -> None:
    """A role that reads or follows another's weights says no more than that, and the other has weights of its own."""
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
    said = {
        "model": role.model is not None,
        "init": role.init != "random",
        "optimizer": role.optimizer is not None,
        "lora": role.lora is not None,
        "average": bool(role.shares) and role.average is not None,
        "head": role.average is not None and role.head is not None,
    }
    if any(said.values()):
        got = ", ".join(field for field, is_said in said.items() if is_said)
        raise ConfigError(
            f"roles.{name}: its weights are those of '{other}', with all that they are. Got also {got}. Remove it."
        )
    if role.shares and role.head == "lm" and source.head != "scalar":
        raise ConfigError(
            f"{where}: is for a second head beside that of '{other}'. Got lm, which '{other}' has itself: the role "
            f"would change with it. For its weights as they started, set roles.{name} to {{init: {other}}}."
        )
    if role.average is not None and source.optimizer is None:
        raise ConfigError(f"{where}: must be a role that is trained. Got '{other}', which has no optimizer.")


def _has_model(role: RoleConfig) -> bool:
    return not role.function and role.weighted_sum is None


def _check_size(where: str, model: ModelConfig) -> None:
    """Sizes that some machine could hold, so that nobody waits for shapes which none can."""
    for field, most in {"num_layers": 10_000, "vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}.items():
        if getattr(model, field) > most:
            raise ConfigError(f"{where}.{field}: must be at most {most:,}. Got {getattr(model, field)}.")
    if num_parameters(model) > MAX_PARAMETERS:
        raise ConfigError(
            f"{where}: must have at most {MAX_PARAMETERS:,} parameters. Got {num_parameters(model):,}. Lower its sizes."
        )


def _check_sum(config: RunConfig, name: str, models: Mapping[str, ModelConfig]) -> None:
    """The parts of a sum are roles that score, none of them the sum itself."""

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
