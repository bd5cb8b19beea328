"""How much work one device does when rows pass through a part of a model: what seconds are made of.

Everything is linear in the rows, since every row has as many columns: so much whatever the rows, so much for each.

    layer, rest = analytic_work(call, "forward", tensor=4, fsdp=1, remat="none")
    whole = layer * num_layers + rest

`analytic_work` counts by formulas; `compiled_costs` has the same from the programs that a compiler made. Letters:
D hidden size, F MLP size, H query heads, K key-value heads, h head size, V vocabulary, T columns, S scored columns.
"""

import dataclasses
from typing import Literal, NamedTuple

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.counts import forward_flops
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.strategy import Remat

Phase = Literal["forward", "gradient", "prefill", "decode"]
"""`forward` of inference; `gradient` of one micro-batch of a train call, forward and backward; `prefill` of prompts;
`decode` of one token of every sequence, with the cache half full."""

PHASES: dict[str, tuple[Phase, ...]] = {
    "infer": ("forward",),
    "train": ("gradient",),
    "generate": ("prefill", "decode"),
}
"""Kind of call -> the phases that it has."""


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

    Flops are those of `models.counts`; bytes assume that each element-wise group is one kernel and that attention keeps
    its scores on the chip.
    """
    if phase == "decode":
        return _decode(call, tensor)
    model = call.model
    T = call.prompt if phase == "prefill" else call.columns
    S = 1 if phase == "prefill" else call.outputs
    head_S = call.num_samples if phase == "prefill" else S
    times = {"none": 3.0, "dots": 3.0, "layer": 4.0}[remat] if phase == "gradient" else 1.0
    size = _itemsize(model)
    one, two = (_flops(model, n, T, S) for n in (1, 2))
    full, rest = two - one, one - (two - one)
    reads = (3.0 if remat == "layer" else 2.0) if phase == "gradient" else 1.0
    layer_weights = layer_parameters(model) / tensor
    head = model.vocab_size if model.head != "scalar" else 1
    head_weights = model.hidden_size * head / tensor
    passes = {"forward": 1.0, "prefill": 1.0, "gradient": 2.0 + (times - 3.0)}[phase]
    layer = Work(
        flops=full * times / tensor,
        narrow_flops=2 * T * _narrow(model, tensor) * times,
        row_bytes=T * size * _activations(model, tensor) * times,
        weight_bytes=layer_weights * (reads * size + (4 + size if phase == "gradient" else 0)),
        kernels=_KERNELS_OF_LAYER * times,
        tensor_collectives=2 * passes if tensor > 1 else 0.0,
        tensor_bytes=2 * passes * T * model.hidden_size * size if tensor > 1 else 0.0,
        fsdp_collectives=_GATHERED_WEIGHTS * (passes + (phase == "gradient")) if fsdp > 1 else 0.0,
        fsdp_bytes=layer_weights * size * (passes + (phase == "gradient")) if fsdp > 1 else 0.0,
    )
    others = Work(
        flops=rest * times / tensor,
        row_bytes=head_S * 4 * _LOGITS_PASSES * (head / tensor if head > 1 else 1) * times
        + T * model.hidden_size * size * 4,
        weight_bytes=head_weights * (reads * size + (4 + size if phase == "gradient" else 0)),
        kernels=_KERNELS_OF_REST * times,
        tensor_collectives=passes if tensor > 1 else 0.0,
        tensor_bytes=passes * T * model.hidden_size * size if tensor > 1 else 0.0,
        fsdp_collectives=2 * (passes + (phase == "gradient")) if fsdp > 1 else 0.0,
        fsdp_bytes=2 * head_weights * 4 * (passes + (phase == "gradient")) if fsdp > 1 else 0.0,
    )
    return LayerWork(layer, others)


_KERNELS_OF_LAYER, _KERNELS_OF_REST = 14.0, 12.0
"""Kernels of a layer's forward pass, and of embedding and head: as compiled for A100 by jaxlib 0.10."""
_GATHERED_WEIGHTS = 7.0
"""Matrices of a layer, each gathered by itself."""
_LOGITS_PASSES = 3.0
"""How often logits are read or written: the product, the exponentials, the sums."""


def layer_parameters(model: ModelConfig) -> int:
    """Weights of a layer that take part in matrix products."""
    D, F, h = model.hidden_size, model.intermediate_size, model.head_size
    return D * h * (2 * model.num_heads + 2 * model.num_kv_heads) + 3 * D * F


def _narrow(model: ModelConfig, tensor: int) -> float:
    """The sum over a layer's matrices of size / narrowest dim, on one device."""
    D, F, h = model.hidden_size, model.intermediate_size, model.head_size
    matrices = [(D, model.num_heads * h, 2), (D, model.num_kv_heads * h, 2), (D, F, 3)]
    return sum(count * max(D, split / tensor) for D, split, count in matrices)


def _flops(model: ModelConfig, num_layers: int, columns: int, scored: int) -> float:
    """Of one row through so many layers; scanned layers are all computed in full."""
    config = dataclasses.replace(model, num_layers=num_layers)
    if not model.scan_layers:
        return forward_flops(config, rows=1, columns=columns, scored=scored)
    head = columns - scored
    whole = forward_flops(config, rows=1, columns=columns, scored=columns)
    return whole - head * 2 * model.hidden_size * (model.vocab_size if model.head == "lm" else 1)


def _activations(model: ModelConfig, tensor: int) -> float:
    """Numbers that a layer's forward pass reads and writes for each token: two norms and two sums over the hidden
    state, what enters and leaves products, rotations, attention and gate."""
    D, F, h = model.hidden_size, model.intermediate_size, model.head_size
    heads = (3 * model.num_heads + 4 * model.num_kv_heads) * h
    return 12 * D + (heads + 5 * F) / tensor


def _decode(call: ModelCall, tensor: int) -> LayerWork:
    """One token of every sequence, with half of the response in the cache."""
    model = call.model
    size, D, V = _itemsize(model), model.hidden_size, model.vocab_size
    tokens = call.prompt + call.response / 2
    weights = layer_parameters(model) / tensor
    cache = 2 * model.num_kv_heads * model.head_size * tokens / tensor
    layer = Work(
        flops=2 * weights + 4 * model.num_heads * model.head_size * tokens / tensor,
        narrow_flops=2 * _narrow(model, tensor),
        row_bytes=size * (cache + _activations(model, tensor)),
        weight_bytes=size * weights,
        kernels=_KERNELS_OF_LAYER,
        tensor_collectives=2.0 if tensor > 1 else 0.0,
        tensor_bytes=2 * D * size if tensor > 1 else 0.0,
    )
    rest = Work(
        flops=2 * D * V / tensor,
        row_bytes=4 * V * _LOGITS_PASSES,
        weight_bytes=size * D * V / tensor,
        kernels=2 * _KERNELS_OF_REST,
        tensor_collectives=2.0 if tensor > 1 else 0.0,
        tensor_bytes=D * size + 4 * V if tensor > 1 else 0.0,
    )
    return LayerWork(layer, rest)


def _itemsize(model: ModelConfig) -> int:
    return model.compute_dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]
