"""The rules that a plan must keep: of its graph, models, rows and devices.

    check(plan, graph, models, num_devices=16, devices_per_node=8)

Every error names the key of the config, the rule, the value, and a remedy.
"""

import math
from collections.abc import Iterable, Mapping

import jax

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.config.reading import to_tree
from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plans.config_keys import BATCH_SIZE, RowCountKeys
from jaxrlhf.planner.plans.parts import in_parts
from jaxrlhf.planner.plans.plan import Plan, PlanError
from jaxrlhf.planner.plans.row_blocks import split_sequences
from jaxrlhf.planner.plans.splits import copied_rows, term_rows, undivided_sizes
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.reshard.protocols import AUTO, split_axes
from jaxrlhf.schedules.schedule import bubble_warning
from jaxrlhf.sharding.axes import BATCH_AXES
from jaxrlhf.sharding.row_padding import can_split
from jaxrlhf.sharding.strategy import Strategy


def check(
    plan: Plan,
    graph: CallGraph,
    models: Mapping[str, ModelConfig],
    num_devices: int,
    devices_per_node: int | None = None,
    keys: RowCountKeys = BATCH_SIZE,
) -> None:
    """Checks that a plan fits its graph, its models and the devices.

    Args:
        models: Role -> model, for roles that have one.
        devices_per_node: Devices of each node. None means that all are in one.
        keys: The config's keys that set the graph's rows, for error messages.

    Raises:
        PlanError: Devices do not exist or are not contiguous, or a degree does not divide the model or the rows.
    """
    for call in graph.calls:
        if call.plan_name in plan.placements:
            _check_parts(call, plan[call])
        elif call.kind != "host":
            raise PlanError(f"plan: needs a placement for every call. Got none for '{call.plan_name}'.")
    graph, plan = in_parts(graph, plan)
    for call in graph.calls:
        if call.kind != "host":
            check_call(call, plan[call], models, num_devices, devices_per_node, keys)


def check_call(
    call: Call,
    placement: Placement,
    models: Mapping[str, ModelConfig],
    num_devices: int,
    devices_per_node: int | None = None,
    keys: RowCountKeys = BATCH_SIZE,
) -> None:
    """Checks that a placement fits one call of a graph, whole or a part. Arguments and errors are those of `check`."""
    where = f"plan.calls.{call.whole_name}"
    if call.part is not None and (call.part.share or call.part.migrate):
        where += ".tail" if call.part.migrate else f"[{call.part.share}]"
    _check_devices(where, placement, num_devices, devices_per_node or num_devices)
    if call.role is not None:
        model, strategy = models[call.role], placement.strategy
        for degree, name in undivided_sizes(model, tensor=strategy.tensor, fsdp=strategy.fsdp):
            value, size = getattr(strategy, degree), getattr(model, name)
            raise PlanError(f"{where}.{degree}: {value} does not divide {name}={size}. Use {_divisors(size)}.")
        _check_stages(where, call, strategy, model)
        _check_slots(where, call, strategy)
    _check_rows(keys, call, placement.strategy)
    _check_protocol(where, call, placement)


def check_offload(offload: Iterable[str], roles: Iterable[str], models: Iterable[str]) -> None:
    """Raises PlanError if a role to offload is unknown, is listed twice, or has no weights of its own."""
    roles, models, seen = tuple(roles), tuple(models), set[str]()
    for role in offload:
        if role not in roles:
            raise PlanError(
                f"plan.offload: must be roles of the run. Got '{role}'. Roles: {', '.join(roles)}."
                f"{did_you_mean(role, roles)}"
            )
        if role not in models:
            raise PlanError(
                f"plan.offload: '{role}' has no weights of its own. Roles with weights: {', '.join(models)}. Remove it."
            )
        if role in seen:
            raise PlanError(f"plan.offload: each role must be listed at most once. Got '{role}' again. Remove it.")
        seen.add(role)


def check_entries(
    placements: Mapping[str, Placement], graphs: Iterable[CallGraph], *, more: Iterable[str] = ()
) -> None:
    """Raises PlanError if an entry of a config's plan does not name a call of one of the graphs that takes devices, or
    has stages for a `compute` call. Under a default that has some, its rows are the same on every stage. `placements`:
    the entries, by call. `more`: names that calls of other parts of the run may have."""
    calls = [call for graph in graphs for call in graph.calls]
    named = {call.plan_name.split("#")[0]: call for call in calls} | {call.plan_name: call for call in calls}
    known = sorted(name for name, call in named.items() if call.kind != "host")
    for name, placement in placements.items():
        where, pipeline = f"plan.calls.{name}", placement.strategy.pipeline
        kind = named[name].kind if name in named else ""
        if kind == "host":
            if placement.with_devices() != Placement(parts=placement.parts).with_devices():
                got = brief(to_tree(placement.devices or placement.strategy))
                raise PlanError(
                    f"{where}: is plain Python on the host and takes no devices. Got {got}. Leave all but `parts` out."
                )
            continue
        if not kind and name.split("#")[0] not in more:
            raise PlanError(
                f"{where}: no call of this run has that name. Calls: {', '.join(known)}.{did_you_mean(name, known)}"
            )
        if kind != "generate" and (slots := placement.strategy.slots):
            raise PlanError(
                f"{where}.slots: are for calls that generate. Got {slots} for a call of kind '{kind}'. Leave slots out."
            )
        if kind == "compute" and pipeline > 1:
            raise PlanError(
                f"{where}.pipeline: must be 1, since a `compute` call has no layers to put on stages. Got {pipeline}. "
                "Leave pipeline out, or use data."
            )


def stage_warnings(plan: Plan, graph: CallGraph) -> list[str]:
    """Warnings for calls with too few micro-batches to fill their pipeline; fused calls fill each other's bubbles."""
    warnings = []
    for call in graph.calls:
        if call.kind in ("train", "infer") and call.plan_name not in plan.fuse:  # generation makes as many as it needs
            strategy = plan[call].strategy
            if warning := bubble_warning(strategy.pipeline, strategy.chunks, strategy.micro_batches):
                warnings.append(f"plan.calls.{call.plan_name}: {warning}")
    return warnings


def tail_warnings(plan: Plan, graph: CallGraph) -> list[str]:
    """Warnings for tails to which no sequence moves, since fewer than a whole number for each device are left."""
    warnings = []
    for call in graph.calls:
        placement = plan.placements.get(call.plan_name)
        if placement is None or placement.tail is None or not placement.tail.rows:
            continue
        where = f"plan.calls.{call.plan_name}"
        if split_sequences(where, call, placement).tail_bounds == (0,):
            warnings.append(
                f"{where}.tail: no sequence moves, since {placement.tail.rows:g} of them are fewer than divide over "
                "its devices. Raise rows, or use fewer devices for the tail."
            )
    return warnings


def _check_parts(call: Call, placement: Placement) -> None:
    """Checks that a call that is not whole may run in parts, and its shares and its tail fit each other."""
    where, shares, tail = f"plan.calls.{call.plan_name}", (placement, *placement.shares), placement.tail
    if placement.rows != 1:
        raise PlanError(
            f"{where}.rows: is for calls on several placements, written as a list. Got {placement.rows:g} and one "
            "placement. Leave rows out, or add the other placements."
        )
    if placement.is_whole:
        return
    if call.kind == "train":
        _check_training_parts(where, call, placement)
        return
    if call.kind not in ("generate", "infer", "host") or not call.row_wise:
        needs = "a statistic of the whole batch" if call.kind == "compute" else "all of its rows at once"
        raise PlanError(
            f"{where}: parts, shares and a tail are for calls whose output for a row depends on that row alone. Got a "
            f"call of kind '{call.kind}', which may need {needs}. Leave them out."
        )
    if call.kind == "host" and (placement.shares or tail):
        raise PlanError(f"{where}: a call on the host has no shares and no tail. Leave all but `parts` out.")
    if tail is not None and call.kind != "generate":
        raise PlanError(f"{where}.tail: is for calls that generate. Got a call of kind '{call.kind}'. Leave tail out.")
    seen: set[int] = set()
    for share in shares if placement.shares else ():
        if both := seen & set(share.devices):
            raise PlanError(
                f"{where}: each placement of a call must have devices of its own. Got "
                f"{devices_to_text(tuple(sorted(both)))} in two of them. Change `devices`."
            )
        seen |= set(share.devices)
    if call.kind != "generate":
        return
    for share in shares:
        if share.strategy.micro_batches > 1:
            raise PlanError(
                f"{where}.micro_batches: must be 1 for a generation in parts. Got {share.strategy.micro_batches}. Use "
                "slots to bound its memory."
            )
    if tail is None or not tail.rows:
        return
    stages = {share.strategy.pipeline for share in (*shares, tail)}
    if tail.migrate == "cache" and len(stages) > 1:
        raise PlanError(
            f"{where}.tail.pipeline: must be that of all placements where sequences move with their caches. Got "
            f"{' and '.join(map(str, sorted(stages)))} stages. Use `migrate: prefill`, or equal numbers of stages."
        )
    if tail.migrate == "prefill" and tail.strategy.pipeline > 1:
        raise PlanError(
            f"{where}.tail.pipeline: must be 1 where sequences are prefilled anew. Got {tail.strategy.pipeline}. Use "
            "`migrate: cache`, or another split."
        )
    if tail.strategy.micro_batches > 1:
        raise PlanError(
            f"{where}.tail.micro_batches: must be 1. Got {tail.strategy.micro_batches}. Leave micro_batches out."
        )
    if tail.strategy.slots:
        raise PlanError(
            f"{where}.tail.slots: are as many as sequences move. Got {tail.strategy.slots}. Leave slots out."
        )


def _check_training_parts(where: str, call: Call, placement: Placement) -> None:
    """Checks that a train call may add up gradients of parts of its rows."""
    if placement.shares or placement.tail is not None:
        raise PlanError(f"{where}: a train call has no shares and no tail. Leave all but `parts` out.")
    for name in ("mini_batches", "epochs"):
        if (value := getattr(call.update, name)) > 1:
            raise PlanError(
                f"{where}.parts: must be 1 where {name} is above 1, since the first update takes rows of all parts. "
                f"Got {placement.parts} parts with {name} {value}. Leave `parts` out, or set {name} to 1."
            )
    if (pipeline := placement.strategy.pipeline) > 1:
        raise PlanError(
            f"{where}.parts: must be 1 for a train call over stages. Got {placement.parts} parts with pipeline "
            f"{pipeline}. Leave `parts` out, or use fsdp or tensor."
        )


def _check_devices(where: str, placement: Placement, num_devices: int, devices_per_node: int) -> None:
    devices, strategy = placement.devices, placement.strategy
    if len(set(devices)) != len(devices):
        raise PlanError(f"{where}.devices: each device must be listed at most once. Got {brief(list(devices))}.")
    if missing := [d for d in devices if not 0 <= d < num_devices]:
        there = f"the {num_devices} devices of this run, 0 to {num_devices - 1}"
        there = "device 0, the only one of this run" if num_devices == 1 else f"among {there}"
        raise PlanError(
            f"{where}.devices: must be {there}. Got {brief(missing)[1:-1]}. Lower the degrees, or run on more devices."
        )
    if len(devices) != strategy.num_devices:
        raise PlanError(
            f"{where}: pipeline x data x fsdp x tensor must be the number of devices, {len(devices)}. Got "
            f"{strategy.pipeline} x {strategy.data} x {strategy.fsdp} x {strategy.tensor} = {strategy.num_devices}. "
            "Change a degree or `devices`."
        )
    _check_node_parts(where, devices, devices_per_node)


def _check_node_parts(where: str, devices: tuple[int, ...], devices_per_node: int) -> None:
    """Checks that devices are a consecutive part of one node, or whole nodes.

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
    raise PlanError(f"{where}.devices: {rule}. Got {brief(list(devices))}. Use {use}, say.")


def _check_stages(where: str, call: Call, strategy: Strategy, model: ModelConfig) -> None:
    """Checks that each stage has at least one layer and, where a call generates, one part of the layers."""
    layers, pipeline, chunks = model.num_layers, strategy.pipeline, strategy.chunks
    if call.kind == "generate" and chunks > 1:
        entry = f"{{pipeline: {pipeline}, data: {strategy.data}, fsdp: {strategy.fsdp}, tensor: {strategy.tensor}}}"
        raise PlanError(
            f"{where}.chunks: must be 1 where a call generates, since its stages have one part of the layers each. Got "
            f"{chunks}. Leave chunks out; if they are from `default`, give the call an entry of its own, {entry}."
        )
    if strategy.num_stages <= layers:
        return
    if pipeline <= layers:
        most = layers // pipeline
        remedy = f"Use chunks {most} or fewer" if most > 1 else "Leave chunks out"
    else:
        remedy = f"Use pipeline {layers} or fewer" if layers > 1 else "Leave pipeline out"
    product = "pipeline x chunks" if chunks > 1 else "pipeline"
    got = f"{pipeline} x {chunks} = {strategy.num_stages}" if chunks > 1 else str(pipeline)
    raise PlanError(
        f"{where}: {product} must be at most num_layers={layers}, a layer for each stage. Got {got}. {remedy}."
    )


def _check_slots(where: str, call: Call, strategy: Strategy) -> None:
    """Checks that a call with slots has no micro-batches but those of its stages, and room for all samples of a prompt
    in each of these."""
    if call.kind != "generate" or not strategy.slots:
        return
    if strategy.micro_batches > 1:
        raise PlanError(
            f"{where}.micro_batches: must be 1 where a call has slots. Got {strategy.micro_batches} with slots "
            f"{strategy.slots}. Leave micro_batches or slots out."
        )
    samples = max((x.num_samples for x in jax.tree.leaves(call.args) if isinstance(x, Sampling)), default=1)
    if strategy.shared_prompts and samples == 1:
        raise PlanError(
            f"{where}.shared_prompts: are for calls that draw several samples of a prompt. Got "
            f"{strategy.shared_prompts} with num_samples 1. Leave shared_prompts out."
        )
    try:
        slots_of(strategy).require_room(samples, strategy.pipeline)
    except ValueError as error:
        raise PlanError(f"{where}.{error}") from error


def _check_rows(keys: RowCountKeys, call: Call, strategy: Strategy) -> None:
    where = keys.where(call.whole_name)
    if call.kind == "train" and call.part is not None:
        for rows in term_rows(call):
            remedy = f"fewer parts, or another {keys.key(rows * call.part.count)}"
            _check_shards(where, rows, f"the {rows} rows of a part", strategy, (strategy.micro_batches,), remedy)
        return
    if call.kind == "train":
        mini_batches = call.update.mini_batches
        for rows in term_rows(call):
            if rows % mini_batches:
                key = keys.mini_batches(call.update)
                raise PlanError(
                    f"{where}: mini_batches must divide the rows of the batch. Got {mini_batches} for {rows} rows. Use "
                    f"{_divisors(rows)}{f' for {key}' if key else ''}, or another {keys.key(rows)}."
                )
            what = f"a mini-batch of {rows // mini_batches} rows ({rows} / {mini_batches})"
            _check_shards(
                where, rows // mini_batches, what, strategy, (strategy.micro_batches,), f"another {keys.key(rows)}"
            )
        return
    if call.kind == "compute":  # whose arrays are whole on every device if their rows do not divide
        return
    micro_batches: tuple[int, ...] = (strategy.micro_batches,)
    if call.kind == "generate" and strategy.pipeline > 1:
        micro_batches += (strategy.pipeline,)  # each micro-batch is cut once more, into a part for each stage
    copied = copied_rows(call, strategy) > 0
    for rows in sorted({ref.shape[0] for ref in call.refs if ref.has_rows}, reverse=True):
        remedy = (
            f"another {keys.key(rows)}" if call.part is None else f"fewer parts, or another {keys.key(call.num_rows)}"
        )
        what = f"{rows} rows" if call.part is None else f"the {rows} rows of a part"
        _check_shards(where, rows, what, strategy, micro_batches, remedy, may_copy=copied)


def _check_shards(
    where: str, rows: int, what: str, strategy: Strategy, micro: tuple[int, ...], remedy: str, *, may_copy: bool = False
) -> None:
    """Checks that rows split over micro-batches and shards: evenly, or with copies of some. `micro` is micro-batches of
    the plan, then the number of stages where each is cut once more, a part for each."""
    factors = (*micro, strategy.data, strategy.fsdp)
    if not can_split(rows, math.prod(factors), may_copy=may_copy):
        rule = f"be at most {what}" if may_copy else f"divide {what}"
        raise PlanError(
            f"{where}: micro_batches {'x pipeline ' if len(micro) > 1 else ''}x data x fsdp must {rule}. Got "
            f"{' x '.join(map(str, factors))} = {math.prod(factors)}. Lower a degree, or use {remedy}."
        )


def _check_protocol(where: str, call: Call, placement: Placement) -> None:
    """Checks that a protocol by name splits the rows of a call evenly, and gives each stage all of them."""
    if placement.protocol == AUTO:
        return
    strategy = placement.strategy
    try:
        axes = split_axes(placement.protocol, strategy)
    except ValueError as error:
        raise PlanError(f"{where}.{error}") from error
    parts = math.prod(getattr(strategy, axis) for axis in axes)
    for num_rows in {ref.shape[0] for ref in call.refs if ref.has_rows}:
        if num_rows % parts:
            raise PlanError(
                f"{where}.rows: {' x '.join(axes)} must divide them. Got {num_rows} rows for {parts} parts. Lower a "
                "degree, or use another batch_size."
            )
    if strategy.pipeline > 1 and call.role and axes != BATCH_AXES:
        raise PlanError(
            f"{where}.protocol: must give each stage all rows, split over data x fsdp, where a call has stages. Got "
            f"{placement.protocol!r}. Use {AUTO} or 3D_PROTO."
        )


def _divisors(size: int) -> str:
    small = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    return small[0] if len(small) == 1 else ", ".join(small[:-1]) + " or " + small[-1]
