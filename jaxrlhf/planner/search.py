"""The search for a fast plan: chains that walk, and branch and bound, which can tell that there is no better one.

Some hundred thousand plans a second are looked at where numba is installed, some hundred where it is not.
"""

import functools
import math

import numpy as np

from jaxrlhf.planner.numba_loops import numba_is_there
from jaxrlhf.planner.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.planner.searching.arena import Arena, SearchResult
from jaxrlhf.planner.searching.branch_and_bound import go_through
from jaxrlhf.planner.searching.metropolis import WAYS, descend, walk
from jaxrlhf.sharding.strategy import Strategy

STEPS, STEPS_IN_PYTHON = 400_000, 2_000
"""Plans that chains look at where nobody says how many."""
BOUNDS, BOUNDS_IN_PYTHON = 500_000, 2_000
"""Bounds computed where nobody says how many."""
_PART_OF_CHAINS = 0.7
"""The part of the time that chains may take."""
_FIRST_STEPS, _FIRST_STEPS_IN_PYTHON = 20_000, 400
"""Plans looked at before branch and bound, so that there is something to compare with."""


def search(
    problem: Problem,
    *,
    seed: int = 0,
    steps: int | None = None,
    bounds: int | None = None,
    seconds: float | None = None,
    chains: int = len(WAYS),
    compiled: bool = True,
) -> SearchResult:
    """The fastest plan that chains find (`metropolis`), and then branch and bound, as far as it gets.

    Only choices take part that are worth keeping (`dominance`).

    Args:
        seed: Of the chains. The same seed, steps, bounds and chains give the same plan, unless time is up before.
        steps: Plans that chains look at, all together. None: `STEPS`, or `STEPS_IN_PYTHON` without numba.
        bounds: To compute at the most. None: `BOUNDS`, or `BOUNDS_IN_PYTHON`.
        seconds: To stop after. None: no limit.
        compiled: Whether numba is used, if it is installed. It changes nothing but the time and what None stands for.

    Raises:
        PlanError: No plan fits the memory of the devices, or none was found that does.
    """
    for name, number, least in (("steps", steps, 1), ("bounds", bounds, 0), ("chains", chains, 1)):
        if number is not None and number < least:
            raise ValueError(f"search: {name} must be at least {least}. Got {number}.")
    compiled = compiled and numba_is_there()
    steps = (STEPS if compiled else STEPS_IN_PYTHON) if steps is None else steps
    bounds = (BOUNDS if compiled else BOUNDS_IN_PYTHON) if bounds is None else bounds
    arena = Arena(problem, exact=False, compiled=compiled, seconds=seconds)
    walk(arena, seed=seed, steps=steps, chains=chains, part=_PART_OF_CHAINS if bounds else 1.0)
    descend(arena, most=steps // 2)
    proven = go_through(arena, bounds=bounds) if bounds else False
    return arena.result(proven=proven)


@functools.cache
def warm_up() -> None:
    """Compiles the loops of searches, or reads them from disk, so that the time of the next one is all for plans."""
    choice = Choice(0, 1, Strategy(), 1.0, resting=1, working=1, copy=1)
    calls = (
        CallChoices("actor.generate", "generate", "actor", "actor", False, (), (choice,)),
        CallChoices("actor.train", "train", "actor", "actor", True, ("actor.generate",), (choice,)),
    )
    seconds = PairSeconds.of(np.zeros((1, 1)))
    search(Problem(calls, 1, 1, (10,), {(1, 0): seconds}, {(0, 1): seconds}, tokens=1), steps=1, bounds=100)


def exhaustive(
    problem: Problem,
    *,
    bounds: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    compiled: bool = True,
) -> SearchResult:
    """The fastest plan there is, if it is given the time. `proven` says whether it was.

    Args:
        bounds: To compute at the most. None: no limit.
        seconds: To stop after. None: no limit.
        seed: Of a short walk of chains that comes first.
        compiled: Whether numba is used, if it is installed. It changes nothing but the time.

    Raises:
        PlanError: No plan fits the memory of the devices, or none was found that does.
    """
    compiled = compiled and numba_is_there()
    arena = Arena(problem, exact=True, compiled=compiled, seconds=seconds)
    walk(arena, seed=seed, steps=_FIRST_STEPS if compiled else _FIRST_STEPS_IN_PYTHON, chains=len(WAYS), part=0.5)
    proven = go_through(arena, bounds=math.inf if bounds is None else bounds)
    return arena.result(proven=proven)
