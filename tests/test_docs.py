"""The documentation says what the code says: every key of a config, every metric, and links that lead somewhere."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxrlhf
from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.dpo import DPOConfig, DPOUpdate
from jaxrlhf.algorithms.gspo import SequenceUpdate
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.algorithms.policy import PolicyConfig, PolicyUpdate, ReinforceUpdate
from jaxrlhf.algorithms.ppo import ActorCriticConfig, PPOConfig, ValueUpdate
from jaxrlhf.algorithms.ppo_ptx import PretrainingMix
from jaxrlhf.algorithms.ppo_shared import SharedUpdate
from jaxrlhf.algorithms.reward_model import RewardModelConfig, RewardModelUpdate
from jaxrlhf.algorithms.sft import SFTConfig, SupervisedUpdate
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.config.plan_config import Placement, PlanConfig, ResponseLengths, Tail
from jaxrlhf.config.reading import FORM, INLINE, keys_of, to_tree
from jaxrlhf.config.schema import (
    AverageConfig,
    EvaluationRunConfig,
    MemoryLimits,
    OptimizerConfig,
    OutputConfig,
    RoleConfig,
    RunConfig,
    StalenessConfig,
    WandbConfig,
    WarmStartConfig,
    load_run,
)
from jaxrlhf.data.arithmetic import ArithmeticConfig
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.retokenizing import OwnTokenizerConfig
from jaxrlhf.data.tokenizer import TokenizerConfig
from jaxrlhf.experience import Sampling
from jaxrlhf.models.config import PRESETS, ModelConfig, RopeScaling
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.observe.events import Event
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.observe.step_timers import timing_metrics
from jaxrlhf.observe.utilization import utilization_metrics
from jaxrlhf.rewards.built_in import VERIFIERS
from jaxrlhf.run.assembly import assemble
from jaxrlhf.run.step_metrics import TokenCounts, throughput_metrics

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]  # fmt: skip
CONFIGURATION = ROOT / "docs" / "configuration.md"
METRICS = ROOT / "docs" / "metrics.md"

WITH_EXAMPLES = [
    path
    for path in sorted((ROOT / "jaxrlhf").rglob("*.py"))
    if ">>>" in path.read_text() and path.parent.name != "api"  # tests/api/test_examples.py
]

SECTIONS: dict[str, type[Any]] = {
    "A run": RunConfig,
    "`devices_memory`": MemoryLimits,
    "`staleness`": StalenessConfig,
    "`data`": DataConfig,
    "`data.arithmetic`": ArithmeticConfig,
    "`tokenizer`": TokenizerConfig,
    "`roles.<role>`": RoleConfig,
    "`roles.<role>.model`": ModelConfig,
    "`roles.<role>.model.rope_scaling`": RopeScaling,
    "`roles.<role>.lora`": LoRAConfig,
    "`roles.<role>.average`": AverageConfig,
    "`roles.<role>.own_tokenizer`": OwnTokenizerConfig,
    "`roles.<role>.optimizer`": OptimizerConfig,
    "`settings` of algorithms that sample": PolicyConfig,
    "`settings` of algorithms with a critic": ActorCriticConfig,
    "`settings` of `ppo`": PPOConfig,
    **{
        f"`settings` of `{name}`": ALGORITHMS[name].config
        for name in (
            *("ppo_ptx", "ppo_shared", "safe_rlhf"),
            *("remax", "rloo", "reinforce_plus_plus", "grpo", "dr_grpo", "dapo", "gspo"),
        )
    },
    "`settings.sampling`": Sampling,
    "`settings.kl`": KLPenalty,
    "`settings.actor_update`": PolicyUpdate,
    "`settings.actor_update` of `remax` and `rloo`": ReinforceUpdate,
    "`settings.actor_update` of `gspo`": SequenceUpdate,
    "`settings.actor_update` of `ppo_shared`": SharedUpdate,
    "`settings.critic_update`": ValueUpdate,
    "`settings.pretraining`": PretrainingMix,
    "`settings` of `sft`": SFTConfig,
    "`settings.update`": SupervisedUpdate,
    "`settings` of `reward_model`": RewardModelConfig,
    "`settings.update` of `reward_model`": RewardModelUpdate,
    "`settings` of `dpo`": DPOConfig,
    "`settings.update` of `dpo`": DPOUpdate,
    "`plan`": PlanConfig,
    "`plan.lengths`": ResponseLengths,
    "`plan.calls.<call>`": Placement,
    "`plan.calls.<call>.tail`": Tail,
    "`warm_start`": WarmStartConfig,
    "`evaluation`": EvaluationRunConfig,
    "`output`": OutputConfig,
    "`output.wandb`": WandbConfig,
}
"""Heading in docs/configuration.md -> the dataclass that it describes."""


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_give_what_they_say(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    public = {name: getattr(jaxrlhf, name) for name in jaxrlhf.__all__}
    failed, tried = doctest.testmod(module, globs={**public, "jnp": jnp, **vars(module)})
    assert tried and not failed


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    parts = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert heading in found, f"{page.name} has no section {heading!r}: {list(found)}"
    return found[heading]


def table_rows(text: str) -> list[list[str]]:
    """The cells of tables' rows that begin with a name in backticks."""
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]


def shown_default(field: dataclasses.Field[Any]) -> str:
    """A field's default as the documentation writes it."""
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    if FORM in field.metadata:
        return f"`{json.dumps(field.metadata[FORM][2](field.default))}`"
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        usual = to_tree(type(default)())
        default = {key: value for key, value in to_tree(default).items() if value != usual[key]}
        if not default:
            return "its own"
    return f"`{json.dumps(to_tree(default))}`"


def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Key of a dataclass -> its type; inline fields give way to their own keys."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if INLINE in field.metadata:
            hints |= hints_of(hints.pop(field.name))
    return hints


def contained(hint: Any, outside: frozenset[Any] = frozenset()) -> set[type[Any]]:
    """The dataclasses that a type mentions, those that they contain, and those that they build on."""
    if hint in outside:
        return set()
    found = {hint} if dataclasses.is_dataclass(hint) and isinstance(hint, type) else set()
    inner = [*hints_of(hint).values(), *hint.__bases__] if isinstance(hint, type) and found else typing.get_args(hint)
    return found.union(*(contained(each, outside | found) for each in inner))


def own_fields(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """The keys of a dataclass that are not, with type and default, those of one that it builds on."""
    inherited = [
        field for base in cls.__bases__ if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    ]
    same = {(field.name, field.type, str(field.default)) for field in inherited}
    return [field for field in keys_of(cls).values() if (field.name, field.type, str(field.default)) not in same]


def test_every_dataclass_of_a_run_has_a_section():
    reachable = contained(RunConfig).union(*(contained(algorithm.config) for algorithm in ALGORITHMS.values()))
    assert set(SECTIONS.values()) == reachable - {PlacementStrategy}, "which has the keys that its section shows"


@pytest.mark.parametrize(("heading", "cls"), SECTIONS.items(), ids=lambda x: x if isinstance(x, str) else "")
def test_every_key_is_documented_with_its_default(heading, cls):
    rows = table_rows(section(CONFIGURATION, heading))
    fields = own_fields(cls)
    assert [(row[0], row[2]) for row in rows] == [(f"`{field.name}`", shown_default(field)) for field in fields]
    hints = hints_of(cls)
    for row, field in zip(rows, fields, strict=True):
        if typing.get_origin(hints[field.name]) is typing.Literal:
            assert row[1] == ", ".join(f"`{option}`" for option in typing.get_args(hints[field.name]))


@pytest.mark.parametrize("names", [ALGORITHMS, PRESETS, VERIFIERS], ids=["algorithms", "presets", "rewards"])
def test_everything_that_has_a_name_is_documented(names):
    text = CONFIGURATION.read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_shipped_config_is_listed_once():
    listed = re.findall(r"\]\(\.\./jaxrlhf/configs/(\w+)\.yaml\)", section(CONFIGURATION, "Files"))
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "jaxrlhf" / "configs").glob("*.yaml"))


def documented_metrics() -> list[str]:
    """The names in docs/metrics.md, without the table that compares them with verl's."""
    described, _, _ = METRICS.read_text().partition("\n## Names\n")
    return [row[0].strip("`") for row in table_rows(described)]


def test_every_metric_is_documented_and_no_other():
    names: set[str] = set()
    for overrides in ([], ["settings.kl.placement=loss"]):
        run = assemble(load_run("ppo_arithmetic", overrides), num_devices=8)
        assert run.warm_start is not None
        for phase, above in ((run.train, None), (run.warm_start, "warm_start")):
            results = jax.tree.map(lambda _: 0.0, phase.graph.results[0])
            names |= set(flatten({above: results} if above else results))
        calls = [(call.name, call.kind) for call in run.train.graph.calls]
        others = [("actor.logprobs", "infer"), ("results", "wait")]
        timings = timing_metrics({call: [(0.0, 1.0)] for call in [*calls, *others]})
        names |= set(utilization_metrics([Event("actor.train", "train", (0,), 1, 0.0, 1.0)], 1, [0]))
        names |= {*timings, *throughput_metrics(TokenCounts(2, 1, 1.0, 1), timings, seconds=1.0, num_devices=1)}
    for name in ("dapo_arithmetic", "ppo_shared_arithmetic", "remax_arithmetic", "safe_rlhf_arithmetic"):
        stale = ["staleness=1"] if name == "remax_arithmetic" else []
        results = assemble(load_run(name, stale), num_devices=2).train.graph.results[0]
        names |= set(flatten(jax.tree.map(lambda _: 0.0, results)))
    for config in ("sft_arithmetic", "reward_model_arithmetic", "dpo_arithmetic"):
        run = assemble(load_run(config), num_devices=8)
        assert run.held_out is not None
        for phase, above in ((run.train, None), (run.held_out, "eval")):
            results = jax.tree.map(lambda _: 0.0, phase.graph.results[0])
            names |= set(flatten({above: results} if above else results))
    for module in ("trainer", "warm_start", "evaluation", "step_metrics"):
        source = (ROOT / "jaxrlhf" / "run" / f"{module}.py").read_text()
        names |= set(re.findall(r'"((?:perf|training|eval|timing_s|warm_start|staleness)/\w+)"', source))
    documented = documented_metrics()
    assert len(set(documented)) == len(documented)
    assert {name for name in documented if "<" not in name} == names


def test_the_names_that_differ_from_verl_s_are_names_of_ours():
    differing = {name for row in table_rows(section(METRICS, "Names")) for name in row[0].strip("`").split("`, `")}
    assert "kl/mean" in differing and differing <= set(documented_metrics())


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_example_of_the_docs_is_the_one_that_is_tested():
    page = ROOT / "docs" / "own_algorithm.md"
    code, config = code_blocks(page, "python")[0], code_blocks(page, "yaml")[0]
    assert code.startswith("import dataclasses") and (ROOT / "examples" / "raft.py").read_text().endswith(code)
    assert (ROOT / "examples" / "raft_arithmetic.yaml").read_text() == config


def body(step: Callable[..., Any]) -> list[str]:
    """The lines of a step function after its docstring."""
    lines = textwrap.dedent(inspect.getsource(step)).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.FunctionDef)
    return [line[4:] for line in lines[definition.body[1].lineno - 1 :]]


@pytest.mark.parametrize(("heading", "name"), [("PPO beside ReMax", "remax"), ("PPO beside Safe RLHF", "safe_rlhf")])
def test_steps_stand_side_by_side_as_they_are(heading, name):
    (block,) = re.findall(r"```diff\n(.*?)```", section(ROOT / "docs" / "algorithms.md", heading), flags=re.DOTALL)
    lines = [(line[0], line[2:]) for line in block.splitlines()]
    assert [text for mark, text in lines if mark != "+"] == body(ALGORITHMS["ppo"].step)
    assert [text for mark, text in lines if mark != "-"] == body(ALGORITHMS[name].step)


def test_every_algorithm_is_in_the_table():
    rows = table_rows(section(ROOT / "docs" / "algorithms.md", "The family").replace("| [`", "| `"))
    named = {name for row in rows for name in re.findall(r"`(\w+)`\]\(", "[" + row[0])}
    assert named == set(ALGORITHMS)


def test_every_module_is_in_the_picture_of_the_architecture():
    picture = section(ROOT / "docs" / "architecture.md", "File by file")
    modules = [path.name for path in (ROOT / "jaxrlhf").rglob("*.py") if path.name != "__init__.py"]
    drawn = re.findall(r"^ +(\w+\.py) ", picture, flags=re.MULTILINE)
    assert sorted(drawn) == sorted(modules)


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub finds a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:", link)]
    for link in links:
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT), f"{page.name} links to {link}"
        assert not fragment or fragment in anchors(target), f"{page.name} links to {link}"
