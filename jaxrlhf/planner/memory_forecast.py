"""The forecast of a run's memory under its plan: per call, and at its peak, compared with the capacity."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.cluster.host_memory import PROCESS_BYTES, UNLIMITED, host_memory, total_memory, with_process
from jaxrlhf.planner.costs.memory import CallMemory, call_memory
from jaxrlhf.planner.fusion.fused_choice import as_one
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.search.choices import memory_problem, on_cpu
from jaxrlhf.planner.search.peak_memory import DeviceMemory, in_gb, memory_at_peak, memory_during
from jaxrlhf.planner.workload import Workload

_UNITS = {"GB": 1e9, "MB": 1e6}
_SMALL = 1e8
"""If no part of a call is this large, they are shown in MB."""


@dataclasses.dataclass(frozen=True)
class MemoryForecast:
    """The forecast of the memory of a plan."""

    rows: tuple[dict[str, Any], ...]
    """A table: call -> its memory on each of its devices. Weights that several calls share are in the row of each."""
    unit: str
    """Unit of the table: 'GB' or 'MB'."""
    lines: tuple[str, ...]
    """The peak memory and the capacity."""
    needed: int
    """Bytes that are needed of the memory that is the fullest for its room; of a host with the process itself."""
    room: int | None
    """Bytes that a run may take of it. None if not known."""
    excess: str = ""
    """The rule that the plan breaks, and by what; empty if everything fits."""
    is_certain: bool = False
    """True if that is so before any call begins: weights and optimizer state at rest, known to the byte, do not fit."""
    crowded: tuple[str, ...] = ()
    """Calls that are the fullest; all during which there is no room, if it does not fit."""


def forecast_memory(workload: Workload, cluster: Cluster, plan: Plan, *, limit: int | None = None) -> MemoryForecast:
    """The memory of a step's plan on this machine's devices, of whose host's memory a run may take all that is
    available or up to a limit in bytes."""
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
    if is_on_cpu:
        room = _host_room(limit, workload.compiled_layers)
        rooms, lines = [room] * len(peaks), _host_lines(max(peaks, key=lambda each: each.total), room)
    else:
        rooms, lines = [_device_room(cluster, each) for each in peaks], _device_lines(peaks, cluster)
    room, peak = max(zip(rooms, peaks, strict=True), key=lambda each: each[0].lacking(each[1].total))
    at_rest, during = sum(peak.resting.values()), memory_during(problem, chosen)
    excess, is_certain = "", room.whole is not None and at_rest + room.process > room.whole
    if is_certain:
        excess = _at_rest(peak, room)
    elif room.lacking(peak.total) > 0:
        excess = _while_running(peak, room)
    crowded = [name for name, each in during.items() if room.lacking(each.total) > 0 or each.total == peak.total]
    return MemoryForecast(
        tuple(rows), unit, tuple(lines), room.needed(peak.total), room.size, excess, is_certain, tuple(crowded)
    )


@dataclasses.dataclass(frozen=True)
class _Room:
    """What a run may take of a memory."""

    size: int | None
    whole: int | None
    """The memory itself, beside what others have of it. None if not known."""
    why: str
    is_host: bool = False
    num_layers: int = 0
    """Layers of the programs in a host's process."""

    @property
    def process(self) -> int:
        """Bytes that a process has before its first array."""
        return PROCESS_BYTES if self.is_host else 0

    def needed(self, arrays: int) -> int:
        """Bytes that arrays take, with the process of a host."""
        return with_process(arrays, num_layers=self.num_layers) if self.is_host else arrays

    def lacking(self, arrays: int) -> int:
        """Bytes by which there is too little; less than zero if there is enough."""
        return self.needed(arrays) - (UNLIMITED if self.size is None else self.size)


def _host_room(limit: int | None, num_layers: int) -> _Room:
    there = host_memory()
    size = min((each for each in (there, limit) if each is not None), default=None)
    why = "devices_memory allows" if size is not None and size == limit else "are available on the host"
    return _Room(size, total_memory(), why, is_host=True, num_layers=num_layers)


def _device_room(cluster: Cluster, memory: DeviceMemory) -> _Room:
    first = memory.devices.start
    return _Room(cluster.capacity(first), cluster.kind_of(first).memory.bytes, "a run may take of a device")


def host_line(arrays: int, *, num_layers: int = 0) -> str:
    """The host memory that a run takes if its devices share it, in words; `num_layers` are those of its programs.

    >>> host_line(8_800_000_000)
    "The run takes up to about 10.9 GB of the host's memory: arrays 8.8 GB, the rest of the process 2.06 GB"
    """
    together = with_process(arrays, num_layers=num_layers)
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


def _host_lines(fullest: DeviceMemory, room: _Room) -> list[str]:
    """Lines for virtual devices, which share the memory of their host."""
    there = host_memory()
    available = f" Available: {in_gb(there)}." if there is not None else ""
    return [f"{host_line(fullest.total, num_layers=room.num_layers)}.{available}", f"Most: {fullest}."]


def _device_lines(peaks: Sequence[DeviceMemory], cluster: Cluster) -> list[str]:
    """Lines for devices with memory of their own. Equal neighbors share one."""
    lines = []
    for same in alike(peaks, cluster):
        first, last = same[0].devices.start, same[-1].devices.start
        devices = f"Device {first}" if first == last else f"Each of devices {first}-{last}"
        lines.append(
            f"{devices}: at most {in_gb(same[0].total)} of {in_gb(cluster.capacity(first))}, during {same[0].call}."
        )
    return lines


def alike(peaks: Iterable[DeviceMemory], cluster: Cluster) -> list[list[DeviceMemory]]:
    """Memories, those of neighbors that are equally large and full together."""

    def key(each: DeviceMemory) -> tuple[Any, ...]:
        return dataclasses.replace(each, devices=range(0)), cluster.capacity(each.devices.start)

    return [list(same) for _, same in itertools.groupby(peaks, key=key)]


def _while_running(peak: DeviceMemory, room: _Room) -> str:
    assert room.size is not None
    needed = f"about {in_gb(room.needed(peak.total))} with the process itself: " if room.is_host else ""
    return f"plan: a step must fit into the {in_gb(room.size)} that {room.why}. Got {needed}{peak}."


def _at_rest(peak: DeviceMemory, room: _Room) -> str:
    """The same for the memory between calls."""
    assert room.whole is not None
    resting = sum(peak.resting.values())
    parts = ", ".join(f"{name} {in_gb(size)}" for name, size in peak.resting.items())
    more = f", the process {in_gb(room.process)}" if room.process else ""
    first, last = peak.devices.start, peak.devices.stop - 1
    where = f"device {first}" if first == last else f"the host of devices {first}-{last}"
    return (
        f"plan: weights and optimizer state at rest must fit into the {in_gb(room.whole)} of {where}. Got "
        f"{in_gb(resting + room.process)} ({parts}{more})."
    )
