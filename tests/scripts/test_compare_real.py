"""Every row that ReaL published is forecast within a fifth from coefficients that were fitted without it."""

import json

import pytest

from scripts import compare_real


def test_rows_and_iterations_are_forecast(capsys):
    assert compare_real.main(["--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results["rows"]) == 12
    for row in results["rows"]:
        assert abs(row["off"]) < 0.2, row
    for table, seconds in results["iterations"].items():
        assert seconds == pytest.approx(compare_real.ITERATIONS[table], rel=0.15)


def test_iterations_of_the_published_seconds():
    """What the rows themselves add up to, where calls on other devices run meanwhile."""
    for table, rows in compare_real.TABLES.items():
        published = {name: row.seconds for name, row in rows.items()}
        assert compare_real.iteration_seconds(published, table) == pytest.approx(
            compare_real.ITERATIONS[table], rel=0.12
        )
