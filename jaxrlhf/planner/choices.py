"""The ways to run each call of a step on a cluster, and what each costs: what a search chooses from.

A choice is a range of devices, degrees over them, micro-batches and remat. Not all that are possible are kept:

- what a plan may not say (degrees that do not divide the model or the rows, more stages than layers) is left out;
- so is what takes more memory by itself than a device has;
- and what takes longer than a whole plan that is known, with a tenth of its seconds granted for reallocation;
- of the choices on the same devices, those that another beats in seconds and in every kind of memory. Memory counts
  as more only from `LESS_MEMORY` on; and where weights have to be brought there, one of another layout has to be
  faster by more than `SLACK`;
- of what is left on the same devices, all but the `KEPT` fastest and the leanest are left out;
- in large clusters, devices that are fewer than a `SMALLEST`-th of all: from 257 on, of nodes of 8, parts of a node;
- with more than `GRID` nodes, whole nodes that do not lie on a grid of as many parts, or are a power of two within one.

What may be fused is kept: of training over all devices, the fastest choice of every tensor and pipeline degree.

The first two lose nothing; nor does the third, unless bringing weights takes more than that tenth. The others may lose
little. Plans that place each set of weights by itself are made without the third (`among="any"`), and the plan that is
usually written by hand has choices of its own (`among="usual"`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jaxrlhf.planner.cost import CostModel
from jaxrlhf.planner.hardware import Cluster, Kind, Network
from jaxrlhf.planner.memory import CallMemory, call_memory, evenness, itemsize, weight_bytes
from jaxrlhf.planner.peak_memory import in_gb, remedy, room_in_words
from jaxrlhf.planner.plan import NoRoomError, Placement, PlanError
from jaxrlhf.planner.problem import CallChoices, Choice, Problem
from jaxrlhf.planner.reallocation import reallocation_seconds
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.sharding.strategy import Remat, Strategy

SLACK = 1.15
"""How much slower a choice may be than another on the same devices, before the search no longer looks at it: bringing
weights there may cost so much less."""
LESS_MEMORY = 0.9
"""What a slower choice must take less than, as a part of a faster one's memory, to be worth it."""
KEPT, KEPT_OF_MANY, MANY = 5, 3, 32
"""Choices kept on the same devices, and in clusters of more than `MANY` devices."""
SMALLEST = 32
GRID = 16
MAX_MICRO_BATCHES = 256
Among = Literal["fast", "any", "usual"]
"""What a problem has choices of: `fast`, those that could be part of the fastest plan; `any`, those too that could not;
`usual`, those of the plan that is usually written by hand, tensor within nodes and pipeline across them, with all
micro-batches and remat."""


def make_problem(
    workload: Workload,
    cluster: Cluster,
    costs: CostModel,
    *,
    fixed: Mapping[str, Placement] | None = None,
    offload: Iterable[str] = (),
    may_offload: bool = True,
    among: Among = "fast",
    say: Callable[[str], None] = lambda line: None,
) -> Problem:
    """Everything that a search for the plan of a workload needs.

    Args:
        fixed: Call -> the placement that it has to keep.
        offload: Roles that must rest in host memory.
        may_offload: Whether other roles that never change may.
        among: See `Among`.
        say: Told how far it is, in lines.

    Raises:
        NoRoomError: A call does not fit on the cluster even by itself: says by how much.
        PlanError: No degrees divide a call's model and rows.
    """
    fixed, offload = fixed or {}, frozenset(offload)
    maker = _Maker(workload, cluster, costs, offload, may_offload)
    usual = maker.usual_degrees(c for c in workload.calls if c.name not in fixed) if among == "usual" else {}
    every = []
    for number, call in enumerate(workload.calls, start=1):
        say(f"Counting what {call.name} costs on {cluster}, {number} of {len(workload.calls)}")
        if call.name in fixed:
            every.append([maker.fixed(call, fixed[call.name])])
        else:
            every.append(maker.usual(call, *usual[call.name]) if among == "usual" else maker.choices(call))
    bound = _known_plan_seconds(workload, cluster, every) if among == "fast" else math.inf
    calls = []
    for call, choices in zip(workload.calls, every, strict=True):
        kept = [c for c in choices if c.seconds <= bound or _may_be_fused(call, c, cluster)] or choices
        calls.append(
            CallChoices(
                call.name, call.kind, call.role, call.weights, call.trains, call.needs, tuple(dict.fromkeys(kept))
            )
        )
    say(f"Counting what it costs to move weights and data between {sum(len(c.choices) for c in calls):,} placements")
    return Problem(
        calls=tuple(calls),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        capacity=_capacity(cluster),
        reallocations=_reallocations(workload, calls, cluster),
        transfers=_transfers(workload, calls, costs),
        tokens=workload.tokens,
        one_at_a_time=on_cpu(cluster) and cluster.num_nodes == 1,
        devices_per_memory=cluster.devices_per_memory,
    )


def on_cpu(cluster: Cluster) -> bool:
    """Whether its devices are virtual ones of CPUs."""
    return all(group.kind.target is None for group in cluster.groups)


def memory_problem(
    workload: Workload, cluster: Cluster, placements: Mapping[str, Placement], offload: Iterable[str] = ()
) -> Problem:
    """A problem with one choice for each call, a placement that is given: what `peak_memory` asks for, and no costs."""
    maker = _Maker(workload, cluster, None, frozenset(offload), may_offload=False)
    calls = [
        CallChoices(c.name, c.kind, c.role, c.weights, c.trains, c.needs, (maker.fixed(c, placements[c.name]),))
        for c in workload.calls
    ]
    return Problem(
        calls=tuple(calls),
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        capacity=_capacity(cluster),
        reallocations={},
        transfers={},
        tokens=workload.tokens,
        devices_per_memory=cluster.devices_per_memory,
    )


def _capacity(cluster: Cluster) -> tuple[int, ...]:
    """Memory -> bytes that a plan may fill."""
    return tuple(cluster.capacity(device) for device in range(0, cluster.num_devices, cluster.devices_per_memory))


class _Maker:
    """Makes the choices of calls. Devices that are alike are looked at once."""

    def __init__(
        self, workload: Workload, cluster: Cluster, costs: CostModel | None, offload: frozenset[str], may_offload: bool
    ) -> None:
        self._workload, self._cluster, self._costs, self._on_cpu = workload, cluster, costs, on_cpu(cluster)
        self._offload, self._may_offload = offload, may_offload
        self._readers = {w: len(workload.readers(w)) for w in {call.weights for call in workload.calls}}

    def choices(self, call: ModelCall) -> list[Choice]:
        """All that are worth keeping, on all devices that a call may have.

        Raises:
            PlanError: There is none.
        """
        found: list[Choice] = []
        least: tuple[int, range, Strategy] | None = None
        by_kind: dict[tuple[int, Kind, Network, bool], list[Choice]] = {}
        for mesh in self._cluster.meshes:
            if len(mesh) * SMALLEST < self._cluster.num_devices or not _on_grid(mesh, self._cluster):
                continue
            kind = self._cluster.slowest(mesh.start, mesh.stop)
            network = self._cluster.network(mesh.start, mesh.stop)
            key = (len(mesh), kind, network, len(mesh) > self._cluster.devices_per_node)
            if key not in by_kind:
                kept: list[Choice] = []
                for choice in self._on(call, mesh):
                    taken = choice.resting + choice.working + choice.copy
                    if taken <= kind.capacity:
                        kept.append(choice)
                    if least is None or taken - kind.capacity < least[0]:
                        least = (taken - kind.capacity, mesh, choice.strategy)
                by_kind[key] = _worth_keeping(
                    kept,
                    is_trained=call.weights in self._workload.trained,
                    most=KEPT if self._cluster.num_devices <= MANY else KEPT_OF_MANY,
                )
                fusible = [c for c in kept if _may_be_fused(call, c, self._cluster)]
                by_kind[key] += [c for c in _fastest_of_stages(fusible) if c not in by_kind[key]]
            for choice in by_kind[key]:
                found.append(dataclasses.replace(choice, first=mesh.start, end=mesh.stop))
        if not found:
            raise self._nothing_fits(call, least)
        return found

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
        """All choices of given degrees that fit, but those that another beats in seconds and memory.

        Raises:
            NoRoomError: There is none.
        """
        kind, kept = self._cluster.slowest(mesh.start, mesh.stop), []
        same = [c for c in self._on(call, mesh) if _degrees(c.strategy) == _degrees(degrees)]
        leanest = min(same, key=lambda c: sum(_bytes(c)))
        if sum(_bytes(leanest)) > kind.capacity:
            raise self._nothing_fits(call, (sum(_bytes(leanest)) - kind.capacity, mesh, leanest.strategy))
        for choice in sorted(same, key=lambda c: (_seconds(c), sum(_bytes(c)))):
            beaten = any(all(a <= b for a, b in zip(_bytes(c), _bytes(choice), strict=True)) for c in kept)
            if sum(_bytes(choice)) <= kind.capacity and not beaten:
                kept.append(choice)
        return kept

    def fixed(self, call: ModelCall, placement: Placement) -> Choice:
        """The choice of a placement that is given."""
        first, end = min(placement.devices), max(placement.devices) + 1
        offloaded = call.role in self._offload
        return self._choice(call, range(first, end), placement.strategy, offloaded)

    def _on(self, call: ModelCall, mesh: range) -> Iterator[Choice]:
        """Every choice on some devices."""
        offloads = {call.role in self._offload}
        if self._may_offload and self._may_rest_on_host(call):
            offloads.add(True)
        for strategy in strategies(call, len(mesh), self._cluster.devices_per_node):
            for offloaded in sorted(offloads):
                if not offloaded or call.role in self._offload or self._host_has_room(call, mesh, strategy):
                    yield self._choice(call, mesh, strategy, offloaded)

    def _may_rest_on_host(self, call: ModelCall) -> bool:
        if self._on_cpu:  # whose devices have the host's memory
            return False
        never_changes = call.weights not in self._workload.trained
        is_own = call.weights == call.role  # else other roles read them too, as adapters that they are the base of
        return never_changes and is_own and self._readers[call.weights] == 1 and call.lora is None

    def _host_has_room(self, call: ModelCall, mesh: range, strategy: Strategy) -> bool:
        """Whether weights can rest on hosts where all that may do so have an equal part of their memory."""
        rooms = [group.host_bytes for group in self._cluster.groups if group.host_bytes is not None]
        others = {c.weights for c in self._workload.calls if c.role in self._offload or self._may_rest_on_host(c)}
        on_a_node = min(len(mesh), self._cluster.devices_per_node) * self._memory(call, strategy).resting
        return not rooms or on_a_node * len(others) <= min(rooms)

    def _choice(self, call: ModelCall, mesh: range, strategy: Strategy, offloaded: bool) -> Choice:
        seconds = 0.0 if self._costs is None else self._costs.seconds(call, mesh, strategy).total
        memory = self._memory(call, strategy)
        resting, working, copy = self._of_a_memory(call, mesh, strategy, memory)
        choice = Choice(mesh.start, mesh.stop, strategy, seconds, resting=resting, working=working, copy=copy)
        if not offloaded:
            return choice
        moved = 0.0 if self._costs is None else self._costs.host_copy(mesh, memory.resting)
        return dataclasses.replace(
            choice,
            resting=resting if self._on_cpu else 0,
            working=working + resting,
            load=moved,
            unload=moved if call.trains else 0.0,
            offloaded=True,
        )

    def _of_a_memory(
        self, call: ModelCall, mesh: range, strategy: Strategy, memory: CallMemory
    ) -> tuple[int, int, int]:
        """What rests, works and is copied in each memory, from what is on each device."""
        together = min(len(mesh), self._cluster.devices_per_memory)
        if together == 1:
            return memory.resting, memory.working, memory.copy
        held = together * evenness(call.model, strategy, lora=call.lora if call.trains else None)
        copies = held / math.gcd(strategy.data, together)  # those that are moved there share what is alike
        return (
            int(memory.resting * (held if call.trains else copies)),
            memory.working * together,
            int(memory.copy * copies),
        )

    def _memory(self, call: ModelCall, strategy: Strategy) -> CallMemory:
        is_trained = call.weights in self._workload.trained
        return call_memory(call, strategy, is_trained=is_trained, on_cpu=self._on_cpu)

    def _nothing_fits(self, call: ModelCall, least: tuple[int, range, Strategy] | None) -> PlanError:
        where, model = f"plan.{call.name}", call.model
        if least is None:
            return PlanError(
                f"{where}: no degrees divide both the model and its rows on this cluster. Got {call.rows} rows"
                f"{f' in {call.mini_batches} mini-batches' if call.trains else ''}, {model.num_heads} heads, "
                f"{model.num_kv_heads} key-value heads, {model.num_layers} layers. Use another batch size."
            )
        missing, mesh, strategy = least
        memory = self._memory(call, strategy)
        parts = {"weights and optimizer": memory.resting, "weights": memory.copy}
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


_WEIGHT_PARTS = ("resting", "optimizer", "copy")


def _may_be_fused(call: ModelCall, choice: Choice, cluster: Cluster) -> bool:
    """Whether it is training over the stages of a pipeline on all devices, the bubbles of which another could fill."""
    return call.trains and len(choice.devices) == cluster.num_devices and choice.strategy.pipeline > 1


def _fastest_of_stages(choices: Iterable[Choice]) -> list[Choice]:
    """Of choices on the same devices, the fastest of every tensor and pipeline degree."""
    fastest: dict[tuple[int, int], Choice] = {}
    for choice in sorted(choices, key=_seconds):
        fastest.setdefault((choice.strategy.tensor, choice.strategy.pipeline), choice)
    return list(fastest.values())


def _on_grid(devices: range, cluster: Cluster) -> bool:
    """Whether devices are worth looking at in a cluster of many nodes: there are as many ranges of nodes as pairs of
    them, and weights can go from each range to each other."""
    per_node, nodes = cluster.devices_per_node, cluster.num_nodes
    size, start = len(devices) // per_node, devices.start // per_node
    if nodes <= GRID or size == 0 or size == nodes:
        return True
    grid = 2 ** math.ceil(math.log2(nodes / GRID))
    part = size if size < grid and size.bit_count() == 1 else grid
    return size % part == 0 and start % part == 0


def strategies(call: ModelCall, num_devices: int, devices_per_node: int) -> Iterator[Strategy]:
    """Every strategy of a call over so many devices that a plan may say, and that could be worth it.

    `tensor` stays within a node. Weights are split over `fsdp` in whole, within a node, or not at all, and not where
    they are decoded with. Remat is none or layer.
    """
    model = call.model
    remats: tuple[Remat, ...] = ("none", "layer") if call.trains else ("none",)
    for tensor in _divisors(min(num_devices, devices_per_node)):
        sizes = (model.num_heads, model.num_kv_heads, model.intermediate_size, model.vocab_size)
        if num_devices % tensor or any(size % tensor for size in sizes):
            continue
        for pipeline in _divisors(num_devices // tensor):
            if pipeline > model.num_layers:
                continue
            rest = num_devices // (tensor * pipeline)
            near = max(1, min(rest, devices_per_node // tensor))
            shards = {1} if call.kind == "generate" else {1, rest, near if rest % near == 0 else 1}
            for fsdp in sorted(shards):
                if model.hidden_size % fsdp:
                    continue
                for micro_batches in _micro_batches(call, rest * (pipeline if call.kind == "generate" else 1)):
                    for remat in remats:
                        yield Strategy(
                            data=rest // fsdp, fsdp=fsdp, tensor=tensor, pipeline=pipeline, micro_batches=micro_batches,
                            remat=remat,
                        )  # fmt: skip


def _micro_batches(call: ModelCall, shards: int) -> list[int]:
    """Powers of two into which the rows of every shard can be cut."""
    counts = [2**i for i in range(MAX_MICRO_BATCHES.bit_length())]
    return [n for n in counts if n <= MAX_MICRO_BATCHES and all(rows % (n * shards) == 0 for rows in call.divisible)]


@functools.cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _worth_keeping(choices: Sequence[Choice], *, is_trained: bool, most: int) -> list[Choice]:
    """The choices on the same devices that are worth a look, as the module says."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (_seconds(c), sum(_bytes(c)))):
        if not any(_beats(other, choice, is_trained=is_trained) for other in kept):
            kept.append(choice)
    if len(kept) > most:
        leanest = {min(kept, key=lambda c, i=i: (_bytes(c)[i], _seconds(c))) for i in range(3)}
        leanest |= {min(kept, key=lambda c: (sum(_bytes(c)), _seconds(c)))}
        kept = kept[:most] + [c for c in kept[most:] if c in leanest]
    return kept


def _beats(one: Choice, other: Choice, *, is_trained: bool) -> bool:
    s, t = one.strategy, other.strategy
    slack = SLACK if is_trained and _degrees(s) != _degrees(t) else 1.0
    faster = _seconds(one) * slack <= _seconds(other)
    return faster and all(a * LESS_MEMORY <= b for a, b in zip(_bytes(one), _bytes(other), strict=True))


def _degrees(strategy: Strategy) -> tuple[int, ...]:
    return strategy.pipeline, strategy.data, strategy.fsdp, strategy.tensor


def _seconds(choice: Choice) -> float:
    return choice.load + choice.seconds + choice.unload


def _bytes(choice: Choice) -> tuple[int, int, int]:
    return choice.resting, choice.working, choice.copy


def _known_plan_seconds(workload: Workload, cluster: Cluster, every: Sequence[Sequence[Choice]]) -> float:
    """Seconds of calls one after another, each on all devices with what is fastest of what fits beside the others;
    infinite where no such plan is found. Reallocation comes on top: a tenth is granted for it."""
    whole = [[c for c in choices if len(c.devices) == cluster.num_devices] for choices in every]
    if not all(whole):
        return float("inf")
    capacity = min(cluster.capacity(device) for device in range(cluster.num_devices))
    picks = [min(choices, key=lambda c: c.resting + c.copy + c.working) for choices in whole]
    for i, choices in enumerate(whole):
        for choice in sorted(choices, key=lambda c: c.seconds):
            tried = [*picks[:i], choice, *picks[i + 1 :]]
            if _taken(tried) <= capacity:
                picks = tried
                break
    return 1.1 * sum(c.seconds for c in picks) if _taken(picks) <= capacity else float("inf")


def _taken(picks: Sequence[Choice]) -> int:
    return sum(c.resting + c.copy for c in picks) + max(c.working for c in picks)


def _reallocations(
    workload: Workload, calls: Sequence[CallChoices], cluster: Cluster
) -> dict[tuple[int, int], np.ndarray]:
    """Seconds between where sets are trained and where they are read."""
    tables = {}
    for (i, train), (j, reader) in itertools.product(enumerate(calls), enumerate(calls)):
        if not train.trains or reader.trains or train.weights != reader.weights:
            continue
        model = workload.calls[j].model
        size = weight_bytes(model, Strategy(), itemsize(model), lora=workload.calls[j].lora)
        tables[i, j] = reallocation_seconds(
            train.choices, reader.choices, size=size, num_layers=model.num_layers, cluster=cluster
        )
    return tables


def _transfers(workload: Workload, calls: Sequence[CallChoices], costs: CostModel) -> dict[tuple[int, int], np.ndarray]:
    """Seconds of handing outputs to the calls that wait for them."""
    numbers = {call.name: i for i, call in enumerate(calls)}
    tables = {}
    for j, call in enumerate(calls):
        for name in call.needs:
            i = numbers[name]
            size = workload.calls[i].output_bytes
            if size:
                tables[i, j] = _by_devices(calls[i].choices, call.choices, functools.partial(costs.hand_over, size))
    return tables


def _by_devices(
    sources: Sequence[Choice], targets: Sequence[Choice], seconds: Callable[[range, range], float]
) -> np.ndarray:
    """A table of seconds that depend on the devices alone."""
    froms = {c.devices: None for c in sources}
    tos = {c.devices: None for c in targets}
    unique = np.array([[seconds(a, b) for b in tos] for a in froms])
    at_from, at_to = ({devices: i for i, devices in enumerate(group)} for group in (froms, tos))
    return unique[np.ix_([at_from[c.devices] for c in sources], [at_to[c.devices] for c in targets])]
