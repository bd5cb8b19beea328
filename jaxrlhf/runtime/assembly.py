"""From a config to everything a run needs: data, roles, graphs, plans. All is checked here, and nothing is compiled.

A run has up to four graphs over the same roles: the warm start, the algorithm's step, the evaluation by samples, and
what the algorithm measures on held-out rows.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.algorithms.evaluation import EvaluationConfig, evaluation_step
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_state, sft_step
from jaxrlhf.brief import brief
from jaxrlhf.call_graph import CallGraph, GraphError
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import EvaluationRunConfig, PlacementConfig, RoleConfig, RunConfig, load_algorithm
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.importing import failure
from jaxrlhf.models.attention import attention_implementation
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import declare_adapters
from jaxrlhf.models.params import Weight, num_parameters
from jaxrlhf.planner.device_order import reuse_training_shards, training_placements
from jaxrlhf.planner.fusion import check_fusion, fusion_notes, oppose
from jaxrlhf.planner.plan import (
    DEFAULT,
    Placement,
    Plan,
    check,
    check_computes,
    check_names,
    check_offload,
    resolve,
    stage_warnings,
)
from jaxrlhf.planner.row_keys import RowKeys, count_keys
from jaxrlhf.runtime.configured_roles import check_roles, check_vocabulary, configured_models, describe, make_role
from jaxrlhf.runtime.metrics import check_results
from jaxrlhf.runtime.roles import FunctionRole, ModelRole, Role, WeightedSumRole
from jaxrlhf.runtime.step_rows import StepRows, Tables, check_rows, load_tables
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.suggest import did_you_mean
from jaxrlhf.tracing import trace

MAX_BATCH_TOKENS = 2**28
"""What no run of any size reaches."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A step function ready to run: traced and planned."""

    roles: Mapping[str, Role]
    graph: CallGraph
    plan: Plan
    first_state: Any


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A run, before it starts."""

    config: RunConfig
    tables: Tables
    loader: PromptLoader
    train: Phase
    train_rows: StepRows
    """Step -> the rows that it is given."""
    warm_start: Phase | None
    evaluation: Phase | None
    """Samples of the actor, scored."""
    eval_batches: tuple[Prompts, ...]
    held_out: Phase | None
    """What the algorithm measures on held-out rows."""
    held_out_batches: tuple[Any, ...]
    best_by: str
    """The metric by which the best checkpoint is chosen, without `eval/`. Empty: by none."""
    warnings: tuple[str, ...]

    @property
    def table(self) -> PromptTable:
        """The rows of `data`."""
        return self.tables.main

    @property
    def phases(self) -> dict[str, Phase]:
        """In the order in which they run first."""
        named = {
            "warm start": self.warm_start,
            "evaluation": self.evaluation,
            "held-out rows": self.held_out,
            "step": self.train,
        }
        return {name: phase for name, phase in named.items() if phase is not None}

    def role_rows(self) -> list[dict[str, Any]]:
        """What plays each role, as a table."""
        rows = []
        for name, role in self.train.roles.items():
            config = self.config.roles[name]
            if isinstance(role, WeightedSumRole):
                sum_of = " + ".join(f"{weight:g} x {part}" for part, weight in role.weights.items())
                rows.append({"role": name, "what": sum_of})
                continue
            if isinstance(role, FunctionRole):
                options = "".join(f", {key}={value}" for key, value in config.options.items())
                rows.append({"role": name, "what": f"function {config.function}{options}"})
                continue
            model = role.model
            rows.append(
                {
                    "role": name,
                    "what": f"model, {_head(role)}",
                    "parameters": _num_parameters(role),
                    "precision": model.dtype,
                    "attention": ", ".join(sorted(self.attention(name, model))),
                    "starts from": describe(name, role, self.config.roles),
                    "updates": role.num_updates,
                }
            )
        return rows

    def attention(self, role: str, model: ModelConfig) -> set[str]:
        """The implementations of attention that a role's calls use."""
        placements = [p.plan[call] for p in self.phases.values() for call in p.graph.calls if call.role == role]
        layouts = [Layout.over(placement.devices, placement.strategy) for placement in placements]
        try:
            return {attention_implementation(model, layout) for layout in layouts}
        except ValueError as error:
            raise ConfigError(f"roles.{role}.model.{error}") from error


def assemble(
    config: RunConfig, num_devices: int, devices_per_node: int | None = None, *, tables: Tables | None = None
) -> Assembly:
    """Everything that a run needs.

    Args:
        num_devices: How many devices the plan may use.
        devices_per_node: How many of them each node has. None: all are in one.
        tables: The rows of its data. None: they are read.

    Raises:
        ConfigError, PlanError, GraphError or ValueError: Something in config, data or plan does not fit. Each says
            where, which rule, what it got and what to do.
    """
    algorithm = load_algorithm(config.algorithm)
    tables = tables or load_tables(config)
    table = tables.main
    settings = _with_stop_ids(config.settings, table.tokenizer.end_id)
    for sampling in _samplings((settings, config.evaluation)):
        _check_stop_ids(sampling, table)
    models = configured_models(config)
    check_roles(config, algorithm.roles, models)
    check_vocabulary(models, table)
    train_rows = StepRows(algorithm.data(settings), tables, config.batch_size, config.seed)
    measures = config.evaluation is not None and algorithm.evaluation is not None
    warnings = _warnings(config, table) + check_rows(train_rows, config, held_out=measures)
    new_tokens = max([s.max_new_tokens for s in _samplings(settings)] + [train_rows.max_new_tokens]) or 128
    _check_batches(config, train_rows, new_tokens)
    loader = PromptLoader(table, config.batch_size, config.seed)
    written = _written_plan(config.placements, num_devices)
    owners = [name for name in models if not config.roles[name].shares]
    check_offload(config.offload, config.roles, owners)

    def phase(
        step: Callable[..., Any],
        roles: Mapping[str, Role],
        state: Any,
        data: Any,
        phase_settings: Any,
        row_keys: RowKeys,
        trained: Mapping[str, Placement] | None = None,
        fuse: tuple[str, ...] = (),
    ) -> Phase:
        methods = {name: role.methods(name) for name, role in roles.items()}
        state = jax.tree.map(lambda x: np.asarray(jnp.asarray(x)), state)  # on the host: no device is chosen yet
        graph = trace(step, methods, state, data, phase_settings)
        plan = resolve(written, graph, config.offload, fuse)
        check(plan, graph, models, num_devices, devices_per_node, row_keys)
        check_fusion(plan, graph)
        plan = oppose(plan, graph)
        where = training_placements(plan, graph) if trained is None else trained
        plan = reuse_training_shards(plan, graph, where, devices_per_node or num_devices)
        return Phase(roles, graph, plan, state)

    roles: dict[str, Role] = {name: make_role(name, config.roles, models, table) for name in config.roles}
    counts = count_keys(settings, {rows.count for rows in train_rows.named.values()} - {0, config.batch_size})
    keys = RowKeys("the step", counts=counts, settings=settings)
    train = phase(
        algorithm.step, roles, _first_state(algorithm, settings), train_rows(0), settings, keys, fuse=config.fuse
    )
    check_results(getattr(algorithm.step, "__name__", "step"), train.graph.results[0])
    train = dataclasses.replace(train, roles=_count_updates(train, config.steps))

    warm_start = None
    if config.warm_start is not None:
        warm = config.warm_start
        left_out = table.num_train - len(table.demonstrable(new_tokens))
        if warm.overlong == "error" or left_out == table.num_train:
            table.check_demonstrations(max_new_tokens=new_tokens, key="warm_start.overlong")
        elif left_out:
            warnings.append(
                f"{left_out} of {table.num_train} completions do not fit into {new_tokens} tokens: no warm start on "
                "them."
            )
        rows = loader.demonstrations(0, warm.batch_size * warm.updates_per_step, new_tokens)
        actor: dict[str, Role] = {"actor": ModelRole(models["actor"], warm.optimizer, warm.steps)}
        sft = SFTConfig(update=SupervisedUpdate(mini_batches=warm.updates_per_step))
        keys = RowKeys("the warm start", "warm_start.batch_size")
        warm_start = phase(sft_step, actor, sft_state(sft), rows, sft, keys)

    trained = training_placements(train.plan, train.graph)  # so that evaluations generate where the step does
    eval_size, eval_key = 0, "evaluation.num_prompts"
    if config.evaluation is not None:
        eval_size = config.evaluation.batch_size or config.evaluation.num_prompts
        eval_key = "evaluation.batch_size" if config.evaluation.batch_size else eval_key
    evaluation, eval_batches = None, ()
    if config.evaluation is not None and config.evaluation.scorers:
        if "actor" not in config.roles:
            raise ConfigError(
                f"evaluation.scorers: must be [] where no actor samples, as under {config.algorithm}. Got "
                f"[{', '.join(config.evaluation.scorers)}], and [reward] is the default. "
                + ("Write `scorers: []`." if measures else "Leave evaluation out.")
            )
        eval_config = _evaluation_config(config.evaluation, settings, new_tokens, table.tokenizer.end_id, config.roles)
        eval_batches = tuple(PromptLoader(table, eval_size, config.seed).eval_batches(config.evaluation.num_prompts))
        keys = RowKeys("the evaluation", eval_key)
        evaluation = phase(evaluation_step, train.roles, (), eval_batches[0], eval_config, keys, trained)
    held_out, held_out_batches = None, ()
    if config.evaluation is not None and algorithm.evaluation is not None:
        held_out_batches = train_rows.held_out(config.evaluation.num_prompts, eval_size)
        state = _first_state(algorithm, settings)
        keys = RowKeys("the evaluation", eval_key)
        held_out = phase(algorithm.evaluation, train.roles, state, held_out_batches[0], settings, keys, trained)
    best_by = _best_by(config.evaluation, held_out) if config.evaluation is not None else ""

    made = Assembly(
        config, tables, loader, train, train_rows, warm_start, evaluation, eval_batches, held_out, held_out_batches,
        best_by, tuple(warnings),
    )  # fmt: skip
    graphs = [p.graph for p in made.phases.values()]
    check_names(config.placements, graphs)
    check_computes({name: written[name] for name in config.placements if name != DEFAULT}, graphs)
    waits = [warning for p in made.phases.values() for warning in stage_warnings(p.plan, p.graph)]
    waits += fusion_notes(train.plan, train.graph)
    made = dataclasses.replace(made, warnings=(*made.warnings, *dict.fromkeys(waits)))
    _check_length(made, models)
    for name, model in models.items():
        made.attention(name, model)
    for name in config.output.export:
        if name not in owners:
            raise ConfigError(
                f"output.export: must be roles with weights of their own. Got {brief(name)}. Known: "
                f"{', '.join(owners)}."
            )
    return made


def _head(role: ModelRole) -> str:
    """Which heads a role speaks by, in words."""
    head = role.view or role.model.head
    return "lm and scalar heads" if head == "both" else f"{head} head"


def _first_state(algorithm: Algorithm, settings: Any) -> Any:
    """What the first step is given.

    Raises:
        GraphError: The algorithm's function fails.
    """
    name = getattr(algorithm.step, "__name__", "step")
    try:
        return algorithm.init_state(settings)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(
            f"{name}: its init_state must give the first state. Got {failure(error, algorithm.init_state)}. Its only "
            f"argument is the settings, here {type(settings).__name__}: write `def init_state(config): ...`."
        ) from error


def _num_parameters(role: ModelRole) -> str:
    """How many numbers a role's weights hold, and of those of its adapters how many are trained."""
    if role.view is not None:
        return f"those of {role.weights}"
    whole = f"{num_parameters(role.model):,}"
    if role.lora is None:
        return whole
    adapters = jax.tree.leaves(declare_adapters(role.model, role.lora), is_leaf=lambda x: isinstance(x, Weight))
    return f"{whole}, trained {sum(w.size for w in adapters):,}"


def parse_devices(text: str, where: str) -> tuple[int, ...]:
    """Positions of devices: '0-3', '3,2,1,0', '0-1,4-5'. At most four digits each.

    Raises:
        ConfigError: Anything else.
    """
    devices: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if last < first:
            raise ConfigError(f"{where}: must be positions of devices, such as '0-3' or '3,2,1,0'. Got {brief(text)}.")
        devices.extend(range(first, last + 1))
    return tuple(devices)


def _written_plan(plan: Mapping[str, PlacementConfig], num_devices: int) -> dict[str, Placement]:
    written = {DEFAULT: Placement(tuple(range(num_devices)), Strategy(data=num_devices))}
    for name, entry in plan.items():
        try:
            strategy = Strategy(
                data=entry.data, fsdp=entry.fsdp, tensor=entry.tensor, pipeline=entry.pipeline,
                chunks=entry.chunks, schedule=entry.schedule,
                micro_batches=entry.micro_batches, remat=entry.remat, balance=entry.balance,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"plan.{name}.{error}") from error
        devices = tuple(range(min(strategy.num_devices, num_devices + 1)))  # one too many is refused below
        if entry.devices:
            devices = parse_devices(entry.devices, f"plan.{name}.devices")
        written[name] = Placement(devices, strategy, entry.protocol)
    return written


def _check_batches(config: RunConfig, train_rows: StepRows, new_tokens: int) -> None:
    """Batches that the host could hold, before the first one is made."""
    rows = {"batch_size": max(map(train_rows.size, train_rows.named.values()))}
    if config.warm_start is not None:
        rows["warm_start.batch_size"] = config.warm_start.batch_size * config.warm_start.updates_per_step
    if config.evaluation is not None:
        rows["evaluation.num_prompts"] = config.evaluation.num_prompts
        new_tokens = max([new_tokens, *(sampling.max_new_tokens for sampling in _samplings(config.evaluation))])
    tables = train_rows.tables
    prompt_length = max(table.prompt_length for table in (tables.main, *tables.more.values()))
    for where, num_rows in rows.items():
        if num_rows * (prompt_length + new_tokens) > MAX_BATCH_TOKENS:
            raise ConfigError(
                f"{where}: rows x (prompt + response) must be at most {MAX_BATCH_TOKENS:,} tokens. Got {num_rows} x "
                f"({prompt_length} + {new_tokens}). Lower it, data.max_prompt_tokens or max_new_tokens."
            )


def _check_length(made: Assembly, models: Mapping[str, ModelConfig]) -> None:
    """No call of any phase sees longer sequences than its model holds."""
    calls = [call for phase in made.phases.values() for call in phase.graph.calls if call.role in models]
    for call in calls:
        model = models[call.role or ""]
        columns = [ref.shape[1] for ref in (*call.refs, *call.output_refs) if ref.has_rows and ref.ndim == 2]
        longest, prompt = max(columns, default=0), made.table.prompt_length
        if longest > model.max_position_embeddings:
            raise ConfigError(
                f"roles.{call.role}.model.max_position_embeddings: must hold prompt and response, {prompt} + "
                f"{longest - prompt} tokens in {call.name}. Got {model.max_position_embeddings}. Lower "
                "data.max_prompt_tokens or max_new_tokens."
            )


def _count_updates(phase: Phase, steps: int) -> dict[str, Role]:
    """The roles, each knowing how many updates the whole run will make of it."""
    updates: dict[str, int] = {}
    for call in phase.graph.calls:
        if call.kind == "train" and call.role is not None:
            settings = call.update
            updates[call.role] = updates.get(call.role, 0) + steps * settings.mini_batches * settings.epochs
    return {
        name: dataclasses.replace(role, num_updates=updates.get(name, 0)) if isinstance(role, ModelRole) else role
        for name, role in phase.roles.items()
    }


def _with_stop_ids(settings: Any, end_id: int) -> Any:
    """Settings in which every `Sampling` without stop tokens stops at the end of text."""
    if isinstance(settings, Sampling):
        return settings if settings.stop_ids else dataclasses.replace(settings, stop_ids=(end_id,))
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return settings
    changed = {
        f.name: _with_stop_ids(getattr(settings, f.name), end_id) for f in dataclasses.fields(settings) if f.init
    }
    return dataclasses.replace(settings, **changed)


def _check_stop_ids(sampling: Sampling, table: PromptTable) -> None:
    for token in sampling.stop_ids:
        if not 0 <= token < table.tokenizer.vocab_size:
            raise ConfigError(
                f"sampling.stop_ids: must be tokens of the vocabulary ({table.tokenizer.name}), 0 to "
                f"{table.tokenizer.vocab_size - 1}. Got {token}."
            )


def _samplings(settings: Any) -> list[Sampling]:
    if isinstance(settings, Sampling):
        return [settings]
    if isinstance(settings, tuple):
        return [sampling for each in settings for sampling in _samplings(each)]
    if not dataclasses.is_dataclass(settings):
        return []
    return [s for f in dataclasses.fields(settings) for s in _samplings(getattr(settings, f.name))]


def _evaluation_config(
    config: EvaluationRunConfig, settings: Any, new_tokens: int, end_id: int, roles: Mapping[str, RoleConfig]
) -> EvaluationConfig:
    sampling = config.sampling
    if sampling is None:
        as_trained = next(iter(_samplings(settings)), Sampling(max_new_tokens=new_tokens))
        sampling = dataclasses.replace(as_trained, temperature=0.0, num_samples=1)
    for scorer in config.scorers:
        if scorer not in roles:
            raise ConfigError(
                f"evaluation.scorers: must be roles of the run. Got {brief(scorer)}. Roles: {', '.join(roles)}."
                f"{did_you_mean(scorer, roles)} Write [] to sample nothing."
            )
    return EvaluationConfig(_with_stop_ids(sampling, end_id), config.scorers)


def _best_by(config: EvaluationRunConfig, held_out: Phase | None) -> str:
    """What the best checkpoint is chosen by, checked."""
    measured = [] if held_out is None else list(held_out.graph.results[0])
    if not config.scorers and not measured:
        raise ConfigError(
            "evaluation.scorers: must name at least one role, since the algorithm measures nothing by itself. Got "
            "none. Leave evaluation out to have none."
        )
    if taken := [name for name in config.scorers if name in measured]:
        raise ConfigError(
            f"evaluation.scorers: the algorithm itself measures eval/{taken[0]}. Got a role of that name. Rename it."
        )
    if held_out is not None and (trained := [c.name for c in held_out.graph.calls if c.kind == "train"]):
        raise ConfigError(f"evaluation: an algorithm's evaluation must train nothing. Got {trained[0]} in it.")
    known = [*config.scorers, *measured]
    if config.best_by and config.best_by not in known:
        raise ConfigError(
            f"evaluation.best_by: must be what is measured, {', '.join(known)}. Got {brief(config.best_by)}."
            f"{did_you_mean(config.best_by, known)}"
        )
    by_loss = "loss" if "loss" in measured else ""
    return config.best_by or (config.scorers[0] if config.scorers else by_loss)


def _warnings(config: RunConfig, table: PromptTable) -> list[str]:
    warnings = []
    if config.batch_size > table.num_train:
        warnings.append(
            f"batch_size={config.batch_size} exceeds the {table.num_train} training rows: a step repeats rows."
        )
    return warnings
