"""Reward, KL and perplexity before and after a training run, side by side: does the policy still write English?

    python -m examples.sentiment.perplexity runs/sentiment/grpo/latest

The perplexity is that of newspaper editorials and of held-out reviews, under the model that the run started from and
under what it exported: adapters, or a whole model. Rewards are those of the run's own evaluations. A policy that was
only made to please its reward scores high and reads badly; its perplexity has risen.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxrlhf
from jaxrlhf.config.schema import RunConfig, load_run

CONFIG = Path(__file__).parent / "perplexity.yaml"
OUT = Path("runs/sentiment/perplexity")
TEXTS = {"editorials": "editorials", "reviews": "demonstrations_held_out"}
"""Name of a text in the table -> the file of the data that holds it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Reward and perplexity before and after a run of examples/sentiment.")
    parser.add_argument("run", type=Path, metavar="RUN", help="its folder, such as runs/sentiment/grpo/latest")
    parser.add_argument("--data", type=Path, default=Path("runs/sentiment/data"), metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=256, metavar="N", help="rows of each text; 256 if left out")
    options = parser.parse_args(arguments)
    try:
        config = load_run(str(options.run / "config.yaml"))
        evaluations = _evaluations(options.run)
        weights = {"before": start_of(config), "after": end_of(config, options.run)}
        perplexities = {
            (when, name): perplexity(options.data / f"{file}.jsonl", values, num_rows=options.rows)
            for when, values in weights.items()
            for name, file in TEXTS.items()
        }
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print("\n" + "\n".join(table(evaluations, perplexities)))
    return 0


@dataclasses.dataclass(frozen=True)
class Weights:
    """The start of an actor: a folder, and the settings of its adapters, if it has some."""

    model: str
    lora: dict[str, Any] | None


def start_of(config: RunConfig) -> Weights:
    """The weights that a run's actor started from."""
    actor = config.roles["actor"]
    return Weights(actor.init, None if actor.lora is None else {**vars(actor.lora), "targets": [*actor.lora.targets]})


def end_of(config: RunConfig, run: Path) -> Weights:
    """The weights that a run's actor ended with. Raises ValueError if it did not export them."""
    exported = run / "actor"
    if not exported.is_dir():
        raise ValueError(
            f"{exported}: the run must have exported its actor. Got no such folder. Let it end, with output.export: "
            "[actor]."
        )
    start = start_of(config)
    if start.lora is None:
        return Weights(str(exported), None)
    return Weights(start.model, {**start.lora, "init": str(exported)})


def perplexity(texts: Path, weights: Weights, *, num_rows: int) -> float:
    """Perplexity of the completions in a file, under an actor's weights."""
    run = jaxrlhf.train(
        CONFIG, model=weights.model, roles={"actor": {"lora": weights.lora}},
        data={"path": str(texts), "eval_path": str(texts)}, output={"folder": str(OUT)},
        evaluation={"num_prompts": num_rows, "batch_size": min(64, num_rows)},
    )  # fmt: skip
    return math.exp(next(record["eval/loss"] for record in run.records if "eval/loss" in record))


def _evaluations(run: Path) -> list[dict[str, float]]:
    """The first and the last evaluation of a run."""
    path = run / "outcome.json"
    if not path.is_file():
        raise ValueError(f"{path}: the run must have ended. Got no such file. Go on with it: --resume {run}.")
    evaluations = json.loads(path.read_text(encoding="utf-8"))["evaluations"]
    return [evaluations[0], evaluations[-1]] if evaluations else [{}, {}]


def table(evaluations: Sequence[Mapping[str, float]], perplexities: Mapping[tuple[str, str], float]) -> list[str]:
    """Lines: what was measured, before and after."""
    before, after = evaluations
    lines = [f"{'':<28}{'before':>10}{'after':>10}"]
    for name in (name for name in before if name.startswith("eval/")):
        lines.append(f"{name:<28}{before[name]:>10.3f}{after[name]:>10.3f}")
    for name in TEXTS:
        values = (perplexities[when, name] for when in ("before", "after"))
        lines.append(f"{f'perplexity of {name}':<28}" + "".join(f"{value:>10.2f}" for value in values))
    return lines


if __name__ == "__main__":
    sys.exit(main())
