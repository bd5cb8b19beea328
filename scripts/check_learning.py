"""Runs configs over seeds and prints, as a table, what their held-out scores were before and after, and what it took.

    python scripts/check_learning.py grpo_arithmetic remax_arithmetic --seeds 0 1 2
    python scripts/check_learning.py grpo_arithmetic --metric eval/exact_match --rise 0.2 --set steps=30

Each run is one of the train command, in a process of its own. Seconds are from its start to its end, compiling
included; CPU-seconds are those of all its threads. With --rise, the exit status is 1 where a score rose by less.
"""

import argparse
import datetime
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jaxrlhf.observe.metrics import evaluations_in, read_metrics


def run(config: str, seed: int, overrides: list[str], folder: Path) -> tuple[float, float]:
    """Seconds and CPU-seconds of one run, which leaves its records in the folder."""
    arguments = [f"seed={seed}", f"output.folder={folder}", "output.tensorboard=false", *overrides]
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", config]
    command += [part for argument in arguments for part in ("--set", argument)]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="shipped configs by name, or paths")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--metric", default="eval/exact_match", help="a metric of the evaluations")
    parser.add_argument("--rise", type=float, default=None, help="by how much it must have risen in every run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; {datetime.date.today()}; commit {commit.stdout.strip() or '?'}"
    )
    print(f"\n| Config | Seed | {options.metric} before -> after | Seconds | CPU-seconds |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    too_little = []
    for config in options.configs:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                seconds, cpu = run(config, seed, options.overrides, Path(folder))
                records = read_metrics(Path(folder) / "latest" / "metrics.jsonl")
            evaluations = [values[options.metric] for _, values in evaluations_in(records)]
            before, after = evaluations[0], evaluations[-1]
            print(
                f"| {Path(config).stem} | {seed} | {before:.3f} -> {after:.3f} | {seconds:.0f} | {cpu:.0f} |",
                flush=True,
            )
            if options.rise is not None and after - before < options.rise:
                too_little.append(f"{config}, seed {seed}: {before:.3f} -> {after:.3f}, less than +{options.rise}")
    print("\n".join(too_little), file=sys.stderr)
    return 1 if too_little else 0


if __name__ == "__main__":
    sys.exit(main())
