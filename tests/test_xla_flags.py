"""Flags of XLA are asked for before they are set."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.xla_flags import known_flags

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("jaxrlhf", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
FLAGS: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_made_up": 1}


def test_a_flag_that_xla_does_not_know_is_left_out():
    assert known_flags(FLAGS) == {"xla_backend_optimization_level": 0}
    assert known_flags({"xla_backend_optimization": 0, "backend_optimization_leve": 0}) == {}


def test_xla_agrees():
    def compiled(**flags: Any) -> jax.stages.Compiled:
        return jax.jit(lambda x: x + 1).lower(jnp.zeros(2)).compile(flags)

    assert compiled(**known_flags(FLAGS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_made_up"):
        compiled(**FLAGS)


def test_whoever_names_a_flag_asks_for_it():
    texts = {path: path.read_text() for path in SOURCES if path != Path(__file__)}
    naming = {path: text for path, text in texts.items() if re.search(r"""["' ](--)?xla_(?!flags)[a-z_]+["'=]""", text)}
    assert ROOT / "tests" / "conftest.py" in naming
    assert [path for path, text in naming.items() if "import known_flags" not in text] == []
