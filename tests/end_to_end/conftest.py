"""A small version of ppo_arithmetic, run as the command runs it."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxrlhf.observe.metrics import read_metrics, without_times
from jaxrlhf.train import main

TINY = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
}
OPTIMIZER = {"learning_rate": 1e-3, "eps": 1e-5}  # eps: see tests/invariance/test_plans.py

CONFIG = {
    "base": "ppo_arithmetic",
    "name": "tiny",
    "steps": 3,
    "batch_size": 16,
    "data": {"arithmetic": {"digits": 1, "held_out": 4}},
    "roles": {
        "actor": {"model": TINY, "optimizer": OPTIMIZER},
        "critic": {"optimizer": OPTIMIZER},
    },
    "warm_start": {"steps": 4, "batch_size": 16, "updates_per_step": 2},
    "settings": {"actor_update": {"mini_batches": 2}, "critic_update": {"mini_batches": 1}},
    "evaluation": {"every": 2, "num_prompts": 16},
    "output": {"samples_every": 1, "num_samples": 2, "checkpoint_every": 2},
    "compilation_cache": "",
}


@pytest.fixture
def train(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in a folder of its own; returns exit status, standard output and error."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(*arguments: str, config: str = "tiny.yaml") -> tuple[int, str, str]:
        status = main(["--config", config, *arguments] if config else [*arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[..., Path]:
    """Runs the command once for all tests of a module; returns the folder of the run, which no test may change."""

    @functools.cache
    def run(*overrides: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("undisturbed"))
            Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
            assert main(["--config", "tiny.yaml", *(x for override in overrides for x in ("--set", override))]) == 0
            return Path("runs/latest").resolve()

    return run


@pytest.fixture
def results() -> Callable[..., list[dict]]:
    """The metrics of every step of a run, without the times."""

    def of(folder: str | Path = "runs/latest") -> list[dict]:
        steps = [record for record in read_metrics(Path(folder) / "metrics.jsonl") if "actor/pg_loss" in record]
        return [without_times(record) for record in steps]

    return of


@pytest.fixture
def tiny_model() -> dict[str, int]:
    return TINY


@pytest.fixture
def optimizer() -> dict[str, float]:
    return OPTIMIZER
