"""The plan: a placement for every call, as plain data, checked before anything compiles.

A placement is devices and a strategy. The plan changes where and how fast a call runs, never what it gives.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jaxrlhf.brief import brief
from jaxrlhf.call_graph import Call, CallGraph, Ref
from jaxrlhf.config.schema import DEFAULT, FUSE, OFFLOAD
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.row_keys import BATCH_SIZE, RowKeys
from jaxrlhf.planner.schedules.instructions import Schedule, ScheduleError
from jaxrlhf.planner.schedules.schedule_data import from_data, to_data
from jaxrlhf.planner.stage_rules import (
    computes_in_stages,
    micro_batches_of,
    stage_fault,
    stage_warning,
    stages_in_words,
)
from jaxrlhf.reshard.protocols import AUTO, Grid, find
from jaxrlhf.sharding.row_padding import can_split, num_copies, row_parts
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.suggest import did_you_mean

SCHEDULES = "fused_schedules"
"""Where plain data of a plan have the schedules of calls that are fused."""


class PlanError(ValueError):
    """A plan that does not fit its graph, its models or the devices."""


class NoRoomError(PlanError):
    """Devices have too little memory for any plan."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one call runs and how it is parallelized."""

    devices: tuple[int, ...]
    """Positions in `jax.devices()`: consecutive ones of one node, or whole nodes; in any order, which is the mesh's."""
    strategy: Strategy
    protocol: str = AUTO
    """How rows reach the devices: the name of a protocol of `reshard.protocols`, or `auto`."""

    def __str__(self) -> str:
        first, last = self.devices[0], self.devices[-1]
        where = str(first) if len(self.devices) == 1 else f"{first}-{last}"
        if self.devices != tuple(range(first, last + 1)):
            where = ",".join(map(str, self.devices))
        return f"{self.strategy} on {where}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Call, by its name in the graph -> placement."""

    placements: Mapping[str, Placement]
    offload: tuple[str, ...] = ()
    """Roles whose weights rest in host memory where no call needs them."""
    fuse: tuple[str, ...] = ()
    """Two train calls that run as one pipeline."""
    schedules: tuple[Schedule, ...] = ()
    """In which order they work: of data-parallel groups that share devices, one for all sets of groups that are alike.
    Empty: they are found when the run starts (`fusion.with_schedules`)."""

    def __getitem__(self, call: Call) -> Placement:
        return self.placements[call.plan_name]

    def to_json(self) -> dict[str, Any]:
        placements = {name: dataclasses.asdict(placement) for name, placement in self.placements.items()}
        lists = {OFFLOAD: list(self.offload), FUSE: list(self.fuse), SCHEDULES: [to_data(x) for x in self.schedules]}
        return placements | {name: names for name, names in lists.items() if names}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: Something is missing, unknown or not as it should be.
        """
        for key, what, example in ((OFFLOAD, "roles", "[reference]"), (FUSE, "calls", "[actor.train, critic.train]")):
            names = data.get(key, ())
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise PlanError(f"plan: {key}: must be a list of {what}. Got {names!r}. Write {example}, say.")
        placements = {}
        for name, entry in data.items():
            if name in (OFFLOAD, FUSE, SCHEDULES):
                continue
            try:
                placements[name] = _placement(entry)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise PlanError(
                    f"plan.{name}: must be a placement, {{devices: [...], strategy: {{data: ..., ...}}}}. Got one with "
                    f"a fault: {reason}"
                ) from error
        schedules = _schedules(data.get(SCHEDULES, ()))
        return cls(placements, tuple(data.get(OFFLOAD, ())), tuple(data.get(FUSE, ())), schedules)


def _schedules(data: Any) -> tuple[Schedule, ...]:
    """Schedules from plain data."""
    if not isinstance(data, list | tuple):
        raise PlanError(f"plan: {SCHEDULES}: must be a list of schedules. Got {brief(data)}. Remove it.")
    try:
        return tuple(from_data(each) for each in data)
    except ScheduleError as error:
        raise PlanError(
            f"plan: {SCHEDULES}: {error} Without `{SCHEDULES}` the run finds its own; or plan again."
        ) from error


def _placement(entry: Any) -> Placement:
    """A placement from plain data."""
    fields = {"devices", "strategy", "protocol"}, {field.name for field in dataclasses.fields(Strategy)}
    for tree, known in zip((entry, entry["strategy"]), fields, strict=True):
        if unknown := [key for key in tree if key not in known]:
            raise ValueError(f"unknown key {brief(unknown[0])}.{did_you_mean(unknown[0], known)}")
    for field in dataclasses.fields(Strategy):
        value = entry["strategy"].get(field.name, field.default)
        if type(value) is not type(field.default):
            raise ValueError(f"{field.name}: must be like {field.default!r}. Got {brief(value)}.")
    devices = tuple(map(operator.index, entry["devices"]))
    return Placement(devices, Strategy(**entry["strategy"]), entry.get("protocol", AUTO))


@dataclasses.dataclass(frozen=True)
class TrainSizes:
    """How a train call cuts its rows."""

    rows: int
    mini_batches: int
    epochs: int
    micro_batches: int

    @property
    def mini_batch_rows(self) -> int:
        return self.rows // self.mini_batches

    @property
    def micro_batch_rows(self) -> int:
        return self.mini_batch_rows // self.micro_batches


def train_sizes(call: Call, strategy: Strategy) -> tuple[TrainSizes, ...]:
    """The sizes of each term of a train call, from its own settings and the strategy."""
    update = call.update
    rows = [max(x.shape[0] for x in jax.tree.leaves(term) if isinstance(x, Ref) and x.has_rows) for term in call.terms]
    return tuple(TrainSizes(n, update.mini_batches, update.epochs, strategy.micro_batches) for n in rows)


def resolve(
    written: Mapping[str, Placement], graph: CallGraph, offload: Iterable[str] = (), fuse: Iterable[str] = ()
) -> Plan:
    """A placement for every call of a graph from a plan written by hand.

    A call takes the placement under its own name (`actor.generate#2`), else under its name without the ordinal, else
    the default. Work on the host has no placement.
    """
    placements = {}
    for call in graph.calls:
        if call.kind == "host":
            continue
        name = call.plan_name
        placements[name] = written.get(name) or written.get(name.split("#")[0]) or written[DEFAULT]
    return Plan(placements, tuple(offload), tuple(fuse))


def check_offload(offload: Iterable[str], roles: Iterable[str], models: Iterable[str]) -> None:
    """Every role that is to rest in host memory is there once, and has a model.

    Raises:
        PlanError: A role is not, or does not.
    """
    roles, models, seen = tuple(roles), tuple(models), set[str]()
    for role in offload:
        if role not in roles:
            raise PlanError(
                f"plan.{OFFLOAD}: must be roles of the run. Got '{role}'. Roles: {', '.join(roles)}."
                f"{did_you_mean(role, roles)}"
            )
        if role not in models:
            raise PlanError(
                f"plan.{OFFLOAD}: '{role}' has no weights of its own to offload. Roles that have: {', '.join(models)}. "
                "Remove it."
            )
        if role in seen:
            raise PlanError(f"plan.{OFFLOAD}: a role may stand there once. Got '{role}' again. Remove it.")
        seen.add(role)


def check_names(written: Iterable[str], graphs: Iterable[CallGraph]) -> None:
    """Every name in a plan is a call of one of the graphs.

    Raises:
        PlanError: A name is not.
    """
    calls = {call.plan_name: call for graph in graphs for call in graph.calls}
    known = {DEFAULT} | {n for name, call in calls.items() if call.kind != "host" for n in (name, name.split("#")[0])}
    for name in written:
        if name in calls and calls[name].kind == "host":
            raise PlanError(f"plan.{name}: is plain Python on the host and takes no devices. Remove it.")
        if name not in known:
            raise PlanError(
                f"plan.{name}: no call of this run has that name. Calls: "
                f"{', '.join(sorted(known))}.{did_you_mean(name, known)}"
            )


def check_computes(written: Mapping[str, Placement], graphs: Iterable[CallGraph]) -> None:
    """No entry of a `compute` call asks for stages. Under a default that has some, each of them has the same rows.

    Raises:
        PlanError: One does.
    """
    computed = {call.plan_name for graph in graphs for call in graph.calls if call.kind == "compute"}
    for name in computed:
        for entry in (name, name.split("#")[0]):
            fault = computes_in_stages(written[entry].strategy) if entry in written else None
            if fault:
                raise PlanError(f"plan.{entry}{fault}")


def stage_warnings(plan: Plan, graph: CallGraph) -> list[str]:
    """What to say of calls whose stages wait for want of micro-batches; fused ones work for each other meanwhile."""
    calls = [call for call in graph.calls if call.kind != "host" and call.plan_name not in plan.fuse]
    return [warning for call in calls if (warning := stage_warning(call, plan[call].strategy)) is not None]


def check(
    plan: Plan,
    graph: CallGraph,
    models: Mapping[str, ModelConfig],
    num_devices: int,
    devices_per_node: int | None = None,
    row_keys: RowKeys = BATCH_SIZE,
) -> None:
    """A plan fits its graph, its models and the devices.

    Args:
        models: Role -> model, for roles that have one.
        devices_per_node: How many of the devices each node has. None: all are in one.
        row_keys: What the config calls the graph's rows, for error messages.

    Raises:
        PlanError: Devices that are not there or lie scattered, or degrees that divide neither the model nor the rows.
    """
    for call in graph.calls:
        if call.kind == "host":
            continue
        if call.plan_name not in plan.placements:
            raise PlanError(f"plan: needs a placement for every call. Got none for '{call.plan_name}'.")
        check_call(call, plan[call], models, num_devices, devices_per_node, row_keys)


def check_call(
    call: Call,
    placement: Placement,
    models: Mapping[str, ModelConfig],
    num_devices: int,
    devices_per_node: int | None = None,
    row_keys: RowKeys = BATCH_SIZE,
) -> None:
    """A placement fits one call of a graph. Arguments and errors are those of `check`."""
    where = f"plan.{call.plan_name}"
    _check_devices(where, placement, num_devices, devices_per_node or num_devices)
    if call.role is not None:
        _check_model(where, placement.strategy, models[call.role])
        fault = stage_fault(call, placement.strategy, models[call.role])
        if fault:
            raise PlanError(where + fault)
    _check_rows(row_keys, call, placement.strategy)
    _check_protocol(where, call, placement)


def _check_devices(where: str, placement: Placement, num_devices: int, devices_per_node: int) -> None:
    devices, strategy = placement.devices, placement.strategy
    if len(set(devices)) != len(devices):
        raise PlanError(f"{where}.devices: a device may stand there once. Got {list(devices)}.")
    missing = [d for d in devices if not 0 <= d < num_devices]
    if missing:
        there = f"the {num_devices} devices of this run, 0 to {num_devices - 1}"
        there = "device 0, the only one of this run" if num_devices == 1 else f"among {there}"
        raise PlanError(
            f"{where}.devices: must be {there}. Got {', '.join(map(str, missing))}. Lower the degrees, or run on more "
            "devices."
        )
    if len(devices) != strategy.num_devices:
        raise PlanError(
            f"{where}: pipeline x data x fsdp x tensor must be the number of devices, {len(devices)}. Got "
            f"{strategy.pipeline} x {strategy.data} x {strategy.fsdp} x {strategy.tensor} = {strategy.num_devices}. "
            "Change a degree or `devices`."
        )
    _check_node_parts(where, devices, devices_per_node)


def _check_node_parts(where: str, devices: tuple[int, ...], devices_per_node: int) -> None:
    """Devices are a consecutive part of one node, or whole nodes.

    Meshes of other shapes would leave devices between them that no other call can use well.

    Reference:
        Mei et al. 2024 (ReaL), arXiv:2406.14088, section 4.
    """
    count, nodes = len(devices), sorted({device // devices_per_node for device in devices})
    if count == len(nodes) * devices_per_node or (len(nodes) == 1 and max(devices) - min(devices) + 1 == count):
        return
    rule, first = "must be a consecutive part of one node, in any order", min(devices)
    if len(nodes) == 1 or count < devices_per_node:
        first = min(first, (nodes[0] + 1) * devices_per_node - count)  # what fits into the first node
    else:
        rule, first, count = "must be whole nodes", nodes[0] * devices_per_node, len(nodes) * devices_per_node
    use = str(first) if count == 1 else f"{first}-{first + count - 1}"
    if len(nodes) > 1:
        rule += f" (a node has {devices_per_node} devices)"
    raise PlanError(f"{where}.devices: {rule}. Got {list(devices)}. Use {use}, say.")


def _check_model(where: str, strategy: Strategy, model: ModelConfig) -> None:
    split_by_tensor = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
    }
    for degree, sizes in (("tensor", split_by_tensor), ("fsdp", {"hidden_size": model.hidden_size})):
        value = getattr(strategy, degree)
        for name, size in sizes.items():
            if size % value:
                raise PlanError(f"{where}.{degree}: {value} does not divide {name}={size}. Use {_divisors(size)}.")


def _check_rows(keys: RowKeys, call: Call, strategy: Strategy) -> None:
    where = keys.where(call.plan_name)
    if call.kind == "train":
        for sizes in train_sizes(call, strategy):
            if sizes.rows % sizes.mini_batches:
                key = keys.mini_batches(call.update)
                raise PlanError(
                    f"{where}: mini_batches must divide the rows of the batch. Got {sizes.mini_batches} for "
                    f"{sizes.rows} rows. Use {_divisors(sizes.rows)}{f' for {key}' if key else ''}, or another "
                    f"{keys.key(sizes.rows)}."
                )
            what = f"a mini-batch of {sizes.mini_batch_rows} rows ({sizes.rows} / {sizes.mini_batches})"
            _check_shards(where, sizes.mini_batch_rows, what, strategy, (strategy.micro_batches,), keys.key(sizes.rows))
        return
    if call.kind == "compute":  # on arrays that lie whole on every device, where their rows do not divide
        return
    micro_batches: tuple[int, ...] = (strategy.micro_batches,)
    if call.kind == "generate" and strategy.pipeline > 1:
        micro_batches += (strategy.pipeline,)  # as many again as there are stages
    copied = copied_rows(call, strategy) > 0
    for rows in sorted({ref.shape[0] for ref in call.refs if ref.has_rows}, reverse=True):
        _check_shards(where, rows, f"{rows} rows", strategy, micro_batches, keys.key(rows), may_copy=copied)


def copied_rows(call: Call, strategy: Strategy) -> int:
    """Rows of no weight that a call is given beside its own, where these do not divide: `sharding.row_padding`."""
    counts = {ref.shape[0] for ref in call.refs if ref.has_rows}
    if call.kind not in ("generate", "infer") or not call.row_wise or len(counts) != 1:
        return 0
    return num_copies(call.num_rows, row_parts(call.kind, strategy))


def splits_rows(call: Call, strategy: Strategy) -> bool:
    """Whether arrays with rows lie split over the devices of a call, its inputs and outputs: else each has all rows."""
    if call.kind == "compute":
        refs = [*call.refs, *call.output_refs]
        return not any(ref.shape[0] % strategy.num_row_shards for ref in refs if ref.has_rows)
    return copied_rows(call, strategy) == 0


def _check_shards(
    where: str,
    rows: int,
    what: str,
    strategy: Strategy,
    micro: tuple[int, ...],
    key: str,
    *,
    may_copy: bool = False,
) -> None:
    """Rows split over micro-batches and shards: evenly, or with copies of some.

    Args:
        micro: The micro-batches of the plan, and the stages if each is cut for them.
    """
    factors = (*micro, strategy.data, strategy.fsdp)
    if not can_split(rows, math.prod(factors), may_copy=may_copy):
        rule = f"be at most {what}" if may_copy else f"divide {what}"
        raise PlanError(
            f"{where}: micro_batches {'x pipeline ' if len(micro) > 1 else ''}x data x fsdp must {rule}. Got "
            f"{' x '.join(map(str, factors))} = {math.prod(factors)}. Lower a degree, or use another {key}."
        )


def _check_protocol(where: str, call: Call, placement: Placement) -> None:
    if placement.protocol == AUTO:  # whatever is chosen splits rows as the strategy does
        return
    strategy = placement.strategy
    grid = Grid(pipeline=strategy.pipeline, data=strategy.num_row_shards, tensor=strategy.tensor)
    try:
        protocol = find(placement.protocol)
        for num_rows in {ref.shape[0] for ref in call.refs if ref.has_rows}:
            received = protocol.distribute(grid, num_rows)
            if strategy.pipeline > 1 and call.role and received != find("3D_PROTO").distribute(grid, num_rows):
                raise ValueError(
                    "protocol: must give each stage all rows, split over data x fsdp, where a call has stages. Got "
                    f"{placement.protocol!r}. Use {AUTO} or 3D_PROTO."
                )
    except ValueError as error:
        raise PlanError(f"{where}.{error}") from error


def _divisors(size: int) -> str:
    small = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    return small[0] if len(small) == 1 else ", ".join(small[:-1]) + " or " + small[-1]


def plan_rows(plan: Plan, graph: CallGraph, models: Mapping[str, ModelConfig]) -> list[dict[str, Any]]:
    """The graph and its plan as a table, with every batch size that follows from them.

    Args:
        models: Role -> model, for roles that have one.
    """
    table = []
    for call in graph.calls:
        fused_with = next((name for name in plan.fuse if name != call.plan_name), "")
        row: dict[str, Any] = {
            "call": call.name,
            "needs": ", ".join(graph.dependencies(call)) or "-",
            "placement": "host" if call.kind == "host" else str(plan[call]),
            "rows": call.num_rows * call.num_drawn,
            "tokens": call.num_tokens if call.role else None,
            "cut into": "-",
        }
        if call.kind != "host":
            model = models.get(call.role or "")
            row["cut into"] = _cut(call, plan[call].strategy, model, fused_with if call.plan_name in plan.fuse else "")
        table.append(row)
    return table


def _cut(call: Call, strategy: Strategy, model: ModelConfig | None, fused_with: str) -> str:
    """How a call's rows are cut, in words: '4 updates of 128 rows in 2 micro-batches of 64, 16 a device'; and its
    layers: 'through 2 stages of 4 layers, 1F1B'."""
    rows = (call.num_rows + copied_rows(call, strategy)) * call.num_drawn
    micro_batches, words = micro_batches_of(call, strategy), []
    if not rows:
        return "-"
    if call.kind == "train":
        every = train_sizes(call, strategy)
        sizes, rows = every[0], max(sizes.mini_batch_rows for sizes in every)
        plural = "s" if sizes.mini_batches > 1 else ""
        rows_each = " + ".join(str(sizes.mini_batch_rows) for sizes in every)
        updates = f"{sizes.mini_batches} update{plural} of {rows_each} rows"
        words.append(f"{sizes.epochs} epochs of {updates}" if sizes.epochs > 1 else updates)
    if call.kind != "compute" and micro_batches > 1:
        rows //= micro_batches
        words.append(f"{micro_batches} micro-batches of {rows}")
    copies = copied_rows(call, strategy) * call.num_drawn
    cut = " in ".join(words) + (", " if words else "") + f"{rows // strategy.num_row_shards} a device"
    cut += f" ({copies} of no weight among them)" if copies else ""
    stages = stages_in_words(call, strategy, model, fused_with) if model is not None else ""
    return f"{cut}; {stages}" if stages else cut
