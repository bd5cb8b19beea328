"""Keys are of content, and files are whole."""

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.costs.cache import CostCache, default_folder, fingerprint, source_digest
from tests.subprocesses import ROOT


@dataclasses.dataclass(frozen=True)
class Thing:
    a: object = 1
    b: object = 2


def double(x, times=2):
    return x * times


VALUES = [
    None, True, 1, 1.0, "1", (1,), [1], (1, 2), ((1,), 2), ((1, 2),), {"a": 1}, {"a": 2}, {"b": 1}, frozenset({1, 2}),
    Thing(), Thing(b=3), ModelConfig(), ModelConfig(num_layers=3), np.dtype("int32"), jnp.int32, jnp.float32,
    jax.ShapeDtypeStruct((2, 3), jnp.int32), jax.ShapeDtypeStruct((3, 2), jnp.int32), double,
    functools.partial(double, times=3), functools.partial(double, times=4),
]  # fmt: skip


def test_fingerprints_differ_with_content_alone():
    assert len({fingerprint(value) for value in VALUES}) == len(VALUES)
    assert fingerprint(Thing("x" * 3)) == fingerprint(Thing("".join(["x", "xx"])))
    assert fingerprint(frozenset("abcdef")) == fingerprint(frozenset("fedcba"))


def test_fingerprints_are_the_same_in_every_process():
    program = (
        "from tests.planner.costs.test_cache import VALUES\n"
        "from jaxrlhf.planner.costs.cache import fingerprint, source_digest\n"
        "print(fingerprint(VALUES), source_digest())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [fingerprint(VALUES), source_digest()]


def test_what_has_no_known_content_is_refused():
    message = "value[1]['x'].a: must be data, or a function of a module, to be found again. Got object."
    with pytest.raises(TypeError, match=re.escape(message)):
        fingerprint([1, {"x": Thing(object())}])
    y = 3
    with pytest.raises(TypeError, match="must be data, or a function of a module"):
        fingerprint(lambda x: x + y)


def test_files_are_found_again_and_damaged_ones_are_not(tmp_path):
    cache = CostCache(tmp_path / "new" / "folder")
    assert cache.get("k") is None
    cache.put("k", {"a": [1, 2.5]})
    assert cache.get("k") == {"a": [1, 2.5]}
    assert [path.name for path in cache.folder.iterdir()] == ["k.json"]
    (cache.folder / "k.json").write_text('{"a": [1')
    assert cache.get("k") is None
    (cache.folder / "k.json").write_bytes(b"\xff\xfe")
    assert cache.get("k") is None


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "jaxrlhf" / "costs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "jaxrlhf" / "costs"
