"""Seconds of calls."""

import dataclasses
import math
from typing import Any

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.architecture import forward_flops
from jaxrlhf.planner.costs.cost_model import CallSeconds, CostModel, PassSeconds, Span, span
from jaxrlhf.planner.costs.work import Work, analytic_work
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

CLUSTER = read_cluster("2x8:a100-80g")
STEP = ppo(rows=64, mini_batches=1)


def seconds(name: str, devices: range = range(8), model: CostModel | None = None, **strategy) -> CallSeconds:
    return (model or CostModel(CLUSTER)).seconds(STEP.workload.call(name), devices, Strategy(**strategy))


@pytest.mark.parametrize("tensor", [1, 2])
def test_operations_are_those_that_are_counted(tensor):
    call = STEP.workload.call("reference.logprobs")
    layer, rest = analytic_work(call, "forward", tensor=tensor, fsdp=1, remat="none")
    whole = forward_flops(TINY, rows=1, columns=call.columns, scored=call.response)
    assert (layer * TINY.num_layers + rest).flops == pytest.approx(whole / tensor)
    train = STEP.workload.call("actor.train")
    layer, rest = analytic_work(train, "gradient", tensor=tensor, fsdp=1, remat="none")
    assert (layer * TINY.num_layers + rest).flops == pytest.approx(3 * whole / tensor)


def test_groups_of_axes_lie_side_by_side():
    strategy = Strategy(pipeline=2, data=2, fsdp=2, tensor=4)
    assert span(strategy, "tensor", 8) == Span(4, 4)
    assert span(strategy, "fsdp", 8) == Span(2, 2)
    assert span(strategy, "data", 8) == Span(2, 1)
    assert span(Strategy(data=16), "data", 8) == Span(16, 8)


def constant(work: Work) -> Any:
    return lambda *_, **__: (work, Work())


def test_a_pass_is_as_slow_as_what_it_waits_for():
    kind = CLUSTER.groups[0].kind
    memory = kind.memory.bandwidth * kind.coefficients.memory_efficiency
    rows = 64 / 8

    def layer_seconds(**work):
        return seconds("reward.scores", data=8, model=CostModel(CLUSTER, constant(Work(**work)))).passes / 4

    assert layer_seconds(flops=1e12) == pytest.approx(1e12 * rows / kind.matmul_flops("float32"))
    assert layer_seconds(flops=1e12, weight_bytes=1.0) == layer_seconds(flops=1e12)
    assert layer_seconds(weight_bytes=1e12) == pytest.approx(1e12 / memory)
    assert layer_seconds(row_bytes=1e12) == pytest.approx(1e12 * rows / memory)
    assert layer_seconds(kernels=100.0) == pytest.approx(100 * kind.coefficients.kernel_seconds)


def test_measured_seconds_take_the_place_of_modelled_ones():
    of_inference: Any = lambda call, *_: PassSeconds(1.0, 0.5) if call.kind == "infer" else None  # noqa: E731
    model = CostModel(CLUSTER, measured=of_inference)
    assert seconds("critic.values", data=8, model=model).passes == 4.5
    assert seconds("actor.train", data=8, model=model) == seconds("actor.train", data=8)


def test_stages_fill_and_drain():
    """Passes of the slowest stage, that with the head; one of every other stage."""
    always: Any = lambda *_: PassSeconds(1.0, 0.5)  # noqa: E731
    model = CostModel(CLUSTER, measured=always)
    whole = seconds("critic.values", data=8, model=model)
    halves = seconds("critic.values", data=4, pipeline=2, micro_batches=4, model=model)
    assert (whole.passes, whole.bubbles) == (4.5, 0.0)
    assert (halves.passes, halves.bubbles) == (4 * 2.5, 2.0)
    chunked = seconds("actor.train", data=4, pipeline=2, chunks=2, micro_batches=4, model=model)
    assert (chunked.passes, chunked.bubbles) == (4 * 2.5, 1.0)
    ring = seconds("actor.generate", data=4, pipeline=2, model=model)
    assert (ring.passes, ring.bubbles) == (2 * (2.5 + 8 * 2.5), 2.5 + 2.5)


def test_sends_that_passes_hide_take_no_time():
    """Between nodes, of stages of a second: inference waits for the first micro-batch only, a ring of generation for
    every tick."""
    always: Any = lambda *_: PassSeconds(0.25, 0.0)  # noqa: E731
    model = CostModel(CLUSTER, measured=always)
    call = STEP.workload.call("critic.values")

    def sends(name: str, **strategy: Any) -> float:
        return seconds(name, range(16), model, data=8, pipeline=2, **strategy).sends

    one, many = (sends("critic.values", micro_batches=n) for n in (1, 8))
    send = model.of(call, range(16), Strategy(pipeline=2, data=8)).send(8 * call.columns * TINY.hidden_size * 4)
    assert one == pytest.approx(send)
    assert 0 < many < one  # smaller, and still one
    assert sends("actor.train", micro_batches=8, schedule="gpipe") == pytest.approx(2 * many)
    assert sends("actor.train", micro_batches=8) == pytest.approx(8 * many)  # 1F1B: of two, one waits there and back
    ticks = sends("actor.generate")
    prompts = STEP.workload.call("actor.generate").prompt * TINY.hidden_size * 4 * 4
    first, later = (model.of(call, range(16), Strategy(pipeline=2, data=8)).send(x) for x in (prompts, prompts / 8))
    assert ticks == pytest.approx(3 * first + 2 * (8 + 1) * later)
    assert model.seconds(call, range(16), Strategy(pipeline=2, data=8, micro_batches=8)).bubbles > 0


def test_both_passes_of_a_stage_are_what_a_call_takes_of_it():
    """Layers on every stage, the head on the last, which makes both passes in its backward."""
    always: Any = lambda *_: PassSeconds(1.0, 0.5)  # noqa: E731
    model, call = CostModel(CLUSTER, measured=always), STEP.workload.call("actor.train")
    plain = Strategy(data=2, pipeline=4, micro_batches=4)
    for strategy, part in ((plain, 1 / 3), (dataclasses.replace(plain, remat="layer"), 1 / 4)):
        first, *others, last = model.of(call, range(8), strategy).stage_seconds()
        assert {first} == set(others) and sum(first) == pytest.approx(1.0)
        assert first[0] == pytest.approx(part, rel=0.1)
        assert last == (0.0, 1.5)
        taken = model.seconds(call, range(8), strategy)
        assert taken.passes + taken.bubbles == pytest.approx(call.updates * (4 * 1.5 + 3 * 1.0))
    uneven = model.of(call, range(3), Strategy(pipeline=3, micro_batches=4)).stage_seconds()
    assert [sum(one) for one in uneven] == pytest.approx([2.0, 1.0, 1.5])


def test_gradients_cross_the_network_once_an_update():
    within, across = (seconds("actor.train", range(n), data=n).reduction for n in (8, 16))
    assert 0 < within < across
    assert 0 < seconds("actor.train", range(8), fsdp=8).reduction < within  # norms, which are not split
    twice = dataclasses.replace(STEP.workload.call("actor.train"), epochs=2)
    both = CostModel(CLUSTER).seconds(twice, range(8), Strategy(data=8))
    assert both.reduction == pytest.approx(2 * within)


def test_a_slower_kind_slows_a_mixed_cluster():
    mixed, fast = CostModel(read_cluster("1x8:h100+1x8:a100-80g")), CostModel(read_cluster("2x8:h100"))
    call = ppo(dataclasses.replace(TINY, hidden_size=2048, intermediate_size=8192)).workload.call("critic.values")
    of_both = [model.seconds(call, range(16), Strategy(data=16)).total for model in (mixed, fast)]
    of_first = [model.seconds(call, range(8), Strategy(data=8)).total for model in (mixed, fast)]
    assert of_both[0] > of_both[1]
    assert of_first[0] == of_first[1]


def test_handing_over_costs_nothing_where_it_is():
    model = CostModel(CLUSTER)
    assert model.way_between(range(8), range(8)) == (0.0, math.inf)
    (near, fast), (far, slow) = model.way_between(range(4), range(4, 8)), model.way_between(range(8), range(8, 16))
    assert 0 < near < far and fast > slow
