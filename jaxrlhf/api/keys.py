"""The keywords of a run in Python, which are the keys of a config, with their types."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.config.plan_config import PlanConfig
from jaxrlhf.config.schema import (
    EvaluationRunConfig,
    MemoryLimits,
    OptimizerConfig,
    OutputConfig,
    RoleConfig,
    RunConfig,
    StalenessConfig,
    WarmStartConfig,
)
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import ModelConfig

F = TypeVar("F", bound=Callable[..., Any])
Keys = Mapping[str, Any]
PathText = str | os.PathLike[str]
Config = PathText | Keys | RunConfig
"""The name of a shipped config, a YAML file, a mapping, or a config that was read."""
Rows = Sequence[Keys]


class RunKeys(TypedDict, total=False):
    """The keys of a config, all optional: what is left out is as in the config that they are laid over.

    A section can be a mapping, whose keys are laid over those of the config, or a dataclass, which replaces it whole.
    """

    name: str
    """The run's folder is `<name>-<time>`. Without a config, the name of the algorithm."""
    algorithm: str | Callable[..., Any] | Algorithm
    """A name, a step function `(roles, state, data, config) -> (results, state)`, or an `Algorithm`."""
    model: PathText | ModelConfig | Keys
    """The first model of the actor and of the roles that follow it: a folder in Hugging Face's format; or a preset's
    name or sizes, with random weights."""
    data: Any
    """Rows: a list of dicts, a file, a pandas DataFrame, a Hugging Face `Dataset` or `DatasetDict`; or the keys of
    `data`, of which `path` and `eval_path` can be rows."""
    reward: Callable[..., Sequence[float]] | PathText | RoleConfig | Keys
    """The role `reward`: a function `f(prompts, completions, **columns) -> list[float]`, the name of one, the folder of
    a reward model, or a role."""
    roles: Mapping[str, RoleConfig | Keys | None]
    steps: int
    batch_size: int
    """Prompts in a step, over all devices."""
    sampling: Sampling | Keys
    """`settings.sampling`, of the algorithm."""
    optimizer: OptimizerConfig | Keys
    """The optimizer of every role that is trained."""
    settings: Any
    """Settings of the algorithm: a mapping, or its own dataclass."""
    devices: str
    """`auto`, or `cpu:8`: the CPU appears as 8 devices."""
    devices_memory: str | MemoryLimits | Keys
    plan: PathText | PlanConfig | Keys
    """`auto`; a placement method, `interleaving`; the file of a plan; or call -> placement, as a line or a mapping:
    `{"actor.train": "fsdp 2 x tensor 2 on 0-3"}`."""
    evaluation: EvaluationRunConfig | Keys | None
    warm_start: WarmStartConfig | Keys | None
    staleness: int | StalenessConfig | Keys
    tokenizer: TokenizerConfig | Keys
    datasets: Mapping[str, DataConfig | Any]
    output: OutputConfig | Keys
    resume: PathText
    """`never`, `auto`, the folder of a run, or a checkpoint."""
    seed: int
    compilation_cache: PathText


class _Default:
    """The default of a key in signatures."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"


def with_keys(function: F) -> F:
    """A decorator that spells out `**keys: Unpack[RunKeys]` in a signature, so that a notebook completes the keys."""
    return spelled_out(function, RunKeys, "as in the config")


def spelled_out(function: F, keys: type[Any], default_text: str) -> F:
    """A function whose signature has the keys of a `TypedDict` in place of its last parameter, which takes them."""
    signature = inspect.signature(function)
    hints, default = get_type_hints(keys), _Default(default_text)
    named = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    taken = [inspect.Parameter(name, kind, default=default, annotation=hint) for name, hint in hints.items()]
    own = [x for x in named if x.kind is kind]
    shown = [*(x for x in named if x not in own), *(x for x in taken if x.name not in {y.name for y in own}), *own]
    function.__signature__ = signature.replace(parameters=shown)  # pyright: ignore[reportFunctionMemberAccess]
    return function
