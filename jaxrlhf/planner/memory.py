"""Bytes that a call takes of each of its devices: of the fullest one.

What stays between calls is exact, counted from the declared weights and the rules by which they are split. What is
there while a call runs (keys and values, activations, logits, gradients) is counted from what the programs keep, which
tests compare with what compiled programs report.

Programs of a CPU keep more than those of a GPU, since their compiler puts off nothing: weights that are split over
`fsdp` are gathered in whole before the first layer, those that are joined are joined in all layers, gradients are added
up over copies into new arrays, and numbers are float32. A tied embedding counts twice: as it is looked up, and as head.

Reference:
    Mei et al. 2024, arXiv:2406.14088, section 5.1 and Table 2 (ReaL): static memory, and dynamic memory.
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.generate import cache_sizes
from jaxrlhf.models.lora import LoRAConfig, declare_adapters
from jaxrlhf.models.params import Weight, declare
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.axes import WEIGHTS_AT_REST
from jaxrlhf.sharding.stages import layers_of_stages
from jaxrlhf.sharding.strategy import Strategy

MASTER_BYTES, MOMENT_BYTES = 4, 8
"""Of each trained weight: itself in float32, and two moments of AdamW."""


@dataclasses.dataclass(frozen=True)
class CallMemory:
    """Bytes on the fullest device of a call, at the fullest moment."""

    resting: int
    """That stay between calls: master weights and moments where it trains, weights where nothing trains them."""
    optimizer: int = 0
    """What of that is moments."""
    copy: int = 0
    """Its own copy of weights that another call trains."""
    gradients: int = 0
    activations: int = 0
    """Of micro-batches between their forward and backward passes, and of the one at work."""
    logits: int = 0
    cache: int = 0
    """Keys and values."""
    gathered: int = 0
    """Weights as they are used: gathered over `fsdp`, joined, in the compute precision."""

    @property
    def working(self) -> int:
        """What is there only while the call runs."""
        return self.gradients + self.activations + self.logits + self.cache + self.gathered


def call_memory(call: ModelCall, strategy: Strategy, *, is_trained: bool, on_cpu: bool = False) -> CallMemory:
    """The memory of a call.

    Args:
        is_trained: Whether any call trains the set of weights that it reads.
        on_cpu: Its programs are compiled for a CPU, not for a GPU.
    """
    if call.kind == "train":
        memory = _train_memory(call, strategy)
        return _trained_on_cpu(call, strategy, memory) if on_cpu else memory
    size = itemsize(call.model)
    weights = weight_bytes(call.model, strategy, size)
    adapted = 0 if call.lora is None else weight_bytes(call.model, strategy, size, lora=call.lora)
    of_changing = (weights + adapted if call.lora is not None else weights) if is_trained else 0
    resting = weights if not is_trained or call.lora is not None else 0
    held = dict(resting=resting, copy=of_changing, **({"gathered": _gathered_on_cpu(call, strategy)} if on_cpu else {}))
    if call.kind == "generate":
        return dataclasses.replace(_generate_memory(call, strategy), **held)
    rows = call.rows / (strategy.micro_batches * strategy.num_row_shards)
    activations = int(rows * call.columns * size * (_at_work(call.model, strategy) + _passing(call.model, strategy)))
    logits, gathered = _logits(call, strategy, rows), _gathered(call, strategy)
    if logits > activations + gathered:
        return CallMemory(logits=logits, **held)
    return CallMemory(activations=activations, **{"gathered": gathered, **held})


def weight_bytes(model: ModelConfig, strategy: Strategy, size: int, *, lora: LoRAConfig | None = None) -> int:
    """Bytes of weights on the device that has most of them.

    Args:
        size: Bytes of a number.
        lora: Count the adapters in place of the weights.
    """
    return max(_stage_numbers(model, lora, *_splits(strategy))) * size


def evenness(model: ModelConfig, strategy: Strategy, *, lora: LoRAConfig | None = None) -> float:
    """Weights of a device, on average, as a part of those of the device that has most of them."""
    numbers = _stage_numbers(model, lora, *_splits(strategy))
    return sum(numbers) / len(numbers) / max(numbers)


def _splits(strategy: Strategy) -> tuple[int, int, int, int]:
    return strategy.pipeline, strategy.chunks, strategy.fsdp, strategy.tensor


@functools.lru_cache(maxsize=4096)
def _stage_numbers(
    model: ModelConfig, lora: LoRAConfig | None, pipeline: int, chunks: int, fsdp: int, tensor: int
) -> tuple[int, ...]:
    """Numbers of each stage's weights on one of its devices."""
    declared: Any = declare(model) if lora is None else declare_adapters(model, lora)
    degrees = {"fsdp": fsdp, "tensor": tensor}

    def local(tree: Any) -> int:
        return sum(_local(w, degrees) for w in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Weight)))

    layer = local(declared["layers"][0])
    virtual = layers_of_stages(model.num_layers, pipeline * chunks)
    numbers = [sum(len(virtual[v]) for v in range(s, len(virtual), pipeline)) * layer for s in range(pipeline)]
    numbers[0] += local(declared.get("embedding", ()))
    numbers[-1] += sum(local(declared[name]) for name in declared if name not in ("embedding", "layers"))
    if pipeline > 1 and model.tie_embeddings:
        numbers[-1] += local(declared.get("embedding", ()))
    return tuple(numbers)


def _local(weight: Weight, degrees: dict[str, int]) -> int:
    """Numbers of a weight on one device."""
    size = 1
    for dim, axis in zip(weight.shape, weight.axes, strict=True):
        over = None if axis is None else WEIGHTS_AT_REST[axis]
        size *= math.ceil(dim / degrees.get(over, 1)) if isinstance(over, str) else dim
    return size


def cache_bytes(call: ModelCall, strategy: Strategy) -> int:
    """Keys and values of all responses that a device draws at a time, at their longest, on the stage with most layers.

    Exact for a cache of `prompt + response` slots.
    """
    model = call.model
    rows = math.ceil(call.sequences / (strategy.micro_batches * strategy.num_row_shards))
    heads = math.ceil(model.num_kv_heads / strategy.tensor)
    return rows * call.columns * _layers_of_fullest(model, strategy) * 2 * heads * model.head_size * itemsize(model)


def _generate_memory(call: ModelCall, strategy: Strategy) -> CallMemory:
    model, size = call.model, itemsize(call.model)
    sizes = cache_sizes(call.response)
    before_last = call.prompt + (sizes[-2] if len(sizes) > 1 else 0)
    cache = cache_bytes(call, strategy)
    growing = int(cache * before_last / call.columns)  # the cache before it grew for the last time
    at_first = int(cache * (call.prompt + sizes[0]) / call.columns)
    prompts = call.rows / (strategy.micro_batches * strategy.pipeline * strategy.num_row_shards)
    prefill = int(prompts * call.prompt * size * (_at_work(model, strategy) + _passing(model, strategy)))
    rows = prompts * call.num_samples
    gathered = _gathered(call, strategy, all_layers=True)
    logits = int(rows * model.vocab_size * 4 * 2)
    if prefill + at_first > cache + growing:
        return CallMemory(0, 0, activations=prefill, logits=logits, cache=at_first, gathered=gathered)
    return CallMemory(0, 0, logits=logits, cache=cache + growing, gathered=gathered)


def _train_memory(call: ModelCall, strategy: Strategy) -> CallMemory:
    model, size = call.model, itemsize(call.model)
    trained = weight_bytes(model, strategy, 1, lora=call.lora)
    base = 0 if call.lora is None else weight_bytes(model, strategy, size)
    rows = call.rows / call.mini_batches / (strategy.micro_batches * strategy.num_row_shards)
    tokens = rows * call.columns
    layers = _layers_of_fullest(model, strategy)
    in_flight = min(strategy.micro_batches, strategy.pipeline) if strategy.schedule == "1f1b" else (
        strategy.micro_batches
    )  # fmt: skip
    kept = tokens * size * (model.hidden_size + layers * _kept(model, strategy)) * max(1, in_flight)
    if strategy.remat == "layer" and strategy.pipeline > 1:  # a stage keeps what it was given, and each layer's input
        kept = tokens * size * model.hidden_size * (layers + in_flight)
    at_work = tokens * size * 2 * _at_work(model, strategy)
    accumulated = MASTER_BYTES if strategy.micro_batches > 1 or strategy.pipeline > 1 else size
    resting, gathered = trained * (MASTER_BYTES + MOMENT_BYTES) + base, _gathered(call, strategy)
    logits, gradients = 2 * _logits(call, strategy, rows), trained * accumulated
    held = dict(resting=resting, optimizer=trained * MOMENT_BYTES, gathered=gathered)
    if strategy.micro_batches == 1 and logits > at_work + gradients:  # the head comes before most gradients are there
        return CallMemory(activations=int(kept), logits=logits, **held)
    return CallMemory(gradients=gradients, activations=int(kept + at_work), **held)


def _trained_on_cpu(call: ModelCall, strategy: Strategy, memory: CallMemory) -> CallMemory:
    """What a train call takes on a CPU. A loop over mini-batches holds what it gathers once more, one over
    micro-batches its gradients."""
    whole, embedding, again = _whole_on_cpu(call.model, strategy)
    adapters = 0 if call.lora is None else weight_bytes(call.model, strategy, MASTER_BYTES, lora=call.lora)
    gradients, gathered = adapters or whole + again, 0
    if strategy.num_row_shards > 1:
        gradients *= 2
    if call.lora is not None:
        gathered = _gathered_on_cpu(call, strategy)
    elif strategy.fsdp > 1:
        gathered = whole * ((call.updates > 1) + (strategy.data == 1))
        if strategy.data == 1:  # gradients are split as they are made, but for those of the embedding
            gradients = embedding + 2 * again
    if strategy.micro_batches > 1:
        gradients *= 2
    return dataclasses.replace(memory, gradients=gradients, gathered=gathered)


def _gathered_on_cpu(call: ModelCall, strategy: Strategy) -> int:
    """Weights as a pass without gradients uses them on a CPU, beside those that are there."""
    if strategy.fsdp == 1:
        return _gathered(call, strategy, all_layers=True)
    whole, _, again = _whole_on_cpu(call.model, strategy)
    return whole + again


def _whole_on_cpu(model: ModelConfig, strategy: Strategy) -> tuple[int, int, int]:
    """Bytes of a stage's weights in float32, not split over `fsdp`; of the embedding; and of that again if it is the
    output head too."""
    split = dataclasses.replace(strategy, fsdp=1)
    embedding = model.vocab_size * model.hidden_size // strategy.tensor * MASTER_BYTES
    is_head = model.tie_embeddings and model.head != "scalar"
    return weight_bytes(model, split, MASTER_BYTES), embedding, embedding if is_head else 0


def _kept(model: ModelConfig, strategy: Strategy) -> float:
    """Numbers that a layer keeps of each token for its backward pass, on one device: its input; and, unless it is
    computed anew, its norms' outputs, queries, keys, values, attention, and what the MLP multiplies."""
    if strategy.remat == "layer":
        return model.hidden_size
    H, K = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    split = (1 if strategy.remat == "dots" else 2) * H + 2 * K + 2 * model.intermediate_size
    return 2 * model.hidden_size + split / strategy.tensor


def kept_per_token(model: ModelConfig, strategy: Strategy) -> float:
    """Numbers that a stage keeps of a token between forward and backward, on one of its devices: its input, and what
    its layers keep."""
    if strategy.remat == "layer":
        return model.hidden_size
    return model.hidden_size + model.num_layers / strategy.num_stages * _kept(model, strategy)


def _at_work(model: ModelConfig, strategy: Strategy) -> float:
    """Numbers of each token that are there while one layer works, on one device: the residual stream before and after,
    a norm's output, and the MLP's two products with half of their gated one, which outnumber what attention has."""
    H, K = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    widest = max(2.5 * model.intermediate_size, 2 * H + 2 * K)
    return 3 * model.hidden_size + widest / strategy.tensor


def _passing(model: ModelConfig, strategy: Strategy) -> int:
    """Numbers of each token that a pass without gradients has beside: what goes into all-reduces and comes out."""
    return 2 * model.hidden_size if strategy.tensor > 1 else 0


def _logits(call: ModelCall, strategy: Strategy, rows: float) -> int:
    """Of one chunk of columns, in float32."""
    if call.model.head == "scalar":
        return 0
    tokens = min(rows * call.outputs, max(call.model.logits_chunk_tokens, rows))
    return int(tokens * call.model.vocab_size / strategy.tensor * 4)


def _gathered(call: ModelCall, strategy: Strategy, *, all_layers: bool = False) -> int:
    """Weights as they are used, where they rest otherwise: those of two layers at a time, or, in decoding, all."""
    model, size = call.model, itemsize(call.model)
    count = _layers_of_fullest(model, strategy) if all_layers else 2
    D, F, h = model.hidden_size, model.intermediate_size, model.head_size
    joined = D * h * (model.num_heads + 2 * model.num_kv_heads) + 2 * D * F
    whole = joined + D * h * model.num_heads + D * F
    in_other_precision = call.kind == "train" and size < MASTER_BYTES
    if strategy.fsdp > 1 or in_other_precision:
        head = D * model.vocab_size * (MASTER_BYTES if call.trains else size) if strategy.fsdp > 1 else 0
        return int((count * whole * size + head) / strategy.tensor)
    return int(count * joined * size) if strategy.tensor == 1 else 0


def _layers_of_fullest(model: ModelConfig, strategy: Strategy) -> int:
    counts = [len(layers) for layers in layers_of_stages(model.num_layers, strategy.num_stages)]
    return max(sum(counts[s :: strategy.pipeline]) for s in range(strategy.pipeline))


def itemsize(model: ModelConfig) -> int:
    """Bytes of a number in the compute precision."""
    return model.compute_dtype.itemsize  # pyright: ignore[reportAttributeAccessIssue]
