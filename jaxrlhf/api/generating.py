"""Responses of a run's roles to prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from jaxrlhf.brief import brief
from jaxrlhf.configured.function_roles import decode_responses
from jaxrlhf.configured.sampling import resolved, samplings_of
from jaxrlhf.data.columns import with_columns
from jaxrlhf.data.examples import prompt_texts, read_example
from jaxrlhf.data.files import Row
from jaxrlhf.execution.executor import Executor
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Placement, resolve
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.step_draft import trace_step
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Strategy

COLUMNS = 16
"""Prompts are padded to a multiple of this number of columns, so that calls share programs."""


class SamplingKeys(TypedDict, total=False):
    """The fields of `Sampling`, all optional."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_tokens: Sequence[int]
    banned_tokens: Sequence[int]
    num_samples: int
    stop_ids: Sequence[int]
    stop_strings: Sequence[str]


def check_request(assembly: Assembly, prompts: Any, role: str, sampling: Mapping[str, Any]) -> Sampling:
    """The sampling of a request: greedy, and else that of training, with some fields replaced. Raises ValueError."""
    models = {name: x for name, x in assembly.train.roles.items() if isinstance(x, ModelRole)}
    speakers = [name for name, x in models.items() if (x.view or x.model.head) != "scalar"]
    if role not in speakers:
        known = ", ".join(speakers) or "none"
        raise ValueError(f"generate: role must have a language model. Got {brief(role)}. Such roles: {known}.")
    if isinstance(prompts, str):
        raise ValueError(f"generate: prompts must be a list. Got {brief(prompts)}. Write [{brief(prompts)}].")
    as_trained = next(iter(samplings_of(assembly.config.settings)), Sampling())
    fields = [field.name for field in dataclasses.fields(Sampling)]
    if unknown := [name for name in sampling if name not in fields]:
        raise ValueError(f"generate: sampling has {', '.join(fields)}. Got {brief(unknown[0])}.")
    greedy: dict[str, Any] = {"temperature": 0.0, "num_samples": 1, "min_new_tokens": 0}
    return resolved(dataclasses.replace(as_trained, **greedy | dict(sampling)), assembly.table.tokenizer)


def responses(
    assembly: Assembly, executor: Executor, prompts: Sequence[str | Mapping[str, Any]], *, role: str, seed: int,
    sampling: Sampling,
) -> list[str]:  # fmt: skip
    """The texts of responses, `num_samples` consecutive ones for each prompt. Raises ValueError for invalid prompts."""
    models = {name: x.model for name, x in assembly.train.roles.items() if isinstance(x, ModelRole)}
    devices = mesh.num_devices()
    batch = _batch(assembly, prompts, rows=len(prompts) + -len(prompts) % devices)
    prompt, new, most = batch.tokens.shape[1], sampling.max_new_tokens, models[role].max_position_embeddings
    if prompt + new > most:
        raise ValueError(
            f"generate: prompt and response must fit into max_position_embeddings={most} of '{role}'. Got {prompt} "
            f"+ {new} tokens. Shorten the prompts, or lower max_new_tokens."
        )
    graph = trace_step(_step, assembly.train.roles, (), batch, (role, sampling))
    plan = resolve(graph, Placement(tuple(range(devices)), Strategy(data=devices)))
    check(plan, graph, models, devices, mesh.devices_per_process())
    rollout = executor.run(graph, plan, (), batch, step=seed, phase="generate").fetch()["rollout"]
    return decode_responses(rollout, assembly.table)[: len(prompts) * sampling.num_samples]


def _step(roles: Any, state: Any, prompts: Prompts, settings: tuple[str, Sampling]) -> tuple[dict, Any]:
    role, sampling = settings
    return {"rollout": getattr(roles, role).generate(prompts, sampling)}, state


def _batch(assembly: Assembly, prompts: Sequence[str | Mapping[str, Any]], *, rows: int) -> Prompts:
    """A batch of `rows` prompts, made like those of the run's own rows; the first ones are repeated."""
    table = assembly.table
    config, beginning = table.config, list[int]()
    if config.text_column:  # the model goes on with texts
        config = dataclasses.replace(config, text_column="", prompt_column=config.text_column)
        beginning = table.tokenizer.beginning
    columns = [dict(x) if isinstance(x, Mapping) else {config.prompt_column: x} for x in prompts]
    given = [with_columns(Row(f"prompts[{i}]", each), config) for i, each in enumerate(columns)]
    examples = [read_example(row, config) for row in given]
    texts = prompt_texts(examples, config, table.tokenizer)
    encoded = [table.tokenizer.encode(text.marked, mark=text.mark) for text in texts]
    tokens = [np.asarray([*beginning, *ids], np.int32) for ids in encoded]
    length = max(map(len, tokens))
    shown = dataclasses.replace(table, tokens=tokens, prompt_length=length + -length % COLUMNS)
    return shown.batch(np.arange(rows) % len(prompts), np.arange(rows, dtype=np.uint32))
