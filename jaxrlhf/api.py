"""Runs from Python, as in a notebook: `jaxrlhf.train` and the run that it returns."""

import dataclasses
import functools
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.brief import brief
from jaxrlhf.config.algorithm_loading import for_another_algorithm
from jaxrlhf.config.reading import Tree, merge, read_config
from jaxrlhf.config.schema import EvaluationRunConfig, OutputConfig, RunConfig, build_run
from jaxrlhf.configured.function_roles import decode_responses
from jaxrlhf.configured.sampling import resolved, samplings_of
from jaxrlhf.data.columns import with_columns
from jaxrlhf.data.examples import prompt_texts, read_example
from jaxrlhf.data.files import Row
from jaxrlhf.execution.executor import Executor
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.importing import name_of
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Placement, resolve
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.require import errors_as
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.step_draft import trace_step
from jaxrlhf.run.trainer import Outcome
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.train import InputError, execute, prepare

Rows = Sequence[Mapping[str, Any]]
COLUMNS = 16
"""Prompts of `generate` are padded to a multiple of this number of columns, so that calls share programs."""


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    data: str | os.PathLike[str] | Rows | Mapping[str, Any] | None = None,
    reward: Callable[..., Sequence[float]] | None = None,
    quiet: bool = False,
    more: Mapping[str, Any],
) -> "TrainedRun":
    """Executes the run of a config; see `jaxrlhf.train`."""
    notes: list[str] = []
    tree, where = _tree(config, more, notes)
    if data is not None:
        tree["data"] = _data(tree, data)
    if reward is not None:
        tree["roles"] = {**(tree.get("roles") or {}), "reward": {"function": reward}}
    tree = _with_names(tree)
    _write_rows(tree)
    with errors_as(InputError):
        run_config = build_run(tree, where=where, notes=notes)
    console = Console(quiet=quiet)
    run = prepare(run_config, console)
    return TrainedRun(run.assembly, execute(run, console))


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A finished run, with its last weights on the devices."""

    assembly: Assembly
    outcome: Outcome

    def __repr__(self) -> str:
        last = f", last reward {self.rewards[-1]:.3g}" if self.rewards else ""
        return f"<run of {self.outcome.steps} steps of {self.config.algorithm} in {self.folder}{last}>"

    @property
    def folder(self) -> Path:
        """The folder of the run: metrics, samples, checkpoints, timeline, exports."""
        return self.outcome.folder.path

    @property
    def config(self) -> RunConfig:
        """The config of the run, with all defaults."""
        return self.assembly.config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step and evaluation, in order: `pandas.DataFrame(run.metrics)` is their table."""
        return read_metrics(self.outcome.folder.metrics)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The mean score of every step."""
        return self.outcome.rewards

    def generate(
        self, prompts: Sequence[str | Mapping[str, Any]], *, role: str = "actor", seed: int = 0, **sampling: Any
    ) -> list[str]:
        """Responses of a role to prompts, greedy by default.

        Args:
            prompts: Texts for `data.prompt_column`; or whole rows, for a `data.template` over other columns and for
                lists of messages.
            role: A role with a language model.
            seed: The seed of the noise.
            sampling: Fields of `Sampling`: temperature, max_new_tokens, num_samples ... Others are those of training.

        Returns:
            The texts, `num_samples` consecutive ones for each prompt.

        Raises:
            ValueError: A prompt is too long or not a valid row of the run, or the role has no language model.
        """
        models = {name: x for name, x in self.assembly.train.roles.items() if isinstance(x, ModelRole)}
        speakers = [name for name, x in models.items() if (x.view or x.model.head) != "scalar"]
        if role not in speakers:
            known = ", ".join(speakers) or "none"
            raise ValueError(f"generate: role must have a language model. Got {brief(role)}. Such roles: {known}.")
        if isinstance(prompts, str):
            raise ValueError(f"generate: prompts must be a list. Got {brief(prompts)}. Write [{brief(prompts)}].")
        if not prompts:
            return []
        settings, devices = self._sampling(sampling), mesh.num_devices()
        batch = self._batch(prompts, rows=len(prompts) + -len(prompts) % devices)
        prompt, new, most = batch.tokens.shape[1], settings.max_new_tokens, models[role].model.max_position_embeddings
        if prompt + new > most:
            raise ValueError(
                f"generate: prompt and response must fit into max_position_embeddings={most} of '{role}'. Got {prompt} "
                f"+ {new} tokens. Shorten the prompts, or lower max_new_tokens."
            )
        graph = trace_step(_generate_step, self.assembly.train.roles, (), batch, (role, settings))
        plan = resolve(graph, Placement(tuple(range(devices)), Strategy(data=devices)))
        check(plan, graph, {name: x.model for name, x in models.items()}, devices, mesh.devices_per_process())
        rollout = self._executor.run(graph, plan, (), batch, step=seed, phase="generate").fetch()["rollout"]
        return decode_responses(rollout, self.assembly.table)[: len(prompts) * settings.num_samples]

    @functools.cached_property
    def _executor(self) -> Executor:
        """Runs calls on the last weights of the run, until this object is collected."""
        executor = Executor(self.assembly.train.roles, seed=self.config.seed, weights=self.outcome.weights)
        weakref.finalize(self, executor.close)  # ends its threads, which would keep it alive
        return executor

    def _sampling(self, wanted: Mapping[str, Any]) -> Sampling:
        """The sampling of training, but greedy, with the wanted fields."""
        as_trained = next(iter(samplings_of(self.config.settings)), Sampling())
        fields = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := [name for name in wanted if name not in fields]:
            raise ValueError(f"generate: sampling has {', '.join(fields)}. Got {brief(unknown[0])}.")
        greedy: dict[str, Any] = {"temperature": 0.0, "num_samples": 1, "min_new_tokens": 0}
        sampling = dataclasses.replace(as_trained, **greedy | dict(wanted))
        return resolved(sampling, self.assembly.table.tokenizer)

    def _batch(self, prompts: Sequence[str | Mapping[str, Any]], *, rows: int) -> Prompts:
        """A batch of `rows` prompts, made like those of the run's own rows; the first ones are repeated."""
        table = self.assembly.table
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


def _generate_step(roles: Any, state: Any, prompts: Prompts, settings: tuple[str, Sampling]) -> tuple[dict, Any]:
    role, sampling = settings
    return {"rollout": getattr(roles, role).generate(prompts, sampling)}, state


def _tree(
    config: str | os.PathLike[str] | Mapping[str, Any], more: Mapping[str, Any], notes: list[str]
) -> tuple[Tree, str]:
    """The tree of a config with more keys, merged over its base, and its name for error messages."""
    above = dict(config) if isinstance(config, Mapping) else {"base": os.fspath(config)}
    base = above.pop("base", None)
    above = _with_names(merge(above, dict(more)))
    if base is None:
        return above, "config"
    adapt = functools.partial(for_another_algorithm, notes=notes)
    below, where = read_config(base, adapt=adapt)
    return merge(adapt(below, above, where), above), f"{where} with other keys" if above else where


def _data(tree: Mapping[str, Any], data: Any) -> Tree:
    """The `data` of a config with other rows. Of rows in a list, as many are held out as the evaluation needs."""
    given = dict(data) if isinstance(data, Mapping) else {"path": data}
    if "path" not in given:
        return {**(tree.get("data") or {}), **given}
    if not isinstance(given["path"], str | os.PathLike) and not {"eval_rows", "eval_path"} & given.keys():
        evaluation = tree.get("evaluation")
        num = EvaluationRunConfig().num_prompts
        given["eval_rows"] = evaluation.get("num_prompts", num) if isinstance(evaluation, Mapping) else 0
    return {key: x for key, x in (tree.get("data") or {}).items() if key not in ("task", "eval_path")} | given


def _with_names(value: Any) -> Any:
    """Plain data with functions and paths in it replaced by their names."""
    if isinstance(value, Mapping):
        return {key: _with_names(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return name_of(value) if callable(value) else value


def _write_rows(tree: Tree) -> None:
    """Writes rows in lists to files, so that the run can be resumed."""
    output = tree.get("output") or {}
    folder = Path(output.get("folder", OutputConfig().folder)) / "rows"
    for name, data in {"data": tree.get("data"), **(tree.get("datasets") or {})}.items():
        for key in ("path", "eval_path"):
            rows = data.get(key) if isinstance(data, dict) else None
            if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(x, Mapping) for x in rows):
                continue
            where = f"{name}.{key}"
            try:
                text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
            except (TypeError, ValueError) as error:
                raise InputError(f"{where}: rows must be plain data, as in JSON. Got {error}.") from error
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
            data[key] = str(folder / f"{digest}.jsonl")
            Path(data[key]).write_text(text, encoding="utf-8")
