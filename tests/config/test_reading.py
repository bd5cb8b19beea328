"""Every message of `reading`, and that nothing but a dataclass or a ConfigError comes out."""

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import hypothesis
import hypothesis.strategies as st
import pytest
from flax.core import FrozenDict

from jaxrlhf.algorithms.grpo import GRPOConfig
from jaxrlhf.algorithms.kl import KLPenalty
from jaxrlhf.config import reading
from jaxrlhf.config.reading import (
    ConfigError,
    apply_overrides,
    build,
    dump_yaml,
    find_config,
    read_config,
    read_yaml,
    to_tree,
)
from jaxrlhf.config.strict_yaml import parse
from jaxrlhf.experience import Sampling


@dataclasses.dataclass(frozen=True)
class Plan:
    tensor: int = 1
    remat: Literal["none", "full"] = "none"

    def __post_init__(self):
        if self.tensor == 3:
            raise ValueError("tensor: 3 does not divide num_heads=8. Use 1, 2, 4 or 8.")
        if self.tensor == 5:
            raise ValueError("plan: must be a good one. Got 5.")


@dataclasses.dataclass(frozen=True)
class Role:
    model: str
    plan: Plan = Plan()
    learning_rate: float = 1e-5
    init: str | None = None
    frozen: bool = False
    options: Any = None

    def __post_init__(self):
        if self.model == "bad":
            raise ValueError("This model is bad.")


@dataclasses.dataclass(frozen=True)
class Run:
    actor: Role
    sampling: Sampling = Sampling()
    roles: Mapping[str, Role] = FrozenDict()
    betas: tuple[float, float] = (0.9, 0.95)
    layers: tuple[int, ...] = ()
    names: Mapping[str, list[str]] = FrozenDict()


TREE = {
    "actor": {
        "model": "tiny",
        "plan": {"tensor": 2, "remat": "full"},
        "learning_rate": 1,
        "options": {"a": [{"b": 1}]},
    },
    "sampling": {"temperature": 0.5, "stop_ids": [0, 7]},
    "roles": {"critic": {"model": "tiny", "init": "actor"}, "judge": {"model": "large", "init": None, "frozen": True}},
    "betas": [0.8, 1],
    "layers": [3],
    "names": {"x": ["y", "z"]},
}


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_build():
    run = build(Run, TREE, where="x.yaml")
    assert run.actor == Role("tiny", Plan(2, "full"), 1.0, options=FrozenDict({"a": ({"b": 1},)}))
    assert type(run.actor.learning_rate) is float
    assert run.sampling == Sampling(temperature=0.5, stop_ids=(0, 7))
    assert run.roles["judge"] == Role("large", frozen=True)
    assert (run.betas, run.layers) == ((0.8, 1.0), (3,))
    assert dict(run.names) == {"x": ("y", "z")}
    hash(run)


def test_defaults():
    run = build(Run, {"actor": {"model": "tiny"}}, where="x.yaml")
    assert run == Run(Role("tiny"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.plan.tensor=two", "actor.plan.tensor: expected an integer. Got 'two'. Write a whole number such as 2."),
        ("actor.plan.tensor=2.0", "actor.plan.tensor: expected an integer. Got 2.0. Write 2."),
        ("actor.plan.tensor=.inf", "actor.plan.tensor: expected an integer. Got inf. Write a whole number such as 2."),
        ("actor.plan.tensor=true", "actor.plan.tensor: expected an integer. Got True."),
        ("actor.plan.tensor=null", "actor.plan.tensor: expected an integer. Got null."),
        ("actor.plan.tensor=3", "actor.plan.tensor: 3 does not divide num_heads=8. Use 1, 2, 4 or 8."),
        ("actor.plan.tensor=5", "actor.plan: must be a good one. Got 5."),
        ("actor.plan.remat=ful", "actor.plan.remat: expected one of none, full. Got 'ful'. Did you mean 'full'?"),
        ("actor.plan.remat=1", "actor.plan.remat: expected one of none, full. Got 1."),
        ("actor.plan=2", "actor.plan: expected a mapping. Got 2. Write `key: value` lines."),
        ("actor.model=bad", "actor: This model is bad."),
        ("actor.model=7", "actor.model: expected text. Got 7. Put text that YAML takes for something else in quotes."),
        (
            "actor.learning_rate='1e-5'",
            "actor.learning_rate: expected a number. Got '1e-5'. Write a number such as 0.1.",
        ),
        ("actor.learning_rate=true", "actor.learning_rate: expected a number. Got True."),
        ("actor.learning_rate=.nan", "actor.learning_rate: expected a number. Got nan."),
        (f"actor.learning_rate={10**400}", "actor.learning_rate: expected a number. Got 1000"),
        (
            "actor.lerning_rate=1",
            "actor: unknown key 'lerning_rate'. Known: model, plan, learning_rate, init, frozen, "
            "options. Did you mean 'learning_rate'?",
        ),
        (
            "acter.model=tiny",
            "unknown key 'acter'. Known: actor, sampling, roles, betas, layers, names. Did you mean 'actor'?",
        ),
        ("actor={}", "actor.model: required. Got nothing. Write `model: ...`."),
        ("actor.frozen=1", "actor.frozen: expected true or false. Got 1. Write true or false."),
        ("actor.init=[a]", "actor.init: expected text. Got ['a']."),
        ("roles.critic.plan.tensor=a", "roles.critic.plan.tensor: expected an integer. Got 'a'."),
        ("roles=[critic]", "roles: expected a mapping. Got ['critic']. Write `key: value` lines."),
        ("layers=3", "layers: expected a list. Got 3. Write [a, b]."),
        ("layers=[1, a]", "layers[1]: expected an integer. Got 'a'."),
        ("betas=[1]", "betas: expected a list of 2. Got [1]."),
        ("names.x=[1]", "names.x[0]: expected text. Got 1."),
        ("sampling.temperature=-1", "sampling.temperature: must be finite and not negative. Got -1.0."),
    ],
)
def test_build_errors(override, message):
    tree = apply_overrides(TREE, [override])
    with pytest.raises(ConfigError, match=f"^{re.escape(f'x.yaml: {message}')}"):
        build(Run, tree, where="x.yaml")


def test_the_place_of_a_part_stands_in_errors():
    with pytest.raises(ConfigError, match=r"^x\.yaml: a\.b\.tensor: expected an integer"):
        build(Plan, {"tensor": "two"}, where="x.yaml", path="a.b")
    with pytest.raises(ConfigError, match=r"^x\.yaml: expected a mapping\. Got \[\]"):
        build(Plan, [], where="x.yaml")
    with pytest.raises(ConfigError, match=r"^x\.yaml: a key must be text\. Got 1\."):
        build(Plan, {1: 2}, where="x.yaml")


def test_a_field_of_an_impossible_type_is_our_error():
    @dataclasses.dataclass(frozen=True)
    class Bytes:
        value: bytes

    with pytest.raises(TypeError, match=r"value: no config can hold a field of type <class 'bytes'>"):
        build(Bytes, {"value": 1}, where="x.yaml")


def test_overrides():
    tree = {"a": {"b": 1, "c": None}, "d": [1]}
    overrides = ["a.b=1e-3", "a.c.x.y=[1, two]", "new.key='3'", "d={e: null}", "url=a=b", "n=null", "text=''"]
    assert apply_overrides(tree, overrides) == {
        "a": {"b": 0.001, "c": {"x": {"y": [1, "two"]}}},
        "new": {"key": "3"},
        "d": {"e": None},
        "url": "a=b",
        "n": None,
        "text": "",
    }
    assert tree == {"a": {"b": 1, "c": None}, "d": [1]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "--set: expected key.key=value. Got 'a.b'. Write null or '' for no value."),
        ("a.b=", "--set: expected key.key=value. Got 'a.b='."),
        ("=3", "--set: expected key.key=value. Got '=3'."),
        ("a..b=3", "--set: expected key.key=value. Got 'a..b=3'."),
        ("a.b =3", "--set: expected key.key=value. Got 'a.b =3'."),
        ("a.b=[1", "--set a.b, line 1, column 3: expected ',' or ']'"),
        ("a.b=off", "--set a.b, line 1, column 1: off is ambiguous in YAML."),
        ("a.d.e=1", "--set a.d.e: a.d has no keys. Got 3. Set it whole."),
    ],
)
def test_override_errors(override, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        apply_overrides({"a": {"d": 3}}, [override])


def test_read_yaml_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^x\.yaml: cannot be read: No such file or directory\."):
        read_yaml("x.yaml")
    write(tmp_path, "list.yaml", "- a")
    with pytest.raises(ConfigError, match=r"^list\.yaml: expected a mapping\. Got \['a'\]\. Write `key: value` lines"):
        read_yaml(tmp_path / "list.yaml")
    write(tmp_path, "empty.yaml", "# nothing")
    with pytest.raises(ConfigError, match=r"^empty\.yaml: expected a mapping\. Got null\."):
        read_yaml("empty.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(ConfigError, match=r"^latin\.yaml: must be UTF-8 text\. Got the byte 0xe9\."):
        read_yaml("latin.yaml")
    write(tmp_path, "twice.yaml", "a: 1\na: 2")
    with pytest.raises(ConfigError, match=r"^twice\.yaml, line 2, column 1: key 'a' is given twice"):
        read_yaml("twice.yaml")


def test_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path, "a.yaml", "base: sub/b.yaml\nactor: {plan: {tensor: 4}}\nlist: [3]\nx: null")
    write(tmp_path, "sub/b.yaml", "base: ../c.yaml\nactor: {model: m}\nlist: [1, 2]")
    write(tmp_path, "c.yaml", "actor: {plan: {tensor: 1, remat: full}}\nx: {y: 1}\nz: 0")
    tree, where = read_config("a.yaml")
    assert tree == {"actor": {"plan": {"tensor": 4, "remat": "full"}, "model": "m"}, "list": [3], "x": None, "z": 0}
    assert where == "a.yaml over sub/b.yaml over sub/../c.yaml"


def test_base_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.yaml", "base: b.yaml")
    write(tmp_path, "b.yaml", "base: a.yaml")
    with pytest.raises(ConfigError, match=r"^b\.yaml: base: must not lead back to itself\. Got a.yaml -> b.yaml -> a"):
        read_config("a.yaml")
    write(tmp_path, "c.yaml", "base: [a]")
    with pytest.raises(ConfigError, match=r"^c\.yaml: base: expected the name of a config or a path\. Got \['a'\]\."):
        read_config("c.yaml")
    write(tmp_path, "d.yaml", "base: e.yaml")
    with pytest.raises(ConfigError, match=r"^e\.yaml: no such file\."):
        read_config("d.yaml")


def test_find_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = {"ppo_arithmetic": write(tmp_path, "ppo_arithmetic.yaml", "a: 1"), "sft": tmp_path / "sft.yaml"}
    monkeypatch.setattr(reading, "_shipped", lambda: shipped)
    assert find_config("ppo_arithmetic") == tmp_path / "ppo_arithmetic.yaml"
    assert find_config("ppo_arithmetic.yaml").is_file()
    with pytest.raises(
        ConfigError,
        match=r"^Unknown config 'ppo_arith'\. Known: ppo_arithmetic, sft; or a path ending "
        r"in \.yaml\. Did you mean 'ppo_arithmetic'\?",
    ):
        find_config("ppo_arith")
    with pytest.raises(ConfigError, match=r"^runs/x: no such file\. Give a path, or one of: ppo_arithmetic, sft\."):
        find_config("runs/x")


def test_shipped_configs_are_found_by_name():
    for name, path in reading._shipped().items():
        assert find_config(name) == path
        read_config(name)


NAMES = st.text("abc_", min_size=1, max_size=5)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
PLANS = st.builds(Plan, tensor=INTEGERS.filter(lambda n: n not in (3, 5)), remat=st.sampled_from(["none", "full"]))
ROLES = st.builds(
    Role,
    model=st.text().filter(lambda name: name != "bad"),
    plan=PLANS,
    learning_rate=st.floats(allow_nan=False),
    init=st.none() | st.text(),
    frozen=st.booleans(),
    options=st.none() | st.builds(FrozenDict, st.dictionaries(NAMES, NAMES)),
)
RUNS = st.builds(
    Run,
    actor=ROLES,
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 2),
        stop_ids=st.tuples(INTEGERS),
        logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=2),
        stop_strings=st.tuples(st.text(min_size=1, max_size=3)),
    ),
    roles=st.builds(FrozenDict, st.dictionaries(st.text(), ROLES, max_size=2)),
    layers=st.tuples(INTEGERS, INTEGERS),
    names=st.builds(FrozenDict, st.dictionaries(NAMES, st.tuples(NAMES), max_size=2)),
)


@hypothesis.given(RUNS)
def test_a_config_that_is_written_reads_back(run):
    assert build(Run, to_tree(run), where="x.yaml") == run
    assert build(Run, parse(dump_yaml(run), where="x.yaml"), where="x.yaml") == run


def paths(tree, path=()):
    """The path of every value inside a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just(math.inf),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
)


MUTATIONS = st.tuples(st.integers(0), st.sampled_from(["replace", "remove", "add"]), VALUES)


@hypothesis.given(st.lists(MUTATIONS, max_size=4))
def test_any_mutation_builds_or_is_a_config_error(mutations):
    tree: Any = copy.deepcopy(TREE)
    for position, action, value in mutations:
        places = list(paths(tree))
        if not places:
            break
        *parents, key = places[position % len(places)]
        holder = tree
        for parent in parents:
            holder = holder[parent]
        if action == "replace":
            holder[key] = value
        elif action == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[f"{key}_"] = value
    try:
        hash(build(Run, tree, where="x.yaml"))
    except ConfigError as error:
        assert str(error).startswith("x.yaml: ")


def test_what_a_mapping_leaves_out_stays_as_it_was_where_it_belongs():
    config = build(GRPOConfig, {"kl": {"coef": 0.5}, "sampling": {"max_new_tokens": 4}}, where="run.yaml")
    assert config.kl == KLPenalty(estimator="k3", placement="loss", coef=0.5)
    assert config.sampling == Sampling(max_new_tokens=4, num_samples=8)
    assert build(GRPOConfig, to_tree(config), where="run.yaml") == config
