"""The examples in the docstrings of the Python door: they share one small run."""

import doctest
import importlib
from pathlib import Path

import pytest

import jaxrlhf as rl
from jaxrlhf.testing import small_run

ROOM = Path(__file__).parents[2] / "jaxrlhf" / "api"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What the examples are given: the package, a folder, a small config, and a run of it that has done two steps."""
    folder = tmp_path_factory.mktemp("examples")
    config = rl.read_config(
        small_run("rloo", steps=4, num_layers=1), output={"folder": str(folder)}, evaluation={"num_prompts": 8}
    )
    return {"rl": rl, "folder": folder, "config": config, "run": rl.Run(config, quiet=True).train(2)}


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in ROOM.glob("*.py") if ">>>" in path.read_text(encoding="utf-8"))
)
def test_examples_give_what_they_say(name, shared):
    module = importlib.import_module(f"jaxrlhf.api.{name}")
    failed, tried = doctest.testmod(module, extraglobs=dict(shared), optionflags=doctest.ELLIPSIS)
    assert tried and not failed
