"""Finds the plan of a run's step: in a file, in the run that is resumed, or by a search.

Nothing is compiled for it: the search uses forecasts of the costs of calls.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from jaxrlhf.cluster.cluster_text import CPU, local_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.plan_config import PlanConfig
from jaxrlhf.config.reading import to_tree
from jaxrlhf.planner.cost_sources import CostSource, costs_from, usual_source
from jaxrlhf.planner.fusion.fused_generation import fuse_generation
from jaxrlhf.planner.fusion.parts_forecast import PlanInParts
from jaxrlhf.planner.make_plan import SEARCH, Planned, plan_workload
from jaxrlhf.planner.placement.pipelined import pipelined
from jaxrlhf.planner.plans.check_plan import check_call, check_entries, check_offload
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError, placement_of
from jaxrlhf.planner.plans.saved_plan import SavedPlan, read_plan
from jaxrlhf.planner.report import rollout_lines
from jaxrlhf.planner.search.methods import PLACEMENT
from jaxrlhf.require import errors_as
from jaxrlhf.run.step_draft import StepDraft
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Strategy

SEARCH_SECONDS = 5.0
"""The longest that a run searches for its plan before it starts."""


@dataclasses.dataclass(frozen=True)
class FoundPlan:
    """A plan and its origin."""

    saved: SavedPlan
    notes: tuple[str, ...]
    """The origin in words, and notes on its forecast."""


def is_planned(draft: StepDraft) -> bool:
    """Returns whether the config leaves at least a part of the step's plan to the planner or a file."""
    return draft.config.plan.auto or bool(draft.config.plan.file)


def find_plan(
    draft: StepDraft, *, resumed: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> FoundPlan:
    """The plan of a step that its config leaves open, for the devices of JAX.

    A resumed run keeps its plan, in the file `resumed` if that exists, while config and devices are the same. A plan in
    a file is read again. `say` gets lines about the progress. Raises PlanError or ConfigError if no plan fits.
    """
    config, asked = draft.config, to_tree(draft.config.plan)
    if resumed is not None and resumed.is_file() and not os.path.isfile(config.plan.file):
        try:
            saved = read_plan(resumed)
            if to_tree(saved.asked) != asked:
                raise PlanError("the config asks for another.")
            _check(saved, draft)
        except PlanError as error:
            say(f"Not the plan that the run had: {error}")
        else:
            return FoundPlan(saved, (f"Kept the plan that the run had, {resumed}",))
    if config.plan.file:
        saved = dataclasses.replace(read_plan(config.plan.file), asked=asked)
        _check(saved, draft)
        return FoundPlan(saved, (f"The plan of {config.plan.file}",))
    planned = plan_draft(draft, local_cluster(config.devices_memory), seconds=SEARCH_SECONDS, say=say)
    notes = [planned.summary(), *planned.notes, *rollout_lines(planned)]
    plan = planned.plan_for(draft.graph)
    saved = planned.saved(plan, asked=asked)
    if (fused := better_in_parts(planned, draft, plan)) is not None:
        saved = fused.adopted_by(saved)
        notes.append(fused.summary())
    return FoundPlan(saved, tuple(notes))


def better_in_parts(planned: Planned, draft: StepDraft, plan: Plan) -> PlanInParts | None:
    """What parts would bring to a plan that was found: on the devices of a placement strategy the pipelining of its
    groups, otherwise a tail. None if lengths of responses are not known, which a tail needs, or calls run in parts
    already. Raises PlanError if parts are asked for that do not work out."""
    lengths = next((call.lengths for call in planned.workload.calls if call.lengths is not None), None)
    if planned.placement is not None and planned.costs is not None:
        groups, costs = planned.groups, planned.costs
        return pipelined(draft.graph, draft.roles, plan, groups, costs, lengths, planned.placement)
    if lengths is None or planned.costs is None or not all(each.is_whole for each in plan.placements.values()):
        return None
    return fuse_generation(draft.graph, draft.roles, plan, planned.costs, lengths)


def _check(saved: SavedPlan, draft: StepDraft) -> None:
    """Raises PlanError unless a plan was made for this step and these devices, and fits them if changed by hand."""
    saved.check_work(draft.workload())
    devices_per_node, kinds = mesh.devices_per_process(), mesh.kinds_of_processes()
    kinds = [CPU] * len(kinds) if mesh.platform() == "cpu" else kinds
    saved.check_devices(devices_per_node=devices_per_node, kinds=kinds)
    with errors_as(PlanError, f"{saved.source}: ", PlanError):
        check_entries(saved.plan.placements, [draft.graph])
        for call in draft.graph.calls:
            placement = saved.plan.placements.get(call.plan_name)
            if placement is not None and placement.is_whole:  # parts are checked with the whole plan
                check_call(call, placement, draft.models, mesh.num_devices(), devices_per_node, draft.keys)


def plan_draft(
    draft: StepDraft,
    cluster: Cluster,
    *,
    method: str | None = None,
    seconds: float | None = None,
    seed: int | None = None,
    costs: CostSource | None = None,
    calibration: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Planned:
    """Plans a step on a cluster by a method of `methods.METHODS`, for up to `seconds`: by default the config's
    `placement`, or a search. If the config plans only some
    calls (`auto`), its placements of the others are kept.

    The seed is by default that of the config, and `costs` are those that take no time; `calibration` is as in
    `costs_from`. Raises PlanError or ConfigError if the config's entries do not fit, or no plan does, and CompileError.
    """
    config, workload = draft.config, draft.workload_to_plan()
    asked = config.plan if config.plan.auto else PlanConfig()
    check_offload(asked.offload, config.roles, draft.owners)
    methods = [f"{name}.{method}" for name, role in draft.roles.items() for method in role.methods(name).methods]
    check_entries(asked.calls, [draft.graph], more=methods)
    placements, fixed = asked.placements, {}
    for call in (call for call in draft.graph.calls if call.kind != "host"):
        # mini-batches must divide the rows under any plan
        check_call(call, Placement((0,), Strategy()), draft.models, 1, 1, draft.keys)
        if placement := placement_of(call.plan_name, placements):
            if not placement.is_whole:
                raise PlanError(
                    f"plan.calls.{call.plan_name}: a search plans around calls that are whole. Got one in parts or "
                    "shares, or with a tail, beside `auto: true`. Leave `auto` out, or parts, shares and tail."
                )
            check_call(call, placement, draft.models, cluster.num_devices, cluster.devices_per_node, draft.keys)
            fixed[call.plan_name] = placement
    source = costs or usual_source(cluster)
    cost_model, notes = costs_from(source, workload, cluster, calibration=calibration, say=say)
    return plan_workload(
        workload,
        cost_model.cluster,
        method=method or (SEARCH if asked.placement is None else PLACEMENT),
        placement=asked.placement,
        costs=cost_model,
        fixed=fixed,
        offload=asked.offload,
        fuse=asked.fuse,
        seed=config.seed if seed is None else seed,
        seconds=seconds,
        notes=notes,
        say=say,
    )


def left_out(draft: StepDraft) -> list[str]:
    """Notes on settings of the config's plan that a search for another plan ignores."""
    plan, calls = draft.config.plan, {call.plan_name for call in draft.graph.calls}
    if not plan.auto:
        is_said = plan != PlanConfig(
            lengths=plan.lengths, longest_first=plan.longest_first, refine_tails=plan.refine_tails
        )
        return ["What the config says under `plan` is not kept to: it has no `auto: true`."] if is_said else []
    names = calls | {name.partition("#")[0] for name in calls}
    notes = [f"plan.calls.{name}: no call of the step has that name." for name in plan.calls if name not in names]
    if plan.fuse:
        notes.append(f"plan.fuse: {' and '.join(plan.fuse)} are counted as if they ran by themselves.")
    return notes
