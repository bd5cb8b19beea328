"""The benchmark of rollouts runs, and its ways give the same responses."""

from scripts.bench_rollouts import measure, parse


def test_every_way_is_timed():
    sizes = ["--size", "tiny", "--rows", "8", "--prompt", "4", "--new-tokens", "8", "--mean", "3", "--slots", "2"]
    found = measure(parse([*sizes, "--prefill-rows", "2", "--rounds", "1"]))
    steps = {name: way["fewest_steps"] for name, way in found["ways"].items()}
    assert list(steps) == ["at once", "waves of 2", "2 slots", "2 slots, longest first"]
    assert steps["at once"] == found["longest"] <= 8
    assert found["tokens"] / 2 <= steps["2 slots, longest first"] <= steps["2 slots"] <= steps["waves of 2"]
    assert len(found["ratios"]) == 4
