"""Per-device memory of a call, in bytes, on its fullest device.

Memory between calls is exact, counted from the declared weights and the rules by which they are split. Memory while a
call runs (keys and values, activations, logits, gradients) is counted from what the programs save, which tests compare
with the reports of compiled programs.

Programs of a CPU take more than those of a GPU, since their compiler defers nothing: weights that are split over `fsdp`
are gathered in whole before the first layer, weights are joined in all layers at once, gradients are added up over
copies into new arrays, and numbers are float32. A tied embedding counts twice: for the lookup, and as the head. And it
merges what a backward pass would compute anew with what the forward pass computed: unless layers are scanned,
rematerialization saves nothing there.

Reference:
    Mei et al. 2024, arXiv:2406.14088, section 5.1 and Table 2 (ReaL): static memory, and dynamic memory.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxrlhf.generation.decoding_weights import declare_ring
from jaxrlhf.generation.rollout_settings import decoding_stages
from jaxrlhf.models import architecture
from jaxrlhf.models.architecture import JOINED, cached_numbers, computed, declare, matrix_numbers
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kv_cache import grown_columns, num_columns
from jaxrlhf.models.lora import LoRAConfig, declare_adapters
from jaxrlhf.planner.costs.work import seen_bytes
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.sharding.axes import FSDP, PIPELINE, mesh_axes, resting_spec
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Remat, Strategy

MASTER_BYTES = 4
"""Bytes of the float32 master of a trained weight."""
SAVED_ON_CPU: Mapping[Remat, tuple[float, float]] = {"none": (1.8, 2.4), "dots": (1.1, 1.9), "layer": (1.4, 2.0)}
"""Activations of a train call on a CPU, where little is fused, as a multiple of those of a GPU: of whole weights, and
of adapters. Compared with compiled programs: 1.7 to 1.9 and 1.2 to 4.4 where nothing is computed anew."""


@dataclasses.dataclass(frozen=True)
class CallMemory:
    """Peak bytes on the fullest device of a call."""

    resting: int = 0
    """Between calls: master weights and moments if it trains, weights that nothing trains."""
    optimizer: int = 0
    """The part of `resting` that is the optimizer's moments."""
    base: int = 0
    """Between calls: the weights that its adapters adapt. Calls that read them in the same layout share the arrays."""
    copy: int = 0
    """Its copy of weights that another call trains, or of adapters and of the weights that they were added into."""
    shared_with_training: int = 0
    """Bytes of that copy which are the master weights themselves, if those are in the call's layout: in float32 all of
    it, except weights with adapters added in."""
    gradients: int = 0
    activations: int = 0
    """Activations of micro-batches between their forward and backward passes, and of the current one."""
    logits: int = 0
    cache: int = 0
    """Keys and values."""
    gathered: int = 0
    """Weights as they are used: gathered over `fsdp`, joined, in the compute precision."""

    @property
    def working(self) -> int:
        """Bytes that are in use only while the call runs."""
        return self.gradients + self.activations + self.logits + self.cache + self.gathered


def call_memory(call: ModelCall, strategy: Strategy, *, is_trained: bool, on_cpu: bool = False) -> CallMemory:
    """The memory of a call on a GPU or on a CPU. `is_trained` if any call trains the set of weights that it reads."""
    if call.kind == "train":
        if not on_cpu:
            return _train_memory(call, strategy)
        if strategy.pipeline == 1 and not call.model.scan_layers:
            strategy = dataclasses.replace(strategy, remat="none")
        return _trained_on_cpu(call, strategy, _train_memory(call, strategy))
    size, in_ring = call.model.itemsize, call.kind == "generate" and strategy.pipeline > 1
    weights = ring_bytes(call.model, strategy) if in_ring else weight_bytes(call.model, strategy, size)
    own, merged, base = weights, 0, 0
    if call.lora is not None:
        own, base = weight_bytes(call.model, strategy, size, lora=call.lora), _base(call, strategy)
        merged = weights if has_merged_copy(call, strategy) else 0
    copies = 1 + call.stale  # older versions, and the one that they are followed by
    held = dict(resting=0 if is_trained else own, copy=merged + (own * copies if is_trained else 0), base=base)
    if size == MASTER_BYTES and is_trained and not in_ring and not call.stale:
        held |= dict(shared_with_training=own)
    if on_cpu:
        held |= dict(gathered=_gathered_on_cpu(call, strategy))
    if call.kind == "generate":
        return dataclasses.replace(_generate_memory(call, strategy), **held)
    rows = call.part_rows(strategy)
    activations = int(rows * call.columns * size * _in_pass(call.model, strategy))
    logits, gathered = logits_bytes(call, strategy, rows), _gathered(call, strategy)
    if logits > activations + gathered:
        return CallMemory(logits=logits, **held)
    return CallMemory(activations=activations, **{"gathered": gathered, **held})


def has_merged_copy(call: ModelCall, strategy: Strategy) -> bool:
    """True if a call reads a copy of weights with its adapters added in: the stages that generate always do."""
    in_ring = call.kind == "generate" and strategy.pipeline > 1
    return call.lora is not None and (call.merges or in_ring)


@functools.lru_cache(maxsize=4096)
def ring_bytes(model: ModelConfig, strategy: Strategy) -> int:
    """Bytes of weights on each device in pipelined generation: as many layers as the stage with most has, with
    embedding, final norm and head whole on every stage."""
    degrees = {"fsdp": strategy.fsdp, "tensor": strategy.tensor, PIPELINE: strategy.pipeline}
    return _all_local(declare_ring(model, strategy.pipeline), degrees) * model.itemsize


def _base(call: ModelCall, strategy: Strategy) -> int:
    """Bytes of the weights that a call's adapters adapt, in the compute precision."""
    return weight_bytes(call.base_model or call.model, strategy, call.model.itemsize)


def weight_bytes(model: ModelConfig, strategy: Strategy, size: int, *, lora: LoRAConfig | None = None) -> int:
    """Bytes of weights, or of adapters in place of them, on the device that has most. `size` is that of a number."""
    return max(_stage_numbers(model, lora, strategy)) * size


def gradient_numbers(model: ModelConfig, strategy: Strategy, *, lora: LoRAConfig | None = None) -> tuple[int, int]:
    """Numbers of the gradient on the device that has most of them: of weights, or adapters in place of them, that are
    split over `fsdp`, or could be, and of all others."""
    stages = zip(*(_stage_numbers(model, lora, strategy, over) for over in (True, False)), strict=True)
    split, whole = max(stages, key=sum)
    return split, whole


def evenness(model: ModelConfig, strategy: Strategy, *, lora: LoRAConfig | None = None) -> float:
    """Mean bytes of weights of a device, as a fraction of those of the device that has most."""
    numbers = _stage_numbers(model, lora, strategy)
    return sum(numbers) / len(numbers) / max(numbers)


def _stage_numbers(
    model: ModelConfig, lora: LoRAConfig | None, strategy: Strategy, over_fsdp: bool | None = None
) -> list[int]:
    """Numbers of each stage's weights on one of its devices: only of those that `fsdp` splits, or does not, if
    `over_fsdp` says so."""
    layer, first, last = _part_numbers(model, lora, strategy.fsdp, strategy.tensor, over_fsdp)
    numbers = [count * layer for count in device_layers(model, strategy)]
    numbers[0] += first
    numbers[-1] += last + (first if strategy.pipeline > 1 and model.tie_embeddings else 0)
    return numbers


@functools.lru_cache(maxsize=4096)
def _part_numbers(
    model: ModelConfig, lora: LoRAConfig | None, fsdp: int, tensor: int, over_fsdp: bool | None
) -> tuple[int, int, int]:
    """The same of a layer, of what is before the first and of what is after the last."""
    declared = declare(model) if lora is None else declare_adapters(model, lora)
    local = functools.partial(_all_local, degrees={"fsdp": fsdp, "tensor": tensor}, over_fsdp=over_fsdp)
    ends = architecture.FIRST_STAGE, architecture.LAST_STAGE
    first, last = (sum(local(declared.get(name, ())) for name in names) for names in ends)
    return local(declared[architecture.LAYERS][0]), first, last


def _all_local(tree: Any, degrees: dict[Any, int], over_fsdp: bool | None = None) -> int:
    """Numbers of declared weights on one device; `over_fsdp` is as in `_stage_numbers`."""
    total = 0
    for weight in jax.tree.leaves(tree, is_leaf=architecture.is_weight):
        spec = resting_spec(weight, degrees)
        if over_fsdp in (None, FSDP in mesh_axes(spec)):
            split = (math.prod(degrees.get(axis, 1) for axis in mesh_axes(PartitionSpec(each))) for each in spec)
            total += math.prod(math.ceil(dim / parts) for dim, parts in zip(weight.shape, split, strict=True))
    return total


def cache_bytes(call: ModelCall, strategy: Strategy) -> int:
    """Keys and values of all responses that a device draws at a time, at their longest, on the fullest stage."""
    model = call.model
    tokens = math.ceil(call.part_rows(strategy) * strategy.pipeline * call.num_samples)
    tokens *= grown_columns(call.columns - 1)
    if shared := strategy.shared_prompts:
        tokens = strategy.slots * num_columns(call.response) + shared * num_columns(call.prompt - 1)
    elif strategy.slots:
        tokens = strategy.slots * num_columns(call.columns - 1)
    return tokens * _cached_numbers(model, strategy) * model.itemsize


def _cached_numbers(model: ModelConfig, strategy: Strategy) -> int:
    """Keys and values of one token in all layers of a device."""
    numbers = cached_numbers(computed(model, strategy.tensor)) // strategy.tensor
    return max(device_layers(model, strategy)) * numbers


def _generate_memory(call: ModelCall, strategy: Strategy) -> CallMemory:
    model, size = call.model, call.model.itemsize
    sizes = [0, *(columns for columns, _ in decoding_stages(call.prompt, call.response))]
    cache = cache_bytes(call, strategy)
    growing, at_first = (int(cache * columns / sizes[-1]) for columns in (sizes[-2], sizes[1]))
    prompts = strategy.prefill_rows if strategy.slots else call.part_rows(strategy)
    columns = min(strategy.prefill_tokens or call.prompt, call.prompt) if strategy.slots else call.prompt
    prefill = int(prompts * columns * size * _in_pass(model, strategy))
    rows = strategy.slots or prompts * call.num_samples
    gathered = _gathered(call, strategy, all_layers=True)
    logits = int(rows * model.vocab_size * (4 * 2 + seen_bytes(call)))
    # prompts are prefilled beside the cache, which in slots never grows
    prefill += int(prompts * call.prompt * _cached_numbers(model, strategy) * size)
    if strategy.slots:
        return CallMemory(activations=prefill, logits=logits, cache=cache, gathered=gathered)
    if prefill + at_first > cache + growing:
        return CallMemory(activations=prefill, logits=logits, cache=at_first, gathered=gathered)
    return CallMemory(logits=logits, cache=cache + growing, gathered=gathered)


def _train_memory(call: ModelCall, strategy: Strategy) -> CallMemory:
    model, size = call.model, call.model.itemsize
    trained = weight_bytes(model, strategy, 1, lora=call.lora)
    rows = call.part_rows(strategy)
    tokens = rows * call.columns
    layers = max(device_layers(model, strategy))
    in_flight = strategy.micro_batches
    if strategy.schedule == "1f1b":
        in_flight = min(in_flight, strategy.pipeline)
    saved = tokens * size * (model.hidden_size + layers * _residuals(model, strategy)) * in_flight
    if strategy.remat == "layer" and strategy.pipeline > 1:  # a stage saves its input and each layer's
        saved = tokens * size * model.hidden_size * (layers + in_flight)
    at_work = tokens * size * 2 * _live(model, strategy)
    accumulated = MASTER_BYTES if strategy.micro_batches > 1 or strategy.pipeline > 1 else size
    resting, gathered = trained * (MASTER_BYTES + call.moment_bytes), _gathered(call, strategy)
    logits, gradients = 2 * logits_bytes(call, strategy, rows), trained * accumulated
    if call.part is not None:  # what its parts have added up
        resting += trained * MASTER_BYTES * call.terms
    held = dict(resting=resting, optimizer=trained * call.moment_bytes, gathered=gathered)
    held |= {} if call.lora is None else dict(base=_base(call, strategy))
    if strategy.micro_batches == 1 and logits > at_work + gradients:  # the head runs before most gradients exist
        return CallMemory(activations=int(saved), logits=logits, **held)
    return CallMemory(gradients=gradients, activations=int(saved + at_work), **held)


def _trained_on_cpu(call: ModelCall, strategy: Strategy, memory: CallMemory) -> CallMemory:
    """The memory of a train call on a CPU. A loop over mini-batches holds gathered weights once more, one over
    micro-batches gradients."""
    activations = memory.activations * SAVED_ON_CPU[strategy.remat][call.lora is not None]
    whole, embedding, again = _whole_on_cpu(call.model, strategy)
    adapters = 0 if call.lora is None else weight_bytes(call.model, strategy, MASTER_BYTES, lora=call.lora)
    gradients, gathered = adapters or whole + again, 0
    if strategy.num_row_shards > 1:
        gradients *= 2
    if call.lora is not None:
        gathered = _gathered_on_cpu(call, strategy)
    elif strategy.fsdp > 1:
        gathered = whole * ((call.updates > 1) + (strategy.data == 1))
        if strategy.data == 1:  # gradients are split as they are made, except those of the embedding
            gradients = embedding + 2 * again
    if strategy.micro_batches > 1:
        gradients *= 2
    return dataclasses.replace(memory, gradients=gradients, gathered=gathered, activations=int(activations))


def _gathered_on_cpu(call: ModelCall, strategy: Strategy) -> int:
    """Bytes of weights that a pass without gradients gathers or joins on a CPU."""
    if strategy.fsdp == 1:
        return _gathered(call, strategy, all_layers=True)
    whole, _, again = _whole_on_cpu(call.model, strategy)
    return whole + again


def _whole_on_cpu(model: ModelConfig, strategy: Strategy) -> tuple[int, int, int]:
    """Bytes of a stage's weights in float32, not split over `fsdp`; of the embedding; and of that again if it is the
    output head too."""
    split, model = dataclasses.replace(strategy, fsdp=1), computed(model, strategy.tensor)
    embedding = model.vocab_size * model.hidden_size // strategy.tensor * MASTER_BYTES
    return weight_bytes(model, split, MASTER_BYTES), embedding, embedding if model.has_tied_head else 0


def _residuals(model: ModelConfig, strategy: Strategy) -> float:
    """Residuals per token of a layer, on one device."""
    return architecture.residuals(computed(model, strategy.tensor), strategy.remat).on_device(strategy.tensor)


def residuals_per_token(model: ModelConfig, strategy: Strategy, num_layers: int) -> float:
    """Residuals per token of a stage on one of its devices: its input, and those of its layers,
    unless its backward pass recomputes them."""
    if strategy.remat == "layer":
        return model.hidden_size
    return model.hidden_size + num_layers * _residuals(model, strategy)


def _live(model: ModelConfig, strategy: Strategy) -> float:
    """Live activations per token while one layer is computed, on one device."""
    return architecture.live_activations(computed(model, strategy.tensor)).on_device(strategy.tensor)


def _in_pass(model: ModelConfig, strategy: Strategy) -> float:
    """The same in a pass without gradients, with the inputs and outputs of all-reduces."""
    return _live(model, strategy) + (2 * model.hidden_size if strategy.tensor > 1 else 0)


def logits_bytes(call: ModelCall, strategy: Strategy, rows: float) -> int:
    """Bytes of the logits of one chunk of columns, in float32."""
    if call.model.head == "scalar":
        return 0
    tokens = min(rows * call.outputs, max(call.model.logits_chunk_tokens, rows))
    return int(tokens * computed(call.model, strategy.tensor).vocab_size / strategy.tensor * 4)


def _gathered(call: ModelCall, strategy: Strategy, *, all_layers: bool = False) -> int:
    """Bytes of weights as they are used, if they rest in another form: of two layers at a time, or all in decoding."""
    model, size = computed(call.model, strategy.tensor), call.model.itemsize
    count = max(device_layers(model, strategy)) if all_layers else 2
    joined = sum(matrix_numbers(model, names) for names in JOINED.values())
    whole = matrix_numbers(model)
    in_other_precision = call.kind == "train" and call.lora is None and size < MASTER_BYTES
    if strategy.fsdp > 1 or in_other_precision:
        head_size = MASTER_BYTES if call.trains else size
        head = model.hidden_size * model.vocab_size * head_size if strategy.fsdp > 1 else 0
        return int((count * whole * size + head) / strategy.tensor)
    is_joined = strategy.tensor == 1 and (call.lora is None or has_merged_copy(call, strategy))
    return int(count * joined * size) if is_joined else _fitted(call.model, model, count) * size // strategy.tensor


def _fitted(model: ModelConfig, used: ModelConfig, num_layers: int) -> int:
    """Numbers of weights that are repeated or padded for use, in some layers and outside of them. `used`: the model
    that `computed` gives."""
    of_layers = matrix_numbers(used, ("key", "value")) if used.num_kv_heads > model.num_kv_heads else 0
    tables = (1 + (model.head != "scalar" and not model.tie_embeddings)) if used.vocab_size > model.vocab_size else 0
    return num_layers * of_layers + tables * used.hidden_size * used.vocab_size


@functools.lru_cache(maxsize=4096)
def device_layers(model: ModelConfig, strategy: Strategy) -> list[int]:
    """The layers on the devices of each stage, all their chunks together."""
    counts = [len(layers) for layers in layers_of_stages(model.num_layers, strategy.num_stages)]
    return [sum(counts[stage :: strategy.pipeline]) for stage in range(strategy.pipeline)]
