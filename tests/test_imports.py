"""The architecture, held: imports go down the layers, one file asks for devices, and every module says what it owns."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "jaxrlhf").rglob("*.py"))

# Top to bottom. A room is a folder of the package, or a file beside them. It may import itself and what lies below it,
# at the top of a file or in a function. The files of `planner` itself lie above its rooms, but for its workload.
LAYERS = [
    {"api", "calibrate"},
    {"train", "plan", "timeline", "report", "testing", "calibration"},
    {"run"},
    {"configured"},
    {"execution"},
    {"pages"},
    {"observe"},
    {"planner"},
    {"planner.fusion"},
    {"planner.search", "planner.compiled"},
    {"planner.costs"},
    {"planner.plans"},
    {"planner.workload"},
    {"programs", "cluster", "checkpoint"},
    {"config"},
    {"algorithms", "data", "rewards", "reshard", "schedules"},
    {"generation"},
    {"models"},
    {"sharding", "tracing"},
    {"call_graph"},
    {"importing", "name_rules"},
    {"experience"},
    {"require"},
    {"brief", "writing", "xla_flags", "numba_loops", "huge_pages"},
]
DEPTH = {room: depth for depth, layer in enumerate(LAYERS) for room in layer}
ONLY = {
    "algorithms": {"algorithms", "tracing", "experience", "require"},
    "schedules": {"schedules", "numba_loops", "brief"},
}
"""Rooms that may import less than all that lies below them."""
OF_PACKAGE = ("api", "huge_pages")
"""Rooms that the package itself imports."""
MOST_FILES, MOST_LINES = 25, 4_000
"""The most files and lines of a room, so that one finds the way in it without a list."""
BY_NAME = {"jaxrlhf.importing", "jaxrlhf.observe.trackers"}
"""Modules that import by a string: a user's own modules, and a tracker that need not be installed."""
ASKS_FOR_DEVICES = "jaxrlhf.sharding.mesh"
VAGUE = {"utils", "util", "common", "helpers", "base", "manager", "misc"}
NOT_AT_RUN_TIME = {"torch", "transformers"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node of a tree, without what only a type checker reads."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from running(child)


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module imports, `from a import b` as a.b. Relative ones start at `package`."""
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room of a module, or of what is in one: `jaxrlhf.models.heads` is in models, `jaxrlhf.planner.search.choices`
    in planner.search; the package itself in none."""
    parts = name.split(".")[1:3]
    return ".".join(parts) if ".".join(parts) in DEPTH else "".join(parts[:1])


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module does that the architecture forbids."""
    tree = ast.parse(source)
    found = []
    package = module if is_package else module.rpartition(".")[0]
    home = room(module)
    if home and home not in DEPTH:
        found.append(f"is in an unknown room {home!r}: give it a layer in tests/test_imports.py")
    imported = list(imports(tree, package))
    for name in imported:
        if name.partition(".")[0] in NOT_AT_RUN_TIME:
            found.append(f"imports {name}, which is not there at run time")
        if not name.startswith("jaxrlhf.") or name == "jaxrlhf.__version__" or room(name) == home:
            continue
        if room(name) not in DEPTH:
            found.append(f"imports {name}, from an unknown room")
        elif room(name) not in OF_PACKAGE if not home else (home in DEPTH and DEPTH[room(name)] <= DEPTH[home]):
            found.append(f"imports {name}, which does not lie below it")
        elif home in ONLY and room(name) not in ONLY[home]:
            found.append(f"imports {name}, where {home} may import only {', '.join(sorted(ONLY[home]))}")
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    for name in ("jax.devices", "jax.local_devices"):
        if module != ASKS_FOR_DEVICES and (name in attributes or name in imported):
            found.append(f"uses {name}, which is for {ASKS_FOR_DEVICES} alone")
    if {"importlib.import_module", "__import__"} & {*attributes, *imported, *called} and module not in BY_NAME:
        found.append("imports by a string: what it needs lies below it")
    if vague := VAGUE.intersection(module.split(".")):
        found.append(f"is called {', '.join(vague)}, which says nothing")
    if not ast.get_docstring(tree):
        found.append("has no docstring")
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_architecture(path):
    assert violations(path.read_text(), module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=lambda path: path.name)
def test_no_room_is_too_large(folder):
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert len(files) <= MOST_FILES and lines <= MOST_LINES


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("jaxrlhf.models.heads", "'.'\nimport jaxrlhf.execution.executor", "imports jaxrlhf.execution.executor, which"),
        ("jaxrlhf.models.heads", "'.'\nfrom jaxrlhf import config", "imports jaxrlhf.config, which does not lie below"),
        (
            "jaxrlhf.models.heads",
            "'.'\ndef f():\n    from jaxrlhf.data.loader import x",
            "imports jaxrlhf.data.loader.x",
        ),
        ("jaxrlhf.models.heads", "'.'\nfrom ..programs import roles", "imports jaxrlhf.programs.roles, which does not"),
        ("jaxrlhf.data.loader", "'.'\nimport jaxrlhf.rewards", "imports jaxrlhf.rewards, which does not lie below"),
        (
            "jaxrlhf.call_graph",
            "'.'\nfrom jaxrlhf.tracing import trace",
            "imports jaxrlhf.tracing.trace, which does not",
        ),
        ("jaxrlhf.train", "'.'\nimport jaxrlhf.plan", "imports jaxrlhf.plan, which does not lie below"),
        ("jaxrlhf.algorithms.ppo", "'.'\nfrom jaxrlhf.sharding.mesh import make", "algorithms may import only"),
        (
            "jaxrlhf.planner.costs.work",
            "'.'\nfrom jaxrlhf.planner.search import choices",
            "imports jaxrlhf.planner.search.choices, which does not",
        ),
        (
            "jaxrlhf.programs.roles",
            "'.'\nimport jaxrlhf.planner.plans.plan",
            "imports jaxrlhf.planner.plans.plan, which",
        ),
        ("jaxrlhf.run.trainer", "'.'\nimport importlib\nimportlib.import_module('x')", "imports by a string"),
        ("jaxrlhf.run.trainer", "'.'\nfrom importlib import import_module", "imports by a string"),
        ("jaxrlhf.run.trainer", "'.'\n__import__('x')", "imports by a string"),
        ("jaxrlhf", "'.'\nimport jaxrlhf.suggest", "imports jaxrlhf.suggest"),
        ("jaxrlhf.models.heads", "'.'\nimport jaxrlhf.nowhere", "imports jaxrlhf.nowhere, from an unknown room"),
        ("jaxrlhf.nowhere", "'.'", "is in an unknown room 'nowhere'"),
        ("jaxrlhf.models.heads", "'.'\nimport jax\nx = len(jax.devices())", "uses jax.devices, which is for jaxrlhf"),
        ("jaxrlhf.models.heads", "'.'\nfrom jax import local_devices", "uses jax.local_devices"),
        ("jaxrlhf.models.heads", "'.'\nimport torch.nn", "imports torch.nn, which is not there at run time"),
        ("jaxrlhf.models.utils", "'.'", "is called utils"),
        ("jaxrlhf.models.heads", "import math", "has no docstring"),
    ],
)
def test_a_violation_is_found(module, source, expected):
    found = violations(source, module)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "jaxrlhf.models.heads",
            "from jaxrlhf.models import layers\nfrom . import params\nimport jaxrlhf.sharding.layout",
        ),
        ("jaxrlhf.models.heads", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxrlhf.train"),
        ("jaxrlhf.planner.make_plan", "from jaxrlhf.planner.search import choices"),
        ("jaxrlhf.run.run_folder", "from jaxrlhf import __version__\nimport jaxrlhf"),
        ("jaxrlhf.algorithms.ppo", "from jaxrlhf.tracing import compute\nfrom jaxrlhf.experience import Rollout"),
        ("jaxrlhf.tracing", "from jaxrlhf.call_graph import CallGraph"),
        ("jaxrlhf.sharding.mesh", "import jax\njax.devices()"),
        ("jaxrlhf.models.heads", "mesh = 1\nmesh.devices"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert violations(f"'.'\n{source}", module) == []


def test_commands_need_no_extra():
    extras = ["gguf", "jax_plugins", "math_verify", "matplotlib", "numba", "pandas", "wandb"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({extras}))"  # None: as if it were not installed
    names = ["api.names", "calibrate", "plan", "report", "timeline", "train"]
    commands = f"import scripts.convert, {', '.join(f'jaxrlhf.{name}' for name in names)}"
    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; {commands}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
