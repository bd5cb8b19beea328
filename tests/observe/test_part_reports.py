"""What is said of a long generation after each of its parts."""

import types

import jax.numpy as jnp

from jaxrlhf.observe import part_reports
from jaxrlhf.observe.part_reports import PartReports


def test_each_part_says_what_was_done_in_it_and_how_far_all_is(monkeypatch):
    said: list[str] = []
    times = iter([0.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(part_reports, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    reports = PartReports("actor.generate", 8, said.append)
    told = [
        reports.after("prefill", [jnp.array([[0, 8, 0, 0]])]),
        reports.after("prefill and decode", [jnp.array([[1, 1000, 3, 2], [2, 208, 2, 2]])]),
        reports.after("decode", [jnp.array([[4, 1000, 3, 2], [4, 208, 2, 2]])]),
    ]
    assert told == [
        "prefill, 8 tokens",
        "prefill and decode, 1,200 tokens, 4 groups in 5 rounds",
        "decode, all had ended",
    ]
    assert said == [
        "actor.generate: 0 of 8 responses, 8 tokens, 4 tokens/s",
        "actor.generate: 3 of 8 responses, 1,208 tokens, 600 tokens/s",
    ]
