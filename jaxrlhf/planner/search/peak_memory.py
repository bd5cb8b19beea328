"""Peak memory of a plan, on each device or in the memory that several share, and its parts."""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.step_order import StepOrder, layout, step_order


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The contents of a memory when it is fullest, in bytes."""

    devices: range
    """The devices that have this memory: one, or the virtual devices of a host."""
    call: str
    """The call of a step that runs then, on these devices or on others; the first of several."""
    resting: Mapping[str, int]
    """Set of weights -> bytes of it at rest, in all its layouts."""
    copies: Mapping[str, int]
    """Call -> bytes of its copy of weights that others train. A copy that several calls share counts for the first."""
    working: int
    """Working memory of that call; 0 if it runs on other devices."""
    beside: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """A call that may run at the same time on other devices that share the memory -> its working memory."""

    @property
    def total(self) -> int:
        return sum(self.resting.values()) + sum(self.copies.values()) + self.working + sum(self.beside.values())

    def __str__(self) -> str:
        parts = {f"{name} at rest": size for name, size in self.resting.items()}
        parts |= {f"a copy for {name}": size for name, size in self.copies.items()}
        parts |= {f"{name} at work": size for name, size in (*self.beside.items(), (self.call, self.working))}
        listed = [f"{name} {in_gb(size)}" for name, size in sorted(parts.items(), key=lambda x: -x[1]) if size]
        first, last = self.devices.start, self.devices.stop - 1
        where = f"on device {first}" if first == last else f"in the memory that devices {first}-{last} share"
        return f"{in_gb(self.total)} {where} during {self.call} ({', '.join(listed)})"


def in_gb(size: float) -> str:
    """Bytes as text.

    >>> in_gb(1.5e9), in_gb(128e9), in_gb(4096)
    ('1.5 GB', '128 GB', '4,096 bytes')
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e6 else f"{size:,.0f} bytes"


def room_in_words(capacity: int, devices_per_memory: int) -> str:
    """The memory that a plan must fit into, in words.

    >>> room_in_words(10**10, 8)
    "the 10 GB that a plan may fill of the host's memory, which 8 devices share"
    """
    of = "a device" if devices_per_memory == 1 else f"the host's memory, which {devices_per_memory} devices share"
    return f"the {in_gb(capacity)} that a plan may fill of {of}"


def remedy(devices_per_memory: int) -> str:
    """The remedy if nothing fits."""
    if devices_per_memory == 1:
        return "Use more devices or larger ones, smaller batches, or shorter responses."
    return (
        "Use a smaller model or adapters, or end other programs. Where more of what is available may be taken, say so: "
        "`devices_memory: 20 GB`."
    )


def peak_memory(problem: Problem, plan: Sequence[int]) -> tuple[int, ...]:
    """Memory -> bytes that it needs under a plan."""
    return tuple(each.total for each in memory_at_peak(problem, plan))


def memory_at_peak(problem: Problem, plan: Sequence[int]) -> tuple[DeviceMemory, ...]:
    """Memory -> its contents when it is fullest, as `problem` says.

    Calls that read the same trained weights in the same layout share one copy, from the first of them on. It is freed
    when the weights are trained again.
    """
    return tuple(max(states, key=lambda state: state.total) for states in memory_during_all(problem, plan))


def memory_during(problem: Problem, plan: Sequence[int]) -> dict[str, DeviceMemory]:
    """Call -> the contents of the fullest memory of its devices while it runs, weights of other calls included."""
    found: dict[str, DeviceMemory] = {}
    for memory, states in enumerate(memory_during_all(problem, plan)):
        for call, index, state in zip(problem.calls, plan, states, strict=True):
            fullest, own = found.get(call.name), problem.memories(call.choices[index].devices)
            if memory in own and (fullest is None or state.total > fullest.total):
                found[call.name] = state
    return found


def memory_during_all(problem: Problem, plan: Sequence[int]) -> Iterator[list[DeviceMemory]]:
    """For each memory: call -> its contents while the call runs, on its devices or on others."""
    order, shared_by = step_order(problem), problem.devices_per_memory
    chosen = [call.choices[index] for call, index in zip(problem.calls, plan, strict=True)]
    own = [problem.memories(choice.devices) for choice in chosen]
    resting = _resting(problem, plan, order)
    copies = _copies(problem, plan, order)
    for memory in range(len(problem.capacity)):
        devices = range(memory * shared_by, (memory + 1) * shared_by)
        rests: dict[str, int] = {}
        for (j, weights), size in resting.items():
            if memory in own[j]:
                rests[weights] = rests.get(weights, 0) + size
        states = []
        for c, call in enumerate(problem.calls):
            there = {j: size for j, size in copies.items() if c in order.alive[j] and memory in own[j]}
            held = {problem.calls[j].name: size for j, size in there.items()}
            working, one, beside = 0, chosen[c], {}
            if memory in own[c]:
                working = one.working
                apart = [j for j in order.beside[c] if chosen[j].first >= one.end or one.first >= chosen[j].end]
                others = [j for j in apart if memory in own[j]]
                if others:
                    most = max(others, key=lambda j: chosen[j].working)
                    beside = {problem.calls[most].name: chosen[most].working}
            states.append(DeviceMemory(devices, call.name, rests, held, working, beside))
        yield states


def _resting(problem: Problem, plan: Sequence[int], order: StepOrder) -> dict[tuple[int, str], int]:
    """(call, set of weights) -> bytes of it that rest in each of the call's memories because of it."""
    sizes: dict[tuple[int, str], int] = {}
    first: dict[tuple[str, Hashable], int] = {}

    def add(j: int, weights: str, size: int) -> None:
        sizes[j, weights] = max(sizes.get((j, weights), 0), size)

    for j, (call, index) in enumerate(zip(problem.calls, plan, strict=True)):
        home, choice = order.homes[j], call.choices[index]
        if home is None:
            add(first.setdefault((call.weights, layout(choice)), j), call.weights, choice.resting)
        elif home == j:
            add(j, call.weights, choice.resting)
        if call.base:
            add(first.setdefault((call.base, layout(choice)), j), call.base, choice.base)
    return sizes


def _copies(problem: Problem, plan: Sequence[int], order: StepOrder) -> dict[int, int]:
    """Call -> bytes of the copy of trained weights that is made for it in each of its memories."""
    chosen = [call.choices[index] for call, index in zip(problem.calls, plan, strict=True)]
    readers = [j for j, alive in enumerate(order.alive) if alive]
    sizes: dict[int, int] = {}
    for j, first in order.first_readers([layout(choice) for choice in chosen], readers).items():
        made_by = order.made_by[j]
        assert made_by is not None
        is_there = layout(chosen[j]) == layout(chosen[made_by[0]])
        sizes[first] = max(sizes.get(first, 0), chosen[j].copy - is_there * chosen[j].shared_with_training)
    return sizes
