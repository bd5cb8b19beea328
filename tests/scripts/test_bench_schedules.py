"""The bench of schedules runs and reports."""

import json

import pytest

from scripts import bench_schedules
from scripts.fused_models import paper_pipes


def test_it_reports_what_it_measures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "fused.png"
    arguments = ["--instance", "8/8/8", "--seeds", "1", "--moves", "20000", "--processes", "1"]
    assert bench_schedules.main([*arguments, "--json", "--picture", str(picture)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["serial"], row["1F1B+"], row["bound"]) == (315, 294, 225)
    assert row["bound"] == row["ours"] <= row["greedy"] <= row["serial"] and row["memory"] <= 1
    assert picture.exists()
    assert len(bench_schedules.table([row]).splitlines()) == 3


def test_it_reports_what_plans_and_runs_find(capsys):
    assert bench_schedules.main(["--instance", "8/4/8", "--quick", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["quick"] == row["bound"] == 225 and row["memory"] <= row["cap"] == pytest.approx(23.6 / 15.6)
    assert len(bench_schedules.quick_table([row]).splitlines()) == 3


def test_all_instances_fill_whole_workers():
    for large, small, micro_batches in bench_schedules.INSTANCES.values():
        pipes = paper_pipes(large, small, micro_batches)
        assert [pipe.stages for pipe in pipes] == [large] + [small] * (large // small)
        assert sum(pipe.micro_batches for pipe in pipes[1:]) == micro_batches == pipes[0].micro_batches
