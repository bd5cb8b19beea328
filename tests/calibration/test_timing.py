"""How long programs take where others are at work too."""

import dataclasses
import os
import time

import pytest

from jaxrlhf.calibration import timing as timing_module
from jaxrlhf.calibration.timing import OthersLoad, time_in_turn, timing


def test_quiet_runs_count():
    runs = [(1.0, 0.0), (1.2, 0.01), (5.0, 0.9), (1.1, 0.02), (9.0, 0.5), (1.2, 0.0), (1.1, 0.05), (1.0, 0.04)]
    seen = timing(runs)
    assert seen.seconds == 1.1
    assert 0 < seen.spread < 0.1
    assert seen.others == pytest.approx(0.02)


def test_where_none_is_quiet_the_quietest_count():
    seen = timing([(1.0 + i, 0.2 + i / 10) for i in range(8)])
    assert seen.seconds == 3.0
    assert seen.others == pytest.approx(0.4)


def test_programs_take_what_they_take(monkeypatch):
    monkeypatch.setattr(timing_module, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(OthersLoad, "share", lambda self: others)
    others, calls = 0.0, []

    def program(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    short, long = time_in_turn([lambda: program("a", 0.002), lambda: program("b", 0.01)], patience_seconds=0.0)
    assert 0.002 <= short.seconds < long.seconds
    assert long.seconds >= 0.01
    assert calls[4:10] == ["a", "b", "a", "b", "a", "b"]  # after two of each, to warm up
    others = 0.75
    (alone,) = time_in_turn([lambda: program("b", 0.01)], patience_seconds=0.0)
    assert alone.others == 0.75
    assert 0.0025 <= alone.seconds < 0.01


def test_the_load_of_others_is_a_fraction(monkeypatch):
    load = OthersLoad()
    time.sleep(0.05)
    assert 0 <= load.share() <= 1
    # of two processors for ten seconds: idle for five seconds, this process at work for three
    ticks = iter([(100.0, 50.0, 7.0), (120.0, 55.0, 10.0)])
    monkeypatch.setattr(timing_module, "_ticks", lambda: next(ticks))
    assert OthersLoad().share() == pytest.approx((20 - 5 - 3) / 20)


def test_a_load_is_told_from_the_beginning_on(monkeypatch):
    """Two CPU cores: idle for 5 of 20 seconds, this process at work for 3; and for 15 more at work alone."""
    ticks = iter([(100.0, 50.0, 7.0), (120.0, 55.0, 10.0), (135.0, 55.0, 25.0)])
    monkeypatch.setattr(timing_module, "_ticks", lambda: next(ticks))
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 1.0, 0.5))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    watched = OthersLoad()
    first, second = watched.load(), watched.load()
    assert (first.others, second.others) == pytest.approx((12 / 20, 12 / 35))
    assert str(first) == (
        "other processes had 60 % of 2 cores, too much to tell how long anything takes alone; load average 2.5"
    )
    assert "too much" not in str(dataclasses.replace(first, others=0.04))
