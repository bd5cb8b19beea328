"""From a config to everything a run needs: data, roles, graphs, plans. All is checked here, and nothing is compiled.

A run has up to four graphs over the same roles: the warm start, the algorithm's step, the evaluation by samples, and
what the algorithm measures on held-out rows.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrlhf.algorithms.evaluation import EvaluationConfig, evaluation_step
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_state, sft_step
from jaxrlhf.brief import brief
from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import EvaluationRunConfig, RoleConfig, RunConfig
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.models.attention import attention_implementation
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import Origin
from jaxrlhf.models.lora import declare_adapters
from jaxrlhf.models.params import Weight, num_parameters
from jaxrlhf.planner.device_order import reuse_training_shards, training_placements
from jaxrlhf.planner.fusion import check_fusion, fusion_notes, oppose, with_schedules
from jaxrlhf.planner.placing import place
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
from jaxrlhf.planner.plan_file import SavedPlan
from jaxrlhf.planner.row_keys import RowKeys
from jaxrlhf.planner.stage_costs import reference_costs
from jaxrlhf.runtime.configured_roles import describe, origins
from jaxrlhf.runtime.planned_step import find_plan, is_planned
from jaxrlhf.runtime.roles import FunctionRole, ModelRole, Role, WeightedSumRole
from jaxrlhf.runtime.run_folder import OWN_FOLDERS
from jaxrlhf.runtime.step_draft import (
    StepDraft,
    draft_step,
    first_state,
    on_host,
    samplings_of,
    trace_step,
    with_stop_ids,
)
from jaxrlhf.runtime.step_rows import StepRows, Tables
from jaxrlhf.runtime.written_plan import written_plan
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.suggest import did_you_mean


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
    saved: SavedPlan | None = None
    """The plan of the step, and what is expected of it; None where the config writes it out."""
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    """Exported role -> what the folder says of it that its weights come from, where they do."""

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
    config: RunConfig,
    num_devices: int,
    devices_per_node: int | None = None,
    *,
    tables: Tables | None = None,
    draft: StepDraft | None = None,
    saved: SavedPlan | None = None,
) -> Assembly:
    """Everything that a run needs.

    Args:
        num_devices: How many devices the plan may use.
        devices_per_node: How many of them each node has. None: all are in one.
        tables: The rows of its data. None: they are read.
        draft: Its step, traced. None: that is done here.
        saved: The plan of its step, where the config says that it is planned for or read from a file.

    Raises:
        ConfigError, PlanError, GraphError or ValueError: Something in config, data or plan does not fit. Each says
            where, which rule, what it got and what to do.
    """
    draft = draft or draft_step(config, tables=tables)
    if saved is None and is_planned(draft):
        saved = find_plan(draft).saved
    algorithm, settings, tables, models = draft.algorithm, draft.settings, draft.tables, draft.models
    table, train_rows, new_tokens, warnings = tables.main, draft.rows, draft.new_tokens, list(draft.warnings)
    loader = PromptLoader(table, config.batch_size, config.seed)
    written = written_plan(config.placements, num_devices)
    if saved is None:
        written = {DEFAULT: Placement(tuple(range(num_devices)), Strategy(data=num_devices)), **written}
    check_offload(config.offload if saved is None else saved.plan.offload, config.roles, draft.owners)

    def planned(
        roles: Mapping[str, Role],
        graph: CallGraph,
        state: Any,
        row_keys: RowKeys,
        trained: Mapping[str, Placement] | None = None,
        fuse: tuple[str, ...] = (),
    ) -> Phase:
        per_node = devices_per_node or num_devices
        if saved is None:
            plan = resolve(written, graph, config.offload, fuse)
        else:
            step = saved.plan
            kept = {**step.placements, **written} if graph is draft.graph else written
            plan = place(
                graph, step.placements, models, num_devices=num_devices, devices_per_node=per_node, written=kept,
                offload=step.offload, fuse=fuse, schedules=step.schedules if fuse else (),
            )  # fmt: skip
        check(plan, graph, models, num_devices, devices_per_node, row_keys)
        check_fusion(plan, graph)
        if plan.fuse:
            plan = with_schedules(oppose(plan, graph), graph, draft.workload(), reference_costs(num_devices, per_node))
        where = training_placements(plan, graph) if trained is None else trained
        plan = reuse_training_shards(plan, graph, where, per_node)
        return Phase(roles, graph, plan, state)

    def phase(
        step: Callable[..., Any],
        roles: Mapping[str, Role],
        state: Any,
        data: Any,
        phase_settings: Any,
        row_keys: RowKeys,
        trained: Mapping[str, Placement] | None = None,
    ) -> Phase:
        state = on_host(state)
        graph = trace_step(step, roles, state, data, phase_settings)
        return planned(roles, graph, state, row_keys, trained)

    fuse = saved.plan.fuse if saved is not None else config.fuse
    train = planned(draft.roles, draft.graph, draft.first_state, draft.keys, fuse=fuse)

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
                + ("Write `scorers: []`." if algorithm.evaluation is not None else "Leave evaluation out.")
            )
        eval_config = _evaluation_config(config.evaluation, settings, new_tokens, table.tokenizer.end_id, config.roles)
        eval_batches = tuple(PromptLoader(table, eval_size, config.seed).eval_batches(config.evaluation.num_prompts))
        keys = RowKeys("the evaluation", eval_key)
        evaluation = phase(evaluation_step, train.roles, (), eval_batches[0], eval_config, keys, trained)
    held_out, held_out_batches = None, ()
    if config.evaluation is not None and algorithm.evaluation is not None:
        held_out_batches = train_rows.held_out(config.evaluation.num_prompts, eval_size)
        state = first_state(algorithm, settings)
        keys = RowKeys("the evaluation", eval_key)
        held_out = phase(algorithm.evaluation, train.roles, state, held_out_batches[0], settings, keys, trained)
    best_by = _best_by(config.evaluation, held_out) if config.evaluation is not None else ""

    made = Assembly(
        config, tables, loader, train, train_rows, warm_start, evaluation, eval_batches, held_out, held_out_batches,
        best_by, tuple(warnings), saved,
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
        if name not in draft.owners:
            raise ConfigError(
                f"output.export: must be roles with weights of their own. Got {brief(name)}. Known: "
                f"{', '.join(draft.owners)}."
            )
        if name.lower() in OWN_FOLDERS:
            raise ConfigError(
                f"output.export: an exported role has a folder of its name in the run's, which has its own "
                f"{', '.join(OWN_FOLDERS)}. Got {name}. Rename the role."
            )
    return dataclasses.replace(made, origins=origins(config))


def _head(role: ModelRole) -> str:
    """Which heads a role speaks by, in words."""
    head = role.view or role.model.head
    return "lm and scalar heads" if head == "both" else f"{head} head"


def _num_parameters(role: ModelRole) -> str:
    """How many numbers a role's weights hold, and of those of its adapters how many are trained."""
    if role.view is not None:
        return f"those of {role.weights}"
    whole = f"{num_parameters(role.model):,}"
    if role.lora is None:
        return whole
    adapters = jax.tree.leaves(declare_adapters(role.model, role.lora), is_leaf=lambda x: isinstance(x, Weight))
    return f"{whole}, trained {sum(w.size for w in adapters):,}"


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


def _evaluation_config(
    config: EvaluationRunConfig, settings: Any, new_tokens: int, end_id: int, roles: Mapping[str, RoleConfig]
) -> EvaluationConfig:
    sampling = config.sampling
    if sampling is None:
        as_trained = next(iter(samplings_of(settings)), Sampling(max_new_tokens=new_tokens))
        sampling = dataclasses.replace(as_trained, temperature=0.0, num_samples=1)
    for scorer in config.scorers:
        if scorer not in roles:
            raise ConfigError(
                f"evaluation.scorers: must be roles of the run. Got {brief(scorer)}. Roles: {', '.join(roles)}."
                f"{did_you_mean(scorer, roles)} Write [] to sample nothing."
            )
    return EvaluationConfig(with_stop_ids(sampling, end_id), config.scorers)


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
