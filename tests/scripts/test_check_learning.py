import json
from pathlib import Path

import pytest

from scripts import check_learning


def a_run_that_gives(*scores: float):
    def run(config: str, seed: int, overrides: list[str], folder: Path) -> tuple[float, float]:
        (folder / "latest").mkdir()
        lines = [{"step": step, "time": 0.0, "eval/exact_match": score} for step, score in enumerate(scores)]
        (folder / "latest" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return 61.4, 80.6

    return run


def test_table(monkeypatch, capsys):
    monkeypatch.setattr(check_learning, "run", a_run_that_gives(0.25, 0.1, 0.75))
    assert check_learning.main(["some/run.yaml", "--seeds", "3", "--rise", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| run | 3 | 0.250 -> 0.750 | 61 | 81 |"


def test_too_little_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(check_learning, "run", a_run_that_gives(0.25, 0.5))
    assert check_learning.main(["x", "--seeds", "0", "1", "--rise", "0.3"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("x, seed 0: 0.250 -> 0.500, less than +0.3\nx, seed 1")
    assert len(shown.out.splitlines()) == 6


def test_a_run_that_fails_ends_it(tmp_path):
    with pytest.raises(SystemExit, match="Unknown config 'no_such_run'"):
        check_learning.run("no_such_run", 0, [], tmp_path)
