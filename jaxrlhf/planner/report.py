"""Reports of a plan: as rows of tables, as lines, as plain data for machines."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from jaxrlhf.planner.make_plan import SEARCH, YARDSTICK, Planned, chosen
from jaxrlhf.planner.memory_forecast import alike, host_line
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.search.choices import looked_at
from jaxrlhf.planner.search.problem import Choice

GB = 1e9
JSON_VERSION = 1


def call_rows(planned: Planned) -> list[dict[str, Any]]:
    """The calls with their devices, strategies, seconds, and the memory of their fullest devices while they run.

    The seconds of two fused calls are in the row of the first. Bringing weights from the host and back has a column of
    its own."""
    rows = []
    for name, choice in planned.choices.items():
        strategy = choice.strategy
        rows.append(
            {
                "call": name,
                "devices": devices_in_words(choice.first, choice.end, planned.cluster.devices_per_node),
                **{degree: getattr(strategy, degree) for degree in ("data", "fsdp", "tensor", "pipeline")},
                "micro-batches": strategy.micro_batches,
                **({"slots": strategy.slots or "-"} if planned.rollouts else {}),
                "remat": strategy.remat if planned.workload.call(name).trains else "-",
                "weights at rest": "host" if choice.offloaded else "devices",
                "seconds": "(fused)" if name in planned.fuse[1:] else planned.call_seconds(name),
                **({"loading": choice.load + choice.unload} if planned.offloaded else {}),
                "peak GB": planned.call_memory(name) / GB,
            }
        )
    return rows


def devices_in_words(first: int, end: int, devices_per_node: int) -> str:
    """Consecutive devices, and the number of nodes if these are whole: '0-15, 2 nodes'."""
    where = _numbers(first, end - 1)
    nodes, rest = divmod(end - first, devices_per_node)
    return where if rest or first % devices_per_node else f"{where}, {nodes} node{'s' if nodes > 1 else ''}"


def memory_rows(planned: Planned) -> list[dict[str, Any]]:
    """The memory of devices when it is fullest, beside their capacity. Equal neighbors share a row."""
    rows = []
    for same in alike(planned.memory, planned.cluster):
        first, last = same[0], same[-1].devices.stop - 1
        capacity = planned.cluster.capacity(first.devices.start)
        parts = {f"{name} at rest": size for name, size in first.resting.items()}
        parts |= {f"copy for {name}": size for name, size in first.copies.items()}
        parts["at work"] = first.working
        parts |= {f"{name} beside it": size for name, size in first.beside.items()}
        listed = [f"{name} {size / GB:.3g}" for name, size in sorted(parts.items(), key=lambda x: -x[1]) if size]
        rows.append(
            {
                "devices": _numbers(first.devices.start, last) + (", shared" if len(first.devices) > 1 else ""),
                "peak GB": first.total / GB,
                "of GB": capacity / GB,
                "full": f"{first.total / capacity:.0%}",
                "during": first.call,
                "made of GB": ", ".join(listed),
            }
        )
    return rows


def _numbers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def summary_lines(planned: Planned) -> list[str]:
    """The plan in short: seconds of an iteration, tokens per second, the gain over the heuristic plan."""
    critical = planned.simulation.critical
    deciding = [name for name in critical if ":" not in name]  # the others move weights and data for one of these
    moved = " and what is brought to them" if len(deciding) < len(critical) else ""
    lines = [
        f"{planned.seconds:.4g} s an iteration, {planned.tokens_per_second:,.0f} tokens/s "
        f"({planned.workload.tokens:,} tokens an iteration)",
        f"Devices are busy {statistics.mean(planned.simulation.busy):.0%} of the time",
        f"What decides: {', '.join(dict.fromkeys(deciding)) or 'no call'}{moved}",
    ]
    calls = [(planned.workload.call(name), choice.strategy) for name, choice in planned.choices.items()]
    copies = [(call.name, call.copied_rows(strategy), max(call.divisible)) for call, strategy in calls]
    if listed := ", ".join(f"{name} {number} beside {rows}" for name, number, rows in copies if number):
        lines.append(f"Rows of no weight, where rows do not divide: {listed}")
    lines += rollout_lines(planned)
    if planned.problem.devices_per_memory > 1:
        most = max(each.total for each in planned.memory)
        lines.append(host_line(most, num_layers=planned.workload.compiled_layers))
    if planned.method == SEARCH:
        lines.append(
            f"The fastest of {planned.result.evaluated:,} plans looked at, of those with {looked_at(planned.cluster)}; "
            "that no other is faster is not proven"
        )
    if planned.gain is None:
        lines.append(f"No {YARDSTICK} plan to compare with: {planned.heuristic_note}")
    elif planned.method != YARDSTICK:
        assert planned.heuristic is not None
        lines.append(
            f"{planned.gain:.2f} x as fast as the {YARDSTICK} plan, which takes {planned.heuristic.seconds:.4g} s: "
            "every call on the same devices, tensor within nodes, pipeline across them"
        )
    return lines


def rollout_lines(planned: Planned) -> list[str]:
    """The decoding steps that generate calls are expected to take, by the lengths of their responses."""
    lines = []
    for name, rollout in planned.rollouts.items():
        strategy, call = planned.choices[name].strategy, planned.workload.call(name)
        how = "all rows at once, until the longest response has ended"
        if strategy.micro_batches > 1:
            how = f"{strategy.micro_batches} micro-batches one after another, each until its longest response has ended"
        if strategy.slots:
            how = (
                f"in {strategy.slots} slots a row shard, {rollout.groups:,.0f} groups of {strategy.prefill_rows} "
                "prompts prefilled as slots get free"
            )
            if strategy.shared_prompts:
                how += f", keys and values of {strategy.shared_prompts} prompts read once for all of their samples"
        steps = rollout.steps * strategy.micro_batches
        lines.append(f"{name}: about {steps:,.0f} decoding steps for at most {call.response:,} new tokens, {how}")
    return lines


def runner_up_lines(planned: Planned) -> list[str]:
    """The best plans that lost: a line with the reason, then one for each call that they place differently."""
    lines = []
    for runner_up in planned.result.runners_up:
        others = chosen(planned.problem, runner_up.plan)
        lines.append(f"{runner_up.seconds:.4g} s, {runner_up.why(planned.seconds)}{_longest(planned, others)}:")
        for name, other in others.items():
            if other != planned.choices[name]:
                lines.append(f"  {name}  {placement_in_words(other, planned.cluster.devices_per_node)}")
    return lines


def _longest(planned: Planned, others: Mapping[str, Choice]) -> str:
    """The call that loses most time against the chosen plan, in words; empty if none does."""
    longer: dict[str, float] = {}
    for name, other in others.items():
        together = planned.fuse if name in planned.fuse else (name,)
        longer[" + ".join(together)] = sum(others[each].seconds for each in together) - planned.call_seconds(name)
        if other == planned.choices[name] and len(together) == 1:
            longer.pop(name)
    name = max(longer, key=lambda each: longer[each], default="")
    if not name or longer[name] <= 0:
        return ""
    return f"; {name} {'take' if ' + ' in name else 'takes'} {longer[name]:.3g} s more"


def placement_in_words(choice: Choice, devices_per_node: int) -> str:
    """Devices and degrees: 'tensor 8 x pipeline 2, 4 micro-batches on 0-15, 2 nodes'."""
    micro = choice.strategy.micro_batches
    cut = f", {micro} micro-batches" if micro > 1 else ""
    cut += f", {choice.strategy.slots} slots" if choice.strategy.slots else ""
    kept = ", from the host" if choice.offloaded else ""
    where = devices_in_words(choice.first, choice.end, devices_per_node)
    return f"{choice.strategy}{cut}{kept} on {where}"


def plan_json(planned: Planned, plan: Plan) -> dict[str, Any]:
    """The whole report as plain data, in seconds and bytes, with the plan of a graph's calls, `compute` calls too."""
    simulation, heuristic = planned.simulation, planned.heuristic
    return {
        "version": JSON_VERSION,
        "cluster": str(planned.cluster),
        "strategy": planned.method,
        "step_seconds": planned.seconds,
        "tokens": planned.workload.tokens,
        "tokens_per_second": planned.tokens_per_second,
        "heuristic_step_seconds": None if heuristic is None else heuristic.seconds,
        "heuristic_note": planned.heuristic_note,
        "times_heuristic": planned.gain,
        "calls": {
            name: {
                "devices": list(choice.devices),
                "strategy": dataclasses.asdict(choice.strategy),
                "offloaded": choice.offloaded,
                "seconds": planned.call_seconds(name),
                "load_seconds": choice.load,
                "unload_seconds": choice.unload,
                "memory_bytes": planned.call_memory(name),
                "padded_rows": planned.workload.call(name).copied_rows(choice.strategy),
                "decoding": dataclasses.asdict(planned.rollouts[name]) if name in planned.rollouts else None,
            }
            for name, choice in planned.choices.items()
        },
        "fused": list(planned.fuse),
        "plan": plan.to_json(),
        "devices": [
            {
                "busy": busy,
                "memory_bytes": memory.total,
                "memory_shared_by": len(memory.devices),
                "capacity_bytes": planned.cluster.capacity(memory.devices.start),
                "fullest_during": memory.call,
                "resting_bytes": dict(memory.resting),
                "copy_bytes": dict(memory.copies),
                "working_bytes": memory.working + sum(memory.beside.values()),
            }
            for device, busy in enumerate(simulation.busy)
            for memory in [planned.memory[device // planned.problem.devices_per_memory]]
        ],
        "timeline": [
            {
                **{key: getattr(span.task, key) for key in ("name", "call", "kind")},
                "devices": sorted({device for part in span.task.devices for device in part}),
                "start": span.start,
                "end": span.end,
            }
            for span in simulation.spans
        ],
        "iterations_in_timeline": max(1, simulation.period),
        "critical": list(simulation.critical),
        "runners_up": [
            {
                "step_seconds": each.seconds,
                "lacking_bytes": each.lacking,
                "why": each.why(planned.seconds),
                "calls": {
                    name: {"devices": list(c.devices), "strategy": dataclasses.asdict(c.strategy)}
                    for name, c in chosen(planned.problem, each.plan).items()
                },
            }
            for each in planned.result.runners_up
        ],
        "search": {
            "plans_possible": planned.problem.size,
            "plans_evaluated": planned.result.evaluated,
            "planning_seconds": planned.planning_seconds,
            "history": [dataclasses.asdict(each) for each in planned.result.history if math.isfinite(each.seconds)],
        },
        "notes": list(planned.notes),
        "assumed": list(planned.assumed),
    }
