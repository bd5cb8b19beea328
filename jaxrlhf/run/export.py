"""Export of a run's last weights: whole models in Hugging Face's format, adapters in PEFT's."""

import dataclasses
from typing import Any

import jax

from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.host_arrays import gather
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.models.adapter_files import save_adapters
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_sets import BASE
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.run_folder import RunFolder


def export(assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel) -> None:
    """Writes the roles that the config names, each to a folder of its name. Every process of a run must call it.

    Weights that started from a folder are written with that folder's settings and precision; random ones in their
    compute precision. The tokenizer is written to the same folder.
    """
    tokenizer = assembly.table.tokenizer
    for name in assembly.config.output.export:
        role = assembly.train.roles[name]
        assert isinstance(role, ModelRole)
        key, target = role.weights or name, folder.path / name
        params = _to_first(executor.weights.snapshot(key)[1], channel)
        if not channel.is_first:
            continue
        if role.lora is not None:
            save_adapters(params, role.model, role.lora, target, base=_base_folder(assembly, folder, role))
            tokenizer.export(target)
            continue
        model = role.model
        if model.head == "both":  # only the language model, without the critic on its trunk
            model = dataclasses.replace(model, head="lm")
            params = {key: value for key, value in params.items() if key != "value_head"}
        origin = assembly.origins.get(name)
        # float16 becomes float32, since weights trained in float32 may have left its range
        dtype = "bfloat16" if (origin.precision if origin else model.dtype) == "bfloat16" else "float32"
        save_params(params, model, target, dtype=dtype, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id, origin=origin)
        tokenizer.export(target)


def _base_folder(assembly: Assembly, folder: RunFolder, role: ModelRole) -> str:
    """The folder with the base weights of a role's adapters; empty if no file has them."""
    for name in assembly.config.output.export:
        other = assembly.train.roles[name]
        if isinstance(other, ModelRole) and other.weights == role.base:
            return str(folder.path.resolve() / name)
    init = assembly.config.roles[role.base.removesuffix(BASE)].init
    warmed = assembly.warm_start is not None and role.base == f"actor{BASE}"
    return init if init not in ("random", *assembly.config.roles) and not warmed else ""


def _to_first(params: Any, channel: Channel) -> Any:
    """Gathers the arrays in the first process, one weight at a time."""
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten([(gather([x], channel, channel.number()) or [None])[0] for x in leaves])
