"""Short training curves, kept beside this file: what a later change must not change.

    CURVES=bitwise python -m pytest tests/golden # to the last bit, on the machine that wrote them
    CURVES=write python -m pytest tests/golden   # writes them again, with the reason in the same commit

Another processor, or another version of JAX, adds up in another order; so elsewhere they are compared to `TOLERANCE`.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxrlhf
from jaxrlhf.observe.metrics import without_times


def characters(completions: list[str], partial_credit: float) -> list[float]:
    """A reward that hardly two completions have the same of: without any, advantages would be rounding, whitened."""
    return [partial_credit * sum(ord(c) % 16 for c in text) / max(len(text), 1) for text in completions]


REWARD = {"function": characters}
CURVES = Path(__file__).parent / "curves.json"
TOLERANCE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}
STEPS = 4
MODEL = {"preset": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
# A larger eps, as in tests/invariance: Adam would turn rounding of gradients that are all but zero into whole steps.
OPTIMIZER = {"learning_rate": 2.0e-3, "eps": 1.0e-5, "schedule": "constant", "warmup_updates": 0}
ROLE = {"model": MODEL, "optimizer": OPTIMIZER}
UPDATE = {"mini_batches": 2}
WARM_START = {"steps": 4, "batch_size": 32, "updates_per_step": 4}
RUNS: dict[str, dict[str, Any]] = {
    "ppo_arithmetic": {
        "roles": {"actor": ROLE, "critic": {"optimizer": OPTIMIZER}, "reward": REWARD},
        "settings": {"actor_update": UPDATE, "critic_update": UPDATE},
        "warm_start": WARM_START,
    },
    "grpo_arithmetic": {
        "roles": {"actor": ROLE, "reward": REWARD},
        "settings": {"actor_update": UPDATE},
        "warm_start": WARM_START,
    },
    "sft_arithmetic": {"roles": {"actor": ROLE}, "settings": {"update": UPDATE}},
    # a reference of its own: next to the actor's weights, which of two responses is preferred is rounding
    "dpo_arithmetic": {
        "roles": {"actor": ROLE, "reference": {"init": "random", "model": MODEL}},
        "settings": {"update": UPDATE},
        "warm_start": WARM_START,
    },
    "reward_model_arithmetic": {
        "roles": {"reward": {**ROLE, "model": {**MODEL, "head": "scalar"}}},
        "settings": {"update": UPDATE},
    },
}


def curve(config: str, folder: Path) -> list[dict[str, Any]]:
    """The metrics of every step and evaluation of a run on one device, but for times."""
    run = jaxrlhf.train(
        config,
        quiet=True,
        steps=STEPS,
        batch_size=16,
        devices="cpu:8",
        plan={"default": {"data": 1}},
        evaluation={"every": 2, "num_prompts": 16},
        output={"folder": str(folder), "tensorboard": False, "timeline": False},
        compilation_cache="",
        **RUNS[config],
    )
    return [without_times(record) for record in run.records]


@pytest.mark.parametrize("config", RUNS)
def test_curve_is_as_it_was(config, tmp_path):
    got, curves, mode = curve(config, tmp_path), json.loads(CURVES.read_text()), os.environ.get("CURVES")
    if mode == "write":
        CURVES.write_text(json.dumps({**curves, config: got}, indent=1) + "\n")
        return
    expected = curves[config]
    if mode == "bitwise":
        assert got == expected
    assert [sorted(record) for record in got] == [sorted(record) for record in expected]
    for is_now, was in zip(got, expected, strict=True):
        for name, value in was.items():
            np.testing.assert_allclose(is_now[name], value, **TOLERANCE, err_msg=f"{name}, step {was['step']}")


@pytest.mark.parametrize("config", RUNS)
def test_curves_are_worth_comparing(config):
    """Losses are there, and move."""
    records = [record for record in json.loads(CURVES.read_text())[config] if any("loss" in name for name in record)]
    losses = [next(value for name, value in record.items() if "loss" in name) for record in records]
    assert len(losses) >= STEPS and len(set(losses)) == len(losses)
