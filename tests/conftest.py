"""What every test runs under: eight virtual CPU devices, strict JAX, a compilation cache, and checked shapes."""

import gc
import os
import pathlib
from collections.abc import Callable

from jaxrlhf.xla_flags import known_flags

os.environ["JAX_PLATFORMS"] = "cpu"
# Images of containers often set it. Every process that a test starts would compile the source of all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Many tiny programs: compiling is what takes the time. The older of two code generators takes half as long, where XLA
# still has it.
os.environ["XLA_FLAGS"] = " ".join([
    *os.environ.get("XLA_FLAGS", "").split(),
    *(f"--{name}={value}" for name, value in known_flags({
        "xla_force_host_platform_device_count": 8,
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": "false",
        "xla_cpu_parallel_codegen_split_count": 1,
    }).items()),
])  # fmt: skip

import beartype
import hypothesis
import jax
import jaxtyping
import pytest

CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "compilations"

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples in every run, however slow the machine.
hypothesis.settings.register_profile("jaxrlhf", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxrlhf")

# Calls into these rooms have the types and shapes of their arguments and results checked. The other rooms are left out:
# tracing and runtime put references and shardings where arrays will be, and the planner's inner loops would crawl.
CHECKED_ROOMS = ["jaxrlhf.algorithms", "jaxrlhf.generation", "jaxrlhf.models"]


def check_function(function: Callable) -> Callable:
    """Checks a function, but not the making of a dataclass.

    JAX rebuilds a tree's dataclasses through `__init__` whenever it maps it, with leaves that need not be arrays (None,
    a reference, a ShapeDtypeStruct, the integers of in_axes). And settings refuse a value with a message of their own.
    The numeric tower lets 1 stand for 1.0.
    """
    if function.__name__ == "__init__":
        return function
    return beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))(function)


# The hook wants a name that it can import; pytest has put this module into `sys.modules` under its own.
jaxtyping.install_import_hook(CHECKED_ROOMS, f"{__name__}.check_function")


gc.set_threshold(50_000, 20, 50)  # tracing makes objects by the million, few of them garbage

LONGEST = ("invariance", "end_to_end")
"""Folders whose tests come first: a long one at the end of the suite would run beside an idle worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Leaves what importing and collecting have made out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


MOST_RESIDENT_BYTES = 4 * 2**30
"""A worker that has grown beyond this drops its compiled programs between two files of tests."""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path == item.path:
        return
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MOST_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
