"""Picture of evaluations over steps, one panel a metric and one curve a run: `curves.png` of the README.

python -m examples.sentiment.curves --out curves.png eval/reward=RUN,RUN,RUN eval/judge=RUN,RUN,RUN
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.figure import Figure


def draw(panels: Sequence[tuple[str, Sequence[Path]]], out: Path) -> None:
    """Draws a panel for each (metric, folders of runs), with a shared vertical axis.

    Raises:
        FileNotFoundError: A run has no outcome.json: it has not ended.
        KeyError: An evaluation of a run lacks the metric.
    """
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (metric, runs) in zip(axes, panels, strict=True):
        for index, run in enumerate(runs):
            evaluations = json.loads((run / "outcome.json").read_text(encoding="utf-8"))["evaluations"]
            steps, values = [each["step"] for each in evaluations], [each[metric] for each in evaluations]
            axis.plot(steps, values, marker="o", markersize=3, label=f"seed {index}")
        algorithm = yaml.safe_load((runs[0] / "config.yaml").read_text(encoding="utf-8"))["algorithm"]
        axis.set(xlabel="step", title=f"{algorithm}: {metric}")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.sentiment.curves", description="Draw evaluations.")
    parser.add_argument("panels", nargs="+", metavar="METRIC=RUN,RUN", help="such as eval/reward=runs/grpo/latest")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    options = parser.parse_args(arguments)
    parts = [panel.partition("=") for panel in options.panels]
    draw([(metric, [Path(run) for run in runs.split(",")]) for metric, _, runs in parts], options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
