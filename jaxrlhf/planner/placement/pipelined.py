"""A placement strategy at work: replicas of the generation, shares of calls on several groups of devices, and
successive parts pipelined between groups.

    found = pipelined(graph, roles, plan, groups, costs, lengths)
    found.plan      # None if whole calls are as fast

The generation hands on blocks of rows; what takes them, on other devices, begins meanwhile, training too where the
algorithm allows it. Of several groups each has rows by how fast it is. How many replicas and parts there are is chosen
by simulation, unless they are given.

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, sections IV-A and IV-C.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast, PlanInParts, takers, with_placements
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError
from jaxrlhf.planner.plans.splits import divisors
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.problem import Choice
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.programs.roles import Role
from jaxrlhf.sharding.strategy import Strategy

EVENINGS = 6
"""How often the rows of shares are corrected by the seconds that they are forecast to take."""
PARTS = (1, 2, 4, 8)
"""Parts of each replica that are tried."""
EVEN_LOSS = 1.001
"""Even shares may take at most so many times the seconds of an iteration with uneven ones."""
WORTH = 0.98
"""Parts and replicas are worth it if an iteration takes at most so much of the time that it takes without."""
_MEANS = "parts and replicas"


def pipelined(
    graph: CallGraph,
    roles: Mapping[str, Role],
    plan: Plan,
    groups: Mapping[str, tuple[range, ...]],
    costs: CostModel,
    lengths: ResponseLengths | None,
    strategy: PlacementStrategy,
) -> PlanInParts:
    """The plan in parts that is fastest.

    Args:
        plan: All calls are whole, each on the first of its groups.
        groups: Call -> its devices.
        strategy: Its `parts` and `replicas` are kept where they are given.

    Raises:
        PlanError: Parts, replicas or several groups are asked for, and no such plan keeps the rules and fits.
    """
    return _Pipelined(PartsForecast(graph, roles, costs, lengths), plan, groups, strategy).run()


class _Pipelined:
    def __init__(
        self,
        forecast: PartsForecast,
        plan: Plan,
        groups: Mapping[str, tuple[range, ...]],
        strategy: PlacementStrategy,
    ) -> None:
        self._forecast, self._plan, self._groups, self._strategy = forecast, plan, groups, strategy
        self._graph, self._cluster = forecast.graph, forecast.costs.cluster
        self._generation = next((call for call in self._graph.calls if call.kind == "generate"), None)
        self._shared: dict[str, Placement] = {}
        """Call with several groups -> its shares on them, without parts."""
        for name, ranges in groups.items():
            if len(ranges) > 1 and not forecast.workload.call(name).trains:
                self._shared[name] = self._shares(forecast.workload.call(name), ranges)

    def run(self) -> PlanInParts:
        before, rows = self._forecast.seconds(self._plan), list[dict[str, object]]()
        asked = bool(self._strategy.parts or self._strategy.replicas > 1 or self._shared)
        best: tuple[float, Plan | None] = (math.inf if asked or before is None else before * WORTH, None)
        refusals: dict[bool, str] = {}
        for replicas, parts, in_training in self._ways():
            try:
                plan = self._in_parts(replicas, parts, in_training=in_training)
                refusal = self._forecast.refusal(plan)
            except PlanError as error:
                plan, refusal = self._plan, str(error)
            if not refusal and (seconds := self._forecast.seconds(plan)) is not None:
                rows.append(
                    {
                        "replicas": replicas, "parts of each": parts,
                        "training in parts": "yes" if in_training else "no", "seconds": seconds,
                        "of the plan as it is": f"{seconds / before:.3f}" if before else "-",
                    }
                )  # fmt: skip
                best = min(best, (seconds, plan), key=lambda each: each[0])
            else:
                refusals.setdefault(in_training, refusal or "They do not fit into memory.")
        seconds, plan = best
        if plan is None and asked:
            raise PlanError(
                f"plan.placement: no plan has such parts, replicas or groups of devices. Got parts "
                f"{self._strategy.parts or 'any'}, replicas {self._strategy.replicas or 'any'} on {self._cluster}: "
                f"{refusals.get(False, '')} Leave them out, or use other devices."
            )
        none_trains = bool(refusals.get(True)) and not any(row["training in parts"] == "yes" for row in rows)
        also = f" Training waits for the whole batch: {refusals[True]}" if none_trains else ""
        if plan is None:
            why = "Whole calls are as fast." if rows else f"Its calls cannot be cut. {refusals.get(False, '')}".strip()
            return PlanInParts(_MEANS, before or 0.0, tuple(rows), reason=why + also)
        seconds, plan = self._evened(seconds, plan)
        calls = self._forecast.calls(plan)
        busy = ", ".join(f"{name} {calls[name].seconds:.3g} s" for name in calls)
        why = f"Seconds of calls, some of which overlap: {busy}.{also}"
        return PlanInParts(_MEANS, before or 0.0, tuple(rows), plan, seconds, calls, why)

    def _evened(self, seconds: float, plan: Plan) -> tuple[float, Plan]:
        """A plan, and its seconds, with rows by which the shares of a call on several groups take as long as one
        another: parts of few rows are slower, for each, than the whole call of which the first guess is."""
        taken = self._of_shares(plan)
        for _ in range(EVENINGS if self._shared else 0):
            evened = with_placements(
                plan, {name: _rows_by_speed(plan.placements[name], each) for name, each in taken.items()}
            )
            after = None if self._forecast.refusal(evened) else self._forecast.seconds(evened)
            now = {} if after is None else self._of_shares(evened)
            if after is None or after > seconds * EVEN_LOSS or _unevenness(now) >= _unevenness(taken):
                break
            seconds, plan, taken = after, evened, now
        return seconds, plan

    def _of_shares(self, plan: Plan) -> dict[str, list[float]]:
        """Call on several groups -> the seconds of each share, of all of its parts."""
        found = {name: [0.0] * (1 + len(plan.placements[name].shares)) for name in self._shared}
        for name, part, forecast in self._forecast.parts(plan):
            if name not in found:
                continue
            assert part is not None
            of_share = itertools.accumulate(p.parts for p in (plan.placements[name], *plan.placements[name].shares))
            generates = self._forecast.workload.call(name).kind == "generate"
            share = part.share if generates else next(i for i, end in enumerate(of_share) if part.number < end)
            found[name][share] += forecast.seconds
        return found

    def _ways(self) -> Iterator[tuple[int, int, bool]]:
        """Replicas, parts of each, and whether train calls run in parts too."""
        if self._generation is None:
            yield 1, 1, False
            return
        replicas = [self._strategy.replicas] if self._strategy.replicas else [1, self._nodes()]
        parts = [self._strategy.parts] if self._strategy.parts else PARTS
        for n, count in itertools.product(dict.fromkeys(replicas), parts):
            if n * count > 1 or self._shared:
                yield n, count, False
            if n * count > 1:
                yield n, count, True

    def _nodes(self) -> int:
        """The nodes of the generation's devices; 1 if these are a part of one, or several groups."""
        assert self._generation is not None
        devices = self._plan[self._generation].devices
        is_shared = self._generation.plan_name in self._shared
        return 1 if is_shared else max(1, len(devices) // self._cluster.devices_per_node)

    def _in_parts(self, replicas: int, parts: int, *, in_training: bool) -> Plan:
        """The plan with so many replicas and parts. Raises PlanError if the generation does not divide so."""
        plan = self._cut(replicas, parts, in_training=in_training, part_rows=1.0)
        if not self._forecast.refusal(plan):
            return plan
        # Blocks of unlike groups may be smaller than others: too small for as many micro-batches.
        return self._cut(replicas, parts, in_training=in_training, part_rows=0.0)

    def _cut(self, replicas: int, parts: int, *, in_training: bool, part_rows: float) -> Plan:
        """The plan with so many replicas and parts, and micro-batches for so much of the mean rows of a part."""
        placements = dict(self._shared)
        if (generation := self._generation) is not None:
            on = self._replicas(generation, replicas, parts)
            blocks = parts * (1 + len(on.shares))
            placements[generation.plan_name] = on
            for call in takers(self._graph, generation, "infer"):
                placements[call.plan_name] = self._taker(call, blocks, part_rows)
            if blocks > 1:
                on_host = takers(self._graph, generation, "host")
                placements |= {call.plan_name: Placement(parts=blocks) for call in on_host}
            if in_training:
                trains = (call for call in self._graph.calls if call.kind == "train")
                placements |= {call.plan_name: _in_equal_parts(self._plan[call], blocks) for call in trains}
        return with_placements(self._plan, placements)

    def _replicas(self, call: Call, replicas: int, parts: int) -> Placement:
        """The shares of a generation: one for each group, or equal ones on consecutive devices. Raises PlanError."""
        if call.plan_name in self._shared:
            shares = self._shared[call.plan_name]
        else:
            whole = self._plan[call]
            strategy, size = whole.strategy, len(whole.devices) // replicas
            if strategy.data % replicas or len(whole.devices) % replicas or (strategy.pipeline > 1 and replicas > 1):
                raise PlanError(f"{call.plan_name} has {strategy}, of which {replicas} replicas cannot be made.")
            devices, strategy = sorted(whole.devices), dataclasses.replace(strategy, data=strategy.data // replicas)
            each = [Placement(tuple(devices[i * size : (i + 1) * size]), strategy) for i in range(replicas)]
            rest = tuple(dataclasses.replace(share, rows=1 / replicas) for share in each[1:])
            shares = dataclasses.replace(each[0], shares=rest)
        more = tuple(_generating(share, parts) for share in shares.shares)
        return dataclasses.replace(_generating(shares, parts), shares=more)

    def _taker(self, call: Call, blocks: int, part_rows: float) -> Placement:
        """An inference call that takes the blocks of a generation."""
        on, rows = self._shared.get(call.plan_name), part_rows * call.num_rows
        if on is None:
            return _with_fewer(dataclasses.replace(self._plan[call], parts=blocks), math.floor(rows / blocks))
        shares = [
            _with_fewer(dataclasses.replace(share, parts=count), math.floor(rows * share.rows / count))
            for share in on.shares
            for count in [max(1, round(blocks * share.rows))]
        ]
        left = max(1, blocks - sum(share.parts for share in shares))
        rest = math.floor(rows * (1 - sum(share.rows for share in shares)) / left)
        return _with_fewer(dataclasses.replace(on, parts=left, shares=tuple(shares)), rest)

    def _shares(self, call: ModelCall, ranges: Sequence[range]) -> Placement:
        """A call on several groups: on each the strategy that is fastest there by itself, rows by how fast that is.
        Raises PlanError if it does not fit on one."""
        alone, costs = Workload((dataclasses.replace(call, needs=()),)), self._forecast.costs
        found = list[tuple[range, Strategy, float]]()
        for devices in ranges:
            problem = make_problem(alone, self._cluster, costs, among="any", on={call.name: devices})
            choices = problem.calls[0].choices
            fastest = min(choices, key=lambda choice: (float(f"{choice.busy:.3g}"), _micro_batches(choice)))
            found.append((devices, fastest.strategy, fastest.busy))
        if call.kind == "generate":  # the first has the rows that are left: its degrees must divide any such number
            found.sort(key=lambda each: each[1].num_row_shards * each[1].pipeline)
        speeds = [1 / seconds for _, _, seconds in found]
        placements = [
            Placement(tuple(devices), strategy, rows=round(speed / sum(speeds), 4))
            for (devices, strategy, _), speed in zip(found, speeds, strict=True)
        ]
        return dataclasses.replace(placements[0], rows=1.0, shares=tuple(placements[1:]))


def _rows_by_speed(placement: Placement, seconds: Sequence[float]) -> Placement:
    """A placement whose shares have as many rows as they would do in equal times, by the seconds of those they have."""
    rows = [1 - sum(share.rows for share in placement.shares), *(share.rows for share in placement.shares)]
    speeds = [of_share / max(taken, 1e-9) for of_share, taken in zip(rows, seconds, strict=True)]
    shares = zip(placement.shares, speeds[1:], strict=True)
    return dataclasses.replace(
        placement,
        shares=tuple(dataclasses.replace(share, rows=round(speed / sum(speeds), 4)) for share, speed in shares),
    )


def _unevenness(seconds: Mapping[str, Sequence[float]]) -> float:
    """By how many times the slowest share of a call takes longer than the fastest; of all calls, the most."""
    return max((max(each) / max(min(each), 1e-9) for each in seconds.values()), default=1.0)


def _micro_batches(choice: Choice) -> int:
    return choice.strategy.micro_batches


def _with_fewer(placement: Placement, rows: int) -> Placement:
    """A placement with at most as many micro-batches as each row shard has rows of a part."""
    strategy = placement.strategy
    most = max(1, rows // strategy.num_row_shards)
    count = max(n for n in divisors(strategy.micro_batches) if n <= most)
    return dataclasses.replace(placement, strategy=dataclasses.replace(strategy, micro_batches=count))


def _generating(placement: Placement, parts: int) -> Placement:
    """A generation in so many parts, which take the place of micro-batches."""
    return dataclasses.replace(
        placement, parts=parts, strategy=dataclasses.replace(placement.strategy, micro_batches=1)
    )


def _in_equal_parts(placement: Placement, parts: int) -> Placement:
    """A train call in so many parts, which take the place of as many micro-batches."""
    micro_batches = max(1, placement.strategy.micro_batches // parts)
    strategy = dataclasses.replace(placement.strategy, micro_batches=micro_batches)
    return dataclasses.replace(placement, parts=parts, strategy=strategy)
