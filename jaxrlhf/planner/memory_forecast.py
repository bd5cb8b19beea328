"""The forecast of a run's memory under its plan: per call, and at its peak, compared with the capacity."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.cluster.host_memory import PROCESS_BYTES, host_memory, total_memory, with_process
from jaxrlhf.planner.costs.memory import CallMemory, call_memory
from jaxrlhf.planner.fusion.fused_choice import as_one
from jaxrlhf.planner.plans.plan import Plan, PlanError
from jaxrlhf.planner.search.choices import memory_problem, on_cpu
from jaxrlhf.planner.search.peak_memory import DeviceMemory, in_gb, memory_at_peak
from jaxrlhf.planner.workload import Workload

_UNITS = {"GB": 1e9, "MB": 1e6}
_SMALL = 1e8
"""If no part of a call is this large, they are shown in MB."""
_LESS = "Use `plan: auto`, more fsdp or micro-batches, a smaller batch, adapters (lora), or a smaller model."


@dataclasses.dataclass(frozen=True)
class MemoryForecast:
    """The forecast of the memory of a plan."""

    rows: tuple[dict[str, Any], ...]
    """A table: call -> its memory on each of its devices. Weights that several calls share are in the row of each."""
    unit: str
    """Unit of the table: 'GB' or 'MB'."""
    lines: tuple[str, ...]
    """The peak memory and the capacity."""
    notes: tuple[str, ...]
    """Warnings where it may not fit."""


def forecast_memory(workload: Workload, cluster: Cluster, plan: Plan, *, limit: int | None = None) -> MemoryForecast:
    """The memory of a step's plan on this machine's devices, of whose host's memory a run may take all that is
    available or up to a limit in bytes. Raises PlanError if the memory between calls, which is known to the byte, is
    more than the devices have."""
    is_on_cpu, trained = on_cpu(cluster), workload.trained
    parts = []
    for call in workload.calls:
        strategy = plan.placements[call.name].strategy
        parts.append(_parts(call_memory(call, strategy, is_trained=call.weights in trained, on_cpu=is_on_cpu)))
    unit = "GB" if any(size >= _SMALL for each in parts for size in each.values()) else "MB"
    rows = []
    for call, sizes in zip(workload.calls, parts, strict=True):
        row: dict[str, Any] = {name: _shown(size, _UNITS[unit]) for name, size in sizes.items()}
        if call.role in plan.offload and sizes["weights"] and not is_on_cpu:
            row["weights"] = f"{row['weights']} (host)"
        rows.append({"call": call.name, **row})
    problem, chosen = memory_problem(workload, cluster, plan.placements, plan.offload), (0,) * len(workload.calls)
    if plan.fuse:  # both run at the same time
        i, j = sorted(i for i, call in enumerate(workload.calls) if call.name in plan.fuse)
        problem = as_one(problem, i, j, chosen, 0.0)
    peaks = memory_at_peak(problem, chosen)
    say = _on_host if is_on_cpu else _on_devices
    lines, notes = say(peaks, cluster, limit)
    return MemoryForecast(tuple(rows), unit, tuple(lines), tuple(notes))


def host_line(arrays: int) -> str:
    """The host memory that a run takes if its devices share it, in words.

    >>> host_line(8_800_000_000)
    "The run takes up to about 10.9 GB of the host's memory: arrays 8.8 GB, the rest of the process 2.06 GB"
    """
    together = with_process(arrays)
    parts = f"arrays {in_gb(arrays)}, the rest of the process {in_gb(together - arrays)}"
    return f"The run takes up to about {in_gb(together)} of the host's memory: {parts}"


def _parts(memory: CallMemory) -> dict[str, int]:
    """The parts of a call's memory, in bytes."""
    return {
        "weights": memory.resting - memory.optimizer + memory.base, "optimizer": memory.optimizer,
        "copies": memory.copy + memory.gathered, "gradients": memory.gradients,
        "activations": memory.activations + memory.logits, "cache": memory.cache,
    }  # fmt: skip


def _shown(size: int, unit: float) -> float | str:
    return float(f"{round(size / unit, 3):.3g}") if size else "-"


def _on_host(peaks: Sequence[DeviceMemory], cluster: Cluster, limit: int | None) -> tuple[list[str], list[str]]:
    """Lines and warnings for virtual devices, which share the memory of their host."""
    fullest = max(peaks, key=lambda each: each.total)
    there, whole = host_memory(), total_memory()
    _require_room(fullest, PROCESS_BYTES, whole)
    room = min((size for size in (there, limit) if size is not None), default=None)
    available = f" Available: {in_gb(there)}." if there is not None else ""
    lines = [f"{host_line(fullest.total)}.{available}", f"Most: {fullest}."]
    if room is None or with_process(fullest.total) <= room:
        return lines, []
    limits = f"devices_memory allows {in_gb(room)}" if room == limit else f"{in_gb(room)} are available"
    return lines, [
        f"The plan may take more memory than there is: about {in_gb(with_process(fullest.total))}, where {limits}. The "
        f"system may end the run, or other programs. {_LESS}"
    ]


def _on_devices(peaks: Sequence[DeviceMemory], cluster: Cluster, limit: int | None) -> tuple[list[str], list[str]]:
    """Lines and warnings for devices with memory of their own. Equal neighbors share a line."""
    lines, notes = [], []
    for same in alike(peaks, cluster):
        first, last = same[0].devices.start, same[-1].devices.start
        capacity = cluster.capacity(first)
        _require_room(same[0], 0, cluster.kind_of(first).memory.bytes)
        devices = f"Device {first}" if first == last else f"Each of devices {first}-{last}"
        lines.append(f"{devices}: at most {in_gb(same[0].total)} of {in_gb(capacity)}, during {same[0].call}.")
        if same[0].total > capacity:
            notes.append(f"The plan may take more memory than there is: {same[0]}, of {in_gb(capacity)}. {_LESS}")
    return lines, notes


def alike(peaks: Iterable[DeviceMemory], cluster: Cluster) -> list[list[DeviceMemory]]:
    """Memories, those of neighbors that are equally large and full together."""

    def key(each: DeviceMemory) -> tuple[Any, ...]:
        return dataclasses.replace(each, devices=range(0)), cluster.capacity(each.devices.start)

    return [list(same) for _, same in itertools.groupby(peaks, key=key)]


def _require_room(memory: DeviceMemory, more: int, whole: int | None) -> None:
    """Raises PlanError if the memory between calls does not fit."""
    resting = sum(memory.resting.values())
    if whole is not None and resting + more > whole:
        parts = ", ".join(f"{name} {in_gb(size)}" for name, size in memory.resting.items())
        first, last = memory.devices.start, memory.devices.stop - 1
        where = f"device {first}" if first == last else f"the host of devices {first}-{last}"
        raise PlanError(
            f"plan: weights and optimizer state at rest must fit into the {in_gb(whole)} of {where}. Got "
            f"{in_gb(resting + more)} ({parts}{f', the process {in_gb(more)}' if more else ''}). {_LESS}"
        )
