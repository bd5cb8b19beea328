"""Dependencies of calls in consecutive iterations of a step: on outputs, on weights, and on the trainer.

There are no others, so calls of two iterations overlap where they can: the training of a critic with the next
generation, for example, and that of the actor too where generation is stale.
"""

import dataclasses
from collections.abc import Hashable

from jaxrlhf.planner.search.evaluate_loops import RUN_AHEAD
from jaxrlhf.planner.search.problem import Choice, Problem


@dataclasses.dataclass(frozen=True)
class Wait:
    """A call waits for another one, of the same iteration or of an earlier one."""

    before: int
    after: int
    lag: int
    """Iterations from the one to the other."""
    weights: bool = False
    """True if new weights are brought from the one to the other."""
    data: bool = False
    """True if outputs are brought."""


@dataclasses.dataclass(frozen=True)
class StepOrder:
    """Dependencies of calls, which are known by their positions in the problem."""

    waits: tuple[Wait, ...]
    """Sorted by the call that waits, and then by the call that it waits for."""
    homes: tuple[int | None, ...]
    """Call -> the train call that its set of weights rests with; None if the set never changes."""
    made_by: tuple[tuple[int, int] | None, ...]
    """Call -> the train call that makes the weights that it reads, and how many iterations before; None if those never
    change."""
    alive: tuple[tuple[int, ...], ...]
    """Call -> the calls of a step during which its copy of trained weights exists: from itself until they are trained
    again. Empty if it has none."""
    beside: tuple[tuple[int, ...], ...]
    """Call -> the calls of its iteration or of neighboring ones that could run at the same time."""

    def lag(self, reader: int) -> int:
        """Iterations from the train call to a call that reads what it makes."""
        made_by = self.made_by[reader]
        assert made_by is not None
        return made_by[1]


def layout(choice: Choice) -> tuple[Hashable, ...]:
    """The key of a choice's weight layout: calls with equal keys share one copy."""
    strategy = choice.strategy
    degrees = (strategy.pipeline, strategy.data, strategy.fsdp, strategy.tensor, strategy.chunks)
    return (choice.first, choice.end, *degrees, choice.layers)


def step_order(problem: Problem) -> StepOrder:
    """The dependencies of a problem."""
    calls = problem.calls
    positions = {call.name: i for i, call in enumerate(calls)}
    trains = {
        call.weights: [i for i, c in enumerate(calls) if c.trains and c.weights == call.weights] for call in calls
    }
    plain = {(positions[name], j, 0) for j, call in enumerate(calls) for name in call.needs}
    data = {(i, j, 0) for i, j in problem.transfers}
    weights: set[tuple[int, int, int]] = set()
    made_by: list[tuple[int, int] | None] = []
    alive: list[tuple[int, ...]] = []
    for j, call in enumerate(calls):
        alive.append(())
        if not (trained := trains[call.weights]):
            made_by.append(None)
            continue
        earlier = [i for i in trained if i < j]
        i, lag = (earlier[-1], 0) if earlier else (trained[-1], 1)
        lag = min(lag + call.stale, RUN_AHEAD)  # by then everything older has ended
        made_by.append((i, lag))
        plain.add((i, j, lag))
        if (i, j) in problem.reallocations:
            weights.add((i, j, lag))
        if call.trains:
            continue
        if call.stale:  # it reads copies that training does not change
            alive[j] = tuple(range(len(calls)))
            continue
        later = [i for i in trained if i > j]
        plain.add((j, later[0], 0) if later else (j, trained[0], 1))
        alive[j] = tuple(range(j, later[0])) if later else (*range(j, len(calls)), *range(trained[0]))
    plain |= _run_ahead(plain | data, len(calls))
    return StepOrder(
        tuple(
            Wait(*each, weights=each in weights, data=each in data)
            for each in sorted(plain | data | weights, key=lambda each: (each[1], each[0], each[2]))
        ),
        tuple(trains[call.weights][0] if trains[call.weights] else None for call in calls),
        tuple(made_by),
        tuple(alive),
        _beside(plain | data | weights, len(calls)),
    )


def _beside(waits: set[tuple[int, int, int]], num_calls: int) -> tuple[tuple[int, ...], ...]:
    """Call -> those that do not take turns with it: of two that do, one waits for the other in its iteration, and is
    waited for in the next."""
    far = RUN_AHEAD + 1
    least = [[far] * num_calls for _ in range(num_calls)]
    for before, after, lag in waits:
        least[before][after] = min(least[before][after], lag)
    for via in range(num_calls):
        for i in range(num_calls):
            for j in range(num_calls):
                least[i][j] = min(least[i][j], least[i][via] + least[via][j])

    def take_turns(i: int, j: int) -> bool:
        return min(least[i][j], least[j][i]) == 0 and max(least[i][j], least[j][i]) <= 1

    every = range(num_calls)
    return tuple(tuple(j for j in every if j != i and not take_turns(i, j)) for i in every)


def _run_ahead(waits: set[tuple[int, int, int]], num_calls: int) -> set[tuple[int, int, int]]:
    """The first calls of an iteration wait for the last ones of the last but one, where they would not anyway."""
    same = {(i, j) for i, j, lag in waits if lag == 0}
    first = [j for j in range(num_calls) if not any(after == j for _, after in same)]
    last = [i for i in range(num_calls) if not any(before == i for before, _ in same)]
    found = set()
    for i in last:
        reached, ahead = set(), [(i, 0)]
        while ahead:
            here, iteration = ahead.pop()
            if (here, iteration) in reached or iteration > RUN_AHEAD:
                continue
            reached.add((here, iteration))
            ahead += [(after, iteration + lag) for before, after, lag in waits if before == here]
        found |= {(i, j, RUN_AHEAD) for j in first if (j, RUN_AHEAD) not in reached}
    return found
