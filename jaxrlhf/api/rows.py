"""Rows from Python, as lists of dicts or as tables of other libraries, none of which is needed here."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config.reading import Tree
from jaxrlhf.config.schema import OutputConfig
from jaxrlhf.run.checked_run import InputError
from jaxrlhf.writing import writing

_TRAIN, _HELD_OUT = ("train",), ("test", "validation", "valid", "eval")
"""Names of the splits of a `DatasetDict`."""


def rows_of(table: Any) -> list[Mapping[str, Any]] | None:
    """The rows of a table as dicts; None if it is no table.

    Tables are sequences of mappings; and what has one of the methods by which pandas (`to_dict("records")`), Hugging
    Face's datasets (`to_list`), polars (`to_dicts`) and pyarrow (`to_pylist`) give their rows.
    """
    if isinstance(table, Mapping | str):
        return None
    if hasattr(table, "columns") and hasattr(table, "to_dict"):
        return [{str(key): _plain(x) for key, x in row.items()} for row in table.to_dict("records")]
    for method in ("to_dicts", "to_list", "to_pylist"):
        if hasattr(table, "column_names" if method != "to_dicts" else "columns") and hasattr(table, method):
            return list(getattr(table, method)())
    if isinstance(table, Sequence) and all(isinstance(row, Mapping) for row in table):
        return list(table)
    return None


def splits_of(tables: Any) -> dict[str, Any] | None:
    """The keys of `data` for a mapping of splits to tables, such as a `DatasetDict`; None if it is something else.

    Raises InputError if it has no split for training.
    """
    if not isinstance(tables, Mapping) or not tables or any(rows_of(table) is None for table in tables.values()):
        return None
    if {"path", "eval_path"} & tables.keys():  # keys of `data`
        return None
    train = next((tables[name] for name in _TRAIN if name in tables), None)
    if train is None:
        raise InputError(
            f"data: a mapping of tables must have the split 'train'. Got {', '.join(map(repr, tables))}. Give the one "
            "to train on by itself, as data=tables['...']."
        )
    held_out = next((tables[name] for name in _HELD_OUT if name in tables), None)
    return {"path": train} if held_out is None else {"path": train, "eval_path": held_out}


def write_rows(tree: Tree) -> None:
    """Writes the rows in a config to files under `output.folder`, so that the run can be resumed, and names these."""
    output = tree.get("output") or {}
    folder = Path(output.get("folder", OutputConfig().folder)) / "rows"
    for name, data in {"data": tree.get("data"), **(tree.get("datasets") or {})}.items():
        for key in ("path", "eval_path"):
            rows = rows_of(data[key]) if isinstance(data, dict) and key in data else None
            if rows is not None:
                data[key] = str(_written(rows, folder, where=f"{name}.{key}"))


def _written(rows: Sequence[Mapping[str, Any]], folder: Path, *, where: str) -> Path:
    try:
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: rows must be plain data, as in JSON. Got {error}.") from error
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """A cell of a table of pandas as plain data: arrays as lists, what is missing as None."""
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and math.isnan(value))
    return None if is_missing else value
