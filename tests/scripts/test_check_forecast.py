"""Seconds of calls, told apart from a run's events, beside what was predicted."""

import dataclasses

import pytest

from jaxrlhf.calibration.timing import Timing
from jaxrlhf.observe.events import Event
from jaxrlhf.planner.costs.cost_model import CallSeconds
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.sharding.strategy import Strategy
from scripts import check_forecast
from scripts.check_forecast import (
    WatchedTimeline,
    compare_pairs,
    comparison,
    full_length,
    is_out,
    measured,
    step_row,
    step_timing,
    with_merge,
)

PLAN = Plan({name: Placement((0, 1), Strategy(data=2)) for name in ("a", "b")})


def noted(name, start, end, cpu, others=0.0):
    return Event(name, "infer", (0, 1), 3, start, end), cpu, others


def test_calls_of_one_processor_begin_where_the_one_before_ends():
    events = [noted("a", 0.0, 1.0, 5.0), noted("b", 0.1, 3.0, 8.0), noted("a", 3.5, 4.0, 9.0)]
    one_at_a_time = measured(events, one_at_a_time=True)
    assert one_at_a_time["b"][0].seconds == 2.0
    assert one_at_a_time["b"][1] == 3.0
    assert one_at_a_time["a"][0].seconds == 0.5  # dispatched when nothing was at work
    assert measured(events, one_at_a_time=False)["b"][0].seconds == pytest.approx(2.9)


def test_a_call_that_merges_adapters_begins_with_the_last_reallocation_of_its_role():
    call = Event("actor.generate", "generate", (0, 1), 3, 2.0, 5.0)
    moves = [
        Event(name, "reallocate", (0, 1), step, start, start + 0.5)
        for name, step, start in (
            ("actor.reallocate", 3, 0.5), ("actor.reallocate", 3, 1.0), ("critic.reallocate", 3, 1.2),
            ("actor.reallocate", 2, 1.3), ("actor.reallocate", 3, 6.0),
        )
    ]  # fmt: skip
    assert with_merge(call, moves) == dataclasses.replace(call, start=1.0)
    assert with_merge(call, []) == call


def test_calls_are_noted_and_copies_are_not():
    timeline = WatchedTimeline()
    timeline.record(Event("a", "train", (0,), 1, 0.0, 1.0))
    timeline.record(Event("a.reallocate", "reallocate", (0,), 1, 1.0, 1.5))
    timeline.record(Event("reward.scores", "host", (), 1, 1.0, 1.5))
    assert [event.name for event, *_ in timeline.noted] == ["a"]
    assert len(timeline.events()) == 3


def test_long_calls_are_judged():
    seen = measured(
        [noted("a", 0.0, 0.0, 0.0), noted("a", 0.0, 0.1, 0.1), noted("b", 0.1, 0.101, 0.1)], one_at_a_time=True
    )
    forecast = {"a": CallSeconds(0.12, update=0.02), "b": CallSeconds(1.0)}
    of_a, of_b = comparison(forecast, seen, PLAN)
    assert (of_a["predicted ms"], of_a["alone ms"], of_a["out by"]) == (140.0, 100.0, "+40 %")
    assert is_out(of_a)
    assert not is_out(of_b)  # a millisecond, whatever was predicted
    assert not is_out(of_a | {"predicted ms": 119.0})
    assert is_out(of_a | {"predicted ms": 121.0})


def test_a_step_stands_beside_the_sum_of_its_calls():
    row = step_row({"a": CallSeconds(0.12), "b": CallSeconds(0.2, host=0.01)}, Timing(0.5, 0.1, others=0.4))
    assert (row["predicted ms"], row["alone ms"], row["out by"], row["judged"]) == (330.0, 300.0, "+10 %", False)


def test_what_others_had_is_not_blamed_on_a_call():
    seen = measured(
        [noted("a", 0, 0, 0), noted("a", 0.0, 0.2, 0.1, others=0.5), noted("b", 0.2, 0.3, 0.2)], one_at_a_time=True
    )
    of_a, of_b = comparison({"a": CallSeconds(0.1), "b": CallSeconds(0.1)}, seen, PLAN)
    assert (of_a["alone ms"], of_a["measured ms"], of_a["others"]) == (100.0, 200.0, "50 %")
    assert (of_b["alone ms"], of_b["measured ms"], of_b["others"]) == (100.0, 100.0, "0 %")


def test_steps_last_from_end_to_end():
    def step(number, ends, others):
        return [(Event("a", "infer", (0,), number, 0.0, end), 0.0, others) for end in ends]

    noted = step(3, [1.0], 0.9) + step(4, [2.0, 3.0], 0.0) + step(5, [4.0, 5.0], 0.5)
    both = step_timing(noted)
    assert (both.seconds, both.others) == (2.0, 0.25)


def test_pairs_are_those_that_differ():
    plans = [("a", 1.0, 1.0), ("b", 1.1, 3.0), ("c", 2.0, 2.0)]
    rows = compare_pairs(plans, 10, seed=0)
    assert [(row["faster, as predicted"], row["slower"], row["right"]) for row in rows] == [
        ("a", "c", True), ("b", "c", False),
    ]  # fmt: skip
    assert rows[0]["predicted"] == "2.00 x"
    assert len(compare_pairs(plans, 1, seed=0)) == 1


def test_responses_have_their_full_length():
    config = full_length("ppo_arithmetic", ["settings.sampling.max_new_tokens=7"])
    assert config.settings.sampling.min_new_tokens == 7
    assert config.warm_start is None
    assert full_length("sft_arithmetic", []).evaluation is None


def test_without_a_calibration_it_says_how_to_get_one(tmp_path, capsys):
    assert check_forecast.main(["--calibration", str(tmp_path / "none.json")]) == 1
    assert "none.json: cannot be read: No such file or directory. Measure this machine" in capsys.readouterr().err
