"""Compares the seconds that the planner predicts for the calls of a run with those that the run takes.

    python -m jaxrlhf.calibrate --config ppo_arithmetic
    python scripts/check_forecast.py --config ppo_arithmetic
    python scripts/check_forecast.py --config ppo_arithmetic --set batch_size=64 --calibration measured.json --json
    python scripts/check_forecast.py --config ppo_arithmetic --pairs 10

Predicted is the cost model's, with what `jaxrlhf.calibrate` measured on this machine. Measured is the median of some
steps of the run, in its own plan, without warm start and evaluation. Responses all have their full length, whatever the
model draws, since a generation goes on until the last one has ended and predictions are of full ones.

Where virtual devices share a processor, calls beside one another slow each other, and nobody could tell whose seconds
are whose. So each call is started when all before it have ended. CPU-seconds are those of the whole process in that
time. Beside the calls stands a step as it runs, with nothing held back, and their sum as what was predicted. Other
processes make calls longer: the steps count in which they had least of the processors. What a call takes `alone` is the
median times what others left of the processors; where others had a twentieth at most, the two are nearly the same.
The exit status is 1 where a call of more than 50 ms, alone, is out by more than 20 %. Where other processes had more
than a twentieth of the processors that says little; the last lines tell how much they had.

With --pairs, plans are drawn by chance from those of which every call was measured, or lies between measurements, and
pairs of them whose predicted seconds differ by more than 20 % are run. The exit status is 1 where the one that is
predicted to be faster is so in fewer than 8 of 10.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.calibration.measure_host import COMPILING_STEPS, run_steps
from jaxrlhf.calibration.timing import OthersLoad, Timing, timing
from jaxrlhf.cluster.cluster_text import local_cluster
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import Event
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.costs.calibration import Calibration, calibration_file, read_calibration, this_machine
from jaxrlhf.planner.costs.cost_model import CallSeconds, CostModel
from jaxrlhf.planner.costs.work import PHASES
from jaxrlhf.planner.plans.complete_plan import complete_plan
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.search.choices import strategies
from jaxrlhf.planner.workload import ModelCall, Workload, step_workload
from jaxrlhf.run.assembly import Assembly, assemble
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.train import read, start

WITHIN = 0.2
LONG_SECONDS = 0.05
"""Shorter calls are shown, and not judged."""
APART, RIGHT = 1.2, 0.8
"""The predicted ratio of seconds above which two plans make a pair; the fraction of pairs whose order must be right."""

CALLS = ("generate", "infer", "train", "compute")
"""Kinds of events that keep devices busy. Copies go on beside them."""


class WatchedTimeline(Timeline):
    """A timeline that notes, at the end of each call, the processor time of this process and what others had."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Event, float, float]] = []
        """Events with CPU-seconds of the process so far, and the part of the processors that others had since the event
        before."""
        self.reallocations: list[Event] = []
        self._load = OthersLoad()
        self._noting = threading.Lock()

    def record(self, event: Event) -> None:
        with self._noting:
            if event.kind in CALLS:
                self.noted.append((event, time.process_time(), self._load.share()))
            elif event.kind == "reallocate":
                self.reallocations.append(event)
        super().record(event)


def predicted(work: Workload, plan: Plan, calibration: Calibration) -> dict[str, CallSeconds]:
    """Seconds of every call under a plan."""
    cluster = calibration.on(local_cluster())
    model = CostModel(cluster, measured=calibration)
    found = {}
    for call in work.calls:
        placement = plan.placements[call.name]
        devices = range(min(placement.devices), max(placement.devices) + 1)
        found[call.name] = model.seconds(call, devices, placement.strategy)
    return found


def noted_steps(
    assembly: Assembly, plan: Plan, steps: int, *, one_at_a_time: bool = False, merging: Collection[str] = ()
) -> list[tuple[Event, float, float]]:
    """Steps of a run, after those that compile: its calls in the order of their ends, as `WatchedTimeline.noted`.

    Args:
        merging: Calls that begin when their adapters begin to be merged: the timeline has an event of that before them.
    """
    timeline = WatchedTimeline()
    run_steps(assembly, plan, steps, timeline=timeline, one_at_a_time=one_at_a_time)
    noted = sorted((x for x in timeline.noted if x[0].step > COMPILING_STEPS), key=lambda noted: noted[0].end)
    return [(with_merge(x, timeline.reallocations) if x.name in merging else x, cpu, load) for x, cpu, load in noted]


def with_merge(call: Event, reallocations: Sequence[Event]) -> Event:
    """A call with the last bringing of its role's weights before it."""
    name = f"{call.name.partition('.')[0]}.reallocate"
    before = [x for x in reallocations if (x.name, x.step) == (name, call.step) and x.end <= call.end]
    return dataclasses.replace(call, start=min(call.start, before[-1].start)) if before else call


def measured(noted: Sequence[tuple[Event, float, float]], *, one_at_a_time: bool) -> dict[str, tuple[Timing, float]]:
    """Call -> how long it took, and CPU-seconds: medians over steps."""
    runs: dict[str, list[tuple[float, float]]] = {}
    cpu: dict[str, list[float]] = {}
    for (before, cpu_before, _), (event, cpu_after, others) in itertools.pairwise(noted):
        start = max(event.start, before.end) if one_at_a_time else event.start
        runs.setdefault(event.name, []).append((event.end - start, others))
        cpu.setdefault(event.name, []).append(cpu_after - cpu_before)
    return {name: (timing(of_call), sorted(cpu[name])[len(cpu[name]) // 2]) for name, of_call in runs.items()}


def alone(took: Timing) -> float:
    """Seconds, had others not been at work."""
    return took.seconds * (1 - took.others)


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
                "predicted ms": round(1e3 * seconds.total, 1),
                "alone ms": round(1e3 * alone(took), 1),
                "out by": f"{100 * (seconds.total / alone(took) - 1):+.0f} %",
                "measured ms": round(1e3 * took.seconds, 1),
                "+-": f"{100 * took.spread:.0f} %",
                "others": f"{100 * took.others:.0f} %",
                "CPU ms": round(1e3 * cpu, 1),
                "judged": alone(took) > LONG_SECONDS,
            }
        )
    return rows


def step_row(forecast: Mapping[str, CallSeconds], took: Timing) -> dict[str, Any]:
    """The row of a whole step, which is shown and not judged: not all that it does is a call of a model."""
    seconds = sum(each.total for each in forecast.values())
    return {
        "call": "step",
        "placement": "",
        "predicted ms": round(1e3 * seconds, 1),
        "alone ms": round(1e3 * alone(took), 1),
        "out by": f"{100 * (seconds / alone(took) - 1):+.0f} %",
        "measured ms": round(1e3 * took.seconds, 1),
        "+-": f"{100 * took.spread:.0f} %",
        "others": f"{100 * took.others:.0f} %",
        "judged": False,
    }


def is_out(row: Mapping[str, Any]) -> bool:
    """True if the prediction of a call that is judged is too far off."""
    return row["judged"] and abs(row["predicted ms"] / row["alone ms"] - 1) > WITHIN


# -- pairs of plans ----------------------------------------------------------------------------------------------------


def drawn_plan(assembly: Assembly, work: Workload, calibration: Calibration, rng: np.random.Generator) -> Plan | None:
    """A plan in which every call has devices and a strategy by chance; None where one of them was not measured."""
    cluster, chosen = local_cluster(), {}
    for call in work.calls:
        devices = cluster.meshes[rng.integers(len(cluster.meshes))]
        ways = [s for s in strategies(call, len(devices), cluster.devices_per_node) if s.pipeline == 1]
        ways = [s for s in ways if is_measured(call, s, calibration)]
        if not ways:
            return None
        chosen[call.name] = Placement(tuple(devices), ways[rng.integers(len(ways))])
    models = {call.role: call.model for call in work.calls}
    graph, per_node = assembly.train.graph, cluster.devices_per_node
    return complete_plan(graph, chosen, models, num_devices=cluster.num_devices, devices_per_node=per_node)


def is_measured(call: ModelCall, strategy: Strategy, calibration: Calibration) -> bool:
    rows = call.rows / (strategy.micro_batches * strategy.num_row_shards)
    return all(calibration(call, phase, strategy, rows) is not None for phase in PHASES[call.kind])


def drawn_plans(
    assembly: Assembly, work: Workload, calibration: Calibration, count: int, seed: int
) -> list[tuple[Plan, float]]:
    """Plans by chance, with the seconds of a step that are predicted: of three times as many, those that lie evenly
    from the fastest to the slowest."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(1000 * count):
        plan = drawn_plan(assembly, work, calibration, rng)
        if plan is not None:
            found.append((plan, sum(call.total for call in predicted(work, plan, calibration).values())))
        if len(found) == 3 * count:
            break
    found.sort(key=lambda pair: pair[1])
    return [found[i] for i in np.linspace(0, len(found) - 1, count).round().astype(int)] if found else []


def step_timing(noted: Sequence[tuple[Event, float, float]]) -> Timing:
    """Seconds of a step, from the end of the one before it."""
    by_step: dict[int, list[tuple[Event, float, float]]] = {}
    for event in noted:
        by_step.setdefault(event[0].step, []).append(event)
    steps = [by_step[number] for number in sorted(by_step)]
    runs = []
    for before, events in itertools.pairwise(steps):
        ends = [before[-1][0].end, *(event.end for event, *_ in events)]
        parts = [(b - a) for a, b in itertools.pairwise(ends)]
        others = sum(part * share for part, (*_, share) in zip(parts, events, strict=True)) / sum(parts)
        runs.append((sum(parts), others))
    return timing(runs)


def _in_words(placement: Placement) -> str:
    strategy = placement.strategy
    cut = f" in {strategy.micro_batches} micro-batches" if strategy.micro_batches > 1 else ""
    return f"{placement}{cut}" + (f", remat {strategy.remat}" if strategy.remat != "none" else "")


def compare_pairs(plans: Sequence[tuple[str, float, float]], count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of `(name, predicted seconds, measured seconds)`, by chance, whose predictions differ by enough."""
    pairs = [(a, b) for a, b in itertools.combinations(sorted(plans, key=lambda p: p[1]), 2) if b[1] > APART * a[1]]
    chosen = np.random.default_rng(seed).permutation(len(pairs))[:count]
    return [
        {
            "faster, as predicted": a[0],
            "slower": b[0],
            "predicted": f"{b[1] / a[1]:.2f} x",
            "measured": f"{b[2] / a[2]:.2f} x",
            "right": b[2] > a[2],
        }
        for a, b in (pairs[i] for i in sorted(chosen))
    ]


def check_pairs(assembly: Assembly, calibration: Calibration, options: argparse.Namespace, console: Console) -> int:
    """Runs pairs of plans. Returns the exit status."""
    work, ran = step_workload(assembly.train.graph, assembly.train.roles), []
    for number, (plan, seconds) in enumerate(drawn_plans(assembly, work, calibration, options.plans, options.seed)):
        took = step_timing(noted_steps(assembly, plan, options.steps))
        ran.append((f"plan {number}", seconds, alone(took)))
        placements = "; ".join(f"{call.name} {_in_words(plan.placements[call.name])}" for call in work.calls)
        console.line(
            f"plan {number}: predicted {seconds:.3f} s, took {alone(took):.3f} s alone, {took.seconds:.3f} s while "
            f"others had {100 * took.others:.0f} %: {placements}"
        )
    rows = compare_pairs(ran, options.pairs, options.seed)
    right = sum(row["right"] for row in rows)
    console.table(f"{right} of {len(rows)} pairs in the right order", rows)
    return 0 if len(rows) == options.pairs and right >= RIGHT * len(rows) else 1


def full_length(name_or_path: str, overrides: Sequence[str]) -> RunConfig:
    """A config without warm start and evaluation, whose responses all have their full length."""
    overrides = [*overrides, "warm_start=null", "evaluation=null"]
    sampling = getattr(read(name_or_path, overrides).settings, "sampling", None)
    if sampling is not None:
        overrides.append(f"settings.sampling.min_new_tokens={sampling.max_new_tokens}")
    return read(name_or_path, overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", metavar="NAME_OR_PATH", default="ppo_arithmetic")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="otherwise that of this machine")
    parser.add_argument("--steps", type=int, default=10, help="that are measured (default: 10)")
    parser.add_argument("--pairs", type=int, default=0, help="of plans to compare, in place of calls (such as 10)")
    parser.add_argument("--plans", type=int, default=7, help="that are run for these pairs (default: 7)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans that are drawn (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        config = full_length(options.config, options.overrides)
        start(config)
        machine = this_machine()
        calibration = read_calibration(options.calibration or calibration_file(machine), machine=machine)
        assembly = assemble(config, mesh.num_devices(), mesh.devices_per_process())
    except ValueError as error:
        console.error(str(error))
        return 1
    if options.pairs:
        return check_pairs(assembly, calibration, options, console)
    plan, watched = assembly.train.plan, OthersLoad()
    forecast = predicted(step_workload(assembly.train.graph, assembly.train.roles), plan, calibration)
    apart = machine.shares_processor
    merging = [name for name, seconds in forecast.items() if seconds.merge]
    noted = noted_steps(assembly, plan, options.steps, one_at_a_time=apart, merging=merging)
    seen = measured(noted, one_at_a_time=apart)
    rows = comparison(forecast, seen, plan)
    rows.append(step_row(forecast, step_timing(noted_steps(assembly, plan, options.steps))))
    load = watched.load()
    if options.json:
        print(json.dumps({"load": dataclasses.asdict(load), "rows": rows}, indent=2))
    else:
        console.line(f"{datetime.date.today()}, {machine}")
        console.table(f"{config.name}: predicted and measured", rows)
        console.line(f"While it was calibrated, {calibration.load or 'nobody noted how busy the machine was'}.")
        console.line(f"While it ran, {load}.")
    return 1 if any(is_out(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
