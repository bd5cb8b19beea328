"""Rows from Python: lists, and tables of libraries that need not be installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

import jaxrlhf as rl
from jaxrlhf.api.rows import rows_of

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(10, 26)]


class Dataset:
    """What matters here of `datasets.Dataset`."""

    column_names = ("prompt", "answer", "level")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_list(self) -> list[dict[str, Any]]:
        return self._rows


class DatasetDict(dict[str, Dataset]):
    """What matters here of `datasets.DatasetDict`."""

    def to_csv(self) -> None: ...


def written(config: rl.RunConfig, key: str = "path") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(getattr(config.data, key)).read_text().splitlines()]


def read(data: Any, folder: Path, **keys: Any) -> rl.RunConfig:
    return rl.read_config("grpo_arithmetic", data=data, output={"folder": str(folder)}, **keys)


@pytest.mark.parametrize(
    "table",
    [
        ROWS,
        tuple(ROWS),
        pandas.DataFrame(ROWS),
        Dataset(ROWS),
        pyarrow.Table.from_pylist(ROWS),
        {"path": Dataset(ROWS)},
    ],
    ids=["list", "tuple", "pandas", "datasets", "pyarrow", "keys"],
)
def test_tables_give_their_rows(table, tmp_path):
    config = read(table, tmp_path)
    assert written(config) == ROWS and config.data.task == ""
    assert config.data.eval_rows == 512, "as many as the evaluation needs"
    assert read(table, tmp_path, evaluation=None).data.eval_rows == 0
    assert read(table, tmp_path).data.path == config.data.path, "the same rows have the same file"


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_a_mapping_of_splits_gives_rows_for_training_and_held_out_ones(held_out, tmp_path):
    config = read(DatasetDict({"train": Dataset(ROWS[:12]), held_out: Dataset(ROWS[12:])}), tmp_path)
    assert written(config) == ROWS[:12] and written(config, "eval_path") == ROWS[12:]
    assert written(read({"train": ROWS[:12], held_out: ROWS[12:]}, tmp_path), "eval_path") == ROWS[12:]


def test_files_and_keys_stay_what_they_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read(path, tmp_path).data.path == str(path)
    assert read({"path": [str(path), "x.jsonl"]}, tmp_path).data.path == (str(path), "x.jsonl")
    config = read({"arithmetic": {"digits": 1}}, tmp_path)
    assert config.data.task == "arithmetic"
    assert read(rl.DataConfig(path="a.jsonl"), tmp_path).data.path == "a.jsonl"


def test_cells_of_pandas_become_plain_data():
    frame = pandas.DataFrame({
        "text": ["a", None], "number": [1, 2], "hole": [0.5, np.nan], "list": [np.array([1, 2]), [{"x": np.int64(3)}]],
    })  # fmt: skip
    rows = rows_of(frame)
    assert rows == [
        {"text": "a", "number": 1, "hole": 0.5, "list": [1, 2]},
        {"text": None, "number": 2, "hole": None, "list": [{"x": 3}]},
    ]
    assert json.loads(json.dumps(rows)) == rows


def test_rows_that_json_cannot_hold_are_refused(tmp_path):
    with pytest.raises(rl.InputError, match=r"data.path: rows must be plain data, as in JSON. Got .*not JSON"):
        read([{"prompt": object()}], tmp_path)
