import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.call_graph import Call, Kind, Ref
from jaxrlhf.experience import Sequences, Term
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.run.balance_metrics import balance_metrics
from jaxrlhf.sharding.strategy import Strategy

LENGTHS = np.array([8, 7, 6, 5, 4, 3, 2, 1])
MASK = np.arange(10)[None] < LENGTHS[:, None]
SEQUENCES: Any = Sequences(tokens=MASK, mask=MASK, response=MASK)  # pyright: ignore[reportArgumentType]


def call(name: str, kind: Kind, *args: Any) -> Call:
    role, method = name.split(".")
    return Call(
        name=name, role=role, method=method, kind=kind, row_wise=True, function=None, args=args, outputs=None,
        weights=role, reads=0, writes=None, iteration=0, sequence_shapes=(MASK.shape,),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 1


def whole(tree: Any) -> Any:
    return jax.tree.map(lambda x: MASK if isinstance(x, Ref) else x, tree)


def metrics(strategy: Strategy, *calls: Call) -> dict[str, float]:
    result: Any = SimpleNamespace(graph=SimpleNamespace(calls=calls), read=whole)
    placement = Placement(tuple(range(strategy.num_devices)), strategy)
    return balance_metrics(result, Plan(dict.fromkeys((c.name for c in calls), placement)))


VALUES = call("critic.values", "infer", SEQUENCES)
TRAIN = call("critic.train", "train", (Term(len, {"sequences": SEQUENCES}),), Update())


def test_how_much_of_the_work_is_padding():
    expected = {"perf/padding_waste": pytest.approx(1 - 36 / 80), "perf/padded_rows": 0}
    assert metrics(Strategy(), VALUES, TRAIN) == expected


def test_how_evenly_tokens_lie():
    got = metrics(Strategy(data=2), VALUES, TRAIN)
    assert got["perf/token_imbalance/critic.values"] == pytest.approx((8 + 7 + 6 + 5) / 18)
    assert got["perf/token_imbalance/critic.train"] == pytest.approx((8 + 7 + 4 + 3) / 18)
    assert len(got) == 4


def test_copies_of_rows_are_counted_and_take_time_like_others():
    ref: Any = Ref("actor.generate", 0, jax.ShapeDtypeStruct(MASK.shape, bool), has_rows=True, recorder=None)
    values = call("critic.values", "infer", Sequences(tokens=ref, mask=ref, response=ref))
    got = metrics(Strategy(data=3), values)
    assert got["perf/padded_rows"] == 1  # the first again, after the last
    assert got["perf/token_imbalance/critic.values"] == pytest.approx((8 + 7 + 6) / ((36 + 8) / 3))


def test_what_dealing_did():
    got = metrics(Strategy(data=2, balance=True), VALUES, TRAIN)
    assert got["perf/token_imbalance/critic.values"] == got["perf/token_imbalance/critic.train"] == 1
    assert got["perf/token_imbalance_undealt/critic.values"] == pytest.approx(26 / 18)
    assert got["perf/token_imbalance_undealt/critic.train"] == pytest.approx(22 / 18)


def test_calls_without_sequences_have_no_tokens():
    assert metrics(Strategy(data=2), call("actor.generate", "generate", SEQUENCES)) == {"perf/padded_rows": 0}
