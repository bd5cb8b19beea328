"""Assumptions of a forecast that were not measured, in a line each: those that affect the plan at hand."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxrlhf.cluster.hardware import Cluster, Kind
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.response_lengths import length_cdf, median_length
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import ModelCall, Workload

SLOW_KERNEL_SECONDS = 10e-6
"""Between the starts of two kernels that a host launches one by one."""


def assumptions(
    problem: Problem, plan: Sequence[int], workload: Workload, costs: CostModel, *, seconds: float
) -> tuple[str, ...]:
    """The unproven assumptions behind a plan whose iteration is forecast to take some seconds."""
    lines = [_reached(kind) for kind in _not_measured(costs.cluster)]
    if any(call.model.dtype == "bfloat16" for call in workload.calls):
        lines += [_in_float32(group.kind) for group in costs.cluster.groups if _lacks_bfloat16(group.kind)]
    lines += _decoding(problem, plan, workload, costs, seconds)
    if drawn := [call for call in workload.calls if call.kind == "generate"]:
        lines.append(_lengths(drawn))
    if workload.on_host:
        lines.append(f"Python functions on the host take no time: {', '.join(workload.on_host)}.")
    return tuple(lines)


def _lengths(drawn: Sequence[ModelCall]) -> str:
    """The lengths that are assumed of responses."""
    most, lengths = max(call.response for call in drawn), drawn[0].lengths
    if lengths is None:
        return f"Responses have all of their {most:,} tokens: generation goes on until the last one has ended."
    median = median_length(length_cdf(lengths, most))
    return (
        f"Responses have {lengths.mean:,.4g} tokens on average, half of them at most {median:,}, 99 % at most "
        f"{lengths.p99:,}, and none more than {most:,}: lognormal lengths, which do not depend on the prompt."
    )


def _not_measured(cluster: Cluster) -> list[Kind]:
    kinds = dict.fromkeys(group.kind for group in cluster.groups)
    return [kind for kind in kinds if not kind.coefficients.is_measured]


def _lacks_bfloat16(kind: Kind) -> bool:
    """True for GPUs before compute capability 8.0."""
    return kind.target is not None and float(kind.target.capability) < 8


def _in_float32(kind: Kind) -> str:
    return f"{kind.name} devices know no bfloat16: XLA computes it there in float32, at the rate of float32."


def _reached(kind: Kind) -> str:
    """The efficiencies that are assumed of a kind of device."""
    costs, why = kind.coefficients, "assumed, and measured on none"
    if not costs.source.startswith("assumed"):
        why = costs.source
    parts = {
        "large matrix products": costs.matmul_efficiency, "memory": costs.memory_efficiency,
        "links": costs.link_efficiency, "the network": costs.network_efficiency,
    }  # fmt: skip
    listed = ", ".join(f"{what} {part:.0%}" for what, part in parts.items())
    return f"Of their peaks {kind.name} devices reach: {listed} ({why})."


def _decoding(
    problem: Problem, plan: Sequence[int], workload: Workload, costs: CostModel, seconds: float
) -> Iterator[str]:
    """The assumption that decoding runs as one captured graph, and the seconds of an iteration if it did not."""
    kinds = [kind for kind in _not_measured(costs.cluster) if kind.target is not None]
    fast = max((kind.coefficients.graph_kernel_seconds for kind in kinds), default=SLOW_KERNEL_SECONDS)
    if fast >= SLOW_KERNEL_SECONDS or not any(call.kind == "generate" for call in workload.calls):
        return

    def slowed(kind: Kind) -> Kind:
        coefficients = dataclasses.replace(kind.coefficients, graph_kernel_seconds=SLOW_KERNEL_SECONDS)
        return dataclasses.replace(kind, coefficients=coefficients)

    slow = costs.on(costs.cluster.with_kinds(slowed))
    part = problem.with_choices([[index] for index in plan])
    calls = []
    for call, described in zip(part.calls, workload.calls, strict=True):
        (choice,) = call.choices
        if call.kind == "generate":
            taken = slow.seconds(described, choice.devices, choice.strategy).total
            choice = dataclasses.replace(choice, seconds=max(choice.seconds, taken))
        calls.append(dataclasses.replace(call, choices=(choice,)))
    slower = steady_state(dataclasses.replace(part, calls=tuple(calls)), [0] * len(calls)).seconds
    now, then = f"{seconds:.4g} s", f"{slower:.4g} s"
    takes = f"an iteration takes {then}, not {now}" if now != then else "an iteration takes no longer"
    yield (
        f"Decoding steps take {1e6 * fast:.3g} us a kernel and wait for nothing, as in a captured graph, which was not "
        f"measured; at {1e6 * SLOW_KERNEL_SECONDS:.0f} us a kernel {takes}."
    )
