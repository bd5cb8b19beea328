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
from jaxrlhf.models import architecture
from jaxrlhf.models.architecture import (
    MATRICES,
    Matrix,
    matrix_numbers,
    matrix_widths,
    read_and_written,
    tensor_sums,
)
from jaxrlhf.models.config import FULL, SLIDING, ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Remat

Phase = Literal["forward", "gradient", "prefill", "decode"]
"""`forward` of inference; `gradient` of one micro-batch of a train call, forward and backward; `prefill` of prompts;
`decode` of one token of every sequence, over the cache as large as it is on average."""

PHASES: dict[str, tuple[Phase, ...]] = {
    "infer": ("forward",), "train": ("gradient",), "generate": ("prefill", "decode"),
}  # fmt: skip
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

    def __sub__(self, other: "Work") -> "Work":
        return self + other * -1.0

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
    call = _computed(call, tensor)
    if phase == "decode":  # attention reads all slots of the cache, those that are still empty too
        layer, rest = decode_work(call, tensor=tensor, slots=mean_columns(call.prompt, call.response))
    else:
        layer, rest = _pass_work(call, phase, tensor=tensor, fsdp=fsdp, remat=remat)
    if call.lora is None or call.merges:
        return LayerWork(layer, rest)
    columns = {"decode": 1, "prefill": call.prompt}.get(phase, call.columns)
    applied = _adapters(call.model, call.lora, columns, phase == "gradient", tensor=tensor, fsdp=fsdp, remat=remat)
    return LayerWork(layer + applied, rest)


def _computed(call: ModelCall, tensor: int) -> ModelCall:
    """A call of the model as devices along `tensor` compute it."""
    model = architecture.computed(call.model, tensor)
    return call if model is call.model else dataclasses.replace(call, model=model)


def _pass_work(call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork:
    """The work of a phase over whole sequences. With gradients of all weights; where adapters are trained, of none."""
    model, gradient = call.model, phase == "gradient"
    T = call.prompt if phase == "prefill" else call.columns
    S = 1 if phase == "prefill" else call.outputs
    head_S = call.num_samples if phase == "prefill" else S
    times = {"none": 3.0, "dots": 3.0, "layer": 4.0}[remat] if gradient else 1.0
    size = model.itemsize
    full, rest = (flops * times / tensor for flops in _flops(model, T, S))
    of_layer, row_bytes = times, T * size * read_and_written(model).on_device(tensor) * times
    # gathered, again if a layer is recomputed, and the gradient scattered
    moved, moved_rest = ({"none": 2.0, "dots": 3.0, "layer": 3.0}[remat], 2.0) if gradient else (1.0, 1.0)
    kernels, kernels_rest = _KERNELS_OF_LAYER * times, _KERNELS_OF_REST * times
    weight_size = size * ((3.0 if remat == "layer" else 2.0) if gradient else 1.0)
    if gradient and call.lora is None:
        weight_size += 4 + size
    elif gradient:
        of_weights, of_others = _weight_gradients(call)
        full, rest, of_layer = full - of_weights / tensor, rest - of_others / tensor, times - 1
        row_bytes -= T * size * _inputs_and_outputs(model, MATRICES, tensor)
        moved, moved_rest = moved - 1, 1.0
        kernels, kernels_rest = kernels - len(MATRICES), kernels_rest - 2
    layer_weights = matrix_numbers(model) / tensor
    head = model.vocab_size if model.head != "scalar" else 1
    head_weights = model.hidden_size * head / tensor
    embedding_weights = model.hidden_size * model.vocab_size / tensor
    passes = {"forward": 1.0, "prefill": 1.0, "gradient": 2.0 + (times - 3.0)}[phase]
    layer = Work(
        flops=full,
        narrow_flops=2 * T * _narrow(model, tensor) * of_layer,
        row_bytes=row_bytes,
        weight_bytes=layer_weights * weight_size,
        kernels=kernels,
        tensor_collectives=len(tensor_sums(model)) * passes if tensor > 1 else 0.0,
        tensor_bytes=passes * T * sum(tensor_sums(model)) if tensor > 1 else 0.0,
        fsdp_collectives=len(MATRICES) * moved if fsdp > 1 else 0.0,
        fsdp_bytes=layer_weights * size * moved if fsdp > 1 else 0.0,
    )
    others = Work(
        flops=rest,
        row_bytes=head_S * 4 * _LOGITS_PASSES * (head / tensor if head > 1 else 1) * times
        + T * model.hidden_size * size * 4,
        weight_bytes=head_weights * weight_size,
        kernels=kernels_rest,
        tensor_collectives=passes if tensor > 1 else 0.0,
        tensor_bytes=passes * T * model.hidden_size * size if tensor > 1 else 0.0,
        fsdp_collectives=2 * moved_rest if fsdp > 1 else 0.0,
        fsdp_bytes=(embedding_weights + head_weights) * size * moved_rest if fsdp > 1 else 0.0,
    )
    return LayerWork(layer, others)


_KERNELS_OF_LAYER, _KERNELS_OF_REST = 14.0, 12.0
"""Kernels of a layer's forward pass, and of embedding and head: as compiled for A100 by jaxlib 0.10."""
_KERNELS_OF_ADAPTER = 4.0
"""Kernels of its forward pass, as compiled for A100 by jaxlib 0.10."""
_LOGITS_PASSES = 3.0
"""Times that logits are read or written: the product, the exponentials, the sums."""


def _weight_gradients(call: ModelCall) -> tuple[float, float]:
    """Operations for the gradients of a layer's weights, and of all others except a scalar head: of a weight, one
    product of what it multiplied with the gradient of what came of it. Below the first layer nothing is trained, so
    that queries, keys and values of that one hand no gradient on, unless all layers are one loop."""
    model, T, S = call.model, call.columns, call.outputs
    models = (dataclasses.replace(model, num_layers=n) for n in (1, 2))
    of_last = T if model.scan_layers else S
    one, two = (architecture.product_flops(each, columns=T, last_layer=of_last, scored=S) for each in models)
    first = 0 if model.scan_layers else 2 * T * matrix_numbers(model, architecture.JOINED["query_key_value"])
    return two - one, 2 * one - two + first


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
    by_rows = sum(architecture.matrices(model)[target].splits_input for target in lora.targets)
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


def _flops(model: ModelConfig, columns: int, scored: int) -> tuple[float, float]:
    """Operations of one row in a layer, the mean of those that slide and those that do not, and in the rest; scanned
    layers are all computed in full."""
    kinds = [SLIDING if model.slides(i) else FULL for i in range(model.num_layers)]
    of_kind = {}
    for kind in set(kinds):
        alike = dataclasses.replace(model, layer_types=(kind,))
        one, two = (_flops_of_alike(dataclasses.replace(alike, num_layers=n), columns, scored) for n in (1, 2))
        of_kind[kind] = two - one, one - (two - one)
    mean = sum(of_kind[kind][0] for kind in kinds) / len(kinds)
    return mean, of_kind[kinds[-1]][1]


def _flops_of_alike(config: ModelConfig, columns: int, scored: int) -> int:
    if not config.scan_layers:
        return architecture.forward_flops(config, rows=1, columns=columns, scored=scored)
    whole = architecture.forward_flops(config, rows=1, columns=columns, scored=columns)
    return whole - (columns - scored) * 2 * architecture.head_numbers(config)


def seen_bytes(call: ModelCall) -> int:
    """Bytes of what penalties keep for each sequence and token of the vocabulary; 0 without penalties."""
    if call.described is None:
        return 0
    _, sampling = call.described.args
    dtype = seen_dtype(sampling)
    return 0 if dtype is None else dtype.itemsize


def decode_work(call: ModelCall, *, tensor: int, slots: float) -> LayerWork:
    """The work of one token of every sequence, of whose cache attention reads some slots."""
    model = architecture.computed(call.model, tensor)
    size, D, V = model.itemsize, model.hidden_size, model.vocab_size
    weights = matrix_numbers(model) / tensor
    cache = architecture.cached_numbers(model) * slots / tensor
    layer = Work(
        flops=2 * weights + architecture.pair_flops(model) * slots / tensor,
        narrow_flops=2 * _narrow(model, tensor),
        row_bytes=size * (cache + read_and_written(model).on_device(tensor)),
        weight_bytes=size * weights,
        kernels=_KERNELS_OF_LAYER,
        tensor_collectives=float(len(tensor_sums(model))) if tensor > 1 else 0.0,
        tensor_bytes=float(sum(tensor_sums(model))) if tensor > 1 else 0.0,
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
