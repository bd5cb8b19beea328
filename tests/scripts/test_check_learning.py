import pytest

from scripts import check_learning


def a_run_that_gives(*scores: float):
    def run(config: str, varied: str, seed: int, metric: str, overrides: list[str]) -> check_learning.Run:
        return check_learning.Run(config, varied, seed, list(enumerate(scores)), 61.4, 80.6)

    return run


def test_table(monkeypatch, capsys):
    monkeypatch.setattr(check_learning, "run", a_run_that_gives(0.25, 0.1, 0.75))
    assert check_learning.main(["some/run.yaml", "--seeds", "3", "--rise", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "| run | 3 | 0.250 -> 0.750 | 61 | 81 |"


def test_variations_and_their_curves(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check_learning, "run", a_run_that_gives(0.25, 0.75))
    varied = ["--vary", "staleness=0", "--vary", "staleness=1", "--picture", str(tmp_path / "curves.svg")]
    assert check_learning.main(["x", "y", "--seeds", "0", "1", *varied]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-8] == "| x | `staleness=0` | 0 | 0.250 -> 0.750 | 61 | 81 |" and "`staleness=1` | 1" in shown[-1]
    assert (tmp_path / "curves.svg").stat().st_size > 1000


def test_too_little_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(check_learning, "run", a_run_that_gives(0.25, 0.5))
    assert check_learning.main(["x", "--seeds", "0", "1", "--rise", "0.3"]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("x, seed 0: 0.250 -> 0.500, less than +0.3\nx, seed 1")
    assert len(shown.out.splitlines()) == 6


def test_a_run_that_fails_ends_it():
    with pytest.raises(SystemExit, match="Unknown config 'no_such_run'"):
        check_learning.run("no_such_run", "", 0, "eval/exact_match", [])
