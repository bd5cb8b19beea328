"""What compiled train programs communicate of gradients, beside what the cost model counts."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.compiled.hlo_counts import count
from jaxrlhf.planner.compiled.program_counts import Collective, Counts
from jaxrlhf.planner.costs.cost_model import reduced_bytes
from jaxrlhf.planner.costs.work import analytic_work
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.programs.ahead_of_time import call_program, update_program
from jaxrlhf.sharding.axes import MESH_AXES
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.compiled.described_programs import described
from tests.planner.compiled.device_groups import device_groups
from tests.programs.pipelined_calls import TrainCall, Update, over

MODEL = ModelConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=4
)  # fmt: skip
COLUMNS, RESPONSE = 16, 8


def axes_of(collective: Collective, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    shape = [getattr(strategy, axis) for axis in MESH_AXES]
    places = np.array(np.unravel_index(device_groups(collective.groups, math.prod(shape))[0], shape))
    return tuple(axis for axis, along in zip(MESH_AXES, places, strict=True) if len(set(along)) > 1)


def over_axes(counts: Counts, kind: str, strategy: Strategy) -> dict[tuple[str, ...], float]:
    """Mesh axes -> bytes that a device puts into the collectives of a kind along them."""
    found: dict[tuple[str, ...], float] = {}
    for collective, times in counts.collectives.items():
        if collective.kind == kind:
            axes = axes_of(collective, strategy)
            found[axes] = found.get(axes, 0.0) + times * collective.bytes
    return found


def train_call(model: ModelConfig, rows: int, lora: LoRAConfig | None = None) -> ModelCall:
    return ModelCall(
        "actor.train", "actor", "train", model, "actor", rows=rows, prompt=COLUMNS - RESPONSE, response=RESPONSE,
        lora=lora,
    )  # fmt: skip


def compiled_counts(model: ModelConfig, strategy: Strategy, rows: int, lora: LoRAConfig | None) -> Counts:
    call = described("train", model, rows=rows, columns=COLUMNS, response=RESPONSE)
    call = dataclasses.replace(call, role=dataclasses.replace(call.role, lora=lora))
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    lowered = call_program(call, layout, num_layers=model.num_layers, rows=rows).lower()
    return count(lowered.compile().as_text()).total()


SCALARS = 256
"""Bytes of the numbers that are added up beside gradients: weights of the loss, metrics, the norm."""


def near(expected: float) -> Any:
    return pytest.approx(expected, rel=0.01, abs=SCALARS)


@pytest.mark.parametrize(
    ("scan", "lora", "strategy"),
    [
        (False, None, Strategy(data=4, micro_batches=4)),
        (True, None, Strategy(data=2, micro_batches=2)),
        (False, None, Strategy(fsdp=2, micro_batches=4)),
        (False, None, Strategy(data=2, fsdp=2, tensor=2, micro_batches=2, remat="layer")),
        (True, None, Strategy(data=2, fsdp=2, micro_batches=2, remat="dots")),
        (False, LoRAConfig(rank=8), Strategy(data=2, fsdp=2, micro_batches=2)),
    ],
    ids=str,
)
def test_a_train_program_reduces_gradients_once_as_the_cost_model_counts(scan, lora, strategy):
    """Over copies of the weights once an update, whatever the micro-batches; over `fsdp` once a micro-batch."""
    model = dataclasses.replace(MODEL, scan_layers=scan)
    rows = strategy.num_row_shards * strategy.micro_batches
    call = train_call(model, rows, lora)
    counts = compiled_counts(model, strategy, rows, lora)

    split, whole = reduced_bytes(call, strategy)
    rows_axes = tuple(axis for axis in ("data", "fsdp") if getattr(strategy, axis) > 1)
    expected = {rows_axes: whole} if rows_axes else {}
    if strategy.data > 1:
        expected["data",] = expected.get(("data",), 0.0) + split
    every = over_axes(counts, "all-reduce", strategy)
    reduced = {axes: n for axes, n in every.items() if "tensor" not in axes and n > SCALARS}
    assert reduced == {axes: near(bytes_) for axes, bytes_ in expected.items()}

    if strategy.fsdp > 1 and lora is None:
        layer, rest = analytic_work(call, "gradient", tensor=strategy.tensor, fsdp=strategy.fsdp, remat=strategy.remat)
        scattered = over_axes(counts, "reduce-scatter", strategy)["fsdp",]
        gathered = over_axes(counts, "all-gather", strategy)["fsdp",] * strategy.fsdp
        assert scattered == near(split * strategy.fsdp * strategy.micro_batches)
        everything = (layer * model.num_layers + rest).fsdp_bytes * strategy.micro_batches
        assert scattered + gathered <= everything * 1.01  # a CPU's compiler gathers once for all micro-batches


def test_what_is_measured_of_an_update_has_its_reduction():
    strategy = Strategy(data=2, fsdp=2, tensor=2)
    call = described("train", MODEL, rows=8, columns=COLUMNS, response=RESPONSE)
    program = update_program(call, Layout.over(tuple(range(8)), strategy), num_layers=MODEL.num_layers)
    counts = count(program.lower().compile().as_text()).total()
    split, whole = reduced_bytes(train_call(MODEL, 8), strategy)
    reduced = over_axes(counts, "all-reduce", strategy)
    assert (reduced["data",], reduced["data", "fsdp"]) == (near(split), near(whole))


def stage_reductions(strategy: Strategy, model: ModelConfig) -> Iterable[Counts]:
    """What each stage does when the gradients of an update are added up over its data-parallel groups."""
    call = TrainCall(model, over(strategy), update=Update(mini_batches=1))
    call.run()
    programs = call.program.programs
    for stage in range(strategy.pipeline):
        text = programs.sum_over_groups(0, stage).compiled.as_text()
        assert text is not None
        yield count(text).total()


def test_stages_reduce_gradients_once_in_float32_as_the_cost_model_counts():
    strategy = Strategy(pipeline=2, data=2, tensor=2, micro_batches=4)
    model = dataclasses.replace(MODEL, dtype="bfloat16", vocab_size=32, num_layers=3)
    within = dataclasses.replace(strategy, pipeline=1)
    bytes_ = [over_axes(counts, "all-reduce", within) for counts in stage_reductions(strategy, model)]
    split, whole = reduced_bytes(train_call(model, 16), strategy)
    assert max(of_stage["data",] for of_stage in bytes_) == near(split + whole)
