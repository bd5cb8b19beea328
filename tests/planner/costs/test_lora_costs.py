"""What training and reading adapters costs, beside compiled programs and beside whole weights."""

import dataclasses
from typing import Any

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.architecture import declare_layer
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.compiled.hlo_counts import count
from jaxrlhf.planner.costs.cost_model import CostModel, memory_rate, trained_on_device
from jaxrlhf.planner.costs.memory import weight_bytes
from jaxrlhf.planner.costs.work import analytic_work
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.programs.ahead_of_time import call_program
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

LORA = LoRAConfig(rank=4)
CLUSTER = read_cluster("1x8:h100")
SEVEN = ModelConfig(**PRESETS["7b"])


def compiled_flops(call: ModelCall, strategy: Strategy) -> float:
    """Operations per row of the compiled program."""
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    program = call_program(call.require_described(), layout, num_layers=call.model.num_layers, rows=call.rows)
    return count(program.lower().compile().as_text()).total(rounds=0).flops / call.rows


def formula_flops(call: ModelCall, strategy: Strategy) -> float:
    layer, rest = analytic_work(call, "gradient", tensor=strategy.tensor, fsdp=1, remat=strategy.remat)
    return (layer * call.model.num_layers + rest).flops


@pytest.mark.parametrize(("scan_layers", "strategy"), [(False, Strategy()), (True, Strategy(tensor=2, remat="layer"))])
def test_operations_of_training_adapters_are_those_that_are_compiled(scan_layers, strategy):
    """To the same few percent as those of whole weights, which are attention in blocks and products computed anew."""
    model = dataclasses.replace(TINY, num_layers=2, hidden_size=64, intermediate_size=160, scan_layers=scan_layers)
    ratios = {}
    for lora in (None, LORA):
        step = ppo(model, rows=4, prompt=24, response=24, mini_batches=1, lora=lora)
        call = step.workload.call("actor.train")
        ratios[lora] = formula_flops(call, strategy) / compiled_flops(call, strategy)
    assert ratios[None] == pytest.approx(1.0, abs=0.1)
    assert ratios[LORA] == pytest.approx(ratios[None], rel=0.04)


def call(kind: Any, lora: LoRAConfig | None = None, **more: Any) -> ModelCall:
    """A call of a 7B model."""
    common: dict[str, Any] = dict(rows=256, prompt=1024, response=1024, mini_batches=4 if kind == "train" else 1)
    return ModelCall(f"actor.{kind}", "actor", kind, SEVEN, "actor", lora=lora, **common | more)


def test_training_adapters_costs_no_gradients_of_the_weights_that_they_adapt():
    """Two thirds of the operations: the backward pass has one product of each weight in place of two. What adapters
    read and write comes on top. What is reduced and updated are the adapters."""
    lora, costs, strategy = LoRAConfig(rank=16), CostModel(CLUSTER), Strategy(data=2, tensor=4, micro_batches=4)
    whole, adapters = (costs.seconds(call("train", x), range(8), strategy) for x in (None, lora))
    operations = [formula_flops(call("train", x), strategy) for x in (None, lora)]
    assert operations[1] / operations[0] == pytest.approx(2 / 3, rel=0.05)
    assert 2 / 3 < adapters.passes / whole.passes < 0.95
    trained = [trained_on_device(call("train", x), strategy) for x in (None, lora)]
    assert trained[1] == weight_bytes(SEVEN, strategy, 1, lora=lora) < trained[0] / 50
    assert adapters.reduction < whole.reduction / 20
    assert adapters.update < whole.update / 20


def test_larger_ranks_and_more_targets_take_longer():
    costs, strategy = CostModel(CLUSTER), Strategy(tensor=8, micro_batches=64)

    def seconds(**lora: Any) -> float:
        return costs.seconds(call("train", LoRAConfig(**lora)), range(8), strategy).total

    assert seconds(rank=8) < seconds(rank=64) < seconds(rank=512)
    assert seconds(targets=("query",)) < seconds(targets=("query", "value")) < seconds()


def test_what_reads_merged_weights_takes_what_whole_weights_take_and_the_merging():
    lora, costs, strategy = LoRAConfig(rank=16), CostModel(CLUSTER), Strategy(tensor=8)
    merged = call("infer", lora)
    plain = dataclasses.replace(merged, lora=None)
    assert merged.merges
    one, other = (costs.seconds(each, range(8), strategy) for each in (merged, plain))
    assert (one.passes, other.merge) == (other.passes, 0.0)
    sizes = {name: w.size for name, w in declare_layer(SEVEN).items() if name in lora.targets}
    numbers = SEVEN.num_layers * sum(sizes.values()) / 8
    kind = CLUSTER.groups[0].kind
    assert numbers * 4 / memory_rate(kind) < one.merge < 0.1  # it is read and written once, at the least
    few = call("infer", lora, rows=1, prompt=16, response=16)
    assert not few.merges
    applied, without = (costs.seconds(each, range(8), strategy) for each in (few, dataclasses.replace(few, lora=None)))
    assert applied.merge == 0.0 and without.passes < applied.passes < 3 * without.passes
