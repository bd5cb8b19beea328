"""Compares the seconds that the planner predicts for the calls of a run with those that the run takes.

    python -m jaxrlhf.calibrate --config ppo_arithmetic
    python scripts/check_forecast.py --config ppo_arithmetic
    python scripts/check_forecast.py --config ppo_arithmetic --set batch_size=64 --calibration measured.json --json

Predicted is the cost model's, with what `jaxrlhf.calibrate` measured on this machine. Measured is the median of some
steps of the run, in its own plan, without warm start and evaluation. Responses all have their full length, whatever the
model draws, since a generation goes on until the last one has ended and predictions are of full ones.

Where virtual devices share a processor, calls run one at a time, and the seconds of a call are those since the end of
the one before it; CPU-seconds are those of the whole process in that time, its Python functions included. Other
processes make calls longer: the steps count in which they had least of the processors, and the table says how much.
The exit status is 1 where a call of more than 50 ms is out by more than 30 %.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf import train
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.planner.calibrate import Calibration, calibration_file, read_calibration, this_machine
from jaxrlhf.planner.cluster_text import local_cluster
from jaxrlhf.planner.cost import CallSeconds, CostModel
from jaxrlhf.planner.plan import Plan
from jaxrlhf.planner.workload import Workload
from jaxrlhf.runtime.assembly import Assembly, assemble
from jaxrlhf.runtime.console import Console
from jaxrlhf.runtime.events import Event
from jaxrlhf.runtime.executor import Executor
from jaxrlhf.runtime.first_weights import load_first_weights
from jaxrlhf.runtime.measure import described_workload
from jaxrlhf.runtime.timeline import Timeline
from jaxrlhf.runtime.timing import OthersLoad, Timing, timing
from jaxrlhf.sharding import mesh

WITHIN = 0.3
LONG_SECONDS = 0.05
"""Shorter calls are shown, and not judged."""
COMPILING_STEPS = 2
"""The first steps, which are not measured."""


CALLS = ("generate", "infer", "train", "compute")
"""Kinds of events that keep devices busy. Copies go on beside them."""


class WatchedTimeline(Timeline):
    """A timeline that notes, at the end of each call, the processor time of this process and what others had."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Event, float, float]] = []
        """Events with CPU-seconds of the process so far, and the part of the processors that others had since the event
        before."""
        self._load = OthersLoad()
        self._noting = threading.Lock()

    def record(self, event: Event) -> None:
        with self._noting:
            if event.kind in CALLS:
                self.noted.append((event, time.process_time(), self._load.share()))
        super().record(event)


def predicted(work: Workload, plan: Plan, calibration: Calibration) -> dict[str, CallSeconds]:
    """Seconds of every call under a plan."""
    cluster = calibration.on(local_cluster())
    model = CostModel(cluster, measured=calibration, measured_update=calibration.update)
    found = {}
    for call in work.calls:
        placement = plan.placements[call.name]
        devices = range(min(placement.devices), max(placement.devices) + 1)
        found[call.name] = model.seconds(call, devices, placement.strategy)
    return found


def run_steps(assembly: Assembly, plan: Plan, steps: int) -> list[tuple[Event, float, float]]:
    """Steps of a run, after those that compile: its calls in the order of their ends, as `WatchedTimeline.noted`."""
    phase, timeline = assembly.train, WatchedTimeline()
    executor = Executor(phase.roles, seed=assembly.config.seed, timeline=timeline)
    load_first_weights(executor, phase, assembly.config, {})
    state = phase.first_state
    for step in range(COMPILING_STEPS + steps):
        state = executor.run(phase.graph, plan, state, assembly.train_rows(step), step=step).state
        if step < COMPILING_STEPS:
            executor.wait()
    executor.wait()
    executor.close()
    return sorted((x for x in timeline.noted if x[0].step > COMPILING_STEPS), key=lambda noted: noted[0].end)


def measured(noted: Sequence[tuple[Event, float, float]], *, one_at_a_time: bool) -> dict[str, tuple[Timing, float]]:
    """Call -> how long it took, and CPU-seconds: medians over steps."""
    runs: dict[str, list[tuple[float, float]]] = {}
    cpu: dict[str, list[float]] = {}
    for (before, cpu_before, _), (event, cpu_after, others) in itertools.pairwise(noted):
        start = max(event.start, before.end) if one_at_a_time else event.start
        runs.setdefault(event.name, []).append((event.end - start, others))
        cpu.setdefault(event.name, []).append(cpu_after - cpu_before)
    return {name: (timing(of_call), sorted(cpu[name])[len(cpu[name]) // 2]) for name, of_call in runs.items()}


def comparison(
    forecast: Mapping[str, CallSeconds], seen: Mapping[str, tuple[Timing, float]], plan: Plan
) -> list[dict[str, Any]]:
    """A row for each call."""
    rows = []
    for name, seconds in forecast.items():
        took, cpu = seen[name]
        rows.append(
            {
                "call": name,
                "placement": str(plan.placements[name]),
                "predicted_ms": round(1e3 * seconds.total, 1),
                "measured_ms": round(1e3 * took.seconds, 1),
                "out by": f"{100 * (seconds.total / took.seconds - 1):+.0f} %",
                "+-": f"{100 * took.spread:.0f} %",
                "cpu_ms": round(1e3 * cpu, 1),
                "others": f"{100 * took.others:.0f} %",
                "judged": "long" if took.seconds > LONG_SECONDS else "short",
            }
        )
    return rows


def is_out(row: Mapping[str, Any]) -> bool:
    """Whether a call that is judged is out by too much."""
    return row["judged"] == "long" and abs(row["predicted_ms"] / row["measured_ms"] - 1) > WITHIN


def full_length(name_or_path: str, overrides: Sequence[str]) -> RunConfig:
    """A config without warm start and evaluation, whose responses all have their full length."""
    overrides = [*overrides, "warm_start=null", "evaluation=null"]
    sampling = getattr(train.read(name_or_path, overrides).settings, "sampling", None)
    if sampling is not None:
        overrides.append(f"settings.sampling.min_new_tokens={sampling.max_new_tokens}")
    return train.read(name_or_path, overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="NAME_OR_PATH", default="ppo_arithmetic")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="otherwise that of this machine")
    parser.add_argument("--steps", type=int, default=10, help="that are measured (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        config = full_length(options.config, options.overrides)
        train.start(config)
        machine = this_machine()
        calibration = read_calibration(options.calibration or calibration_file(machine), machine=machine)
        assembly = assemble(config, mesh.num_devices(), mesh.devices_per_process())
    except ValueError as error:
        console.error(str(error))
        return 1
    plan = assembly.train.plan
    forecast = predicted(described_workload(assembly.train), plan, calibration)
    seen = measured(run_steps(assembly, plan, options.steps), one_at_a_time=machine.shares_processor)
    rows = comparison(forecast, seen, plan)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        console.line(f"{platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}, {machine}")
        console.table(f"{config.name}: predicted and measured", rows)
    return 1 if any(is_out(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
