"""Export of a run's weights: whole models in Hugging Face's format, adapters in PEFT's or merged into a whole model.

    <run>/<role>                     after the last step
    <run>/exports/<steps>/<role>     every `output.export_every` steps

A folder gets its name when all of it is there. The name of one whose writer was killed begins with a dot.
"""

import dataclasses
from pathlib import Path
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
from jaxrlhf.writing import begin_folder, finish_folder, partial_folder


def export(assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel) -> None:
    """Writes the roles that the config names, each to a folder of its name. Every process of a run must call it.

    Weights that started from a folder are written with that folder's settings and precision; random ones in their
    compute precision. The tokenizer is written to the same folder. Weights pass through host memory a few megabytes at
    a time; the arrays on the devices are read where they lie.
    """
    for name in assembly.config.output.export:
        _export_alone(assembly, executor, folder, channel, name)


def is_due(assembly: Assembly, done: int) -> bool:
    """Returns whether weights are to be exported after `done` steps, beside the export at the end."""
    every = assembly.config.output.export_every
    return bool(every) and done % every == 0


def export_step(assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel, done: int) -> None:
    """Writes the weights after `done` steps: the roles of `export` that change, together under the number of steps.
    Those that never change are where the end of the run leaves them, from the first time on."""
    target = folder.exports / str(done)
    channel.share(lambda: begin_folder(target))
    for name in assembly.config.output.export:
        role = assembly.train.roles[name]
        assert isinstance(role, ModelRole)
        if executor.weights.sets[role.weights or name].rests_in_float32:
            _export_role(assembly, executor, folder, channel, name, partial_folder(target) / name)
        elif not channel.share((folder.path / name).exists):
            _export_alone(assembly, executor, folder, channel, name)
    channel.share(lambda: finish_folder(target))


def export_to(
    assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel, name: str, target: Path,
    *, merge_adapters: bool | None = None,
) -> None:  # fmt: skip
    """Writes the present weights of one role to a folder. `merge_adapters` None means as in the config."""
    channel.share(lambda: begin_folder(target))
    _export_role(assembly, executor, folder, channel, name, partial_folder(target), merge_adapters=merge_adapters)
    channel.share(lambda: finish_folder(target))


def _export_alone(assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel, name: str) -> None:
    export_to(assembly, executor, folder, channel, name, folder.path / name)


def _export_role(
    assembly: Assembly, executor: Executor, folder: RunFolder, channel: Channel, name: str, target: Path,
    *, merge_adapters: bool | None = None,
) -> None:  # fmt: skip
    role, tokenizer = assembly.train.roles[name], assembly.table.tokenizer
    assert isinstance(role, ModelRole)
    weights, model = executor.weights, role.model
    own = role.weights or name
    merges = assembly.config.output.merge_adapters if merge_adapters is None else merge_adapters
    is_merged = role.lora is not None and merges
    if is_merged:
        params, _ = weights.for_inference(name, weights.home(own), layers="list", merged=True)
    else:
        params = weights.resting(own)
    if role.lora is not None and not is_merged:
        lora, base = role.lora, _base_folder(assembly, folder, role)
        adapters = _to_first(params, channel)
        channel.share(lambda: save_adapters(adapters, model, lora, target, base=base))
    else:
        if model.head == "both":  # only the language model, without the critic on its trunk
            model = dataclasses.replace(model, head="lm")
        origin = assembly.origins.get(name)
        # float16 becomes float32, since weights trained in float32 may have left its range
        dtype = "bfloat16" if (origin.precision if origin else model.dtype) == "bfloat16" else "float32"
        save_params(
            params, model, target, dtype=dtype, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id, origin=origin,
            processes=channel,
        )  # fmt: skip
    channel.share(lambda: tokenizer.export(target))


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
