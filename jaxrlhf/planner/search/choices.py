"""The ways to run each call of a step on a cluster, and their costs: the choices of a search.

A choice is a range of devices, degrees over them, micro-batches and remat. Those that are left out would not be missed:

- what a plan may not say (degrees that do not divide the model or the rows, more stages than layers);
- what takes more memory by itself than a device has;
- of choices on the same devices that lay the weights in the same way, or weights that are never trained, one than which
  another is as fast and needs no more memory of any sort;
- what no plan can have that is as fast as one that is known, by `within_reach`. Plans that place each set of weights by
  itself are made without this rule (`among="any"`), and the plan that is usually written by hand has choices of its own
  (`among="usual"`).

These might be:

- in large clusters, devices that are fewer than a `SMALLEST`-th of all: from 257 on, of nodes of 8, parts of a node;
- with more than `GRID` nodes, whole nodes that do not lie on a grid of as many parts, or are a power of two within one;
- numbers of slots that are no power of two, other widths of their groups, and slots where nothing is known of lengths;
- micro-batches that are no power of two or more than `MAX_MICRO_BATCHES`; weights split over some row shards of a node;
  remat `dots`; chunks and GPipe; trained roles in host memory.

What may be fused is kept in any case: training over all devices in stages.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrlhf.cluster.hardware import Cluster, Kind, Network
from jaxrlhf.models.params import layer_form
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.memory import CallMemory, call_memory, evenness, weight_bytes
from jaxrlhf.planner.costs.rollout_steps import slot_choices
from jaxrlhf.planner.plans.plan import NoRoomError, Placement, PlanError
from jaxrlhf.planner.plans.splits import divisors, undivided_sizes
from jaxrlhf.planner.search.peak_memory import in_gb, remedy, room_in_words
from jaxrlhf.planner.search.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.search.pruning import undominated, within_reach
from jaxrlhf.planner.search.reallocation_seconds import reallocation_seconds
from jaxrlhf.planner.search.search import fastest_that_fits, most_devices, options_on
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.search.step_order import layout
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.sharding.strategy import Remat, Strategy

SMALLEST = 32
GRID = 16
MAX_MICRO_BATCHES = 256
Among = Literal["fast", "any", "usual"]
"""The choices of a problem: `fast`, those that could be part of the fastest plan; `any`, also those that could not;
`usual`, those of the baseline plan, tensor within nodes and pipeline across them, with all micro-batches and remat."""


def make_problem(
    workload: Workload,
    cluster: Cluster,
    costs: CostModel,
    *,
    fixed: Mapping[str, Placement] | None = None,
    offload: Iterable[str] = (),
    among: Among = "fast",
    on: Mapping[str, range] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Problem:
    """The problem of a search for the plan of a workload.

    Args:
        fixed: Call -> the placement that it has to keep.
        offload: Roles that must rest in host memory. Others that never change may.
        among: See `Among`.
        on: Call -> the only devices that it may have.
        say: Is told the progress, in lines.

    Raises:
        NoRoomError: A call does not fit on the cluster even by itself. Says by how much.
        PlanError: No degrees divide a call's model and rows.
    """
    fixed, offload = fixed or {}, frozenset(offload)
    maker = _Maker(workload, cluster, costs, offload)
    usual = maker.usual_degrees(c for c in workload.calls if c.name not in fixed) if among == "usual" else {}
    every = []
    for number, call in enumerate(workload.calls, start=1):
        say(f"Counting what {call.name} costs on {cluster}, {number} of {len(workload.calls)}")
        if call.name in fixed:
            every.append([maker.fixed(call, fixed[call.name])])
        else:
            meshes = cluster.meshes if on is None else (on[call.name],)
            every.append(maker.usual(call, *usual[call.name]) if among == "usual" else maker.choices(call, meshes))
    unconnected = _unconnected(workload, cluster, every)
    if among == "fast":
        say("Looking for a first plan, on all devices")
        kept = within_reach(unconnected, _first_plan_seconds(unconnected, workload, costs))
        fused = _may_be_fused(unconnected)
        unconnected = unconnected.with_choices([sorted({*s, *more}) for s, more in zip(kept, fused, strict=True)])
    count = sum(len(call.choices) for call in unconnected.calls)
    say(f"Counting what it costs to move weights and data between {count:,} placements")
    return _connected(unconnected, workload, costs)


def _unconnected(workload: Workload, cluster: Cluster, every: Iterable[Sequence[Choice]]) -> Problem:
    """A problem in which nothing has to be moved. `every`: call -> its choices."""
    firsts = range(0, cluster.num_devices, cluster.devices_per_memory)
    return Problem(
        calls=tuple(
            CallChoices(
                c.name, c.kind, c.role, c.weights, c.trains, c.needs, tuple(dict.fromkeys(choices)), c.base, c.stale
            )
            for c, choices in zip(workload.calls, every, strict=True)
        ),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        capacity=tuple(cluster.capacity(device) for device in firsts),
        reallocations={},
        transfers={},
        tokens=workload.tokens,
        one_at_a_time=on_cpu(cluster) and cluster.num_nodes == 1,
        devices_per_memory=cluster.devices_per_memory,
    )


def _connected(problem: Problem, workload: Workload, costs: CostModel) -> Problem:
    """A problem with the seconds of moving weights and data between its choices."""
    reallocations = _reallocations(workload, problem.calls, costs.cluster)
    return dataclasses.replace(
        problem, reallocations=reallocations, transfers=_transfers(workload, problem.calls, costs)
    )


def _first_plan_seconds(problem: Problem, workload: Workload, costs: CostModel) -> float:
    """Seconds of an iteration under the fastest plan with all calls on the most devices that all can have; infinite if
    there is none."""
    try:
        devices = most_devices(problem, "plan")
        options = options_on(problem, dict.fromkeys((call.weights for call in problem.calls), devices))
        kept = [some if len(c.choices) > 1 else [0] for c, some in zip(problem.calls, options, strict=True)]
        part = _connected(problem.with_choices(kept), workload, costs)
        return steady_state(part, fastest_that_fits(part, [range(len(some)) for some in kept], "plan")).seconds
    except PlanError:
        return math.inf


def looked_at(cluster: Cluster) -> str:
    """The limits of the choices, in words."""
    parts = [
        "consecutive devices", "tensor within a node", "fsdp over no row shards, all, or those of a node",
        "micro-batches in powers of two", "remat none or layer", "1F1B without chunks", "trained roles on devices",
    ]  # fmt: skip
    fewest = math.ceil(cluster.num_devices / SMALLEST)
    if fewest > 1:
        parts.append(f"at least {fewest} devices a call")
    if cluster.num_nodes > GRID:
        parts.append(f"nodes on a grid of {GRID}")
    return ", ".join(parts)


def on_cpu(cluster: Cluster) -> bool:
    """True if its devices are virtual devices of CPUs."""
    return all(group.kind.target is None for group in cluster.groups)


def problem_of(
    workload: Workload,
    cluster: Cluster,
    costs: CostModel,
    placements: Mapping[str, Sequence[Placement]],
    *,
    offload: Iterable[str] = (),
) -> Problem:
    """A problem whose choices are given placements, however slow or large. `placements`: call -> those that it may
    have. `offload`: roles that rest in host memory."""
    maker = _Maker(workload, cluster, costs, frozenset(offload))
    every = [[maker.fixed(call, placement) for placement in placements[call.name]] for call in workload.calls]
    return _connected(_unconnected(workload, cluster, every), workload, costs)


def memory_problem(
    workload: Workload, cluster: Cluster, placements: Mapping[str, Placement], offload: Iterable[str] = ()
) -> Problem:
    """A problem without costs, for `peak_memory`, whose only choices are given placements."""
    maker = _Maker(workload, cluster, None, frozenset(offload))
    every = []
    for call in workload.calls:
        choice = maker.fixed(call, placements[call.name])
        if call.part is not None and call.part.migrate:
            whole = next(c for c in workload.calls if c.part and c.part.of == call.part.of and c.part.share == 0)
            if shares_weights(placements[call.name], placements[whole.name]):
                choice = dataclasses.replace(choice, resting=0, base=0, copy=0, shared_with_training=0)
        every.append([choice])
    return _unconnected(workload, cluster, every)


def shares_weights(tail: Placement, share: Placement) -> bool:
    """True if the weights of a tail are those that a share of its generation has on the same devices."""
    a, b, first = tail.strategy, share.strategy, tail.devices[0]
    if not set(tail.devices) <= set(share.devices) or a.pipeline > 1 or b.pipeline > 1:
        return False
    period = a.fsdp * a.tensor
    return (a.fsdp, a.tensor) == (b.fsdp, b.tensor) and share.devices.index(first) % period == 0


class _Maker:
    """Makes the choices of calls. Equal devices are looked at once."""

    def __init__(self, workload: Workload, cluster: Cluster, costs: CostModel | None, offload: frozenset[str]) -> None:
        self._workload, self._cluster, self._costs, self._on_cpu = workload, cluster, costs, on_cpu(cluster)
        self._offload, self._trained = offload, workload.trained
        self._readers = {w: len(workload.readers(w)) for w in {call.weights for call in workload.calls}}

    def choices(self, call: ModelCall, meshes: Sequence[range]) -> list[Choice]:
        """All choices that are worth keeping, on some sets of devices. Raises PlanError if there is none."""
        found: list[Choice] = []
        least: tuple[int, range, Strategy] | None = None
        by_kind: dict[tuple[int, Kind, Network, bool], list[Choice]] = {}
        for mesh in meshes:
            too_small = len(mesh) * SMALLEST < self._cluster.num_devices or not _on_grid(mesh, self._cluster)
            if too_small and len(meshes) > 1:
                continue
            kind = self._cluster.slowest(mesh)
            network = self._cluster.network(mesh)
            key = (len(mesh), kind, network, len(mesh) > self._cluster.devices_per_node)
            if key not in by_kind:
                alike: dict[Hashable, list[Choice]] = {}
                lies_alike = call.weights not in self._trained and self._readers_of(call) == 1
                for choice in self._on(call, mesh):
                    taken = sum(_bytes(choice))
                    if taken <= kind.capacity:
                        alike.setdefault(None if lies_alike else layout(choice), []).append(choice)
                    if least is None or taken - kind.capacity < least[0]:
                        least = (taken - kind.capacity, mesh, choice.strategy)
                by_kind[key] = [choice for group in alike.values() for choice in undominated(_worth_slots(group))]
            for choice in by_kind[key]:
                found.append(dataclasses.replace(choice, first=mesh.start, end=mesh.stop))
        if not found:
            raise self._nothing_fits(call, least)
        return found

    def _readers_of(self, call: ModelCall) -> int:
        """The number of calls that read any of the weights that a call reads, itself included."""
        read = {call.weights, call.base} - {""}
        return sum(not read.isdisjoint({other.weights, other.base}) for other in self._workload.calls)

    def usual_degrees(self, calls: Iterable[ModelCall]) -> dict[str, tuple[range, Strategy]]:
        """Call -> devices, the same for all, and degrees: tensor within a node, pipeline across nodes; where heads or
        layers do not divide so, the most tensor, then the most pipeline up to the number of nodes, data for the rest.

        All devices, or as many nodes, or such a part of one, as the rows of all calls divide over.

        Raises:
            PlanError: They divide over none.
        """
        calls, per_node = list(calls), self._cluster.devices_per_node
        for mesh in sorted((m for m in self._cluster.meshes if m.start == 0), key=len, reverse=True):
            nodes = max(1, len(mesh) // per_node)
            found = {}
            for call in calls:
                ways = [s for s in strategies(call, len(mesh), per_node) if s.pipeline <= nodes and s.fsdp == 1]
                if ways:
                    found[call.name] = mesh, max(ways, key=lambda s: (s.tensor, s.pipeline))
            if len(found) == len(calls):
                return found
        raise PlanError("heuristic: all calls must have degrees over the same devices. Got none. Use another strategy.")

    def usual(self, call: ModelCall, mesh: range, degrees: Strategy) -> list[Choice]:
        """All choices of given degrees that fit, except those that another beats in seconds and memory. Raises
        NoRoomError if there is none."""
        kind, kept = self._cluster.slowest(mesh), []
        same = [c for c in self._on(call, mesh) if _degrees(c.strategy) == _degrees(degrees)]
        leanest = min(same, key=lambda c: sum(_bytes(c)))
        if sum(_bytes(leanest)) > kind.capacity:
            raise self._nothing_fits(call, (sum(_bytes(leanest)) - kind.capacity, mesh, leanest.strategy))
        for choice in sorted(same, key=lambda c: (c.busy, sum(_bytes(c)))):
            beaten = any(all(a <= b for a, b in zip(_bytes(c), _bytes(choice), strict=True)) for c in kept)
            if sum(_bytes(choice)) <= kind.capacity and not beaten:
                kept.append(choice)
        return kept

    def fixed(self, call: ModelCall, placement: Placement) -> Choice:
        """The choice of a given placement."""
        devices = range(min(placement.devices), max(placement.devices) + 1)
        return self._choice(call, devices, placement.strategy, call.role in self._offload)

    def _on(self, call: ModelCall, mesh: range) -> Iterator[Choice]:
        """Every choice on some devices."""
        offloads = {call.role in self._offload}
        if self._may_rest_on_host(call):
            offloads.add(True)
        for strategy in strategies(call, len(mesh), self._cluster.devices_per_node):
            for offloaded in sorted(offloads):
                if not offloaded or call.role in self._offload or self._host_has_room(call, mesh, strategy):
                    yield self._choice(call, mesh, strategy, offloaded)

    def _may_rest_on_host(self, call: ModelCall) -> bool:
        if self._on_cpu:  # whose devices have the host's memory
            return False
        never_changes = call.weights not in self._trained
        is_own = call.weights == call.role  # else other roles read them too, as adapters that they are the base of
        return never_changes and is_own and self._readers[call.weights] == 1 and call.lora is None

    def _host_has_room(self, call: ModelCall, mesh: range, strategy: Strategy) -> bool:
        """True if hosts have room for the weights when all that may rest there get an equal part of their memory."""
        rooms = [group.host_bytes for group in self._cluster.groups if group.host_bytes is not None]
        if not rooms:
            return True
        others = {c.weights for c in self._workload.calls if c.role in self._offload or self._may_rest_on_host(c)}
        on_a_node = min(len(mesh), self._cluster.devices_per_node) * self._memory(call, strategy).resting
        return on_a_node * len(others) <= min(rooms)

    def _choice(self, call: ModelCall, mesh: range, strategy: Strategy, offloaded: bool) -> Choice:
        seconds = 0.0 if self._costs is None else self._costs.seconds(call, mesh, strategy).total
        memory = self._memory(call, strategy)
        sizes = self._of_a_memory(call, mesh, strategy, memory)
        form = layer_form(call.model, generates=call.kind == "generate", is_pipelined=strategy.pipeline > 1)
        choice = Choice(mesh.start, mesh.stop, strategy, seconds, **sizes, layers=form)
        if not offloaded:
            return choice
        own_base = choice.base if call.base.startswith(f"{call.role}.") else 0  # goes to the host with its role
        moved = 0.0 if self._costs is None else self._costs.host_copy(mesh, memory.resting)
        return dataclasses.replace(
            choice,
            resting=choice.resting if self._on_cpu else 0,
            base=choice.base if self._on_cpu else choice.base - own_base,
            working=choice.working + choice.resting + own_base,
            load=moved,
            unload=moved if call.trains else 0.0,
            offloaded=True,
        )

    def _of_a_memory(self, call: ModelCall, mesh: range, strategy: Strategy, memory: CallMemory) -> dict[str, Any]:
        """Bytes in each memory by their names in `Choice`, from those on each device."""
        together = min(len(mesh), self._cluster.devices_per_memory)
        if together == 1:
            names = ("resting", "working", "copy", "shared_with_training", "base")
            return {name: getattr(memory, name) for name in names}
        held = together * evenness(call.model, strategy, lora=call.lora if call.trains else None)
        copies = held / math.gcd(strategy.data, together)  # those that are moved there share what is alike
        of_base = together * evenness(call.base_model or call.model, strategy) / math.gcd(strategy.data, together)
        return dict(
            resting=int(memory.resting * (held if call.trains else copies)),
            working=memory.working * together,
            copy=int(memory.copy * copies),
            shared_with_training=int(memory.shared_with_training * copies),
            base=int(memory.base * of_base),
        )

    def _memory(self, call: ModelCall, strategy: Strategy) -> CallMemory:
        is_trained = call.weights in self._trained
        return call_memory(call, strategy, is_trained=is_trained, on_cpu=self._on_cpu)

    def _nothing_fits(self, call: ModelCall, least: tuple[int, range, Strategy] | None) -> PlanError:
        where, model = f"plan.calls.{call.name}", call.model
        if least is None:
            return PlanError(
                f"{where}: no degrees divide both the model and its rows on this cluster. Got {call.rows} rows"
                f"{f' in {call.mini_batches} mini-batches' if call.trains else ''}, {model.num_heads} heads, "
                f"{model.num_kv_heads} key-value heads, {model.num_layers} layers. Use another batch size."
            )
        missing, mesh, strategy = least
        memory = self._memory(call, strategy)
        parts = {"weights and optimizer": memory.resting, "weights": memory.copy, "adapted weights": memory.base}
        parts |= {f.name: getattr(memory, f.name) for f in dataclasses.fields(memory) if f.name not in _WEIGHT_PARTS}
        listed = ", ".join(f"{name} {in_gb(size)}" for name, size in parts.items() if size)
        capacity = self._cluster.capacity(mesh.start)
        devices = "one device" if len(mesh) == 1 else f"{len(mesh)} devices as {strategy}"
        listed += " on each" if len(mesh) > 1 else ""
        return NoRoomError(
            f"{where}: must fit into {room_in_words(capacity, self._cluster.devices_per_memory)}. Got "
            f"{in_gb(capacity + missing)} at the least, {in_gb(missing)} too much, on {devices} ({listed}). "
            f"{remedy(self._cluster.devices_per_memory)}"
        )


_WEIGHT_PARTS = ("resting", "optimizer", "base", "copy", "shared_with_training")


def _worth_slots(choices: Sequence[Choice]) -> Sequence[Choice]:
    """The choices without slots that are no faster than all rows at once with the same degrees, or their micro-batches,
    which take less memory too."""
    at_once = {_degrees(c.strategy): math.inf for c in choices if c.strategy.slots}
    if not at_once:
        return choices
    for choice in choices:
        if not choice.strategy.slots and (degrees := _degrees(choice.strategy)) in at_once:
            at_once[degrees] = min(at_once[degrees], choice.busy)
    return [c for c in choices if not c.strategy.slots or c.busy < at_once[_degrees(c.strategy)]]


def _may_be_fused(problem: Problem) -> list[list[int]]:
    """Call -> choices of training over stages on all devices, the bubbles of which another call could fill."""
    everywhere = range(problem.num_devices)
    return [
        [k for k, c in enumerate(call.choices) if call.trains and c.devices == everywhere and c.strategy.pipeline > 1]
        for call in problem.calls
    ]


def _on_grid(devices: range, cluster: Cluster) -> bool:
    """True if devices are worth looking at: in a cluster of many nodes there are too many ranges of nodes, between any
    two of which weights could move."""
    per_node, nodes = cluster.devices_per_node, cluster.num_nodes
    size, start = len(devices) // per_node, devices.start // per_node
    if nodes <= GRID or size == 0 or size == nodes:
        return True
    grid = 2 ** math.ceil(math.log2(nodes / GRID))
    part = size if size < grid and size.bit_count() == 1 else grid
    return size % part == 0 and start % part == 0


def strategies(call: ModelCall, num_devices: int, devices_per_node: int) -> Iterator[Strategy]:
    """Every strategy of a call over some number of devices that a plan may have and that could be fast.

    `tensor` stays within a node. Weights are split over `fsdp` in whole, within a node, or not at all, and not where
    they are decoded with. Remat is none or layer. Generation has slots only where lengths of responses are known.
    """
    model = call.model
    remats: tuple[Remat, ...] = ("none", "layer") if call.trains else ("none",)
    for tensor in divisors(min(num_devices, devices_per_node)):
        if num_devices % tensor or undivided_sizes(model, tensor=tensor):
            continue
        for pipeline in divisors(num_devices // tensor):
            if pipeline > model.num_layers:
                continue
            rest = num_devices // (tensor * pipeline)
            near = max(1, min(rest, devices_per_node // tensor))
            shards = {1} if call.kind == "generate" else {1, rest, near if rest % near == 0 else 1}
            for fsdp in sorted(shards):
                if undivided_sizes(model, fsdp=fsdp):
                    continue
                for micro_batches in _micro_batches(call, rest * (pipeline if call.kind == "generate" else 1)):
                    for remat in remats:
                        strategy = Strategy(
                            data=rest // fsdp, fsdp=fsdp, tensor=tensor, pipeline=pipeline, micro_batches=micro_batches,
                            remat=remat,
                        )  # fmt: skip
                        yield strategy
                        yield from slot_choices(call, strategy)


def _micro_batches(call: ModelCall, shards: int) -> list[int]:
    """Powers of two into which the rows of every shard can be cut."""
    counts = [2**i for i in range(MAX_MICRO_BATCHES.bit_length())]
    return [n for n in counts if n <= MAX_MICRO_BATCHES and call.can_split(n * shards)]


def _degrees(strategy: Strategy) -> tuple[int, ...]:
    return strategy.pipeline, strategy.data, strategy.fsdp, strategy.tensor


def _bytes(choice: Choice) -> tuple[int, int, int]:
    return choice.resting + choice.base, choice.working, choice.copy


def _reallocations(
    workload: Workload, calls: Sequence[CallChoices], cluster: Cluster
) -> dict[tuple[int, int], PairSeconds]:
    """Seconds of bringing weights from where they are trained to where they are read."""
    layouts, tables = [_layouts(call.choices) for call in calls], {}
    for (i, train), (j, reader) in itertools.product(enumerate(calls), enumerate(calls)):
        if train.trains and not reader.trains and train.weights == reader.weights:
            (sources, row), (targets, column), read = layouts[i], layouts[j], workload.calls[j]
            size = weight_bytes(read.model, Strategy(), read.model.itemsize, lora=read.lora)
            layers = read.model.num_layers
            seconds = reallocation_seconds(sources, targets, size=size, num_layers=layers, cluster=cluster)
            tables[i, j] = PairSeconds(seconds, row, column)
    return tables


def _layouts(choices: Sequence[Choice]) -> tuple[list[Choice], np.ndarray]:
    """The first choice of every layout, and for every choice the number of its layout."""
    numbers: dict[Hashable, int] = {}
    number = np.array([numbers.setdefault(layout(choice), len(numbers)) for choice in choices])
    return [choices[k] for k in np.unique(number, return_index=True)[1]], number


def _transfers(
    workload: Workload, calls: Sequence[CallChoices], costs: CostModel
) -> dict[tuple[int, int], PairSeconds]:
    """Seconds of bringing outputs to the calls that wait for them."""
    numbers = {call.name: i for i, call in enumerate(calls)}
    places = list(dict.fromkeys(choice.devices for call in calls for choice in call.choices))
    ways = np.array([[costs.way_between(source, target) for target in places] for source in places])
    number_of = {place: number for number, place in enumerate(places)}
    there = [np.unique([number_of[c.devices] for c in call.choices], return_inverse=True) for call in calls]
    tables = {}
    for j, call in enumerate(calls):
        for i in (numbers[name] for name in call.needs):
            (rows, row), (columns, column), size = there[i], there[j], workload.calls[i].output_bytes
            if size:
                latency, bandwidth = np.moveaxis(ways[np.ix_(rows, columns)], -1, 0)
                tables[i, j] = PairSeconds(latency + size / bandwidth, row, column)
    return tables
