"""Predicted seconds beside measured ones."""

import dataclasses
import math

from jaxrlhf.observe.forecast_errors import compare
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.planner.plans.saved_plan import CallForecast, Devices, SavedPlan
from jaxrlhf.sharding.strategy import Strategy

SECONDS = {"actor.generate": 4.0, "reference.logprobs": 1.0, "reward.scores": 2.0, "actor.train": 3.0}
KINDS = {"actor.generate": "generate", "reference.logprobs": "infer", "reward.scores": "infer", "actor.train": "train"}


def saved(fuse: tuple[str, ...] = ()) -> SavedPlan:
    return SavedPlan(
        plan=Plan({name: Placement((0,), Strategy()) for name in SECONDS}, fuse=fuse),
        devices=Devices("cpu:1", 1, 1),
        work={name: {"kind": kind} for name, kind in KINDS.items()},
        method="search",
        step_seconds=8.0,
        calls={name: CallForecast(seconds, 0) for name, seconds in SECONDS.items()},
    )


def record(step: int, scale: float) -> dict[str, float]:
    metrics = {"gen": 8.0, "ref": 1.0, "update_actor": 2.0, "reward": 5.0, "reward/reward.scores": 2.5, "step": 10.0}
    return {"step": step, **{f"timing_s/{name}": scale * seconds for name, seconds in metrics.items()}}


def test_measured_are_medians_of_the_steps_after_the_first():
    compared = compare(saved(), [record(1, 50.0), record(2, 1.0), record(3, 9.0), record(4, 1.0)], after=1)
    assert compared.steps == 3
    assert compared.seconds == {
        "actor.generate": (4.0, 8.0),
        "reference.logprobs": (1.0, 1.0),
        "reward.scores": (2.0, 2.5),  # by itself, not the whole timer with a Python function in it
        "actor.train": (3.0, 2.0),
        "step": (8.0, 10.0),
    }
    assert [row["error"] for row in compared.rows()] == ["-50 %", "+0 %", "-20 %", "+50 %", "-20 %"]
    document = compared.to_json()
    assert document["steps_measured"] == 3 and document["step"] == {"predicted": 8.0, "measured": 10.0}
    assert document["calls"]["actor.train"] == {"predicted": 3.0, "measured": 2.0}


def test_without_steps_nothing_is_measured():
    records = [record(1, 1.0), {"step": 5, "eval/reward": 0.5}]
    compared = compare(saved(), records, after=1)
    assert compared.steps == 0 and {measured for _, measured in compared.seconds.values()} == {None}
    assert {row["error"] for row in compared.rows()} == {""}


def test_calls_that_are_fused_are_measured_together():
    both = {"step": 2, "timing_s/update_actor": 4.0, "timing_s/step": math.nan}
    fused = saved(fuse=("actor.train", "reward.scores"))  # each of the two has the seconds of both
    fused = dataclasses.replace(fused, calls={**fused.calls, **dict.fromkeys(fused.plan.fuse, CallForecast(5.0, 0))})
    compared = compare(fused, [both], after=1)
    assert compared.seconds["actor.train + reward.scores"] == (5.0, 4.0)
    assert "actor.train" not in compared.seconds
