"""Strategies of planning: from a problem to a plan, by search or as people place models by hand.

`heuristic`, `colocate`, `standalone`, `split` say on which devices each set of weights is; what is left open, the
choice of each call there, is the fastest that fits. `hybridflow` is in `mapping`, `search` and `exhaustive` have
modules of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxrlhf.planner.choices import Among
from jaxrlhf.planner.mapping import best_mapping, hybridflow
from jaxrlhf.planner.placed import fastest_that_fits, options_on, result_of
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Choice, Problem
from jaxrlhf.planner.search import exhaustive, search
from jaxrlhf.planner.searching.arena import SearchResult
from jaxrlhf.suggest import did_you_mean


class PlanBy(Protocol):
    """A strategy of planning."""

    def __call__(self, problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult: ...


def heuristic(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every call on all devices, all alike: tensor within a node, pipeline across nodes; the fastest micro-batches and
    remat that fit together. The problem has no other choices (`choices.Among`, `usual`).

    Raises:
        PlanError: They do not fit together.
    """
    del seed, seconds
    return result_of(problem, fastest_that_fits(problem, [range(len(c.choices)) for c in problem.calls], "heuristic"))


def colocate(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every call on all devices, or as many as rows divide over, each with the fastest choice that fits beside the
    others.

    Raises:
        PlanError: Calls have no choice on the same devices, or they do not fit together.
    """
    del seed, seconds
    options = options_on(problem, dict.fromkeys(_sets(problem), _most_devices(problem, "colocate")))
    options = [[0] if len(call.choices) == 1 else some for call, some in zip(problem.calls, options, strict=True)]
    return result_of(problem, fastest_that_fits(problem, options, "colocate"))


def standalone(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every set of weights on devices of its own, in the order of the step; the sizes that give the shortest iteration.

    Raises:
        PlanError: There are fewer devices than sets, or no sizes fit.
    """
    del seed, seconds
    return _best_parts(problem, [[name] for name in _sets(problem)], "standalone")


def split(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Two parts: the first set that is trained with every other set of that size or larger that is not, such as its
    reference; and all others, such as critic and reward. Where there is no second trained set, those never trained are
    the second part. The sizes are those that give the shortest iteration.

    Raises:
        PlanError: There are no two parts, or they do not fit.
    """
    del seed, seconds
    trained = [call.weights for call in problem.calls if call.trains]
    names = _sets(problem)
    if not trained or len(names) < 2:
        raise PlanError(f"split: must have two sets of weights, one of them trained. Got {', '.join(names)}.")
    actor = next((call.weights for call in problem.calls if call.kind == "generate"), trained[0])
    second = [name for name in dict.fromkeys(trained) if name != actor]
    likes = _like(problem, actor)
    first = [actor, *[name for name in names if name not in trained and name in likes]] if second else [actor]
    return _best_parts(problem, [first, [name for name in names if name not in first]], "split")


STRATEGIES: Mapping[str, PlanBy] = {
    "search": search,
    "exhaustive": exhaustive,
    "hybridflow": hybridflow,
    "heuristic": heuristic,
    "colocate": colocate,
    "standalone": standalone,
    "split": split,
}


AMONG: Mapping[str, Among] = {"heuristic": "usual", "standalone": "any", "split": "any"}
"""Strategy -> the choices that its problem has. Of the others: those of `fast` plans."""


def find_strategy(name: str) -> PlanBy:
    """A strategy by name.

    Raises:
        PlanError: There is none of that name.
    """
    if name not in STRATEGIES:
        raise PlanError(
            f"strategy: must be one of {', '.join(STRATEGIES)}. Got {name!r}.{did_you_mean(name, STRATEGIES)}"
        )
    return STRATEGIES[name]


def _most_devices(problem: Problem, strategy: str) -> range:
    """The most devices on which every call has a choice, but those that have a single one.

    Raises:
        PlanError: There are none.
    """
    open_calls = [call for call in problem.calls if len(call.choices) > 1]
    common = set.intersection(*({c.devices for c in call.choices} for call in open_calls)) if open_calls else set()
    if open_calls and not common:
        raise PlanError(
            f"{strategy}: all calls must have a choice on the same devices. Got none. Use another strategy."
        )
    return max(common, key=lambda devices: (len(devices), -devices.start), default=range(problem.num_devices))


def _sets(problem: Problem) -> list[str]:
    """The sets of weights, in the order of the step."""
    return list(dict.fromkeys(call.weights for call in problem.calls))


def _like(problem: Problem, name: str) -> set[str]:
    """Sets that could be of the same model, head included: what readers keep or copy is the same to a fiftieth."""

    def size(weights: str) -> int:
        readers = [call for call in problem.calls if call.weights == weights and not call.trains]
        one_device = [c for call in readers for c in call.choices if not c.offloaded]
        return min((((c.resting or c.copy) * len(c.devices) // _copies(c)) for c in one_device), default=0)

    own = size(name)
    return {other for other in _sets(problem) if abs(size(other) - own) <= own / 50}


def _copies(choice: Choice) -> int:
    return choice.strategy.data


def _best_parts(problem: Problem, parts: Sequence[Sequence[str]], strategy: str) -> SearchResult:
    """The best where parts of the sets have devices of their own."""
    return best_mapping(problem, [tuple(tuple(part) for part in parts)], strategy)
