"""A run whose tails follow the lengths of its responses records their sizes, and goes on with the same."""

import dataclasses
from pathlib import Path

from jaxrlhf.observe.metrics import read_metrics, without_times
from jaxrlhf.run import tail_refinement
from jaxrlhf.run.tail_refinement import TAIL_ROWS

CALLS = (
    "{actor.generate: {devices: 0-1, data: 2, parts: 2, tail: {devices: '0', rows: 0.25}}, reward.scores: {parts: 3}}"
)
PLAN = ("--set", "warm_start=null", "--set", "evaluation=null", "--set", "output.checkpoint_every=1")
REFINED = (*PLAN, "--set", f"plan={{refine_tails: 2, default: {{data: 1}}, calls: {CALLS}}}")


def rows(folder: Path) -> list[float]:
    return [record[f"{TAIL_ROWS}actor.generate"] for record in read_metrics(folder / "metrics.jsonl")]


def half_of_all(graph, roles, plan, costs, lengths):
    """A tail of half of the sequences, and of a quarter where it has half."""
    placement = plan.placements["actor.generate"]
    wanted = 0.5 if placement.tail.rows == 0.25 else 0.25
    other = dataclasses.replace(placement, tail=dataclasses.replace(placement.tail, rows=wanted))
    assert 1 <= lengths.mean <= lengths.p99
    return dataclasses.replace(plan, placements={**plan.placements, "actor.generate": other}), 1.0, 2.0


def test_a_run_that_ends_between_goes_on_with_the_same_tail(train, monkeypatch):
    monkeypatch.setattr(tail_refinement, "refined_tails", half_of_all)
    status, output, error = train(*REFINED, "--set", "name=whole", "--set", "steps=5")
    assert status == 0, error
    assert "The tail of actor.generate gets 50% of the sequences, 25% before" in output
    whole = Path("runs/latest").resolve()
    assert rows(whole) == [0.25, 0.25, 0.5, 0.5, 0.25]
    for number, steps in enumerate((3, 4, 5)):  # it goes on within a period, and where one ends
        resume = ("--resume", "auto") if number else ()
        assert train(*REFINED, "--set", "name=parts", "--set", f"steps={steps}", *resume)[0] == 0
    parts = Path("runs/latest").resolve()
    assert rows(parts) == rows(whole)
    records = [[without_times(r) for r in read_metrics(run / "metrics.jsonl")] for run in (whole, parts)]
    assert records[0] == records[1]


def test_sizes_are_chosen_by_forecasts_of_this_machine(train):
    status, _, error = train(*REFINED, "--set", "name=chosen", "--set", "steps=3")
    assert status == 0, error
    found = rows(Path("runs/latest"))
    assert found[:2] == [0.25, 0.25] and found[2] in (0.25, *(i / 100 for i in range(5, 100, 5)))


def test_without_a_tail_nothing_is_refined(train):
    status, output, error = train(*PLAN, "--set", "plan={refine_tails: 2, default: {data: 1}}", "--dry-run")
    assert status == 0, error
    assert "Note: plan.refine_tails changes nothing: no call of the step has a tail." in output
