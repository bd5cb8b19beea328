"""The memory that devices need under a plan, and what it is made of."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.step_order import StepOrder, layout, step_order


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What is on a device when most is there, in bytes."""

    device: int
    call: str
    """The call of a step that runs then, on this device or on others; the first of several."""
    resting: Mapping[str, int]
    """Set of weights -> what rests of it, in all its layouts."""
    copies: Mapping[str, int]
    """Call -> its copy of weights that others train. One that several calls share is the first's."""
    working: int
    """Of that call; 0 where it runs on other devices."""

    @property
    def total(self) -> int:
        return sum(self.resting.values()) + sum(self.copies.values()) + self.working

    def __str__(self) -> str:
        parts = {f"{name} at rest": size for name, size in self.resting.items()}
        parts |= {f"a copy for {name}": size for name, size in self.copies.items()}
        parts[f"{self.call} at work"] = self.working
        listed = [f"{name} {in_gb(size)}" for name, size in sorted(parts.items(), key=lambda x: -x[1]) if size]
        return f"{in_gb(self.total)} on device {self.device} during {self.call} ({', '.join(listed)})"


def in_gb(size: float) -> str:
    """Bytes as text.

    >>> in_gb(1.5e9), in_gb(128e9), in_gb(4096)
    ('1.5 GB', '128 GB', '4,096 bytes')
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e6 else f"{size:,.0f} bytes"


def peak_memory(problem: Problem, plan: Sequence[int]) -> tuple[int, ...]:
    """Device -> bytes that it needs under a plan."""
    return tuple(each.total for each in memory_at_peak(problem, plan))


def memory_at_peak(
    problem: Problem, plan: Sequence[int], devices: Iterable[int] | None = None
) -> tuple[DeviceMemory, ...]:
    """Device -> what is there when most is there, as `problem` says.

    Calls that read the same trained weights in the same layout have one copy together, from the first of them on. It is
    gone when the weights are trained again.

    Args:
        devices: The ones asked for. None: all.
    """
    which = range(problem.num_devices) if devices is None else devices
    return tuple(max(states, key=lambda state: state.total) for states in _states(problem, plan, which))


def memory_during(problem: Problem, plan: Sequence[int]) -> dict[str, DeviceMemory]:
    """Call -> what is on the fullest of its devices while it runs: its own and what rests there of others."""
    found: dict[str, DeviceMemory] = {}
    for states in _states(problem, plan, range(problem.num_devices)):
        for call, index, state in zip(problem.calls, plan, states, strict=True):
            fullest = found.get(call.name)
            if state.device in call.choices[index].devices and (fullest is None or state.total > fullest.total):
                found[call.name] = state
    return found


def _states(problem: Problem, plan: Sequence[int], devices: Iterable[int]) -> Iterator[list[DeviceMemory]]:
    """For each device: call -> what is there while it runs, there or elsewhere."""
    order = step_order(problem)
    chosen = [call.choices[index] for call, index in zip(problem.calls, plan, strict=True)]
    resting = _resting(problem, plan, order)
    copies = _copies(problem, plan, order)
    for device in devices:
        rests: dict[str, int] = {}
        for j, size in resting.items():
            if device in chosen[j].devices:
                weights = problem.calls[j].weights
                rests[weights] = rests.get(weights, 0) + size
        states = []
        for c, call in enumerate(problem.calls):
            there = {j: size for j, size in copies.items() if c in order.alive[j] and device in chosen[j].devices}
            working = chosen[c].working if device in chosen[c].devices else 0
            states.append(
                DeviceMemory(device, call.name, rests, {problem.calls[j].name: x for j, x in there.items()}, working)
            )
        yield states


def _resting(problem: Problem, plan: Sequence[int], order: StepOrder) -> dict[int, int]:
    """Call -> bytes that rest on each of its devices because of it."""
    sizes: dict[int, int] = {}
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for j, (call, index) in enumerate(zip(problem.calls, plan, strict=True)):
        home, choice = order.homes[j], call.choices[index]
        if home is None:
            j = first.setdefault((call.weights, layout(choice)), j)
        elif home != j:
            continue
        sizes[j] = max(sizes.get(j, 0), choice.resting)
    return sizes


def _copies(problem: Problem, plan: Sequence[int], order: StepOrder) -> dict[int, int]:
    """Call -> bytes of the copy of trained weights that is made for it on each of its devices."""
    chosen = [call.choices[index] for call, index in zip(problem.calls, plan, strict=True)]
    readers = [j for j, alive in enumerate(order.alive) if alive]
    sizes: dict[int, int] = {}
    for j, first in order.first_readers([layout(choice) for choice in chosen], readers).items():
        sizes[first] = max(sizes.get(first, 0), chosen[j].copy)
    return sizes
