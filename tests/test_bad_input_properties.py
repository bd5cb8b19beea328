"""Whatever a config or a data file holds, it is run or refused with a message that names the place; nothing else."""

import copy
import io
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pyarrow
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from jaxrlhf.config.reading import to_tree
from jaxrlhf.config.schema import load_run
from jaxrlhf.config.strict_yaml import to_text
from jaxrlhf.observe.console import Console
from jaxrlhf.train import InputError, prepare, read
from tests.small_run import CONFIG, ROWS, write_run

OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
           "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e300, float("inf"),
    float("-inf"), float("nan"), "", " ", "\0", "é", "\U0001f600", "a" * 5000, "²", "٣", "1e400", [], [1], [None], {},
    {"a": {}}, {"": 1}, [[1] * 5], "nowhere/x.jsonl", "../..", "rows.jsonl", "/", "{", "{prompt}", "{{ x }}", "{0}",
    "{prompt!z}", "{prompt[0]}", "actor", "critic", "reward", "exact", "cpu:0", "cpu:99999999", "0-99999999", "7,7",
    "arithmetic", "file", "train", "messages", "user", "os:system", "json:dumps", "scalar", "lm", "sft", "default",
]  # fmt: skip
"""Values to put where they may not belong."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[None]:
    """A folder with the small run; what a run sets in JAX is set back afterwards."""
    jax.devices()  # the devices are those of the tests, whatever a config asks for
    before, options = os.getcwd(), {name: getattr(jax.config, name) for name in OPTIONS}
    os.chdir(tmp_path_factory.mktemp("bad_input"))
    write_run(pathlib.Path())
    pathlib.Path("valid.yaml").write_text(CONFIG)
    yield
    os.chdir(before)
    for name, value in options.items():
        jax.config.update(name, value)


def places(tree: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all nodes of a tree, as keys and positions."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in inner for place in ((*above, key), *places(value, (*above, key)))]


def at(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        tree = tree[key]
    return tree


def mutated(tree: Any, draw: Any) -> Any:
    """The tree with something deleted, renamed, replaced, wrapped, doubled or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.draw(st.integers(1, 2))):
        *above, key = draw.draw(st.sampled_from(places(tree)))
        parent = at(tree, tuple(above))
        match draw.draw(
            st.sampled_from(["replace", "replace", "replace", "delete", "rename", "wrap", "double", "move"])
        ):
            case "replace":
                parent[key] = copy.deepcopy(draw.draw(st.sampled_from(VALUES)))
            case "delete":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[draw.draw(st.sampled_from([f"{key}x", key[:-1], key.upper(), "", "\0"]))] = parent.pop(key)
            case "wrap":
                parent[key] = draw.draw(st.sampled_from([[parent[key]], {"a": parent[key]}]))
            case "double" if isinstance(parent, dict):
                parent[f"{key}2"] = copy.deepcopy(parent[key])
            case _:
                parent[key] = copy.deepcopy(at(tree, draw.draw(st.sampled_from(places(tree)))))
        if not places(tree):
            break
    return tree


PIECES = ["", *"{}[]:,#&*!|>'\"%@`-?~\t\n \\0é\x07\ud800", "&a ", "*a", "<<: ", "- ", "!!x "]


def scrambled(text: str, draw: Any) -> str:
    """The text with a few characters put in, taken out or exchanged, or a piece of it repeated."""
    letters = list(text)
    for _ in range(draw.draw(st.integers(1, 4))):
        place = draw.draw(st.integers(0, len(letters) - 1))
        size = draw.draw(st.sampled_from([0, 0, 1, 1, 20]))
        new = draw.draw(
            st.sampled_from(["", *"{}[]:,#&*!|>'\"%@`-?~\t\n \\0é\x07\ud800", "&a ", "*a", "<<: ", "- ", "!!x "])
        )
        letters[place : place + size] = list(new)
    return "".join(letters)


def check(*names: str) -> None:
    """run.yaml can be run, or is refused by a message that holds one of the names and is of bearable length."""
    try:
        prepare(read("run.yaml", []), Console(quiet=True))
    except InputError as error:
        message = str(error)
        assert any(name in message for name in names), message
        assert len(message) < 20_000


def sections() -> set[str]:
    return {
        "run.yaml",
        "rows.",
        "Name of the run",
        *yaml.safe_load(CONFIG),
        "resume",
        "output",
        "tokenizer",
        "sampling",
    }


@settings(max_examples=120, suppress_health_check=SLOW)
@given(st.data())
def test_any_tree_is_run_or_refused(data):
    written = yaml.safe_load(CONFIG)
    tree = written if data.draw(st.booleans()) else to_tree(load_run("valid.yaml"))
    pathlib.Path("run.yaml").write_text(to_text(mutated(tree, data)), encoding="utf-8")
    check(*sections())


@settings(max_examples=100, suppress_health_check=SLOW)
@given(st.data())
def test_any_text_is_run_or_refused(data):
    text = scrambled(CONFIG, data).encode(errors="surrogatepass")
    pathlib.Path("run.yaml").write_bytes(text)
    check(*sections())


CHATS = [
    {"messages": [{"role": "system", "content": "é"}, {"role": "user", "content": str(i)}], "answer": str(i)}
    for i in range(12)
]
KINDS = {
    "text": (ROWS, "{eval_rows: 4, path: rows.%s}"),
    "filled in": (ROWS, "{eval_rows: 4, path: rows.%s, template: '{prompt:>9} {answer}', overlong: drop}"),
    "chats": (
        CHATS,
        "{eval_rows: 4, path: rows.%s, prompt_column: messages, chat: messages, chat_template: '{%% for m in messages "
        "%%}{{ m.role + m.content }}{%% endfor %%}'}",
    ),
}
"""Rows, and how a config reads them."""


def write_config(kind: str, suffix: str) -> list[Any]:
    """A config that reads `rows` with that suffix; returns valid rows."""
    rows, data = KINDS[kind]
    tree = yaml.safe_load(CONFIG) | {"data": yaml.safe_load(data % suffix)}
    if kind == "chats":
        tree |= {"warm_start": None}
    pathlib.Path("run.yaml").write_text(yaml.safe_dump(tree))
    return rows


@settings(max_examples=80, suppress_health_check=SLOW)
@given(st.data())
def test_any_lines_are_run_or_refused(data):
    rows = write_config(data.draw(st.sampled_from(list(KINDS))), "jsonl")
    if data.draw(st.booleans()):
        text = "\n".join(map(json.dumps, mutated(rows, data)))
    else:
        text = scrambled("\n".join(map(json.dumps, rows)), data)
    pathlib.Path("rows.jsonl").write_bytes(text.encode(errors="surrogatepass"))
    check("rows.jsonl", "data.", "data:", "roles.")


COLUMNS: list[pyarrow.Array] = [
    pyarrow.array(values, kind)
    for values, kind in [
        ([1] * 12, None),
        ([0.5] * 12, None),
        ([float("nan")] * 12, None),
        ([True] * 12, None),
        ([None] * 12, None),
        ([None, "a"] * 6, None),
        (["a", ""] * 6, None),
        ([b"\xff"] * 12, None),
        (["a"] * 12, pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
        ([2**62] * 12, pyarrow.timestamp("ms")),
        ([1] * 12, pyarrow.timestamp("ns")),
        ([[]] * 12, pyarrow.list_(pyarrow.string())),
        ([["a", None]] * 12, None),
        ([{"role": "user"}] * 12, None),
        ([[{"role": "user", "content": None}]] * 12, None),
        ([[{"role": "user", "content": "a", "tool": None}]] * 12, None),
        ([[{"role": "assistant", "content": "a"}]] * 12, None),
        ([[("role", "user")]] * 12, pyarrow.map_(pyarrow.string(), pyarrow.string())),
    ]
]
"""Columns to put in place of others."""


@settings(max_examples=60, suppress_health_check=SLOW)
@given(st.data())
def test_any_table_is_run_or_refused(data):
    rows = write_config(data.draw(st.sampled_from(list(KINDS))), "parquet")
    table = pyarrow.Table.from_pylist(rows)
    name = data.draw(st.sampled_from(table.column_names))
    match data.draw(st.sampled_from(["replace", "rename", "drop", "cut"])):
        case "replace":
            column = data.draw(st.sampled_from(range(len(COLUMNS))))
            table = table.set_column(table.column_names.index(name), name, COLUMNS[column])
        case "rename":
            others = ["", "\0", "prompt", "finished", "prompts"]
            table = table.rename_columns({name: data.draw(st.sampled_from(others))})
        case "drop":
            table = table.drop_columns([name])
        case _:
            table = table.slice(0, data.draw(st.integers(0, 5)))
    parquet.write_table(table, "rows.parquet")
    check("rows.parquet", "data.", "data:", "roles.")


@settings(max_examples=60, suppress_health_check=SLOW)
@given(st.data())
def test_any_bytes_of_parquet_are_run_or_refused(data):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(write_config("text", "parquet")), sink)
    content = bytearray(sink.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([len(content), len(content), len(content) // 2, 8, 0]))
    pathlib.Path("rows.parquet").write_bytes(content[:length])
    check("rows.parquet", "data.", "data:", "roles.")
