"""Memory falls as stages are added, and 1F1B keeps less than GPipe."""

import json

from scripts import bench_pipelines


def test_memory_of_a_device(capsys, monkeypatch):
    monkeypatch.setitem(bench_pipelines.SIZES, "tiny", {**bench_pipelines.SIZES["tiny"], "layers": 4})
    options = ["--size", "tiny", "--stages", "1", "2", "--remat", "none", "--rounds", "1", "--json"]
    assert bench_pipelines.main(options) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["-", "GPipe", "1F1B", "1F1B x 2"]
    assert rows["1F1B"]["total"] < rows["GPipe"]["total"] < rows["-"]["total"]
    # 8 micro-batches under GPipe, at most 2 under 1F1B on the first of two stages
    assert rows["GPipe"]["kept"] == 4 * rows["1F1B"]["kept"] > 0
    assert rows["1F1B"]["weights"] < 0.6 * rows["-"]["weights"]
    assert round(9 * rows["1F1B"]["bubbles"], 6) == 1
    assert all(row["seconds"] > 0 for row in rows.values())
