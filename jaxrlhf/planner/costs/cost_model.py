"""Seconds of a call: from its work, the rates of its devices, and how a strategy splits the work over them.

    model = CostModel(cluster)
    model.seconds(call, range(0, 16), Strategy(data=2, tensor=8)).total

A pass of a micro-batch through a part of a model takes

    max(flops / matmul rate, weight bytes / memory rate) + row bytes / memory rate + kernels x launch + collectives

since products wait for weights or for arithmetic, and everything else for memory. Over stages, a call takes as many
passes of its slowest stage as there are micro-batches, and one more for every other stage, while the pipeline fills and
drains; of the sends between stages, what no pass hides (`schedules.exposed_sends`). Generation is one program, every
tick of which begins with what the one before sent: its sends are never hidden. Seconds that were measured (`calibrate`)
take the place of those of a pass where they exist.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from jaxrlhf.cluster.hardware import Cluster, Kind
from jaxrlhf.generation.rollout_settings import Slots, decoding_stages, mean_columns
from jaxrlhf.models.architecture import matrix_numbers, num_parameters
from jaxrlhf.planner.costs.memory import (
    MASTER_BYTES,
    cached_numbers,
    device_layers,
    gradient_numbers,
    has_merged_copy,
    weight_bytes,
)
from jaxrlhf.planner.costs.rollout_steps import (
    RolloutSpan,
    RolloutSteps,
    steps_at_once,
    steps_in_slots,
    steps_of_span,
)
from jaxrlhf.planner.costs.work import SLOT_PHASES, LayerWork, Phase, SlotPhase, Work, analytic_work, decode_work
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.schedules.exposed_sends import exposed_in_inference, exposed_in_training
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Remat, Strategy

UPDATE_BYTES = 3 * 4
"""Bytes that an update reads and writes for each weight: reads it and its gradient, writes it. Moments are read and
written, too."""


class WorkSource(Protocol):
    """The source of the work of a phase of a call: formulas, or compiled programs."""

    def __call__(self, call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork: ...


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """A pass of a micro-batch, or the optimizer, through one layer, and through embedding, head and loss."""

    layer: float
    rest: float
    includes_reduction: bool = False
    """True if an update's seconds include adding up gradients over copies of the weights."""


MeasuredPhase = Literal[Phase, SlotPhase, "update"]
"""Phases of calls, and `update`: the optimizer, once for each mini-batch."""
MeasuredPass = Callable[[ModelCall, MeasuredPhase, Strategy, float], PassSeconds | None]
"""Measured seconds of a pass, from the call, its phase, its strategy, and the rows of a micro-batch on each row shard.
All row shards work at the same time. None if nothing similar was measured."""


@dataclasses.dataclass(frozen=True)
class CallSeconds:
    """The seconds of a call, by what they are spent on."""

    passes: float
    bubbles: float = 0.0
    """Stages wait for the first micro-batches to come, or for the last ones to come back."""
    sends: float = 0.0
    """Stages wait for activations of other stages."""
    reduction: float = 0.0
    """Gradients are added up over copies of the weights."""
    update: float = 0.0
    """The optimizer."""
    merge: float = 0.0
    """Adapters are added into a copy of the weights that they adapt."""
    dispatch: float = 0.0
    """Devices wait for programs to be started."""
    host: float = 0.0
    """The program's own work on the host, if it takes time from the devices."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclasses.dataclass(frozen=True)
class Span:
    """The devices of an axis of a mesh: groups of `size`, of which `per_node` are in one node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return self.size // self.per_node


def span(strategy: Strategy, axis: str, devices_per_node: int) -> Span:
    """The groups of an axis over nodes. Axes are in the order pipeline, data, fsdp, tensor, of which the last are
    neighbors. `rows` is `data` and `fsdp` together."""
    inner = {
        "tensor": 1,
        "fsdp": strategy.tensor,
        "data": strategy.tensor * strategy.fsdp,
        "rows": strategy.tensor,
    }[axis]
    size = strategy.num_row_shards if axis == "rows" else getattr(strategy, axis)
    within = max(1, min(size, devices_per_node // inner)) if inner <= devices_per_node else 1
    while size % within:
        within -= 1
    return Span(size, within)


class CostModel:
    """Costs of calls on a cluster."""

    def __init__(
        self, cluster: Cluster, work: WorkSource = analytic_work, measured: MeasuredPass = lambda *_: None
    ) -> None:
        self.cluster, self.work, self.measured = cluster, work, measured
        self._works: dict[tuple[object, ...], tuple[ModelCall, LayerWork]] = {}
        self.kind = functools.cache(cluster.slowest)
        """The kind of devices that the others wait for."""
        self.network = functools.cache(cluster.network)
        """The same of the networks of their nodes."""

    def on(self, cluster: Cluster) -> "CostModel":
        """The same on another cluster."""
        return CostModel(cluster, self.work, self.measured)

    def of(self, call: ModelCall, devices: range, strategy: Strategy) -> "CallCosts":
        """The costs of a call."""
        return CallCosts(self, call, devices, strategy)

    def seconds(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        """The seconds of one call."""
        return self.of(call, devices, strategy).seconds()

    def work_of(self, source: WorkSource, call: ModelCall, phase: Phase, strategy: Strategy) -> LayerWork:
        """The work of a row of a pass, counted once for all devices and micro-batches."""
        key = source, id(call), phase, strategy.tensor, strategy.fsdp, strategy.remat
        if key not in self._works:
            work = source(call, phase, tensor=strategy.tensor, fsdp=strategy.fsdp, remat=strategy.remat)
            self._works[key] = call, work  # with the call, so that no other one gets its identity
        return self._works[key][1]

    def host_copy(self, devices: range, size: float) -> float:
        """Seconds of copying `size` bytes of every device from host memory, or to it."""
        return size / self.kind(devices).coefficients.host_bandwidth

    def way_between(self, source: range, target: range) -> tuple[float, float]:
        """Seconds until the first byte of a call's outputs arrives from some devices at others, and bytes a second from
        then on: every target device may get all of them. From devices to themselves it takes no time."""
        if source == target:
            return 0.0, math.inf
        both = range(min(source.start, target.start), max(source.stop, target.stop))
        kind, per_node = self.kind(both), self.cluster.devices_per_node
        costs = kind.coefficients
        if both.start // per_node == (both.stop - 1) // per_node:
            return costs.collective_seconds, kind.link.bandwidth * costs.link_efficiency
        return costs.network_collective_seconds, self.network(both).bandwidth * costs.network_efficiency


class CallCosts:
    """Costs of a call on some devices, under a strategy."""

    def __init__(self, model: CostModel, call: ModelCall, devices: range, strategy: Strategy) -> None:
        self.model, self.call, self.devices, self.strategy = model, call, devices, strategy
        self.kind, self.per_node = model.kind(devices), model.cluster.devices_per_node
        self.rates = self.kind.coefficients

    def seconds(self) -> CallSeconds:
        """The seconds of the call."""
        seconds = {"generate": self.generate, "train": self._train}.get(self.call.kind, self._infer)()
        host = len(self.devices) * self.rates.host_seconds
        return dataclasses.replace(seconds, merge=self._merge(), host=host)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _infer(self) -> CallSeconds:
        rows = self.call.part_rows(self.strategy)
        return self._through_stages(self._stages("forward", rows), rows, directions=1)

    def _train(self) -> CallSeconds:
        call, strategy = self.call, self.strategy
        rows = call.part_rows(strategy)
        one = self._through_stages(self._stages("gradient", rows), rows, directions=2)
        update = trained_on_device(call, strategy) * (UPDATE_BYTES + 2 * call.moment_bytes) / memory_rate(self.kind)
        update, reduction = update + 12 * self.rates.kernel_seconds, self._reduction()
        if (measured := self.model.measured(call, "update", strategy, 0.0)) is not None:
            update = max(self._by_device(measured))
            reduction = 0.0 if measured.includes_reduction else reduction
        return _times(dataclasses.replace(one, reduction=reduction, update=update), call.updates)

    def _reduction(self) -> float:
        """Seconds of adding up gradients over copies of weights. Those scattered over `fsdp` are in the passes."""
        split, whole = reduced_bytes(self.call, self.strategy)
        return self._all_gather("data", 2 * split) + self._all_gather("rows", 2 * whole)

    def generate(self) -> CallSeconds:
        """The seconds of a generate call, all rows at once being one group. Over stages (`pipelined_batching`) a group
        for each micro-batch is prefilled in as many ticks as it takes its chunks to pass all of them; the ring fills
        and empties in every turn, and every tick begins with what the one before sent."""
        call, strategy, stages, expected = self.call, self.strategy, self.strategy.pipeline, self.rollout_steps()
        if call.part is not None and not strategy.slots:  # all sequences are in slots
            entering = call.rows // strategy.num_row_shards
            rows, turns = entering * call.num_samples // stages, expected.steps / Slots.steps
        elif strategy.slots:
            entering, rows, turns = strategy.prefill_rows, strategy.slots // stages, expected.steps / Slots.steps
        else:
            entering = call.part_rows(strategy)
            rows, turns = entering * call.num_samples, len(decoding_stages(call.prompt, call.response))
        if (measured := self._measured_slots(expected)) is not None:
            prefill, step = measured
        else:
            prefill, step = max(self._stages("prefill", entering)), self.step(rows, expected.columns)
        fills = math.ceil(expected.groups / stages) if stages > 1 else expected.groups
        chunks = math.ceil(call.prompt / (strategy.prefill_tokens or call.prompt))
        sends, size = 0.0, call.model.hidden_size * call.model.itemsize
        if stages > 1:
            chunk = self.send(entering * math.ceil(call.prompt / chunks) * size)
            sends = fills * (stages * chunks + stages - 1) * chunk
            sends += stages * (expected.steps + turns) * self.send(rows * size)
        if call.part is not None and call.part.migrate and call.part.handed_on[0] == 0:
            sends += self.migration(rows * stages)
        seconds = CallSeconds(
            passes=stages * (expected.steps * step + fills * prefill),
            bubbles=(stages - 1) * (turns * step + fills * prefill / chunks),
            sends=sends,
            dispatch=self.rates.dispatch_seconds,
        )
        return _times(seconds, strategy.micro_batches)

    def _measured_slots(self, expected: RolloutSteps) -> tuple[float, float] | None:
        """Seconds of a group and of a step of a rollout in slots, where they were measured: without stages."""
        strategy = self.strategy
        if not strategy.slots or strategy.pipeline > 1:
            return None
        rows = {"slot_prefill": strategy.prefill_rows, "slot_step": strategy.slots, "slot_column": strategy.slots}
        measured = [self.model.measured(self.call, phase, strategy, rows[phase]) for phase in SLOT_PHASES]
        if any(each is None for each in measured):
            return None
        prefill, step, column = (self._by_device(each)[0] for each in measured if each is not None)
        return prefill, step + expected.columns * column

    def rollout_steps(self) -> RolloutSteps:
        """The decoding steps that a generate call is expected to take; of micro-batches, each. All rows at once go on
        until the longest response of all row shards has ended; in slots each shard ends by itself."""
        call, strategy = self.call, self.strategy
        if call.part is not None:
            span = _span_of(call, strategy)
            return steps_of_span(call.lengths, call.prompt, call.response, span, self.kind.target is not None)
        prompts, shards = math.ceil(call.part_rows(strategy)), strategy.num_row_shards
        if strategy.slots:
            on_gpu = self.kind.target is not None
            lengths = call.lengths, call.prompt, call.response
            queue = prompts * strategy.pipeline
            return steps_in_slots(*lengths, queue, call.num_samples, shards, slots_of(strategy), on_gpu)
        rows = prompts * call.num_samples * shards * strategy.pipeline
        return steps_at_once(call.lengths, call.prompt, call.response, rows)

    def step(self, rows: float, columns: float) -> float:
        """Seconds of a decoding step of the slowest stage that reads so many columns of the cache. What it takes more,
        or less, than a step of full-length responses is modelled, within what reading the cache alone could make of
        it."""
        one, usual = self._pass("decode", rows), mean_columns(self.call.prompt, self.call.response)
        works = [decode_work(self.call, tensor=self.strategy.tensor, slots=slots).layer for slots in (columns, usual)]
        now, then = (self._work_seconds("decode", rows, work) for work in works)
        least, most = sorted((one.layer, one.layer * columns / usual))
        layer = min(max(one.layer + now - then, least), most)
        return max(self._by_device(dataclasses.replace(one, layer=layer)))

    def migration(self, rows: float) -> float:
        """Seconds in which so many sequences come to each row shard of a tail: with their caches over the links, or as
        tokens, by a prefill over all columns, in groups."""
        call, strategy = self.call, self.strategy
        assert call.part is not None
        if call.part.migrate == "prefill":
            group = min(Slots.prefill_rows, rows)
            return math.ceil(rows / group) * max(self._stages("prefill", group)) * call.columns / call.prompt
        size = rows * call.columns * max(device_layers(call.model, strategy)) * cached_numbers(call.model)
        return self.send(size * call.model.itemsize)  # parted over `tensor` there

    def _merge(self) -> float:
        """Seconds of adding adapters into a copy of the weights: their product in float32, and the sum."""
        call, strategy = self.call, self.strategy
        if call.lora is None or not has_merged_copy(call, strategy):
            return 0.0
        targets, layers = call.lora.targets, call.model.num_layers / strategy.pipeline
        numbers = layers * matrix_numbers(call.model, targets) / (strategy.tensor * strategy.fsdp)
        product = 2 * numbers * call.lora.rank / self.kind.matmul_flops("float32")
        moved = numbers * (2 * 4 + 2 * call.model.itemsize) / memory_rate(self.kind)
        return max(product + moved, 2 * layers * len(targets) * self.rates.kernel_seconds)

    def _through_stages(self, passes: Sequence[float], rows: float, directions: int) -> CallSeconds:
        """Micro-batches through the stages of a call: forward, or forward and back. They follow one another as the
        slowest stage lets them, and the first or the last of them passes the others. `passes` are seconds of one on the
        devices of each stage."""
        call, strategy, dispatch = self.call, self.strategy, self.rates.dispatch_seconds
        count = strategy.micro_batches
        if strategy.pipeline == 1:
            return CallSeconds(passes=count * passes[0], dispatch=dispatch)
        send = self.send(rows * call.columns * call.model.hidden_size * call.model.itemsize)
        busy, waiting = count * max(passes), (sum(passes) - max(passes)) / strategy.chunks
        programs = count * strategy.num_stages * directions * strategy.data
        held_up = max(0.0, programs * dispatch - busy - waiting)  # one thread starts them all
        sends = self._sends(max(passes), rows, send)
        if self.kind.target is None:  # sends take time from the processor that all stages share
            sends = count * (strategy.num_stages - 1) * directions * send
        return CallSeconds(busy, waiting, sends=sends, dispatch=dispatch + held_up)

    def _sends(self, stage: float, rows: float, send: float) -> float:
        """Seconds of sends that stages wait for, from those of one send, and of a micro-batch on a device (`stage`),
        through all its chunks, forward and back."""
        strategy = self.strategy
        one, count = stage / strategy.chunks, strategy.micro_batches
        if not self.call.trains:
            return exposed_in_inference(strategy.pipeline, strategy.chunks, count, forward=one, send=send)
        forward = one * self._forward_share(rows)
        times = dict(forward=forward, backward=one - forward, send=send)
        return exposed_in_training(strategy.schedule, strategy.pipeline, strategy.chunks, count, **times)

    def stage_seconds(self) -> list[tuple[float, float]]:
        """Forward and backward pass of a micro-batch through each stage of a train call, as its programs make them: the
        last stage runs both in its backward. What a forward takes of both is its part of the work of a layer."""
        rows = self.call.part_rows(self.strategy)
        one, share = self._pass("gradient", rows), self._forward_share(rows)
        *others, last = map(len, layers_of_stages(self.call.model.num_layers, self.strategy.num_stages))
        seconds = [(n * one.layer * share, n * one.layer * (1 - share)) for n in others]
        return [*seconds, (0.0, last * one.layer + one.rest)]

    def _forward_share(self, rows: float) -> float:
        """The part of both passes through a layer that is the forward one. By formulas: compiled programs and
        measurements have no forward of a train call by itself."""
        phases: tuple[Phase, Phase] = ("forward", "gradient")
        works = (self.model.work_of(analytic_work, self.call, phase, self.strategy).layer for phase in phases)
        forward, both = (self._work_seconds(phase, rows, work) for phase, work in zip(phases, works, strict=True))
        return forward / both

    # -- passes --------------------------------------------------------------------------------------------------------

    def _stages(self, phase: Phase, rows: float) -> Sequence[float]:
        """A pass of a micro-batch on the devices of each stage, all their chunks together."""
        return self._by_device(self._pass(phase, rows))

    def _by_device(self, one: PassSeconds) -> list[float]:
        """Seconds of a pass on the devices of each stage, all their chunks together; the last has the head."""
        per_device = [layers * one.layer for layers in device_layers(self.call.model, self.strategy)]
        return [*per_device[:-1], per_device[-1] + one.rest]

    def _pass(self, phase: Phase, rows: float) -> PassSeconds:
        if (measured := self.model.measured(self.call, phase, self.strategy, rows)) is not None:
            return measured
        layer, rest = self.model.work_of(self.model.work, self.call, phase, self.strategy)
        waits = self.rates.step_seconds if phase == "decode" else 0.0
        one = self._work_seconds(phase, rows, layer)
        return PassSeconds(one, self._work_seconds(phase, rows, layer + rest) - one + waits)

    def _work_seconds(self, phase: Phase, rows: float, work: Work) -> float:
        rates, memory = self.rates, memory_rate(self.kind)
        launch = rates.graph_kernel_seconds if phase == "decode" else rates.kernel_seconds
        operations = work.flops + rates.half_dim * work.narrow_flops
        products = max(operations * rows / self.kind.matmul_flops(self.call.model.dtype), work.weight_bytes / memory)
        seconds = max(products + work.row_bytes * rows / memory, work.kernels * launch)
        if work.tensor_collectives:  # each is a reduce-scatter and an all-gather
            seconds += self._all_gather("tensor", 2 * work.tensor_bytes * rows, work.tensor_collectives)
        if work.fsdp_collectives:
            seconds += self._all_gather("fsdp", work.fsdp_bytes, work.fsdp_collectives)
        return seconds

    # -- communication -------------------------------------------------------------------------------------------------

    def _all_gather(self, axis: str, size: float, count: float = 1.0) -> float:
        """Seconds of `count` all-gathers, or reduce-scatters, along an axis, in rings within nodes and between them.
        `size` is bytes of the whole arrays of all of them."""
        group = span(self.strategy, axis, self.per_node)
        if group.size == 1:
            return 0.0
        rates, local, nodes = self.rates, group.per_node, group.nodes
        seconds = (local - 1) / local * size / (self.kind.link.bandwidth * rates.link_efficiency)
        latency = rates.collective_seconds * math.log2(local)
        if nodes > 1:
            share = self.model.network(self.devices).shared_by(min(len(self.devices), self.per_node))
            seconds += (nodes - 1) / nodes * size / local / (share * rates.network_efficiency)
            latency += rates.network_collective_seconds * math.log2(nodes)
        return seconds + count * latency

    def send(self, size: float) -> float:
        """Seconds of a send from a device of one stage to its neighbor of the next."""
        rates, per_stage = self.rates, len(self.devices) // self.strategy.pipeline
        size /= self.strategy.tensor  # each of a tensor group sends its part
        if per_stage * self.strategy.pipeline <= self.per_node:
            return rates.collective_seconds + size / (self.kind.link.bandwidth * rates.link_efficiency)
        rate = self.model.network(self.devices).shared_by(min(per_stage, self.per_node)) * rates.network_efficiency
        return rates.network_collective_seconds + size / rate


def _span_of(call: ModelCall, strategy: Strategy) -> RolloutSpan:
    """What a part of a generation is of its rollout."""
    assert call.part is not None
    share, of_share = call.left or (call, strategy)
    shards, n = of_share.num_row_shards, share.num_samples
    prompts = share.rows // shards
    slots = slots_of(of_share) if of_share.slots else Slots(prompts * n, prefill_rows=prompts)
    tail = {"stay": call.part.stay, "tail_shards": strategy.num_row_shards} if call.left else {}
    return RolloutSpan(prompts, n, shards, slots, call.part.handed_on, **tail)


def memory_rate(kind: Kind) -> float:
    """Bytes a second that kernels read and write."""
    return kind.memory.bandwidth * kind.coefficients.memory_efficiency


def trained_on_device(call: ModelCall, strategy: Strategy) -> float:
    """Weights that a train call changes, on one device."""
    if call.lora is not None:
        return weight_bytes(call.model, strategy, 1, lora=call.lora)
    return num_parameters(call.model) / (strategy.tensor * strategy.fsdp * strategy.pipeline)


def reduced_bytes(call: ModelCall, strategy: Strategy) -> tuple[float, float]:
    """Bytes of gradients that a device puts into the all-reduces of an update, on the stage that has most: of weights
    that rest split over `fsdp`, which has scattered their gradients, so that they go over `data` only; and of others,
    which go over all row shards.

    That is once an update, in the compute precision, but for a scalar head; over stages, in the float32 in which they
    were added up.
    """
    split, whole = gradient_numbers(call.model, strategy, lora=call.lora)
    size = MASTER_BYTES if strategy.pipeline > 1 else call.model.itemsize
    return split * size, whole * size


def _times(seconds: CallSeconds, times: float) -> CallSeconds:
    return CallSeconds(**{name: part * times for name, part in vars(seconds).items()})
