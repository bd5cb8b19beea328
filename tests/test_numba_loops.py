"""Loops of several modules, compiled together and kept on disk."""

import importlib
import sys

import pytest

from jaxrlhf import numba_loops


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_kept_on_disk_follows_changes_in_any_of_the_modules(compiled, tmp_path, monkeypatch):
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own files go by the second
    (tmp_path / "loops_above.py").write_text(
        "from loops_below import ONE, twice\n\ndef both(x):\n    return twice(x) + ONE\n"
    )
    results = []
    for factor, one in ((2, 1), (2, 1), (3, 1), (3, 5)):
        (tmp_path / "loops_below.py").write_text(f"ONE = {one}\n\ndef twice(x):\n    return {factor} * x\n")
        for name in ("loops_below", "loops_above"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        numba_loops._compiled.cache_clear()
        modules = [importlib.import_module(name) for name in ("loops_below", "loops_above")]
        functions = numba_loops.loops(*modules, compiled=compiled)
        results.append(int(functions["both"](10)))
        hits = sum(functions["both"].stats.cache_hits.values()) if compiled else len(results) == 2
        assert hits == (len(results) == 2)
    assert results == [21, 21, 31, 35]


def test_functions_of_modules_that_do_not_go_along_are_refused():
    pytest.importorskip("numba")
    from jaxrlhf.planner.search import chain_loops

    with pytest.raises(AssertionError, match=r"fit of jaxrlhf.planner.search.evaluate_loops must go along"):
        numba_loops.loops(chain_loops, compiled=True)
