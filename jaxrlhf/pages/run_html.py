"""A run in short, as a fragment: its config in a line, the curve of its reward, its last metrics, its folder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config.reading import read_yaml
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.observe.plain_text import duration, number
from jaxrlhf.pages.curves import curves_svg
from jaxrlhf.pages.markup import element, escaped, fragment

REWARDS = ("critic/score/mean", "critic/rewards/mean", "reward/accuracy", "dpo/accuracy", "actor/loss", "sft/loss")
"""Metrics of which the first that a run has is its curve; else the first loss."""
_SHOWN = (
    "critic/score/mean", "kl/mean", "response_length/mean", "actor/entropy", "actor/loss", "critic/loss",
    "actor/grad_norm", "timing_s/step", "perf/throughput", "perf/busy_fraction",
)  # fmt: skip


def run_html(
    folder: Path | str, *, records: Sequence[Mapping[str, Any]] | None = None, config: Mapping[str, Any] | None = None
) -> str:
    """A fragment about a run, finished or not.

    Args:
        folder: The folder of the run.
        records: The records of its metrics; otherwise those of its file.
        config: Its config as plain data; otherwise that of its file. May be empty.
    """
    folder = Path(folder)
    if records is None:
        records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    if config is None:
        config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    parts = [element("div", escaped(folder.resolve().name), class_="title")]
    parts.append(element("div", escaped(config_line(config, records)), class_="note"))
    if name := main_metric(records):
        charts = [curves_svg({name: points_of(records, name)}, title=name)]
        if held_out := next(iter(_evaluated(records)), ""):
            charts.append(curves_svg({held_out: points_of(records, held_out)}, title=held_out, x_label="steps done"))
        style = "display:flex;flex-wrap:wrap;gap:8px 24px;margin:6px 0"
        parts.append(element("div", *charts, style=style))
    steps = [record for record in records if "timing_s/step" in record]
    if steps:
        last = steps[-1]
        names = [n for n in _SHOWN if n in last]
        shown = [
            element("div", element("b", escaped(number(float(last[n]), digits=4))), element("span", escaped(n)))
            for n in names
        ]
        parts.append(element("div", *shown, class_="facts"))
    parts.append(element("div", escaped(str(folder)), class_="note"))
    return fragment("run", *parts)


def main_metric(records: Sequence[Mapping[str, Any]]) -> str:
    """The metric that tells best how a run goes; empty if there is none."""
    names = list(dict.fromkeys(name for record in records for name in record))
    losses = [name for name in names if name.endswith("loss") and not name.startswith(("eval/", "warm_start/"))]
    return next((name for name in (*REWARDS, *losses) if name in names), "")


def points_of(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) of a metric; values that were not finite are NaN, and those that are no numbers are left out.
    Metrics of the warm start are by its own steps."""
    of_step = "warm_start/step" if name.startswith("warm_start/") else "step"
    return [
        (float(record[of_step]), math.nan if record[name] is None else float(record[name]))
        for record in records
        if name in record and of_step in record and (record[name] is None or isinstance(record[name], int | float))
    ]


def config_line(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """A config and how far its run is, in a line."""
    done = max((int(record["step"]) for record in records if "timing_s/step" in record), default=0)
    words = [str(config["algorithm"])] if config.get("algorithm") else []
    words.append(f"step {done} of {config['steps']}" if config.get("steps") else f"step {done}")
    if config.get("batch_size"):
        words.append(f"{config['batch_size']} prompts a step")
    roles = config.get("roles")
    actor = roles.get("actor") if isinstance(roles, Mapping) else None
    if isinstance(actor, Mapping) and isinstance(actor.get("init"), str) and actor["init"] not in ("", "random"):
        words.append(f"actor from {Path(actor['init']).name}")
    if config.get("devices"):
        words.append(f"devices {config['devices']}")
    if config.get("seed") is not None:
        words.append(f"seed {config['seed']}")
    if seconds := sum(y for _, y in points_of(records, "timing_s/step") if math.isfinite(y)):
        words.append(f"{duration(seconds)} in steps")
    return ", ".join(words)


def _evaluated(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics of evaluations, of which a chart can be made."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith("eval/"))
    return [name for name in names if name != "eval/response_length"]
