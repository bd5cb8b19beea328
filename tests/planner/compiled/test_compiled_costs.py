"""Seconds from compiled programs keep the same rules as those from formulas, and are of their size.

Programs of a virtual CPU device: their operations are those of a GPU's, their kernels less fused, so that they move two
to four times the bytes. Rates are those of an A100.
"""

import dataclasses
import functools

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.compiled.compiled_work import ROWS, CallAtDepth, depths, lower_program, work_from_counts
from jaxrlhf.planner.compiled.compiler import compile_counts
from jaxrlhf.planner.compiled.described_devices import described_devices
from jaxrlhf.planner.costs.cost_model import CostModel, WorkSource
from jaxrlhf.planner.costs.work import PHASES, analytic_work
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.described_step import TINY, ppo

CLUSTER = read_cluster("1x8:a100-80g")
MODEL = dataclasses.replace(TINY, hidden_size=64, intermediate_size=160, num_heads=4, num_kv_heads=2)
LORA = LoRAConfig(rank=4)
NAMES = ("actor.generate", "reference.logprobs", "actor.train")
CPU = read_cluster("cpu:1").groups[0].kind
FACTOR = 4.5
"""Within which compiled bytes, and seconds where bytes are what takes them, are those of formulas."""
MANY = 2**17
"""Rows: so many that work takes time, and not launching kernels."""


def calls_of(lora: LoRAConfig | None) -> dict[str, ModelCall]:
    step = ppo(MODEL, rows=64, prompt=32, response=24, mini_batches=1, lora=lora)
    suffix = "" if lora is None else " (adapters)"
    found = {name + suffix: step.workload.call(name) for name in NAMES}
    return {
        key: dataclasses.replace(
            call, name=key, needs=(), described=dataclasses.replace(call.require_described(), name=key)
        )
        for key, call in found.items()
        if lora is None or call.trains
    }


CALLS = calls_of(None) | calls_of(LORA)


@pytest.fixture(scope="module")
def compiled() -> WorkSource:
    """Compiled in this process, whose compilations are kept from run to run."""
    described, counts = described_devices(CPU, 1), {}
    for name, call in CALLS.items():
        for depth in depths(call):
            lowered = lower_program(CallAtDepth(call.require_described(), depth, ROWS[call.kind], 1), described)
            counts[name, depth, 1] = compile_counts(lowered, described).counts
    return functools.partial(work_from_counts, counts)


@pytest.fixture(scope="module")
def costs(compiled) -> CostModel:
    return CostModel(CLUSTER, compiled)


@pytest.mark.parametrize("name", CALLS)
def test_work_is_of_the_size_of_the_formulas(name, compiled):
    """Operations to 8 %, attention in blocks; bytes, which a CPU's kernels move more of, within a factor."""
    call = CALLS[name]
    for phase in PHASES[call.kind]:
        one, other = (
            layer * call.model.num_layers + rest
            for layer, rest in (work(call, phase, tensor=1, fsdp=1, remat="none") for work in (compiled, analytic_work))
        )
        assert one.flops == pytest.approx(other.flops, rel=0.08), phase
        moved = [(work.row_bytes * 16 + work.weight_bytes) for work in (one, other)]
        assert 1 / FACTOR < moved[0] / moved[1] < FACTOR, phase


@pytest.mark.parametrize("name", CALLS)
def test_seconds_are_of_the_size_of_the_formulas(name, costs):
    call = dataclasses.replace(CALLS[name], rows=MANY)
    for strategy in (Strategy(data=8), Strategy(data=4, fsdp=2), Strategy(data=2, pipeline=4, micro_batches=4)):
        one, other = (model.seconds(call, range(8), strategy).total for model in (costs, CostModel(CLUSTER)))
        assert 1 / FACTOR < one / other < FACTOR, strategy


@pytest.mark.parametrize("source", ["compiled", "formulas"])
@pytest.mark.parametrize("name", CALLS)
def test_more_rows_take_longer_and_more_devices_do_not(name, source, costs):
    model = costs if source == "compiled" else CostModel(CLUSTER)
    call = dataclasses.replace(CALLS[name], rows=MANY)

    def seconds(rows: int, data: int) -> float:
        return model.seconds(dataclasses.replace(call, rows=rows), range(data), Strategy(data=data)).total

    assert seconds(call.rows, 2) < seconds(2 * call.rows, 2) < seconds(4 * call.rows, 2)
    by_data = [seconds(call.rows, n) for n in (1, 2, 4, 8)]
    assert by_data == sorted(by_data, reverse=True)


def test_remat_takes_longer_and_adapters_less_operations(compiled):
    whole, adapters = CALLS["actor.train"], CALLS["actor.train (adapters)"]

    def flops(call: ModelCall, **more) -> float:
        layer, rest = compiled(call, "gradient", **{"tensor": 1, "fsdp": 1, "remat": "none", **more})
        return (layer * call.model.num_layers + rest).flops

    assert flops(whole, remat="layer") == pytest.approx(4 / 3 * flops(whole), rel=0.05)
    assert flops(adapters) / flops(whole) < 0.85
