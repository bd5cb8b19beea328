import contextlib
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.observe.json_lines import JsonLinesWriter, read_json_lines
from jaxrlhf.observe.metrics import (
    TrainingError,
    best_evaluation,
    check_finite,
    evaluations_in,
    flatten,
    metrics_record,
    read_metrics,
    sample_record,
)


def test_flatten_joins_keys_and_keeps_complete_names() -> None:
    tree = {
        "rollout": {"critic/score/mean": jnp.float32(0.5), "length": jnp.int32(31), "deep": {"er": np.float64(2)}},
        "actor": {"loss": 1.5, "reward/kl": {"max": 3, "other/name": True}},
        "critic": {},
        "seconds": jnp.bfloat16(0.25),
    }
    flat = flatten(tree)
    assert flat == {
        "critic/score/mean": 0.5,
        "rollout/length": 31.0,
        "rollout/deep/er": 2.0,
        "actor/loss": 1.5,
        "reward/kl/max": 3.0,
        "other/name": 1.0,
        "seconds": 0.25,
    }
    assert list(flat)[:3] == ["critic/score/mean", "rollout/length", "rollout/deep/er"]
    assert {type(value) for value in flat.values()} == {float}


def test_flatten_refuses_two_metrics_of_one_name() -> None:
    message = "Two metrics get the name 'reward/mean'. Got it from reward > mean and from rollout > reward/mean."
    with pytest.raises(ValueError, match=re.escape(message)):
        flatten({"reward": {"mean": 1.0}, "rollout": {"reward/mean": 1.0}})


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jnp.ones(1), "shape (1,)"),
        (np.ones((2, 3)), "shape (2, 3)"),
        ("3", "'3' of type str"),
        (None, "None of type NoneType"),
        (1j, "1j of type complex"),
        (jnp.complex64(1), "of type ArrayImpl"),
        (jax.random.key(0), "of type PRNGKeyArray"),
        ([1.0], "[1.0] of type list"),
    ],
)
def test_flatten_refuses_what_is_no_number(leaf: Any, got: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)Metric 'a/b': must be a single real number\. Got .*" + re.escape(got)):
        flatten({"a": {"b": leaf}})


@pytest.mark.parametrize("key", ["", 3])
def test_flatten_refuses_keys_that_are_no_names(key: Any) -> None:
    with pytest.raises(ValueError, match=f"keys must be names. Got {key!r} under a."):
        flatten({"a": {key: 1.0}})


def test_flatten_refuses_names_that_lead_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"Metric '../x/loss': a name must be group/name"):
        flatten({"..": {"x": {"loss": 1.0}}})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["actor/loss", "loss", "critic/value_loss", "actor/grad_norm"])
def test_check_finite_stops_at_a_broken_loss_or_gradient(name: str, value: float) -> None:
    message = rf"Step 7: .* Got {name}={value}\. Resume from the last checkpoint"
    with pytest.raises(TrainingError, match=message):
        check_finite({"reward/mean": 1.0, name: value}, step=7)


def test_check_finite_names_all() -> None:
    metrics = {"actor/loss": math.nan, "critic/loss": 1.0, "actor/grad_norm": math.inf, "kl": math.nan, "x": math.nan}
    with pytest.raises(TrainingError, match=r"Got actor/loss=nan, actor/grad_norm=inf\."):
        check_finite(metrics, step=0)
    check_finite({"critic/loss": 1.0, "actor/loss_scale": math.nan, "x": math.nan}, step=0)


def test_metrics_round_trip_as_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = time.time()
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write(metrics_record(3, {"actor/loss": 0.25, "b": math.nan, "c": -math.inf}))
        # Flushed: a reader sees the line while the run goes on.
        (line,) = path.read_text().splitlines()
        writer.write(metrics_record(4, {"actor/loss": 0.125}))

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    record = json.loads(line, parse_constant=refuse)
    assert before <= record.pop("time") <= time.time()
    assert record == {"step": 3, "actor/loss": 0.25, "b": None, "c": None, "non_finite": ["b", "c"]}

    first, second = read_metrics(path)
    assert math.isnan(first["b"]) and math.isnan(first["c"]) and first["actor/loss"] == 0.25
    assert second["step"] == 4 and "non_finite" not in second


def test_samples_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    texts = {"prompt": "2 + 2 =\n", "completion": " 4 \x1b[0m 四\udce9"}
    sample = {**texts, "scores": {"math": 1.0, "length": math.nan}, "finish": "stop"}
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write(sample_record(2, "train", sample))
    scores = {"math": 1.0, "length": None}
    expected = {"step": 2, "split": "train", **texts, "scores": scores, "finish": "stop", "non_finite": ["length"]}
    assert read_json_lines(path) == [expected]
    assert "四" in path.read_text(encoding="utf-8"), "legible to those who open the file"


@pytest.mark.parametrize("name", ["step", "time", "non_finite"])
def test_the_records_own_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Metric '{name}': this name is the record's own"):
        metrics_record(0, {name: 1.0})


def test_evaluations_are_found_again_with_the_best_of_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(JsonLinesWriter(path)) as writer:
        writer.write(metrics_record(0, {"eval/x": 0.5, "timing_s/testing": 1.0}))
        writer.write(metrics_record(1, {"actor/loss": 1.0}))
        writer.write(metrics_record(2, {"eval/x": math.nan}))
        writer.write(metrics_record(4, {"eval/x": 0.75}))
        writer.write(metrics_record(6, {"eval/x": 0.75}))
    evaluations = evaluations_in(read_metrics(path))
    assert [step for step, _ in evaluations] == [0, 2, 4, 6]
    assert evaluations[0] == (0, {"eval/x": 0.5, "timing_s/testing": 1.0})
    assert best_evaluation(evaluations, "eval/x") == (4, 0.75)
    assert math.isnan(best_evaluation(evaluations[1:2], "eval/x")[1])
    losses = [(step, {"eval/loss": values.get("eval/x", math.nan)}) for step, values in evaluations]
    assert best_evaluation(losses, "eval/loss") == (0, 0.5), "of losses, less is better"
