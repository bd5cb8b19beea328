"""Measures this machine for a run: seconds of the passes of its calls, and rates of its devices.

jaxrlhf calibrate --config NAME_OR_PATH [--set a.b=c ...] [--degrees tensor=1,2 data=1,8] [--out FILE]

The file is kept for this machine and this version of jax, and further runs add to it; planning reads it.
"""

import argparse
import dataclasses
import datetime
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from jaxrlhf.brief import brief
from jaxrlhf.calibration.measure_calls import Degrees, Job, jobs, measure
from jaxrlhf.calibration.measure_host import host_seconds
from jaxrlhf.calibration.measure_machine import measure_machine
from jaxrlhf.calibration.timing import OthersLoad
from jaxrlhf.config.excerpts import with_excerpt
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.observe.console import Console
from jaxrlhf.planner.costs.calibration import (
    QUIET,
    Calibration,
    Case,
    Point,
    Rates,
    calibration_file,
    read_calibration,
    this_machine,
    write_calibration,
)
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.run.assembly import assemble
from jaxrlhf.run.recorded_lengths import response_lengths
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Remat
from jaxrlhf.train import read, start

_DEGREES = tuple(field.name for field in dataclasses.fields(Degrees))
_EXAMPLE = "Write --degrees tensor=1,2 fsdp=1, say."


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="jaxrlhf calibrate", description="Measure this machine for the calls of a run."
    )
    parser.add_argument("--config", metavar="NAME_OR_PATH", required=True, help="as of jaxrlhf.train")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of it")
    parser.add_argument(
        "--degrees", nargs="+", default=[], metavar="NAME=N,N",
        help="beside those of the run's own plan: data, fsdp, tensor and remat, all that go together",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=Path, help="otherwise one for this machine, in ~/.cache/jaxrlhf")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no measurement begins (default: 10)")
    parser.add_argument(
        "--patience", type=float, default=3.0, metavar="SECONDS",
        help="how long each measurement waits for other processes to be quiet (default: 3)",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 0, or 1 after an error that the user can fix."""
    options = parser().parse_args(arguments)
    console, began = Console(), time.perf_counter()
    try:
        if not 0 < options.minutes < math.inf:
            raise ConfigError(f"--minutes: must be positive. Got {options.minutes}.")
        if not 0 <= options.patience < math.inf:
            raise ConfigError(f"--patience: must not be negative. Got {options.patience}.")
        config = read(options.config, options.set)
        if start(config).count > 1:
            raise ConfigError("calibrate: measures the devices of one process. Got several. Start one, on one node.")
        degrees = parse_degrees(options.degrees, all_devices=mesh.num_devices())
        assembly = assemble(config, mesh.num_devices(), mesh.devices_per_process())
        step, lengths = assembly.train, response_lengths(config.plan.lengths, config.settings)
        machine = this_machine()
        path = options.out or calibration_file(machine)
        known = read_calibration(path, machine=machine) if path.exists() else None
    except ValueError as error:
        console.error(with_excerpt(str(error), options.config, options.set))
        return 1
    console.line(f"Measuring {machine}, as {mesh.num_devices()} devices")
    watched = OthersLoad()
    rates = measure_machine(patience_seconds=options.patience)
    rates = dataclasses.replace(rates, host_seconds=host_seconds(assembly, machine.num_cores))
    console.table("One device, while all of them do the same", rate_rows(rates))
    work = step_workload(step.graph, step.roles, lengths)
    own = {call.name: step.plan.placements[call.name].strategy for call in work.calls}
    to_do = jobs(work, {c.name: [own[c.name], *degrees.strategies(c, mesh.num_devices())] for c in work.calls})
    today, curves = datetime.date.today().isoformat(), known.curves if known else ()

    def save(measured: Measured) -> None:
        pairs = [pair for _, of_job in measured for pair in of_job]
        write_calibration(path, Calibration(today, machine, rates, watched.load(), curves).with_points(pairs))

    deadline = began + 60 * options.minutes
    measured = measure_all(to_do, rates, console, deadline=deadline, patience_seconds=options.patience, save=save)
    if not measured:
        console.error(f"calibrate: no pass was measured in {options.minutes:g} minutes. Nothing is written.")
        return 1
    console.line(f"{len(measured)} of {len(to_do)} measured in {time.perf_counter() - began:.0f} s")
    console.line(f"Meanwhile {watched.load()}")
    console.line(f"Written to {path}")
    return 0


def parse_degrees(texts: Sequence[str], *, all_devices: int) -> Degrees:
    """Parses `--degrees`, or raises ConfigError. On a CPU, `data` is 1 and the number of virtual devices by default."""
    found: dict[str, Any] = {"data": (1, all_devices)} if mesh.platform() == "cpu" and all_devices > 1 else {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name not in _DEGREES or not equals:
            raise ConfigError(f"--degrees: must be of {', '.join(_DEGREES)}. Got {brief(text)}. {_EXAMPLE}")
        listed = values.split(",")
        if name == "remat":
            known = get_args(Remat)
            if not set(listed) <= set(known):
                raise ConfigError(f"--degrees: remat: must be of {', '.join(known)}. Got {brief(values)}. {_EXAMPLE}")
        elif not all(value.isdecimal() and 1 <= int(value) <= all_devices for value in listed):
            raise ConfigError(
                f"--degrees: {name}: must be numbers from 1 to {all_devices}, the devices that there are, with commas "
                f"between. Got {brief(values)}. {_EXAMPLE}"
            )
        found[name] = tuple(listed if name == "remat" else map(int, listed))
    return Degrees(**found)


Measured = list[tuple[Job, list[tuple[Case, Point]]]]


def measure_all(
    to_do: Sequence[Job], rates: Rates, console: Console, *,
    deadline: float, patience_seconds: float, save: Callable[[Measured], None],
) -> Measured:  # fmt: skip
    """Runs jobs one after another and reports progress, then all of them once more while there is time, since the
    speed of a machine varies. Jobs that do not fit into memory are left out. No job begins after the deadline, a value
    of `time.perf_counter()`. `save` is called with all measurements so far after each job."""
    measured: Measured = []
    for again in (False, True):
        left = [job for job, _ in measured] if again else to_do
        for i, job in enumerate(left):
            if time.perf_counter() > deadline:
                console.line(f"Note: no time is left for {len(left) - i} of {len(left)} measurements.")
                break
            what = f"[{i + 1}/{len(left)}{', again' if again else ''}] {job.call.name}, {job.strategy}, {job.rows} rows"
            try:
                pairs = measure(job, dispatch_seconds=rates.dispatch_seconds, patience_seconds=patience_seconds)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                console.line(f"{what}: does not fit into memory")
                continue
            passes = [(case.phase, case.model.num_layers * x.layer + x.rest, x.spread) for case, x in pairs]
            seconds = ", ".join(f"{phase} {1e3 * whole:.2f} ms +- {spread:.0%}" for phase, whole, spread in passes)
            others = max((point.others for _, point in pairs), default=0.0)
            console.line(f"{what}: {seconds}" + (f" (others had {100 * others:.0f} %)" if others > QUIET else ""))
            if again:
                measured[i] = (job, [(x, mean(a, b)) for (x, a), (_, b) in zip(measured[i][1], pairs, strict=True)])
            else:
                measured.append((job, pairs))
            save(measured)
    return measured


def mean(one: Point, other: Point) -> Point:
    """The mean of two measurements of one pass, weighted by the CPU share left by other processes. Its spread is at
    least half their difference."""
    weights = np.array([1 - one.others, 1 - other.others]) + 1e-6
    both = np.array([dataclasses.astuple(one), dataclasses.astuple(other)])
    rows, layer, rest, spread, others = (float(x) for x in weights @ both / weights.sum())
    apart = abs(one.layer - other.layer) / 2 / layer if layer else 0.0
    return Point(rows, layer, rest, max(spread, apart), others)


def rate_rows(rates: Rates) -> list[dict[str, Any]]:
    """Rates as a table."""
    units = {"flops": ("Gflop/s", 1e-9), "bandwidth": ("GB/s", 1e-9), "seconds": ("us", 1e6)}
    rows = []
    for name, value in dataclasses.asdict(rates).items():
        unit, scale = units.get(name.rpartition("_")[2], ("", 1.0))
        rows.append({"what": name.replace("_", " "), "measured": round(value * scale, 3), "unit": unit})
    return rows


if __name__ == "__main__":
    sys.exit(main())
