"""From a workload and a cluster to a plan and its forecast.

planned = plan_workload(workload, read_cluster("16x8:a100-80g"))
planned.seconds, planned.gain                  # of an iteration; speed-up over the baseline plan
plan = planned.plan_for(graph)
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.placement_strategy import STRATEGIES, PlacementStrategy
from jaxrlhf.numba_loops import numba_is_there
from jaxrlhf.planner.assumptions import assumptions
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.rollout_steps import RolloutSteps
from jaxrlhf.planner.fusion.fused_choice import FusedPlan, best_fused
from jaxrlhf.planner.placement.role_groups import devices_of_calls
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.complete_plan import complete_plan
from jaxrlhf.planner.plans.plan import NoRoomError, Placement, Plan, PlanError
from jaxrlhf.planner.plans.saved_plan import CallForecast, SavedPlan, described_work, devices_of
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.methods import AMONG, PLACEMENT, find_method
from jaxrlhf.planner.search.peak_memory import DeviceMemory, memory_at_peak, memory_during, peak_memory
from jaxrlhf.planner.search.problem import Choice, Problem
from jaxrlhf.planner.search.search import warm_up
from jaxrlhf.planner.search.search_result import RunnerUp, SearchResult
from jaxrlhf.planner.search.simulate import Simulation, steady_state
from jaxrlhf.planner.what_fits import what_would_fit
from jaxrlhf.planner.workload import Workload
from jaxrlhf.schedules.instructions import Schedule

SEARCH, YARDSTICK = "search", "heuristic"
"""Planning methods: the default, and the baseline that others are compared with."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, how it was found, and its forecast."""

    workload: Workload
    cluster: Cluster
    problem: Problem
    result: SearchResult
    method: str
    heuristic: Simulation | None
    """The simulation of the baseline plan; None if it does not fit."""
    heuristic_note: str
    """The reason why it does not fit."""
    memory: tuple[DeviceMemory, ...]
    """Memory -> its contents when it is fullest."""
    planning_seconds: float
    fixed: Mapping[str, Placement] = dataclasses.field(default_factory=dict)
    """Placements that were given."""
    offload: tuple[str, ...] = ()
    """Roles that were asked to rest in host memory."""
    fuse: tuple[str, ...] = ()
    """Train calls that run as one pipeline."""
    schedules: tuple[Schedule, ...] = ()
    """The schedules of that pipeline, from which its seconds come."""
    notes: tuple[str, ...] = ()
    """Notes on the forecast."""
    assumed: tuple[str, ...] = ()
    """Assumptions of the forecast that were not measured."""
    placement: PlacementStrategy | None = None
    """The placement strategy by which it was planned."""
    groups: Mapping[str, tuple[range, ...]] = dataclasses.field(default_factory=dict)
    """Call -> the devices that this gives it, of which its choice has the first range. Empty without one, and for calls
    with a placement that was given."""
    rollouts: Mapping[str, RolloutSteps] = dataclasses.field(default_factory=dict)
    """Generate call -> the decoding steps that are expected of it, if lengths of responses are known, or it has
    slots."""

    costs: CostModel | None = dataclasses.field(default=None, compare=False)
    """The costs of its calls."""

    def __repr__(self) -> str:
        return f"<{self.summary()}>"  # all fields would fill a hundred lines

    @property
    def simulation(self) -> Simulation:
        """The steady state of consecutive iterations."""
        return self.result.simulation

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return self.simulation.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens / self.seconds if self.seconds else 0.0

    @property
    def gain(self) -> float | None:
        """The speed-up over the heuristic plan. None if that does not fit."""
        return self.heuristic.seconds / self.seconds if self.heuristic is not None and self.seconds else None

    @property
    def choices(self) -> dict[str, Choice]:
        """Call -> its devices, strategy and forecast."""
        return chosen(self.problem, self.result.plan)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Roles whose weights rest in host memory."""
        weights = [call.weights for call in self.workload.calls if self.choices[call.name].offloaded]
        return tuple(dict.fromkeys((*self.offload, *weights)))

    def summary(self) -> str:
        """The plan in a line."""
        compared = self.gain is not None and self.method != YARDSTICK
        gain = f", {self.gain:.2f} x as fast as the {YARDSTICK} plan" if compared else ""
        how = f"{self.cluster} by {self.method} in {self.planning_seconds:.1f} s"
        return f"Planned for {how}: {self.seconds:.4g} s a step{gain}"

    def call_seconds(self, name: str) -> float:
        """Seconds of a call without loading; of two that run as one pipeline, of both together."""
        choices = self.choices
        return sum(choices[each].seconds for each in (self.fuse if name in self.fuse else (name,)))

    def call_memory(self, name: str) -> int:
        """Bytes in the fullest memory of a call's devices while it runs, weights of other calls included."""
        together = self.fuse if name in self.fuse else (name,)
        return max(self._during[each].total for each in together)

    @functools.cached_property
    def _during(self) -> dict[str, DeviceMemory]:
        return memory_during(self.problem, self.result.plan)

    def placements(self) -> dict[str, Placement]:
        """Call of a model -> its placement."""
        return {
            name: self.fixed.get(name) or Placement(tuple(choice.devices), choice.strategy)
            for name, choice in self.choices.items()
        }

    def plan_for(self, graph: CallGraph) -> Plan:
        """The plan with a placement for every call of a graph that takes devices, `compute` calls too. Raises PlanError
        if the graph has a call of a model that was not planned for."""
        models = {call.role: call.model for call in self.workload.calls}
        known = {call.name for call in self.workload.calls}
        for call in graph.calls:
            if call.role in models and call.kind != "host" and call.plan_name not in known:
                raise PlanError(
                    f"plan.calls.{call.plan_name}: must be a call of the workload that was planned for. Got one that "
                    f"is not. Its calls: {', '.join(known)}."
                )
        num_devices, devices_per_node = self.cluster.num_devices, self.cluster.devices_per_node
        plan = complete_plan(
            graph, self.placements(), models, num_devices=num_devices, devices_per_node=devices_per_node,
            written=self.fixed, offload=self.offloaded, fuse=self.fuse, schedules=self.schedules,
        )  # fmt: skip
        check(plan, graph, models, num_devices, devices_per_node)
        return plan

    def saved(self, plan: Plan | None = None, *, asked: object = None) -> SavedPlan:
        """The plan as it is written to disk, for all calls of a graph or those of models alone. `asked` is the config's
        `plan`, as plain data."""
        names = [call.name for call in self.workload.calls]
        return SavedPlan(
            plan=plan or Plan(self.placements(), self.offloaded, self.fuse, self.schedules),
            devices=devices_of(self.cluster),
            work=described_work(self.workload),
            method=self.method,
            step_seconds=self.seconds,
            calls={name: CallForecast(self.call_seconds(name), self.call_memory(name)) for name in names},
            asked=asked,
        )


def plan_workload(
    workload: Workload,
    cluster: Cluster,
    *,
    method: str = SEARCH,
    costs: CostModel | None = None,
    fixed: Mapping[str, Placement] | None = None,
    offload: Iterable[str] = (),
    fuse: Iterable[str] = (),
    placement: PlacementStrategy | None = None,
    seed: int = 0,
    seconds: float | None = None,
    notes: Iterable[str] = (),
    compare: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Planned:
    """The plan of a workload on a cluster.

    Args:
        method: One of `methods.METHODS`.
        costs: The costs of calls. None means formulas with the numbers of the cluster's devices.
        fixed: Call -> the placement that it keeps.
        offload: Roles whose weights must rest in host memory.
        fuse: Train calls that are to run as one pipeline. They are counted as if they ran by themselves.
        placement: The placement strategy of the method `placement`. The others have their own.
        seconds: The most that the search may take. None means no limit.
        notes: Notes on the source of the costs.
        compare: Plan by the baseline too. If not, the plan itself stands for it.
        say: Called with lines about the progress.

    Raises:
        NoRoomError: No plan fits. Says by how much, and on which clusters one would.
        PlanError: The method is not known, or has no plan for the workload.
    """
    started = time.perf_counter()
    if seconds is not None and not seconds > 0:
        raise PlanError(f"seconds: the time to look for a plan must be positive. Got {seconds}.")
    plan_by, costs = find_method(method), costs or CostModel(cluster)
    fixed, offload = dict(fixed or {}), tuple(offload)
    placement = _strategy(method, placement)
    groups = {} if placement is None else devices_of_calls(placement, workload, cluster)
    problem_of = functools.partial(make_problem, workload, cluster, costs, fixed=fixed, offload=offload)
    try:
        on = {name: ranges[0] for name, ranges in groups.items()} or None
        problem = problem_of(among=AMONG.get(method, "fast"), on=on, say=say)
        say("Compiling the loops of the search, if they are not on disk")
        warm_up()
        say(f"Looking for a plan by {method}, of {problem.size:.2g}")
        result = without_needless_offload(problem, plan_by(problem, seed=seed, seconds=seconds))
    except NoRoomError as error:
        if groups:
            raise NoRoomError(f"{error} Or give its role more devices; `--strategy search` looks for some.") from error
        fitting = what_would_fit(workload, cluster, fixed=fixed, offload=offload, say=say)
        raise NoRoomError(f"{error} {fitting}".rstrip()) from error
    heuristic, why_not = result.simulation, ""
    if method != YARDSTICK and compare:
        try:
            usual = problem_of(among=AMONG.get(YARDSTICK, "fast"))
            heuristic = without_needless_offload(usual, find_method(YARDSTICK)(usual)).simulation
        except PlanError as error:
            heuristic, why_not = None, str(error)
    fuse, notes = tuple(fuse), list(notes)
    may_fuse = method == SEARCH and not fuse and not any(call.trains for call in workload.calls if call.name in fixed)
    if may_fuse:
        say("Looking whether two train calls as one pipeline are faster")
    plans = _plans_to_fuse(problem, result) if may_fuse else []
    fused = best_fused(problem, workload, costs, plans, beat=result.seconds)
    if method == SEARCH and not numba_is_there():
        notes.append("numba is not installed: few plans were looked at. pip install 'jaxrlhf[planner]'.")
    if fused is not None:
        problem, fuse, result = fused.problem, fused.fuse, _with_fused(result, fused)
        notes.append(
            f"{' and '.join(fuse)} run as one pipeline, each in the bubbles of the other: {fused.seconds:.4g} s both. "
            f"One after the other they would take {fused.apart:.4g} s."
        )
    return Planned(
        workload=workload,
        cluster=cluster,
        problem=problem,
        result=result,
        method=method,
        heuristic=heuristic,
        heuristic_note=why_not,
        memory=memory_at_peak(problem, result.plan),
        planning_seconds=time.perf_counter() - started,
        fixed=fixed,
        offload=offload,
        fuse=fuse,
        placement=placement,
        groups={name: ranges for name, ranges in groups.items() if name not in fixed},
        schedules=fused.schedules if fused is not None else (),
        notes=tuple(notes),
        rollouts={
            call.name: costs.of(call, choice.devices, choice.strategy).rollout_steps()
            for call, choice in zip(workload.calls, chosen(problem, result.plan).values(), strict=True)
            if call.kind == "generate" and (call.lengths is not None or choice.strategy.slots)
        },
        assumed=assumptions(problem, result.plan, workload, costs, seconds=result.simulation.seconds),
        costs=costs,
    )


def _strategy(method: str, placement: PlacementStrategy | None) -> PlacementStrategy | None:
    """The placement strategy that a method names, or that is given. Raises PlanError if the method needs one and there
    is none."""
    if method in STRATEGIES:
        return PlacementStrategy(method)
    if method == PLACEMENT and placement is None:
        raise PlanError(
            f"strategy: {PLACEMENT} needs the config's `plan.placement`. Got a config without it. Write it, or use one "
            f"of {', '.join(STRATEGIES)}."
        )
    return placement if method == PLACEMENT else None


def _plans_to_fuse(problem: Problem, result: SearchResult) -> list[tuple[int, ...]]:
    """Plans whose train calls may be faster as one pipeline: the best, those that lost, and one with all calls on all
    devices."""
    plans = [result.plan, *(each.plan for each in result.runners_up if not each.lacking)]
    with contextlib.suppress(PlanError):  # it does not fit, or its degrees do not divide the rows
        plans.append(find_method("colocate")(problem).plan)
    return plans


def _with_fused(result: SearchResult, fused: FusedPlan) -> SearchResult:
    """A search's result with two train calls fused. The plan without fusion is a runner-up."""
    seconds = fused.simulation.seconds
    lost = [RunnerUp(result.plan, result.seconds, 0), *result.runners_up]
    return dataclasses.replace(
        result,
        plan=fused.plan,
        simulation=fused.simulation,
        memory=peak_memory(fused.problem, fused.plan),
        runners_up=tuple(each for each in lost if not each.lacking or each.seconds < seconds),
    )


def without_needless_offload(problem: Problem, result: SearchResult) -> SearchResult:
    """The same plan with weights on the devices wherever they fit and the iteration takes no longer. A search sees no
    difference to copies from the host that nothing waits for."""
    for number, call in enumerate(problem.calls):
        choice = call.choices[result.plan[number]]
        same = (choice.devices, choice.strategy)
        at_home = (i for i, c in enumerate(call.choices) if not c.offloaded and (c.devices, c.strategy) == same)
        other = next(at_home, None) if choice.offloaded else None
        if other is None:
            continue
        plan = (*result.plan[:number], other, *result.plan[number + 1 :])
        memory, simulation = peak_memory(problem, plan), steady_state(problem, plan)
        fits = all(taken <= room for taken, room in zip(memory, problem.capacity, strict=True))
        if fits and simulation.seconds <= result.seconds:
            result = dataclasses.replace(result, plan=plan, simulation=simulation, memory=memory)
    return result


def chosen(problem: Problem, plan: Iterable[int]) -> dict[str, Choice]:
    """Call -> its choice under a plan."""
    return {call.name: call.choices[pick] for call, pick in zip(problem.calls, plan, strict=True)}
