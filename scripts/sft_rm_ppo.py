"""The whole chain on a file of preferences in the format of HH-RLHF: supervised fine-tuning, a reward model, PPO.

python scripts/sft_rm_ppo.py --data harmless-base/train.jsonl.gz [--eval harmless-base/test.jsonl.gz] [--out runs/hh]
    [--set STAGE.KEY=VALUE ...]

Each row of the file is {"chosen": dialogue, "rejected": dialogue}. The three stages are runs of `jaxrlhf.train`, of the
configs sft_hh, reward_model_hh and ppo_hh, one after another; weights go from one to the next as folders in Hugging
Face's format. At the end it prints what each stage measured on held-out rows, before and after.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STAGES = ("sft", "reward_model", "ppo")
"""In their order. Each is the config of this name with `_hh` after it, and a folder in the output."""
SHOWN = {
    "sft": {"loss": "loss of the chosen replies, nats a token"},
    "reward_model": {"accuracy": "preference accuracy", "loss": "preference loss"},
    "ppo": {"reward": "reward", "response_length": "length of replies, tokens"},
}
"""Stage -> what it measures on held-out rows, and how the table calls that."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the stages. Returns the exit status of the first one that fails, or 0."""
    parser = argparse.ArgumentParser(description="SFT, a reward model and PPO on a file in the format of HH-RLHF.")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="rows for training, .jsonl[.gz]")
    parser.add_argument("--eval", type=Path, metavar="FILE", help="rows held out; without it, 512 rows of --data")
    parser.add_argument("--out", default=Path("runs/hh"), type=Path, metavar="FOLDER", help="where the runs go")
    parser.add_argument(
        "--set", action="append", default=[], metavar="STAGE.KEY=VALUE", help=f"stages: {', '.join(STAGES)}"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the stages that an earlier call began")
    options = parser.parse_args(arguments)
    for override in options.set:
        if override.partition(".")[0] not in STAGES:
            parser.error(f"--set: must begin with a stage ({', '.join(STAGES)}). Got {override!r}.")
    for path in filter(None, (options.data, options.eval)):
        if not path.is_file():
            parser.error(f"--data and --eval: must be existing files. Got {str(path)!r}.")
    seconds = {}
    for stage in STAGES:
        print(f"\n=== {stage} ===", flush=True)
        started = time.perf_counter()
        status = subprocess.run(command(stage, options), check=False).returncode
        if status:
            print(f"{stage} ended with status {status}: the stages after it did not run.", file=sys.stderr)
            return status
        seconds[stage] = time.perf_counter() - started
    outcomes = {s: json.loads((options.out / s / "latest" / "outcome.json").read_text("utf-8")) for s in STAGES}
    print("\n" + "\n".join(report(outcomes, seconds)))
    return 0


def command(stage: str, options: argparse.Namespace) -> list[str]:
    """The command that runs a stage: what the user sets for it comes last."""
    actor, reward = (options.out / path for path in ("sft/latest/actor", "reward_model/latest/reward"))
    values = {"data.path": options.data, "output.folder": options.out / stage}
    if options.eval is not None:
        values["data.eval_path"] = options.eval
    if stage != "sft":
        values |= {"tokenizer.path": actor, "roles.reward.init": actor if stage == "reward_model" else reward}
    if stage == "ppo":
        values["roles.actor.init"] = actor
    overrides = [f"{key}={json.dumps(str(value))}" for key, value in values.items()]
    overrides += [each.removeprefix(f"{stage}.") for each in options.set if each.startswith(f"{stage}.")]
    more = ["--resume", "auto"] if options.resume else []
    sets = [part for override in overrides for part in ("--set", override)]
    return [sys.executable, "-m", "jaxrlhf.train", "--config", f"{stage}_hh", *sets, *more]


def report(outcomes: Mapping[str, Mapping], seconds: Mapping[str, float]) -> list[str]:
    """Metrics of the stages on held-out rows before their first and after their last step, as lines of a table."""
    lines = [f"{'On held-out rows':<55}{'before':>10}{'after':>10}"]
    for stage, names in SHOWN.items():
        first, last = (outcomes[stage]["evaluations"][i] for i in (0, -1))
        for name, words in names.items():
            lines.append(f"{f'{stage}: {words}':<55}{first[f'eval/{name}']:>10.3f}{last[f'eval/{name}']:>10.3f}")
    return [*lines, f"{sum(seconds.values()):.0f} s: {', '.join(f'{s} {t:.0f} s' for s, t in seconds.items())}"]


if __name__ == "__main__":
    sys.exit(main())
