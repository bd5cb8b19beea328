"""HybridFlow's mapping: which models share devices, how many devices they get, and the best strategy of each there.

All partitions of the models into sets that share devices (PPO's four models: 15), and all allocations of devices to the
sets. A call's strategy on so many devices is the fastest one, found once. A mapping takes as long as its stages one
after another, where models that share devices add up and others run side by side. The best mappings are placed on the
devices and simulated as all plans are.

Reference:
    Sheng et al. 2024 (HybridFlow), arXiv:2409.19256, section 6 and Algorithm 1.
"""

import heapq
import time
from collections.abc import Iterator, Sequence

from jaxrlhf.planner.placed import all_meshes, fastest_that_fits, result_of
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.search import SearchResult

SIMULATED = 50
"""Of all mappings, so many of the fastest are placed and simulated."""


def hybridflow(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """The best mapping. It is the same for every seed; `seconds` only cut the simulation of the best ones.

    Raises:
        PlanError: No mapping fits.
    """
    del seed
    begun, best, why = time.monotonic(), None, "hybridflow: no allocation of devices fits the models."
    looked, leading = _ranked(problem)
    for _, _, sets, sizes in leading:
        if best is not None and seconds is not None and time.monotonic() - begun > seconds:
            break
        try:
            found = _placed(problem, sets, sizes, looked)
        except PlanError as error:
            why = str(error)
            continue
        if best is None or found.seconds < best.seconds:
            best = found
    if best is None:
        raise PlanError(why)
    return best


def partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """All partitions of distinct items into sets.

    >>> len(list(partitions(["actor", "critic", "reference", "reward"])))
    15
    """
    if not items:
        yield []
        return
    first, *others = items
    for smaller in partitions(others):
        yield [[first], *smaller]
        for i in range(len(smaller)):
            yield [*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]]


Ranked = tuple[float, int, list[list[str]], tuple[int, ...]]


def _ranked(problem: Problem) -> tuple[int, list[Ranked]]:
    """How many mappings there are, and the fastest of them: seconds, number, sets of models, devices of each set."""
    sizes = sorted({len(mesh) for mesh in all_meshes(problem)})
    fastest = [_fastest_by_size(problem, i, sizes) for i in range(len(problem.calls))]
    stages = _stages(problem)
    models = list(dict.fromkeys(call.weights for call in problem.calls))
    heap: list[tuple[float, int, list[list[str]], tuple[int, ...]]] = []
    looked = 0
    for sets in partitions(models):
        at = {name: i for i, names in enumerate(sets) for name in names}
        sets_of_calls = [at[call.weights] for call in problem.calls]
        for allocation in _allocations(problem.num_devices, len(sets), sizes):
            looked += 1
            total = 0.0
            for stage in stages:
                of_set = [0.0] * len(sets)
                for i in stage:
                    of_set[sets_of_calls[i]] += fastest[i].get(allocation[sets_of_calls[i]], float("inf"))
                total += max(of_set)
            if total == float("inf"):
                continue
            entry = (-total, looked, sets, allocation)
            if len(heap) < SIMULATED:
                heapq.heappush(heap, entry)
            elif entry[:2] > heap[0][:2]:
                heapq.heapreplace(heap, entry)
    return looked, sorted((-negative, number, sets, allocation) for negative, number, sets, allocation in heap)


def _fastest_by_size(problem: Problem, call: int, sizes: Sequence[int]) -> dict[int, float]:
    """Devices -> seconds of a call on so many."""
    choices = problem.calls[call].choices
    found: dict[int, float] = {}
    for size in sizes:
        seconds = [c.load + c.seconds + c.unload for c in choices if len(c.devices) == size]
        if seconds:
            found[size] = min(seconds)
    return found


def _stages(problem: Problem) -> list[list[int]]:
    """The calls by stage: generation, what is computed of the responses, training."""
    order = ("generate", "infer", "train")
    return [stage for kind in order if (stage := [i for i, c in enumerate(problem.calls) if c.kind == kind])]


def _allocations(num_devices: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sizes of the sets' meshes that fill the devices and can be placed: parts of nodes are powers of two, so that,
    the larger first, they always can where their sum is whole nodes."""
    allowed = set(sizes)

    def choose(left: int, remaining: int) -> Iterator[tuple[int, ...]]:
        if remaining == 1:
            if left in allowed:
                yield (left,)
            return
        for size in sizes:
            if size < left:
                for others in choose(left - size, remaining - 1):
                    yield (size, *others)

    return choose(num_devices, count)


def _placed(problem: Problem, sets: list[list[str]], sizes: tuple[int, ...], looked: int) -> SearchResult:
    """A mapping on devices, the larger sets first, with the fastest choices there that fit together."""
    devices: dict[str, range] = {}
    first = 0
    for names, size in sorted(zip(sets, sizes, strict=True), key=lambda each: -each[1]):
        devices |= dict.fromkeys(names, range(first, first + size))
        first += size
    options = []
    for call in problem.calls:
        here = [i for i, c in enumerate(call.choices) if c.devices == devices[call.weights]]
        if not here:
            raise PlanError(f"hybridflow: {call.name} has no choice on {devices[call.weights]}.")
        options.append(here)
    return result_of(problem, fastest_that_fits(problem, options, "hybridflow"), evaluated=looked)
