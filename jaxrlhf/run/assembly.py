"""From a config to all parts of a run: data, roles, graphs and plans. All of it is checked, and nothing is compiled.

A run has up to four graphs over the same roles: the warm start, the algorithm's step, the evaluation by samples, and
the algorithm's own evaluation on held-out rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrlhf.algorithms.algorithm import EvaluationConfig, evaluation_step
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate, sft_step
from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import EvaluationRunConfig, RunConfig
from jaxrlhf.configured.roles import describe, origins
from jaxrlhf.configured.rows import StepRows, Tables
from jaxrlhf.configured.sampling import resolved, samplings_of
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Sampling
from jaxrlhf.models.architecture import Weight, num_parameters
from jaxrlhf.models.attention import attention_implementation
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import Origin
from jaxrlhf.models.lora import declare_adapters
from jaxrlhf.name_rules import check_metric_name
from jaxrlhf.planner.costs.cpu_micro_batches import with_micro_batches
from jaxrlhf.planner.costs.stage_costs import reference_costs
from jaxrlhf.planner.fusion.fusible import check_fusion, fusion_notes, oppose, with_schedules
from jaxrlhf.planner.plans.check_plan import check, check_entries, check_offload, stage_warnings, tail_warnings
from jaxrlhf.planner.plans.complete_plan import complete_plan
from jaxrlhf.planner.plans.config_keys import RowCountKeys
from jaxrlhf.planner.plans.device_order import reuse_training_shards, training_placements
from jaxrlhf.planner.plans.plan import Placement, Plan, placement_of, resolve
from jaxrlhf.planner.plans.saved_plan import SavedPlan
from jaxrlhf.programs.roles import ModelRole, Role, WeightedSumRole
from jaxrlhf.require import errors_as
from jaxrlhf.run.find_plan import find_plan, is_planned
from jaxrlhf.run.run_folder import OWN_FOLDERS
from jaxrlhf.run.step_draft import StepDraft, draft_step, first_state, on_host, trace_step
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MOST_CATEGORIES = 100
"""The most values of the column by which an evaluation reports scores."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A step function ready to run: traced and planned."""

    roles: Mapping[str, Role]
    graph: CallGraph
    plan: Plan
    first_state: Any
    batches: tuple[Any, ...] = ()
    """The data of an evaluation."""


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A run, before it starts."""

    config: RunConfig
    tables: Tables
    train: Phase
    train_rows: StepRows
    """Step -> its rows."""
    warm_start: Phase | None
    evaluation: Phase | None
    """The evaluation by scored samples of the actor."""
    held_out: Phase | None
    """The algorithm's own evaluation on held-out rows."""
    best_by: str
    """The metric by which the best checkpoint is chosen, without `eval/`; empty for none."""
    warnings: tuple[str, ...]
    saved: SavedPlan | None = None
    """The plan of the step with its forecast; None if the config has the whole plan."""
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    """Exported role -> the description of its model in the folder that its weights come from."""

    @property
    def table(self) -> PromptTable:
        """The rows of `data`."""
        return self.tables.main

    @property
    def phases(self) -> dict[str, Phase]:
        """The phases by name, in the order in which they first run."""
        named = {
            "warm start": self.warm_start,
            "evaluation": self.evaluation,
            "held-out rows": self.held_out,
            "step": self.train,
        }
        return {name: phase for name, phase in named.items() if phase is not None}

    def role_rows(self) -> list[dict[str, Any]]:
        """A table of the roles."""
        rows = []
        for name, role in self.train.roles.items():
            if isinstance(role, ModelRole):
                head = role.view or role.model.head
                row = {
                    "what": "model, lm and scalar heads" if head == "both" else f"model, {head} head",
                    "parameters": _num_parameters(role),
                    "precision": role.model.dtype,
                    "attention": ", ".join(sorted(self.attention(name, role.model))),
                    "starts from": describe(name, role, self.config.roles),
                    "updates": role.num_updates,
                }
            elif isinstance(role, WeightedSumRole):
                row = {"what": " + ".join(f"{weight:g} x {part}" for part, weight in role.weights.items())}
            else:
                config = self.config.roles[name]
                options = "".join(f", {key}={value}" for key, value in config.options.items())
                row = {"what": f"function {config.function}{options}"}
            rows.append({"role": name, **row})
        return rows

    def attention(self, role: str, model: ModelConfig) -> set[str]:
        """The implementations of attention in a role's calls."""
        calls = [(p, call) for p in self.phases.values() for call in p.graph.calls if call.kind != "host"]
        placements = [p.plan[call] for p, call in calls if call.role == role]
        layouts = [Layout.over(placement.devices, placement.strategy) for placement in placements]
        with errors_as(ConfigError, f"roles.{role}.model."):
            return {attention_implementation(model, layout) for layout in layouts}


def assemble(
    config: RunConfig,
    num_devices: int,
    devices_per_node: int | None = None,
    *,
    draft: StepDraft | None = None,
    saved: SavedPlan | None = None,
) -> Assembly:
    """The parts of a run, checked. Raises ConfigError, PlanError, GraphError or ValueError if they do not fit.

    Args:
        num_devices: The number of devices that the plan may use.
        devices_per_node: None means that all are on one node.
        draft: Its traced step. None means that it is traced here.
        saved: The plan of its step, if the config leaves it to the planner or names a file.
    """
    draft = draft or draft_step(config)
    if saved is None and is_planned(draft):
        saved = find_plan(draft).saved
    check_offload(config.plan.offload if saved is None else saved.plan.offload, config.roles, draft.owners)
    _check_evaluation(draft)
    _check_export(draft)
    phases = _Phases(draft, saved, num_devices, devices_per_node or num_devices)
    train = phases.step
    warm_start, warnings = _warm_start(draft, phases)
    held_out = _held_out(draft, phases)
    made = Assembly(
        config=config,
        tables=draft.tables,
        train=train,
        train_rows=draft.rows,
        warm_start=warm_start,
        evaluation=_evaluation(draft, phases),
        held_out=held_out,
        best_by=_best_by(config.evaluation, held_out) if config.evaluation is not None else "",
        warnings=(*draft.warnings, *warnings),
        saved=saved,
        origins=origins(config),
    )
    graphs = [phase.graph for phase in made.phases.values()]
    check_entries(config.plan.calls, graphs)
    _check_lengths(made, draft.models)
    for name, model in draft.models.items():
        made.attention(name, model)
    waits = [warning for phase in made.phases.values() for warning in stage_warnings(phase.plan, phase.graph)]
    waits += tail_warnings(train.plan, train.graph) + fusion_notes(train.plan, train.graph)
    generated = [train.plan[call].strategy for call in train.graph.calls if call.kind == "generate"]
    if config.plan.longest_first and not any(strategy.slots for strategy in generated):
        waits.append("plan.longest_first changes nothing: no call of the step generates in slots.")
    if config.plan.refine_tails and all(placement.tail is None for placement in train.plan.placements.values()):
        waits.append("plan.refine_tails changes nothing: no call of the step has a tail.")
    return dataclasses.replace(made, warnings=(*made.warnings, *dict.fromkeys(waits)))


@dataclasses.dataclass(frozen=True)
class _Phases:
    """Traces and plans the phases of a run, by the entries of its config or by the plan that was found for its step."""

    draft: StepDraft
    saved: SavedPlan | None
    num_devices: int
    devices_per_node: int

    @functools.cached_property
    def step(self) -> Phase:
        """The step of the algorithm."""
        draft = self.draft
        plan = self._plan(draft.graph, draft.keys, (self.saved.plan if self.saved else draft.config.plan).fuse)
        trained = training_placements(plan, draft.graph)
        plan = reuse_training_shards(plan, draft.graph, trained, self.devices_per_node)
        return Phase(draft.roles, draft.graph, plan, draft.first_state)

    def trace(
        self, step: Callable[..., Any], roles: Mapping[str, Role], state: Any, batches: tuple[Any, ...], settings: Any,
        keys: RowCountKeys,
    ) -> Phase:  # fmt: skip
        """Another phase of the run. An evaluation generates on the devices of the step's generation."""
        state = on_host(state)
        graph = trace_step(step, roles, state, batches[0], settings)
        plan = self._plan(graph, keys)
        trained = training_placements(plan, graph) or training_placements(self.step.plan, self.step.graph)
        plan = reuse_training_shards(plan, graph, trained, self.devices_per_node)
        return Phase(roles, graph, plan, state, batches)

    def _plan(self, graph: CallGraph, keys: RowCountKeys, fuse: tuple[str, ...] = ()) -> Plan:
        """The plan of one graph, checked."""
        draft, num_devices, per_node = self.draft, self.num_devices, self.devices_per_node
        config = draft.config.plan
        if self.saved is None:
            default = config.default or Placement(strategy=Strategy(data=num_devices))
            plan = resolve(graph, default.with_devices(), config.placements, offload=config.offload, fuse=fuse)
            if config.default is None and graph is draft.graph and mesh.platform() == "cpu":
                plan = self._with_micro_batches(plan)
        else:
            step = self.saved.plan
            kept = {**step.placements, **config.placements} if graph is draft.graph else config.placements
            plan = complete_plan(
                graph, step.placements, draft.models, num_devices=num_devices, devices_per_node=per_node, written=kept,
                offload=step.offload, fuse=fuse, schedules=step.schedules if fuse else (),
            )  # fmt: skip
        check(plan, graph, draft.models, num_devices, per_node, keys)
        check_fusion(plan, graph)
        if not plan.fuse:
            return plan
        return with_schedules(oppose(plan, graph), graph, draft.workload(), reference_costs(num_devices, per_node))

    def _with_micro_batches(self, plan: Plan) -> Plan:
        """The plan of a step on CPUs, whose train calls without an entry in the config get micro-batches of a size that
        is fast there."""
        calls = {call.name: call for call in self.draft.workload().calls if call.trains}
        open_ones = {
            name: placement
            for name, placement in plan.placements.items()
            if name in calls and placement_of(name, self.draft.config.plan.placements) is None
        }
        chosen = {
            name: dataclasses.replace(placement, strategy=with_micro_batches(calls[name], placement.strategy))
            for name, placement in open_ones.items()
        }
        return dataclasses.replace(plan, placements={**plan.placements, **chosen})


def _warm_start(draft: StepDraft, phases: _Phases) -> tuple[Phase | None, list[str]]:
    """The warm start, if the config has one, and notes on the rows that it leaves out."""
    warm, table, new_tokens = draft.config.warm_start, draft.tables.main, draft.new_tokens
    if warm is None:
        return None, []
    notes, left_out = [], table.num_train - len(table.usable("demonstrations", new_tokens))
    if warm.overlong == "error" or left_out == table.num_train:
        rows = table.usable("prompts")
        table.check("demonstrations", rows, max_new_tokens=new_tokens, key="warm_start.overlong")
    elif left_out:
        notes.append(
            f"{left_out} of {table.num_train} completions do not fit into {new_tokens} tokens: no warm start on them."
        )
    loader = PromptLoader(table, warm.batch_size * warm.updates_per_step, draft.config.seed)
    first = loader.batch(0, "demonstrations", max_new_tokens=new_tokens)
    actor: dict[str, Role] = {"actor": ModelRole(draft.models["actor"], warm.optimizer, warm.steps)}
    sft = SFTConfig(update=SupervisedUpdate(mini_batches=warm.updates_per_step))
    keys = RowCountKeys("the warm start", "warm_start.batch_size")
    return phases.trace(sft_step, actor, (), (first,), sft, keys), notes


def _evaluation(draft: StepDraft, phases: _Phases) -> Phase | None:
    """The evaluation by scored samples, if the config has scorers."""
    evaluation = draft.config.evaluation
    if evaluation is None or not evaluation.scorers:
        return None
    sampling, table = evaluation.sampling, draft.tables.main
    if sampling is None:
        as_trained = next(iter(samplings_of(draft.settings)), Sampling(max_new_tokens=draft.new_tokens))
        sampling = dataclasses.replace(as_trained, temperature=0.0, num_samples=1)
    settings = EvaluationConfig(resolved(sampling, table.tokenizer), evaluation.scorers)
    size, keys = _evaluation_batch(evaluation)
    batches = tuple(PromptLoader(table, size, draft.config.seed).eval_batches(evaluation.num_prompts))
    return phases.trace(evaluation_step, draft.roles, (), batches, settings, keys)


def _held_out(draft: StepDraft, phases: _Phases) -> Phase | None:
    """The algorithm's own evaluation on held-out rows, if it has one and the config asks for it."""
    evaluation, step = draft.config.evaluation, draft.algorithm.evaluation
    if evaluation is None or step is None:
        return None
    size, keys = _evaluation_batch(evaluation)
    batches = draft.rows.held_out(evaluation.num_prompts, size)
    state = first_state(draft.algorithm, draft.settings)
    return phases.trace(step, draft.roles, state, batches, draft.settings, keys)


def _evaluation_batch(config: EvaluationRunConfig) -> tuple[int, RowCountKeys]:
    """The batch size of an evaluation, and the key that sets it."""
    key = "evaluation.batch_size" if config.batch_size else "evaluation.num_prompts"
    return config.batch_size or config.num_prompts, RowCountKeys("the evaluation", key)


def _num_parameters(role: ModelRole) -> str:
    """The number of a role's parameters, and of those that are trained if it has adapters."""
    if role.view is not None:
        return f"those of {role.weights}"
    whole = f"{num_parameters(role.model):,}"
    if role.lora is None:
        return whole
    adapters = jax.tree.leaves(declare_adapters(role.model, role.lora), is_leaf=lambda x: isinstance(x, Weight))
    return f"{whole}, trained {sum(w.size for w in adapters):,}"


def _check_lengths(made: Assembly, models: Mapping[str, ModelConfig]) -> None:
    """Checks that no call has longer sequences than its model can process."""
    calls = [call for phase in made.phases.values() for call in phase.graph.calls if call.kind != "host"]
    for call in (call for call in calls if call.role in models):
        role = made.train.roles[call.role or ""]
        if isinstance(role, ModelRole) and role.own_tokens is not None:
            most = role.model.max_position_embeddings
            rule = f"must be at most the role's max_position_embeddings={most}"
            where = f"roles.{call.role}.own_tokenizer.max_tokens"
            if call.longest_sequence > most:
                raise ConfigError(
                    f"{where}: {rule}. Got {call.longest_sequence} tokens in {call.name}. Set it to {most}: longer "
                    "sequences are cut, and counted."
                )
            continue
        most, prompt = models[call.role or ""].max_position_embeddings, made.table.prompt_length
        if call.longest_sequence > most:
            raise ConfigError(
                f"roles.{call.role}.model.max_position_embeddings: must hold prompt and response, {prompt} + "
                f"{call.longest_sequence - prompt} tokens in {call.name}. Got {most}. Lower data.max_prompt_tokens or "
                "max_new_tokens."
            )


def _check_evaluation(draft: StepDraft) -> None:
    """Checks that the scorers of an evaluation are roles, and that there is an actor whose samples they score."""
    config, evaluation = draft.config, draft.config.evaluation
    if evaluation is None or not evaluation.scorers:
        return
    if "actor" not in config.roles:
        raise ConfigError(
            f"evaluation.scorers: must be [] where no actor samples, as under {config.algorithm}. Got "
            f"[{', '.join(evaluation.scorers)}], and [reward] is the default. "
            + ("Write `scorers: []`." if draft.algorithm.evaluation is not None else "Leave evaluation out.")
        )
    for scorer in evaluation.scorers:
        if scorer not in config.roles:
            raise ConfigError(
                f"evaluation.scorers: must be roles of the run. Got {brief(scorer)}. Roles: {', '.join(config.roles)}."
                f"{did_you_mean(scorer, config.roles)} Write [] to sample nothing."
            )
    _check_categories(evaluation, draft.tables.main)


def _check_categories(evaluation: EvaluationRunConfig, table: PromptTable) -> None:
    """Checks that the column by which scores are reported is one, of few values that metrics can be named after."""
    by = evaluation.by
    if not by:
        return
    if by not in table.other:
        raise ConfigError(
            f"evaluation.by: must be a column of the rows. Got {brief(by)}. Known: {', '.join(table.other)}."
            f"{did_you_mean(by, table.other)}"
        )
    rows = table.usable("prompts", held_out=True)[: evaluation.num_prompts]
    values = {category(value) for value in table.columns(rows)[by]}
    if len(values) > MOST_CATEGORIES:
        raise ConfigError(
            f"evaluation.by: a column must have at most {MOST_CATEGORIES} values in the held-out rows. Got "
            f"{len(values)} in {brief(by)}. Name another."
        )
    for value in sorted(values):
        with errors_as(ConfigError, "evaluation.by: "):
            check_metric_name(f"eval/{evaluation.scorers[0]}/{by}/{value}")


def category(value: Any) -> str:
    """The value of a column as the names of metrics have it."""
    return "none" if value is None else str(value)


def _check_export(draft: StepDraft) -> None:
    """Checks that exported roles have weights of their own, and names that are no folders of the run itself."""
    for name in draft.config.output.export:
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


def _best_by(config: EvaluationRunConfig, held_out: Phase | None) -> str:
    """The metric by which the best checkpoint is chosen, checked."""
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
    sampled = [f"{scorer}/{what}" for scorer in config.scorers for what in config.by_samples]
    known = [*config.scorers, *sampled, *measured]
    if config.best_by and config.best_by not in known:
        raise ConfigError(
            f"evaluation.best_by: must be what is measured, {', '.join(known)}. Got {brief(config.best_by)}."
            f"{did_you_mean(config.best_by, known)}"
        )
    return config.best_by or next(iter(config.scorers), "loss" if "loss" in measured else "")
