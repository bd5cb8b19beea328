"""The work of one device when rows pass through a part of a model, from which seconds follow.

Everything is linear in the rows, since all rows have equally many columns: a constant part, and a part for each row.

    layer, rest = analytic_work(call, "forward", tensor=4, fsdp=1, remat="none")
    whole = layer * num_layers + rest

`analytic_work` counts by formulas; `compiled_work` has the same from the programs that a compiler made. Letters:
D hidden size, F MLP size, H query heads, K key-value heads, h head size, V vocabulary, T columns, S scored columns.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

from jaxrlhf.generation.rollout_settings import mean_columns
from jaxrlhf.generation.sampling import seen_dtype
from jaxrlhf.models.architecture import (
    JOINED,
    MATRICES,
    Matrix,
    cached_numbers,
    forward_flops,
    head_numbers,
    matrices,
    matrix_numbers,
    matrix_widths,
    pair_flops,
    product_flops,
    read_and_written,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Remat

Phase = Literal["forward", "gradient", "prefill", "decode"]
"""`forward` of inference; `gradient` of one micro-batch of a train call, forward and backward; `prefill` of prompts;
`decode` of one token of every sequence, over the cache as large as it is on average."""

PHASES: dict[str, tuple[Phase, ...]] = {
    "infer": ("forward",),
    "train": ("gradient",),
    "generate": ("prefill", "decode"),
}
"""Kind of call -> the phases that it has."""

SlotPhase = Literal["slot_prefill", "slot_step", "slot_column"]
"""Phases of a rollout in slots that are measured, and never modelled: a group of prompts that enters; a decoding step
without reading its cache; what each column of the cache adds to that."""
SLOT_PHASES: tuple[SlotPhase, ...] = get_args(SlotPhase)


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one device. What is split over `tensor` is counted as it is split."""

    flops: float = 0.0
    """Operations of matrix products, for each row."""
    narrow_flops: float = 0.0
    """The sum over those products of operations / narrowest dim of the weight: what makes small products slow."""
    row_bytes: float = 0.0
    """Bytes that kernels read and write, for each row: activations, keys and values, logits."""
    weight_bytes: float = 0.0
    """Bytes of weights that they read, and of gradients that they write, whatever the rows."""
    kernels: float = 0.0
    """Kernels that are launched."""
    tensor_collectives: float = 0.0
    """All-reduces, and what is like them, over the `tensor` axis."""
    tensor_bytes: float = 0.0
    """Bytes of their operands, for each row."""
    fsdp_collectives: float = 0.0
    fsdp_bytes: float = 0.0
    """Bytes of weights gathered, and of gradients scattered, over the `fsdp` axis: of the whole arrays."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in _PARTS))

    def __mul__(self, times: float) -> "Work":
        return Work(*(getattr(self, name) * times for name in _PARTS))


_PARTS = tuple(field.name for field in dataclasses.fields(Work))
"""dataclasses.astuple would copy every number of them."""


class LayerWork(NamedTuple):
    """The work of a model of any depth: `layer` times its layers, and the `rest`."""

    layer: Work
    rest: Work


def analytic_work(call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork:
    """The work of a phase of a call, by formulas.

    Flops are those of `models.architecture`; bytes assume that each element-wise group is one kernel and that attention
    keeps its scores on the chip. Where adapters are trained, the weights that they adapt have no gradients; where they
    are not merged first, they are applied beside them.
    """
    if phase == "decode":  # attention reads all slots of the cache, those that are still empty too
        layer, rest = decode_work(call, tensor=tensor, slots=mean_columns(call.prompt, call.response))
    else:
        layer, rest = _pass_work(call, phase, tensor=tensor, fsdp=fsdp, remat=remat)
    if call.lora is None or call.merges:
        return LayerWork(layer, rest)
    columns = {"decode": 1, "prefill": call.prompt}.get(phase, call.columns)
    if phase == "gradient":
        unneeded = _weight_gradients(call, tensor=tensor, fsdp=fsdp)
        layer, rest = layer + unneeded.layer * -1.0, rest + unneeded.rest * -1.0
    applied = _adapters(call.model, call.lora, columns, phase == "gradient", tensor=tensor, fsdp=fsdp, remat=remat)
    return LayerWork(layer + applied, rest)


def _pass_work(call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork:
    """The work of a phase over whole sequences, with gradients of all weights."""
    model = call.model
    T = call.prompt if phase == "prefill" else call.columns
    S = 1 if phase == "prefill" else call.outputs
    head_S = call.num_samples if phase == "prefill" else S
    times = {"none": 3.0, "dots": 3.0, "layer": 4.0}[remat] if phase == "gradient" else 1.0
    size = model.itemsize
    one, two = (_flops(model, n, T, S) for n in (1, 2))
    full, rest = two - one, one - (two - one)
    reads = (3.0 if remat == "layer" else 2.0) if phase == "gradient" else 1.0
    layer_weights = matrix_numbers(model) / tensor
    head = model.vocab_size if model.head != "scalar" else 1
    head_weights = model.hidden_size * head / tensor
    embedding_weights = model.hidden_size * model.vocab_size / tensor
    # gathered, again if a layer is recomputed, and the gradient scattered
    moved = {"none": 2.0, "dots": 3.0, "layer": 3.0}[remat] if phase == "gradient" else 1.0
    passes = {"forward": 1.0, "prefill": 1.0, "gradient": 2.0 + (times - 3.0)}[phase]
    layer = Work(
        flops=full * times / tensor,
        narrow_flops=2 * T * _narrow(model, tensor) * times,
        row_bytes=T * size * read_and_written(model).on_device(tensor) * times,
        weight_bytes=layer_weights * (reads * size + (4 + size if phase == "gradient" else 0)),
        kernels=_KERNELS_OF_LAYER * times,
        tensor_collectives=2 * passes if tensor > 1 else 0.0,
        tensor_bytes=2 * passes * T * model.hidden_size * size if tensor > 1 else 0.0,
        fsdp_collectives=len(MATRICES) * moved if fsdp > 1 else 0.0,
        fsdp_bytes=layer_weights * size * moved if fsdp > 1 else 0.0,
    )
    others = Work(
        flops=rest * times / tensor,
        row_bytes=head_S * 4 * _LOGITS_PASSES * (head / tensor if head > 1 else 1) * times
        + T * model.hidden_size * size * 4,
        weight_bytes=head_weights * (reads * size + (4 + size if phase == "gradient" else 0)),
        kernels=_KERNELS_OF_REST * times,
        tensor_collectives=passes if tensor > 1 else 0.0,
        tensor_bytes=passes * T * model.hidden_size * size if tensor > 1 else 0.0,
        fsdp_collectives=2 * (1.0 + (phase == "gradient")) if fsdp > 1 else 0.0,
        fsdp_bytes=(embedding_weights + head_weights) * size * (1.0 + (phase == "gradient")) if fsdp > 1 else 0.0,
    )
    return LayerWork(layer, others)


_KERNELS_OF_LAYER, _KERNELS_OF_REST = 14.0, 12.0
"""Kernels of a layer's forward pass, and of embedding and head: as compiled for A100 by jaxlib 0.10."""
_KERNELS_OF_ADAPTER = 4.0
"""Kernels of its forward pass, as compiled for A100 by jaxlib 0.10."""
_LOGITS_PASSES = 3.0
"""Times that logits are read or written: the product, the exponentials, the sums."""


def _weight_gradients(call: ModelCall, *, tensor: int, fsdp: int) -> LayerWork:
    """The work of `_pass_work` for the gradients of weights, except those of a scalar head: of a weight, one product
    of what it multiplied with the gradient of what came of it. Below the first layer nothing is trained, so that
    queries, keys and values of that one hand no gradient on, unless all layers are one loop."""
    model, T, S, size = call.model, call.columns, call.outputs, call.model.itemsize
    D = model.hidden_size
    of_last = T if model.scan_layers else S
    one, two = (
        product_flops(dataclasses.replace(model, num_layers=n), columns=T, last_layer=of_last, scored=S) for n in (1, 2)
    )
    first = 0 if model.scan_layers else 2 * T * matrix_numbers(model, JOINED["query_key_value"])
    weights = matrix_numbers(model) / tensor
    head = D * (model.vocab_size if model.head != "scalar" else 1) / tensor
    return LayerWork(
        Work(
            flops=(two - one) / tensor,
            narrow_flops=2 * T * _narrow(model, tensor),
            row_bytes=T * size * _inputs_and_outputs(model, MATRICES, tensor),
            weight_bytes=weights * (4 + size),
            kernels=float(len(MATRICES)),
            fsdp_collectives=float(len(MATRICES)) if fsdp > 1 else 0.0,
            fsdp_bytes=weights * size if fsdp > 1 else 0.0,
        ),
        Work(
            flops=(2 * one - two + first) / tensor,
            weight_bytes=head * (4 + size),
            kernels=2.0,
            fsdp_collectives=2.0 if fsdp > 1 else 0.0,
            fsdp_bytes=(D * model.vocab_size / tensor + head) * size if fsdp > 1 else 0.0,
        ),
    )


def _adapters(
    model: ModelConfig, lora: LoRAConfig, columns: int, gradient: bool, *, tensor: int, fsdp: int, remat: Remat
) -> Work:
    """A layer's adapters applied beside its weights to some columns of a row: two products each, and an addition;
    with gradients, twice as many products for the backward pass. Products with so narrow a weight take as long as what
    goes in and comes out is read and written, which is counted, whatever their dims.

    Of a weight that `tensor` splits by columns the first product is whole on every device, and of one that it splits by
    rows the second; what is a sum over devices then has as many columns as the rank.
    """
    size, r = model.itemsize, lora.rank
    passes = (4.0 if remat == "layer" else 3.0) if gradient else 1.0
    forwards = passes - 2.0 if gradient else 1.0
    numbers = _inputs_and_outputs(model, lora.targets, tensor)
    by_rows = sum(matrices(model)[target].splits_input for target in lora.targets)
    sums = by_rows * forwards + (len(lora.targets) - by_rows) * gradient
    gathers = forwards + gradient
    return Work(
        flops=2 * columns * r * numbers * passes,
        row_bytes=columns * size * numbers * (1.5 * forwards + 2.5 * gradient),
        weight_bytes=r * numbers * (passes * size + (4 + size if gradient else 0)),
        kernels=_KERNELS_OF_ADAPTER * len(lora.targets) * passes,
        tensor_collectives=sums if tensor > 1 else 0.0,
        tensor_bytes=sums * columns * r * size if tensor > 1 else 0.0,
        fsdp_collectives=2 * len(lora.targets) * gathers if fsdp > 1 else 0.0,
        fsdp_bytes=r * numbers * size * gathers if fsdp > 1 else 0.0,
    )


def _inputs_and_outputs(model: ModelConfig, names: tuple[Matrix, ...], tensor: int) -> float:
    """Numbers of a token that go into some of a layer's matrices and come out, on one device."""
    return sum(width.on_device(tensor) for width in matrix_widths(model, names))


def _narrow(model: ModelConfig, tensor: int) -> float:
    """The sum over a layer's matrices of size / narrowest dim, on one device: of the wider dim."""
    return sum(max(width.whole, width.split / tensor) for width in matrix_widths(model))


def _flops(model: ModelConfig, num_layers: int, columns: int, scored: int) -> float:
    """Operations of one row through some layers; scanned layers are all computed in full."""
    config = dataclasses.replace(model, num_layers=num_layers)
    if not model.scan_layers:
        return forward_flops(config, rows=1, columns=columns, scored=scored)
    whole = forward_flops(config, rows=1, columns=columns, scored=columns)
    return whole - (columns - scored) * 2 * head_numbers(model)


def seen_bytes(call: ModelCall) -> int:
    """Bytes of what penalties keep for each sequence and token of the vocabulary; 0 without penalties."""
    if call.described is None:
        return 0
    _, sampling = call.described.args
    dtype = seen_dtype(sampling)
    return 0 if dtype is None else dtype.itemsize


def decode_work(call: ModelCall, *, tensor: int, slots: float) -> LayerWork:
    """The work of one token of every sequence.

    Args:
        slots: Of each sequence's cache that attention reads.
    """
    model = call.model
    size, D, V = model.itemsize, model.hidden_size, model.vocab_size
    weights = matrix_numbers(model) / tensor
    cache = cached_numbers(model) * slots / tensor
    layer = Work(
        flops=2 * weights + pair_flops(model) * slots / tensor,
        narrow_flops=2 * _narrow(model, tensor),
        row_bytes=size * (cache + read_and_written(model).on_device(tensor)),
        weight_bytes=size * weights,
        kernels=_KERNELS_OF_LAYER,
        tensor_collectives=2.0 if tensor > 1 else 0.0,
        tensor_bytes=2 * D * size if tensor > 1 else 0.0,
    )
    rest = Work(
        flops=2 * D * V / tensor,
        row_bytes=V * (4 * _LOGITS_PASSES + seen_bytes(call)),
        weight_bytes=size * D * V / tensor,
        kernels=2 * _KERNELS_OF_REST,
        tensor_collectives=2.0 if tensor > 1 else 0.0,
        tensor_bytes=D * size + 4 * V if tensor > 1 else 0.0,
    )
    return LayerWork(layer, rest)
