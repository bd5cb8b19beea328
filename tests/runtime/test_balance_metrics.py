import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrlhf.call_graph import Call, Kind
from jaxrlhf.experience import Sequences, Term
from jaxrlhf.planner.plan import Placement, Plan
from jaxrlhf.runtime.balance_metrics import balance_metrics
from jaxrlhf.sharding.strategy import Strategy

LENGTHS = np.array([8, 7, 6, 5, 4, 3, 2, 1])
MASK = np.arange(10)[None] < LENGTHS[:, None]
SEQUENCES: Any = Sequences(tokens=MASK, mask=MASK, response=MASK)  # pyright: ignore[reportArgumentType]


def call(name: str, kind: Kind, *args: Any) -> Call:
    role, method = name.split(".")
    return Call(
        name=name, role=role, method=method, kind=kind, row_wise=True, function=None, args=args, outputs=None,
        weights=role, reads=0, writes=None, iteration=0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 1


def metrics(strategy: Strategy, *calls: Call) -> dict[str, float]:
    result: Any = SimpleNamespace(graph=SimpleNamespace(calls=calls), read=lambda tree: tree)
    placement = Placement(tuple(range(strategy.num_devices)), strategy)
    return balance_metrics(result, Plan(dict.fromkeys((c.name for c in calls), placement)))


VALUES = call("critic.values", "infer", SEQUENCES)
TRAIN = call("critic.train", "train", (Term(len, {"sequences": SEQUENCES}),), Update())


def test_how_much_of_the_work_is_padding():
    assert metrics(Strategy(), VALUES, TRAIN) == {"perf/padding_waste": pytest.approx(1 - 36 / 80)}


def test_how_evenly_tokens_lie():
    got = metrics(Strategy(data=2), VALUES, TRAIN)
    assert got["perf/token_imbalance/critic.values"] == pytest.approx((8 + 7 + 6 + 5) / 18)
    assert got["perf/token_imbalance/critic.train"] == pytest.approx((8 + 7 + 4 + 3) / 18)
    assert len(got) == 3


def test_what_dealing_did():
    got = metrics(Strategy(data=2, balance=True), VALUES, TRAIN)
    assert got["perf/token_imbalance/critic.values"] == got["perf/token_imbalance/critic.train"] == 1
    assert got["perf/token_imbalance_undealt/critic.values"] == pytest.approx(26 / 18)
    assert got["perf/token_imbalance_undealt/critic.train"] == pytest.approx(22 / 18)


def test_calls_without_sequences_have_no_tokens():
    assert metrics(Strategy(data=2), call("actor.generate", "generate", SEQUENCES)) == {}
