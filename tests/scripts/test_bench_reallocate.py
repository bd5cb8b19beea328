"""The bench of reallocation runs and reports."""

import json

from scripts import bench_reallocate


def test_it_reports_both_ways(capsys):
    assert bench_reallocate.main(["--layers", "1", "--rounds", "1", "--pair", "subset", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["bytes"] == 31461376
    assert row["between_processes_bytes"] == 0 < row["moved_bytes"]
    assert set(row["ways"]) == {"reallocate", "device_put"}
    assert all(0 < way["least_s"] <= way["median_s"] for way in row["ways"].values())
    assert len(bench_reallocate.table([row]).splitlines()) == 3
