"""Kills a run again and again, and asks that it ends as if nothing had happened.

    python scripts/check_recovery.py                # 30 kills by SIGKILL, then 5 by SIGTERM
    python scripts/check_recovery.py --kills 3 --terminations 1
    python scripts/check_recovery.py --staleness 1  # generation with the weights of the step before

A small run (warm start, PPO with an adaptive KL coefficient, generation in slots, parts and shares with a tail,
evaluations, checkpoints) is done once undisturbed. Then it is started with `--resume auto`, killed, and started again.
Each kill waits for a part of the run, drawn at random (start-up, warm start, generation, scoring, training, evaluation,
the writing of a checkpoint), then for a random part of a second. A run that ends before all kills are spent is
compared, and another one is started.

Compared are, bitwise: every metric that is not a time, every sample, every prompt of every step, and the actor's last
weights. Prints a JSON object; exit status 1 where anything differs.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.data.arithmetic import ArithmeticConfig, arithmetic_rows
from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.json_lines import read_json_lines
from jaxrlhf.observe.metrics import without_times
from jaxrlhf.observe.timeline_recorder import STEP
from jaxrlhf.train import main as train

PARTS = ("start-up", "warm start", "generate", "host", "train", "evaluation", "checkpoint")
CONFIG = {
    "base": "ppo_arithmetic",
    "name": "recovery",
    "steps": 24,
    "batch_size": 16,
    "data": {"arithmetic": {"digits": 1}},
    "roles": {
        "actor": {
            "model": {
                "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 4,
                "num_kv_heads": 2,
            }
        }
    },
    "devices": "cpu:4",
    "plan": {
        "default": {"data": 4},
        "calls": {
            "actor.generate": [
                {"data": 2, "devices": "0-1", "slots": 2, "parts": 2, "tail": {"devices": "0", "rows": 0.25}},
                {"data": 2, "devices": "2-3", "slots": 4, "rows": 0.5},
            ],
            "reference.logprobs": {"data": 2, "devices": "0-1"},
            "critic.values": {"data": 2, "devices": "2-3", "parts": 3},
            "reward.scores": {"parts": 4},
            "actor.train": {"fsdp": 2, "tensor": 1, "devices": "0-1"},
            "critic.train": {"fsdp": 1, "tensor": 2, "devices": "2-3"},
        },
    },
    "warm_start": {"steps": 24, "batch_size": 16, "updates_per_step": 1},
    "settings": {"actor_update": {"mini_batches": 2}, "critic_update": {"mini_batches": 2}},
    "evaluation": {"every": 3, "num_prompts": 8},
    "output": {
        "samples_every": 1, "num_samples": 16, "checkpoint_every": 2, "checkpoint_minutes": 0.005, "export": ["actor"],
        "timeline": False,
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--terminations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return train_noting_parts(Path(options.child))
    with tempfile.TemporaryDirectory() as scratch:
        report = sweep(
            Path(scratch), kills=options.kills, terminations=options.terminations, seed=options.seed,
            staleness=options.staleness,
        )  # fmt: skip
    print(json.dumps(report, indent=2))
    return 1 if report["differences"] else 0


def sweep(
    scratch: Path,
    *,
    kills: int,
    terminations: int,
    seed: int,
    cache: str | None = None,
    steps: int = CONFIG["steps"],
    staleness: int = 0,
) -> dict[str, Any]:
    """Runs undisturbed, then disturbed until all signals are spent.

    Args:
        cache: Folder of compiled programs. None: a new one, so that the first run fills it.
        steps: Of a run, and of its warm start.
        staleness: Of a run's generation.

    Returns:
        Where the signals fell, how many runs were compared, and what differed.
    """
    chance = random.Random(seed)
    cache = str(scratch / "xla") if cache is None else cache
    warm_start = {**CONFIG["warm_start"], "steps": steps}
    config = {
        **CONFIG, "steps": steps, "warm_start": warm_start, "staleness": staleness, "compilation_cache": cache
    }  # fmt: skip
    (scratch / "recovery.yaml").write_text(json.dumps(config))
    start(scratch / "whole").wait()
    whole = results(scratch / "whole")
    signals = collections.deque([signal.SIGKILL] * kills + [signal.SIGTERM] * terminations)
    fell: collections.Counter[str] = collections.Counter()
    differences: list[str] = []
    num_runs = num_starts = 0
    while signals:
        folder = scratch / f"disturbed-{num_runs}"
        num_runs += 1
        ended = False
        while not ended:
            num_starts += 1
            process = start(folder)
            ended = disturb(process, folder, signals, fell, chance)
        differences += [f"run {num_runs}: {difference}" for difference in compare(whole, results(folder), steps)]
        shutil.rmtree(folder)
    return {
        "signals": dict(sorted(fell.items())),
        "runs_compared": num_runs,
        "starts": num_starts,
        "records_compared": num_runs * len(whole["metrics"]),
        "differences": differences,
    }


def start(folder: Path) -> "subprocess.Popen[bytes]":
    """The run, started or gone on with in a folder of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "part").write_text("start-up")
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, __file__, "--child", str(folder)], stdout=log, stderr=log)


def disturb(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    signals: "collections.deque[signal.Signals]",
    fell: "collections.Counter[str]",
    chance: random.Random,
) -> bool:
    """Sends the next signal at its moment. True where the run ended by itself."""
    if signals:
        wanted = chance.choice(PARTS)
        delay = chance.uniform(0, 4.0 if wanted == "start-up" else 0.3)
        patience = time.monotonic() + 60
        while process.poll() is None and part(folder) != wanted and time.monotonic() < patience:
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        if process.poll() is None:
            number = signals.popleft()
            where = part(folder)
            process.send_signal(number)
            fell[f"{number.name} in {where}"] += 1
            status = process.wait()
            if number == signal.SIGTERM and status not in (128 + signal.SIGTERM, -signal.SIGTERM, 0):
                raise RuntimeError(f"A terminated run ended with {status}:\n{(folder / 'log').read_text()[-3000:]}")
            return status == 0
    if process.wait() != 0:
        raise RuntimeError(f"A run failed:\n{(folder / 'log').read_text()[-3000:]}")
    return True


def part(folder: Path) -> str:
    """The part of the run that is under way, such as "checkpoint"."""
    if any(folder.glob("runs/recovery-*/checkpoints/*/*.orbax-checkpoint-tmp*")):
        return "checkpoint"
    return (folder / "part").read_text()


def train_noting_parts(folder: Path) -> int:
    """The command, in this process, writing down which part of the run is going on."""
    file = os.open(folder / "part", os.O_WRONLY)

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Executor, *arguments: Any) -> Any:
            phase, _ = self._at
            name = arguments[0].kind if phase == STEP else phase
            os.pwrite(file, name.encode(), 0)
            os.ftruncate(file, len(name))
            outputs = method(self, *arguments)
            return jax.block_until_ready(outputs) if isinstance(outputs, list) else outputs

        return call

    Executor._call_device = noting(Executor._call_device)
    Executor._call_host = noting(Executor._call_host)
    os.chdir(folder)
    return train(["--config", str(folder.parent / "recovery.yaml"), "--resume", "auto"])


def results(folder: Path) -> dict[str, Any]:
    """The results of a run, without the times."""

    (run,) = (path for path in (folder / "runs").iterdir() if not path.is_symlink() and (path / "config.yaml").exists())
    metrics = [without_times(record) for record in read_json_lines(run / "metrics.jsonl")]
    samples = read_json_lines(run / "samples.jsonl")
    prompts = [(s["step"], s["prompt"]) for s in samples if s["split"] == "train"]
    return {
        "metrics": metrics,
        "samples": samples,
        "prompts": prompts,
        "weights": (run / "actor" / "model.safetensors").read_bytes(),
    }


def compare(whole: dict[str, Any], disturbed: dict[str, Any], num_steps: int) -> list[str]:
    """The differences between two runs, and what is wrong with the prompts of the disturbed one."""
    differences = [f"{name} differ" for name in whole if whole[name] != disturbed[name]]
    steps = [record["step"] for record in disturbed["metrics"] if "actor/pg_loss" in record]
    if steps != list(range(1, num_steps + 1)):
        differences.append(f"steps are not each there once: {steps}")
    rows = len(arithmetic_rows(ArithmeticConfig(**CONFIG["data"]["arithmetic"]))[0])
    prompts = [prompt for _, prompt in disturbed["prompts"]]
    for first in range(0, len(prompts) - rows + 1, rows):
        if len(set(prompts[first : first + rows])) != rows:
            differences.append(f"a row was seen twice or skipped in epoch {first // rows + 1}")
    return differences


if __name__ == "__main__":
    sys.exit(main())
