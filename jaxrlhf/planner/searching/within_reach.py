"""Which choices a plan can have that is as fast as a known one.

By the bounds of `branch_and_bound`, with what all other calls take at the least: no iteration is shorter than a circle
of calls that wait for each other, nor than all device-seconds divided by the number of devices; where nothing runs
beside anything else, than all calls together.
"""

import numpy as np

from jaxrlhf.planner.problem import Problem
from jaxrlhf.planner.step_order import step_order

_ROUNDING = 1 + 1e-9


def within_reach(problem: Problem, seconds: float) -> tuple[tuple[int, ...], ...]:
    """Call -> the choices with which an iteration could take no longer than `seconds`, in their order. All of them for
    a call that would have none left."""
    busy = [np.array([x.load + x.seconds + x.unload for x in call.choices]) for call in problem.calls]
    waited = [np.array([x.load + x.seconds for x in call.choices]) for call in problem.calls]
    devices = [np.array([len(x.devices) for x in call.choices]) for call in problem.calls]
    least = np.array([each.min() for each in waited])
    area = np.array([(b * n).min() for b, n in zip(busy, devices, strict=True)])
    others = _circles(problem, least)
    kept = []
    for j in range(len(problem.calls)):
        bounds = [
            waited[j] + others[j],
            busy[j],
            (busy[j] * devices[j] + area.sum() - area[j]) / problem.num_devices,
        ]
        if problem.one_at_a_time:
            bounds.append(busy[j] + least.sum() - least[j])
        some = np.flatnonzero(np.max(bounds, axis=0) <= seconds * _ROUNDING)
        kept.append(tuple(int(k) for k in some) or tuple(range(len(busy[j]))))
    return tuple(kept)


def _circles(problem: Problem, least: np.ndarray) -> np.ndarray:
    """Call -> the least that the others take of the longest circle of one iteration that it is part of."""
    waits, num_calls = step_order(problem).waits, len(least)
    path = np.full((num_calls, num_calls), -np.inf)  # from the start of the one to the end of the other
    np.fill_diagonal(path, least)
    for wait in waits:
        if wait.lag == 0:
            path[wait.before, wait.after] = least[wait.before] + least[wait.after]
    for via in range(num_calls):  # calls stand in the order of the step
        path = np.maximum(path, path[:, via : via + 1] + path[via] - least[via])
    longest = np.zeros(num_calls)
    for wait in waits:
        if wait.lag == 1:  # from the start of `after` to the end of `before`, and around
            through = path[wait.after] + path[:, wait.before] - least
            longest = np.maximum(longest, through)
    return np.maximum(0.0, longest - least)
