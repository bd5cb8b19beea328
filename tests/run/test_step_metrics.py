import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrlhf.call_graph import Call, CallKind, Ref
from jaxrlhf.config.schema import load_run
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.experience import Prompts, Sampling, Sequences, Term
from jaxrlhf.planner.plans.plan import Placement, Plan
from jaxrlhf.run.assembly import assemble
from jaxrlhf.run.step_metrics import (
    TokenCounts,
    balance_metrics,
    count_tokens,
    decoding_metrics,
    throughput_metrics,
)
from jaxrlhf.sharding.strategy import Strategy
from tests.programs.pipelined_calls import Update

LENGTHS = np.array([8, 7, 6, 5, 4, 3, 2, 1])
MASK = np.arange(10)[None] < LENGTHS[:, None]
SEQUENCES: Any = Sequences(tokens=MASK, mask=MASK, response=MASK)  # pyright: ignore[reportArgumentType]


def call(name: str, kind: CallKind, *args: Any) -> Call:
    role, method = name.split(".")
    return Call(
        name=name, role=role, method=method, kind=kind, row_wise=True, function=None, args=args, outputs=None,
        weights=role, reads=0, writes=None, iteration=0, sequence_shapes=(MASK.shape,),
    )  # fmt: skip


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


def decoding(strategy: Strategy, lengths: np.ndarray = LENGTHS, expected: Any = None) -> dict[str, float]:
    mask: Any = np.arange(40)[None] < lengths[:, None]
    ref: Any = Ref("prompts", 0, jax.ShapeDtypeStruct(MASK.shape, bool), has_rows=True, recorder=None)
    prompts: Any = Prompts(tokens=ref, mask=ref, row=ref, id=ref, expected_tokens=expected)
    made = call("actor.generate", "generate", prompts, Sampling())
    made = dataclasses.replace(made, outputs=Sequences(mask, mask, mask))
    result: Any = SimpleNamespace(graph=SimpleNamespace(calls=[made]), read=lambda masks: masks)
    return decoding_metrics(result, Plan({made.name: Placement(tuple(range(strategy.num_devices)), strategy)}))


def test_how_full_decoding_steps_are():
    expected = {"perf/decode_steps/actor.generate": 8, "perf/decode_occupancy/actor.generate": 36 / 64}
    assert decoding(Strategy(data=2)) == expected
    assert decoding(Strategy(data=3))["perf/decode_occupancy/actor.generate"] == (36 + 8) / (8 * 9), "a row is copied"
    assert decoding(Strategy(pipeline=2)) == {}


def test_slots_are_beside_waves():
    """Each of four rounds of eight steps has two responses."""
    assert decoding(Strategy(slots=2, prefill_rows=1)) == {
        "perf/decode_steps/actor.generate": 32,
        "perf/decode_occupancy/actor.generate": 36 / 64,
        "perf/decode_steps_in_waves/actor.generate": 8 + 6 + 4 + 2,
        "perf/prefill_groups/actor.generate": 8,
    }


def test_the_longest_first_take_fewer_steps():
    """Of eight responses the last two are three rounds long."""
    slots, lengths = Strategy(slots=4, prefill_rows=1), np.array([1, 1, 1, 1, 1, 1, 20, 20])
    took = [decoding(slots, lengths, expected)["perf/decode_steps/actor.generate"] for expected in (None, lengths)]
    assert took == [32, 24]


def test_rates_are_over_the_tokens_that_a_timer_covers() -> None:
    timings = {"timing_s/gen": 2.0, "timing_s/gen/a": 1.0, "timing_s/ref": 0.5, "timing_s/reward": 9.0,
               "timing_s/reallocate_actor": 0.1}  # fmt: skip
    metrics = throughput_metrics(TokenCounts(total=100, response=40), timings, seconds=4.0, num_devices=5)
    assert metrics == pytest.approx(
        {
            "timing_s/step": 4.0,
            "perf/time_per_step": 4.0,
            "perf/total_num_tokens": 100.0,
            "perf/throughput": 5.0,
            "timing_per_token_ms/gen": 50.0,
            "timing_per_token_ms/ref": 5.0,
        }
    )


def test_without_tokens_there_are_no_rates_per_token() -> None:
    metrics = throughput_metrics(TokenCounts(0, 0), {"timing_s/gen": 2.0}, seconds=4.0, num_devices=1)
    assert metrics["perf/throughput"] == 0.0 and "timing_per_token_ms/gen" not in metrics


def test_tokens_of_rollouts_and_of_demonstrations_are_counted() -> None:
    run = assemble(load_run("ppo_arithmetic", ["batch_size=64", "settings.actor_update.mini_batches=1"]), 8)

    def result(graph: Any, outputs: dict[str, Any]) -> StepResult:
        return StepResult(graph, (), {name: jax.tree.leaves(tree) for name, tree in outputs.items()})

    graph = run.train.graph
    rollout = jax.tree.map(lambda ref: np.zeros(ref.shape, ref.dtype), graph.calls[0].outputs)
    mask, response = np.zeros_like(rollout.mask), np.zeros_like(rollout.response)
    mask[:3, 2:9], response[:3, :4] = True, True
    rollout = rollout.replace(mask=mask, response=response)
    counted = count_tokens(result(graph, {"data": run.train_rows(0), "actor.generate": rollout}))
    assert counted == TokenCounts(21, 12, mean_response=12 / 64, p99_response=4)

    assert run.warm_start is not None
    rows = PromptLoader(run.table, 512, seed=0).batch(0, "demonstrations", max_new_tokens=10)
    assert isinstance(rows, Sequences)
    counted = count_tokens(result(run.warm_start.graph, {"data": rows}))
    assert counted.total == rows.mask.sum() and counted.response == rows.response.sum() > 0
