"""Strategies of planning: from a problem to a plan, by search or as people place models by hand.

`heuristic`, `colocate`, `standalone`, `split` say on which devices each set of weights is; what is left open, the
choice of each call there, is the fastest that fits. `hybridflow` tries all ways to say so. `search` and `exhaustive`
are in `search`.
"""

import contextlib
from collections.abc import Mapping
from typing import Protocol

from jaxrlhf.planner.choices import Among
from jaxrlhf.planner.mapping import Colocation, best_mapping, colocations
from jaxrlhf.planner.placed import fastest_that_fits, most_devices, options_on, result_of
from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Choice, Problem
from jaxrlhf.planner.search import exhaustive, search
from jaxrlhf.planner.searching.arena import SearchResult
from jaxrlhf.planner.searching.lean_plans import require_choices
from jaxrlhf.suggest import did_you_mean

_MOST_SETS = 8
"""Of weights, which can share devices in 4140 ways."""


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
    options = options_on(problem, dict.fromkeys(_sets(problem), most_devices(problem, "colocate")))
    options = [[0] if len(call.choices) == 1 else some for call, some in zip(problem.calls, options, strict=True)]
    return result_of(problem, fastest_that_fits(problem, options, "colocate"))


def standalone(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Every set of weights on devices of its own, in the order of the step; the sizes that give the shortest iteration.

    Raises:
        PlanError: There are fewer devices than sets, or no sizes fit.
    """
    del seed, seconds
    return _best_parts(problem, tuple((name,) for name in _sets(problem)), "standalone")


def split(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """Two parts: the first set that is trained with every other set of that size or larger that is not, such as its
    reference; and all others, such as critic and reward. Where there is no second trained set, those never trained are
    the second part. The sizes are those that give the shortest iteration.

    Raises:
        PlanError: There are no two parts, or they do not fit.
    """
    del seed, seconds
    return _best_parts(problem, _split_parts(problem), "split")


def hybridflow(problem: Problem, *, seed: int = 0, seconds: float | None = None) -> SearchResult:
    """The best mapping of all, those of `colocate`, `standalone` and `split` among them. It is the same for every seed;
    `seconds` only cut the simulation of the best ones.

    Raises:
        PlanError: There are too many sets of weights, or no mapping fits.
    """
    del seed
    require_choices(problem)
    sets = _sets(problem)
    if len(sets) > _MOST_SETS:
        raise PlanError(
            f"hybridflow: tries all ways to group sets of weights, of which there may be {_MOST_SETS}. Got "
            f"{len(sets)}: {', '.join(sets)}. Use search."
        )
    always: list[Colocation] = [(tuple(sets),), tuple((name,) for name in sets)]
    with contextlib.suppress(PlanError):  # there are no two parts
        always.append(_split_parts(problem))
    return best_mapping(problem, list(colocations(sets)), "hybridflow", always=always, seconds=seconds)


def _split_parts(problem: Problem) -> Colocation:
    """The two parts of `split`.

    Raises:
        PlanError: There are none.
    """
    trained = [call.weights for call in problem.calls if call.trains]
    names = _sets(problem)
    if not trained or len(names) < 2:
        raise PlanError(f"split: must have two sets of weights, one of them trained. Got {', '.join(names)}.")
    actor = next((call.weights for call in problem.calls if call.kind == "generate"), trained[0])
    second = [name for name in dict.fromkeys(trained) if name != actor]
    likes = _like(problem, actor)
    first = [actor, *[name for name in names if name not in trained and name in likes]] if second else [actor]
    return tuple(first), tuple(name for name in names if name not in first)


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


def _best_parts(problem: Problem, parts: Colocation, strategy: str) -> SearchResult:
    """The best where parts of the sets have devices of their own."""
    return best_mapping(problem, [parts], strategy)
