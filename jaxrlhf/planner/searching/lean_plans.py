"""Choices of calls, each by itself: what they take of a device, and plans from the fastest to the leanest ones."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrlhf.planner.plan import PlanError
from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.step_order import step_order


def require_choices(problem: Problem) -> None:
    """Every call can run somewhere.

    Raises:
        PlanError: One cannot.
    """
    for call in problem.calls:
        if not call.choices:
            raise PlanError(
                f"plan: {call.name}: must have at least one way to run. Got none on {problem.num_devices} devices. Use "
                "more devices, or batches and degrees that divide each other."
            )


def own_bytes(problem: Problem) -> list[np.ndarray]:
    """Call -> [choice, 4]: bytes on its devices that rest there because of it, that it works with, of its copy where
    it shares what it can with training, and of what its adapters adapt."""
    order = step_order(problem)
    return [
        np.array(
            [
                (
                    x.resting * (order.homes[j] in (None, j)),
                    x.working,
                    (x.copy - x.shared_with_training) * bool(order.alive[j]),
                    x.base,
                )
                for x in call.choices
            ]
        )
        for j, call in enumerate(problem.calls)
    ]


def fast_to_lean(problem: Problem, among: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Plans, from the fastest choice of every call to the one that takes least memory.

    Every call has the choice that is least in seconds, in parts of its fastest, plus a weight times what it takes of a
    device. The weight grows from plan to plan.

    Args:
        among: Call -> its choices that count.
    """
    sizes = own_bytes(problem)
    capacity = max(1, min(problem.capacity))
    seconds = [np.array([x.seconds + x.load + x.unload for x in call.choices]) for call in problem.calls]
    last: tuple[int, ...] = ()
    for weight in (0.0, *(2.0**power for power in range(-8, 11))):
        plan = []
        for each, bytes_, some in zip(seconds, sizes, among, strict=True):
            some = list(some)
            slower = each[some] / max(1e-9, each[some].min())
            plan.append(some[int(np.argmin(slower + weight * bytes_[some].sum(1) / capacity))])
        if tuple(plan) != last:
            last = tuple(plan)
            yield last
