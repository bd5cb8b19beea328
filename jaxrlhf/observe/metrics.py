"""Metrics of a run: names for nested trees of numbers, the file that keeps them, and the check that they are finite.

A metric's name is `group/name`, such as 'actor/loss'. Values are global: one number per step, whatever the plan.
"""

import math
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.brief import brief
from jaxrlhf.call_graph import GraphError, Ref
from jaxrlhf.name_rules import check_metric_name
from jaxrlhf.observe.json_lines import read_json_lines, split_non_finite
from jaxrlhf.require import errors_as

_OF_THE_CLOCK = ("time", "timing_s/", "timing_per_token_ms/", "perf/")
_RECORD_KEYS = ("step", "time", "non_finite")


class TrainingError(RuntimeError):
    """Training cannot go on."""


def flatten(tree: Mapping[str, Any]) -> dict[str, float]:
    """Names the numbers of a nested dict by the path that leads to them, joined by '/'.

    A key that itself contains a '/' is a complete name: the keys above it are dropped.

    >>> flatten({"rollout": {"critic/score/mean": 0.5, "length": 31}})
    {'critic/score/mean': 0.5, 'rollout/length': 31.0}

    Waits for the arrays among the leaves, and fetches them all in one transfer.

    Raises:
        ValueError: Two leaves get one name, a leaf is not a single number, or its name is not allowed.
    """
    leaves: dict[str, Any] = {}
    path_of: dict[str, str] = {}
    for path, name, leaf in _walk(tree, (), ""):
        if name in leaves:
            raise ValueError(
                f"Two metrics get the name {name!r}. Got it from {path_of[name]} and from {path}. Rename one."
            )
        shape = getattr(leaf, "shape", ())
        if not (isinstance(leaf, bool | int | float) or _is_real(leaf)) or shape != ():
            what = f"shape {shape}" if shape != () else f"{reprlib.repr(leaf)} of type {type(leaf).__name__}"
            raise ValueError(f"Metric {name!r}: must be a single real number. Got {what}. Reduce it, or leave it out.")
        leaves[name] = leaf
        path_of[name] = path
    return {name: float(value) for name, value in zip(leaves, jax.device_get(list(leaves.values())), strict=True)}


def check_results(step: str, results: Any) -> None:
    """Raises GraphError unless the results of a traced step can be metrics: single numbers with own names."""
    if not isinstance(results, Mapping):
        raise GraphError(f"{step}: its results must be a dict of numbers, nested or not. Got {brief(results)}.")
    for path, x in jax.tree_util.tree_leaves_with_path(results):
        if isinstance(x, Ref) and x.shape != ():
            raise GraphError(
                f"{step}: its results must be single numbers, which are reported. Got {x.dtype}{list(x.shape)} at "
                f"results{jax.tree_util.keystr(path)}. Take its mean in a compute function, or leave it out."
            )
    with errors_as(GraphError, f"{step}: "):
        flatten(jax.tree.map(lambda x: 0.0 if isinstance(x, Ref) else x, results))


def check_finite(metrics: Mapping[str, float], *, step: int) -> None:
    """Raises TrainingError unless the losses and gradient norms of a step, by the ends of their names, are finite."""
    checked = {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
    if broken := [f"{name}={value}" for name, value in checked.items() if not math.isfinite(value)]:
        raise TrainingError(
            f"Step {step}: losses and gradient norms must be finite. Got {', '.join(broken)}. Resume from the last "
            "checkpoint with a lower learning rate or tighter gradient clipping; the metrics of the steps before show "
            "what grew."
        )


def metrics_record(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """A line of the metrics file: `{"step": 3, "time": 1700000000.0, "actor/loss": 0.1, ...}`. Raises ValueError if a
    metric has the name of one of the record's own keys.

    A value that is not finite becomes null, and its name is listed under "non_finite".
    """
    reserved = [name for name in _RECORD_KEYS if name in metrics]
    if reserved:
        raise ValueError(f"Metric {reserved[0]!r}: this name is the record's own. Rename it, as in 'group/name'.")
    values, non_finite = split_non_finite(metrics)
    return {"step": step, "time": time.time(), **values, **non_finite}


def sample_record(step: int, split: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the samples file, of the split 'train' or 'held-out'. Scores are as metrics in `metrics_record`."""
    scores, non_finite = split_non_finite(sample["scores"])
    return {"step": step, "split": split, **sample, "scores": scores, **non_finite}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in the order of writing; a value that was not finite comes back as NaN."""
    records = read_json_lines(path)
    return [{**record, **dict.fromkeys(record.get("non_finite", ()), math.nan)} for record in records]


def evaluations_in(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """The evaluations among a run's records, as (steps done, metrics)."""
    return [
        (record["step"], {name: value for name, value in record.items() if name not in _RECORD_KEYS})
        for record in records
        if any(name.startswith("eval/") for name in record)
    ]


def best_evaluation(evaluations: Sequence[tuple[int, Mapping[str, float]]], name: str) -> tuple[int, float]:
    """The steps done and the value of the first evaluation with the best value of a metric."""
    values = [(step, metrics[name]) for step, metrics in evaluations if math.isfinite(metrics.get(name, math.nan))]
    sign = -1.0 if less_is_better(name) else 1.0
    return max(values, key=lambda found: sign * found[1]) if values else (evaluations[-1][0], math.nan)


def less_is_better(name: str) -> bool:
    """True for a loss, by the end of its name."""
    return name.endswith("loss")


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that does not depend on a clock, and is the same bit for bit in every run."""
    return {name: value for name, value in record.items() if not name.startswith(_OF_THE_CLOCK)}


def _walk(tree: Mapping[str, Any], above: tuple[str, ...], prefix: str) -> Iterator[tuple[str, str, Any]]:
    """Yields each leaf with the keys that lead to it, in words, and its name."""
    for key, value in tree.items():
        if not isinstance(key, str) or not key:
            raise ValueError(f"Metrics: keys must be names. Got {key!r} under {' > '.join(above) or 'the top'}.")
        name = key if "/" in key or not prefix else f"{prefix}/{key}"
        if isinstance(value, Mapping):
            yield from _walk(value, (*above, key), name)
        else:
            check_metric_name(name)
            yield " > ".join((*above, key)), name, value


def _is_real(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
