"""Fused pipeline schedules of RLHFuse's Table 3: how short, how much memory, how long to find.

    python -m scripts.bench_schedules                                  # all instances, two processes
    python -m scripts.bench_schedules --instance 8/4/8 --instance 16/16/16
    python -m scripts.bench_schedules --instance 16/8/16 --picture fused.png
    python -m scripts.bench_schedules --quick                          # as plans and runs find them
    python -m scripts.bench_schedules --json

An instance is stages of the large model / stages of the small one / micro-batches of the large one: 33B and 13B
parameters on 8 stages, 65B and 33B on 16, with the paper's latencies and activations. Latencies are in units of the
paper; memory is the peak of a worker relative to that of the models trained one after another by 1F1B. Columns:

    serial   one model after another by 1F1B: the sum of (M + S - 1) * (forward + backward)
    1F1B+    the same with half the stages, of twice the latency, and half the micro-batches, in twice the groups
    greedy   always what can start earliest, of the larger model first, and of that a backward first
    ours     `scripts.fused_search.fuse`
    bound    no schedule is shorter
    quick    `jaxrlhf.schedules.fused_schedule.fuse_quickly`, within the memory that both models take by themselves

Seconds are those of the clock, and of processors. numba compiles `fuse` where it is installed, before the first
instance.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.schedules.fused_schedule import fuse_quickly
from jaxrlhf.schedules.schedule import makespan, peak_activations, validate
from jaxrlhf.schedules.schedule_bounds import added_peaks, serial_peak
from scripts.fused_models import MODELS, greedy_schedule, paper_pipes, shallow_serial_latency
from scripts.fused_search import FusedResult, fuse, measured
from scripts.schedule_picture import draw_schedule

INSTANCES = {
    f"{large}/{small}/{times * large}": (large, small, times * large) for large, small in MODELS for times in (1, 2, 4)
}
TIGHT = 1.25
"""A lower memory cap, in peaks of serial 1F1B, for the last column of `--quick`."""
NAMES = {8: ("33B", "13B"), 16: ("65B", "33B")}


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for, which hardly depend on other load."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(instance: str, *, processes: int, moves: int | None, seeds: int) -> tuple[dict[str, Any], FusedResult]:
    """A row of the table, and what it is of."""
    pipes = paper_pipes(*INSTANCES[instance])
    greedy = greedy_schedule(pipes)
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    found = fuse(pipes, seeds=range(seeds), moves=moves, processes=processes)
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - begin_cpu
    validate(found.schedule)
    row = {
        "instance": instance,
        "serial": found.serial_latency,
        "1F1B+": shallow_serial_latency(pipes),
        "greedy": makespan(greedy),
        "ours": found.latency,
        "bound": found.lower_bound,
        "greedy_memory": max(peak_activations(greedy)) / found.serial_peak,
        "memory": found.peak / found.serial_peak,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    return row, found


def measure_quickly(instance: str) -> tuple[dict[str, Any], FusedResult]:
    """A row of the table of `--quick`, and what it is of."""
    pipes = paper_pipes(*INSTANCES[instance])
    begin = time.process_time()
    quick = measured(pipes, fuse_quickly(pipes, memory_cap=added_peaks(pipes)))
    cpu = time.process_time() - begin
    tight = measured(pipes, fuse_quickly(pipes, memory_cap=TIGHT * serial_peak(pipes)))
    row = {
        "instance": instance,
        "bound": quick.lower_bound,
        "quick": quick.latency,
        "over_bound": quick.latency / quick.lower_bound,
        "speedup": quick.serial_latency / quick.latency,
        "memory": quick.peak / quick.serial_peak,
        "cap": added_peaks(pipes) / quick.serial_peak,
        "cpu_seconds": cpu,
        "tight_over_bound": tight.latency / tight.lower_bound,
        "tight_memory": tight.peak / tight.serial_peak,
    }
    return row, quick


def quick_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `--quick` as a table in Markdown."""
    lines = [
        "| instance | bound | quick | quick / bound | over serial | memory | cap | CPU-seconds | "
        f"quick / bound within {TIGHT} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['instance']} | {row['bound']:g} | {row['quick']:g} | {row['over_bound']:.3f} | {row['speedup']:.2f} | "
        f"{row['memory']:.2f} | {row['cap']:.2f} | {row['cpu_seconds']:.2f} | "
        f"{row['tight_over_bound']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table in Markdown: latencies, and in parentheses speedups over serial."""

    def latency(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:g} ({row['serial'] / row[key]:.2f})"

    lines = [
        "| instance | serial | 1F1B+ | greedy | ours | bound | memory, greedy | memory, ours | seconds | CPU-seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [
            row["instance"],
            f"{row['serial']:g}",
            *(latency(row, key) for key in ("1F1B+", "greedy", "ours", "bound")),
        ]
        cells += [
            f"{row['greedy_memory']:.2f}",
            f"{row['memory']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", action="append", choices=INSTANCES, help="otherwise all; may be repeated")
    parser.add_argument("--processes", type=int, default=2, help="seeds tried at once (default: 2)")
    parser.add_argument("--seeds", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--moves", type=int, help="of annealing per round; otherwise by the size of the instance")
    parser.add_argument("--quick", action="store_true", help="find schedules as plans and runs do")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the schedule of the last instance")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    settings = dict(processes=options.processes, moves=options.moves, seeds=options.seeds)
    fuse(paper_pipes(8, 8, 8), moves=1)  # compiles
    for instance in options.instance or INSTANCES:
        row, found = measure_quickly(instance) if options.quick else measure(instance, **settings)
        rows.append(row)
        if not options.json:
            in_words = quick_table if options.quick else table
            print(in_words(rows) if len(rows) == 1 else in_words([row]).splitlines()[-1], flush=True)
        if options.picture is not None and instance == (options.instance or list(INSTANCES))[-1]:
            names = NAMES[INSTANCES[instance][0]]
            draw_schedule(found.schedule, options.picture, names=names, serial_peak=found.serial_peak, title=instance)
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
