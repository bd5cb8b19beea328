"""Times of programs, on a host whose processors other processes may use too.

Other processes make runs longer, never shorter. So every run is recorded with the share of the processors that others
had meanwhile, and the quietest runs count. If the devices are these processors, the time of a program is scaled to the
share that it had. For a program that does not keep all of them busy, this is too short by at most the others' share.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrlhf.planner.costs.calibration import QUIET, Load
from jaxrlhf.sharding import mesh

LEAST_RUNS = 5
"""The number of runs that count, of each program."""
WINDOW_SECONDS = 0.2
"""Shorter programs run several times in a row: Linux counts processor time in ticks of 10 ms."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a program."""

    seconds: float
    """The median of the runs that count."""
    spread: float
    """Half the distance between their quartiles, as a fraction of it."""
    others: float
    """The share of the host's processors that other processes had during these runs. 0 if the devices are others."""


class OthersLoad:
    """The share of the host's processors that other processes have. 0 if the system does not tell."""

    def __init__(self) -> None:
        self._first = self._last = _ticks()

    def share(self) -> float:
        """A fraction of all processors, since this was last asked."""
        before, self._last = self._last, _ticks()
        return _share(before, self._last)

    def load(self) -> Load:
        """The load of the processors since the object was made."""
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return Load(_share(self._first, _ticks()), average, os.cpu_count() or 1)


def _share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The part of all processors that other processes had between two times."""
    total, idle, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, min(1.0, (total - idle - own) / total)) if total > 0 else 0.0


def _ticks() -> tuple[float, float, float]:
    """CPU seconds of all cores together: in all, idle, and of this process."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            ticks = [int(text) for text in file.readline().split()[1:9]]
    except OSError:
        return 0.0, 0.0, 0.0
    per_second = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / per_second, (ticks[3] + ticks[4]) / per_second, time.process_time()


def time_in_turn(programs: Sequence[Callable[[], Any]], *, patience_seconds: float = 3.0) -> list[Timing]:
    """Runs programs in turn, so that changes of the machine affect all of them, and times each, until its results are
    there, as if it were alone. Beyond the least number of runs, it has patience for runs without other processes."""
    shares_processors, counts = mesh.platform() == "cpu", []
    for program in programs:
        jax.block_until_ready(program())  # warms up
        started = time.perf_counter()
        jax.block_until_ready(program())
        counts.append(max(1, round(WINDOW_SECONDS / (time.perf_counter() - started))))
    runs: list[list[tuple[float, float]]] = [[] for _ in programs]
    started, load = time.perf_counter(), OthersLoad()
    least = 0.0
    while True:
        for program, count, of_program in zip(programs, counts, runs, strict=True):
            load.share()
            began = time.perf_counter()
            for _ in range(count):
                jax.block_until_ready(program())
            seconds = (time.perf_counter() - began) / count
            others = load.share() if shares_processors else 0.0
            of_program.append((seconds * (1 - others), others))
        done, passed = len(runs[0]), time.perf_counter() - started
        least = passed if done <= LEAST_RUNS else least
        quiet = min(sum(others <= QUIET for _, others in of_program) for of_program in runs)
        if done >= LEAST_RUNS and (quiet >= LEAST_RUNS or passed > least + patience_seconds):
            return [timing(of_program) for of_program in runs]


def timing(runs: Sequence[tuple[float, float]]) -> Timing:
    """The time of some runs, given as (seconds, share of the processors that others had). Quiet runs count, or else the
    quietest."""
    ordered = sorted(runs, key=lambda run: run[1])
    counting = [run for i, run in enumerate(ordered) if i < LEAST_RUNS or run[1] <= QUIET]
    seconds, others = np.array(counting).T
    low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return Timing(float(median), float((high - low) / 2 / median), float(others.mean()))
