"""Peak memory of a plan, on each device or in the memory that several share, and its parts."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxrlhf.planner.search import evaluate_loops
from jaxrlhf.planner.search.flat_problem import flat_problem, room_for_work
from jaxrlhf.planner.search.problem import Problem


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
    chosen = [call.choices[index] for call, index in zip(problem.calls, plan, strict=True)]
    own, names = [problem.memories(choice.devices) for choice in chosen], [call.name for call in problem.calls]
    flat = flat_problem(problem.with_choices([[index] for index in plan]), compiled=False)
    work = room_for_work(flat, compiled=False)
    evaluate_loops.fit(flat, list(range(len(plan))), work)
    for memory in range(len(problem.capacity)):
        devices = range(memory * problem.devices_per_memory, (memory + 1) * problem.devices_per_memory)
        rests: dict[str, int] = {}
        for j, of_base, size in zip(flat.resters, flat.of_base, work.sizes, strict=False):
            if memory in own[j] and size:
                weights = problem.calls[j].base if of_base else problem.calls[j].weights
                rests[weights] = rests.get(weights, 0) + size
        states = []
        for c, one in enumerate(chosen):
            copies = {
                names[j]: work.sizes[2 * len(plan) + j]
                for j in range(len(plan))
                if flat.alive[c] >> j & 1 and memory in own[j] and work.sizes[2 * len(plan) + j]
            }
            beside = {
                names[j]: chosen[j].working
                for j in range(len(plan))
                if flat.beside[c] >> j & 1
                and memory in own[c]
                and memory in own[j]
                and (chosen[j].first >= one.end or one.first >= chosen[j].end)
            }
            most = dict(sorted(beside.items(), key=lambda each: -each[1])[:1])
            working = one.working if memory in own[c] else 0
            states.append(DeviceMemory(devices, names[c], rests, copies, working, most))
        yield states
