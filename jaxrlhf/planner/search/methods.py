"""Methods to find a plan, by name: search, HybridFlow's mapping, the placements that are written by hand, and those of
placement strategies."""

from collections.abc import Mapping
from typing import Protocol

from jaxrlhf.brief import did_you_mean
from jaxrlhf.config.placement_strategy import STRATEGIES
from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.search.choices import Among
from jaxrlhf.planner.search.mappings import hybridflow, split, standalone
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.search.search import fastest_that_fits, most_devices, options_on, search
from jaxrlhf.planner.search.search_result import SearchResult, result_of

PLACEMENT = "placement"
"""The method for devices that the config's `plan.placement` gives."""


class PlanBy(Protocol):
    """A method to find a plan."""

    def __call__(self, problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult: ...


def heuristic(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every call on all devices with the same degrees, tensor within a node and pipeline across nodes, and the fastest
    micro-batches and remat that fit together. The problem has no other choices (`choices.Among`, `usual`). Raises
    PlanError if they do not fit together."""
    del seed, seconds
    return result_of(problem, fastest_that_fits(problem, [range(len(c.choices)) for c in problem.calls], "heuristic"))


def colocate(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every call on all devices, or as many as rows divide over, with the fastest choices that fit together. Raises
    PlanError if calls have no choice on the same devices, or they do not fit together."""
    del seed, seconds
    devices = most_devices(problem, "colocate")
    options = options_on(problem, {call.weights: devices for call in problem.calls})
    options = [[0] if len(call.choices) == 1 else some for call, some in zip(problem.calls, options, strict=True)]
    return result_of(problem, fastest_that_fits(problem, options, "colocate"))


def on_given_devices(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every call with the fastest of its choices that fit together, which are on the devices that a placement strategy
    gives it. Raises PlanError if they do not fit together."""
    del seed, seconds
    return result_of(problem, fastest_that_fits(problem, [range(len(c.choices)) for c in problem.calls], "placement"))


METHODS: Mapping[str, PlanBy] = {
    "search": search,
    "hybridflow": hybridflow,
    "heuristic": heuristic,
    "colocate": colocate,
    "standalone": standalone,
    "split": split,
    **dict.fromkeys(STRATEGIES, on_given_devices),
    PLACEMENT: on_given_devices,
}
"""Name, as in `--strategy` -> the method."""
AMONG: Mapping[str, Among] = {
    "heuristic": "usual", "standalone": "any", "split": "any", **dict.fromkeys(STRATEGIES, "any"), PLACEMENT: "any",
}  # fmt: skip
"""Method -> the choices that its problem has; `fast` for the others."""


def find_method(name: str) -> PlanBy:
    """The method of a name. Raises PlanError if no method has that name."""
    if name not in METHODS:
        raise PlanError(f"strategy: must be one of {', '.join(METHODS)}. Got {name!r}.{did_you_mean(name, METHODS)}")
    return METHODS[name]
