"""Runs configs over seeds and prints, as a table, what their held-out scores were before and after, and what it took.

    python scripts/check_learning.py grpo_arithmetic remax_arithmetic --seeds 0 1 2
    python scripts/check_learning.py grpo_arithmetic --metric eval/exact_match --rise 0.2 --set steps=30
    python scripts/check_learning.py grpo_arithmetic --vary staleness=0 --vary staleness=1 --picture curves.png

Each run is one of the train command, in a process of its own. Seconds are from its start to its end, compiling
included; CPU-seconds are those of all its threads. With --rise, the exit status is 1 where a score rose by less. Every
config is run with each of the values of --vary, and --picture draws the mean score of the seeds, and their range, over
the steps.
"""

import argparse
import concurrent.futures
import datetime
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrlhf.observe.metrics import evaluations_in, read_metrics


class Run(NamedTuple):
    """A finished run."""

    config: str
    varied: str
    seed: int
    scores: list[tuple[int, float]]
    """Of its evaluations: the number of steps, and the metric."""
    seconds: float
    cpu_seconds: float


def run(config: str, varied: str, seed: int, metric: str, overrides: Sequence[str]) -> Run:
    """Executes one run, whose files are not kept. SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"seed={seed}", f"output.folder={folder}", "output.tensorboard=false", *overrides]
        arguments += [varied] if varied else []
        command = [sys.executable, "-m", "jaxrlhf.train", "--config", config]
        command += [part for argument in arguments for part in ("--set", argument)]
        began, log = time.perf_counter(), Path(folder) / "log"
        with log.open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\nended with status {process.returncode}:\n{log.read_text()}")
        records = read_metrics(Path(folder) / "latest" / "metrics.jsonl")
    scores = [(step, values[metric]) for step, values in evaluations_in(records)]
    return Run(config, varied, seed, scores, time.perf_counter() - began, used.ru_utime + used.ru_stime)


def draw(runs: Sequence[Run], metric: str, path: Path) -> None:
    """Draws a panel for each config, with a line for each variation."""
    from matplotlib.figure import Figure

    configs = list(dict.fromkeys(each.config for each in runs))
    figure = Figure(figsize=(5 * len(configs), 3.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(configs), squeeze=False)[0]
    for axes, config in zip(panels, configs, strict=True):
        here = [each for each in runs if each.config == config]  # those of a variation lie side by side
        for varied, group in itertools.groupby(here, key=lambda each: each.varied):
            of_steps = list(zip(*(each.scores for each in group), strict=True))
            steps = [seeds[0][0] for seeds in of_steps]
            values = [[score for _, score in seeds] for seeds in of_steps]
            (line,) = axes.plot(steps, [statistics.fmean(each) for each in values], label=varied or "as it is")
            axes.fill_between(
                steps,
                *zip(*((min(each), max(each)) for each in values), strict=True),
                alpha=0.15,
                color=line.get_color(),
            )
        axes.set_title(Path(config).stem, fontsize=9, loc="left")
        axes.set_xlabel("steps", fontsize=8)
        axes.set_ylabel(metric, fontsize=8)
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].legend(fontsize=7, frameon=False)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="shipped configs by name, or paths")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--metric", default="eval/exact_match", help="a metric of the evaluations")
    parser.add_argument("--rise", type=float, default=None, help="by how much it must have risen in every run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE", help="one more variation")
    parser.add_argument("--picture", type=Path, help="file for curves, such as curves.png; needs matplotlib")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, whose seconds then say less")
    options = parser.parse_args(arguments)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; {datetime.date.today()}; commit {commit.stdout.strip() or '?'}"
    )
    columns = ["Config", *(["Varied"] if options.vary else []), "Seed", f"{options.metric} before -> after"]
    columns += ["Seconds", "CPU-seconds"]
    print(f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|", flush=True)
    runs, too_little = list[Run](), list[str]()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as executor:
        started = [
            executor.submit(run, config, varied, seed, options.metric, options.overrides)
            for config, varied, seed in itertools.product(options.configs, options.vary or [""], options.seeds)
        ]
        for each in (future.result() for future in started):
            runs.append(each)
            before, after = each.scores[0][1], each.scores[-1][1]
            cells = [Path(each.config).stem, *([f"`{each.varied}`"] if each.varied else []), str(each.seed)]
            cells += [f"{before:.3f} -> {after:.3f}", f"{each.seconds:.0f}", f"{each.cpu_seconds:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
            if options.rise is not None and after - before < options.rise:
                too_little.append(
                    f"{cells[0]}, seed {each.seed}: {before:.3f} -> {after:.3f}, less than +{options.rise}"
                )
    if options.picture:
        draw(runs, options.metric, options.picture)
    print("\n".join(too_little), file=sys.stderr)
    return 1 if too_little else 0


if __name__ == "__main__":
    sys.exit(main())
