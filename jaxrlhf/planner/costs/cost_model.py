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
from typing import Protocol

from jaxrlhf.cluster.hardware import Cluster, Kind
from jaxrlhf.generation.rollout_settings import Slots, decoding_stages, mean_columns
from jaxrlhf.models.architecture import matrix_numbers, num_parameters
from jaxrlhf.planner.costs.memory import MASTER_BYTES, gradient_numbers, has_merged_copy, weight_bytes
from jaxrlhf.planner.costs.rollout_steps import RolloutSteps, steps_at_once, steps_in_slots
from jaxrlhf.planner.costs.work import SLOT_PHASES, LayerWork, Phase, SlotPhase, Work, analytic_work, decode_work
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.schedules.exposed_sends import exposed_in_inference, exposed_in_training
from jaxrlhf.sharding.stage_layers import layers_of_stages
from jaxrlhf.sharding.strategy import Remat, Strategy

ADAM_BYTES = 7 * 4
"""Bytes that an update reads and writes for each weight: reads itself, two moments and its gradient, writes three."""


class WorkSource(Protocol):
    """The source of the work of a phase of a call: formulas, or compiled programs."""

    def __call__(self, call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork: ...


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """A pass of a micro-batch through one layer, and through embedding, head and loss."""

    layer: float
    rest: float


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Both passes of a micro-batch through a stage of a train call."""

    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class UpdateSeconds:
    """The optimizer over one layer, and over embedding, head and norms."""

    optimizer: PassSeconds
    includes_reduction: bool
    """True if the seconds include adding up gradients over copies of the weights."""


MeasuredPass = Callable[[ModelCall, Phase | SlotPhase, Strategy, float], PassSeconds | None]
"""Measured seconds of a pass, from the call, its phase, its strategy, and the rows of a micro-batch on each row shard.
All row shards work at the same time. None if nothing similar was measured."""
MeasuredUpdate = Callable[[ModelCall, Strategy], UpdateSeconds | None]
"""Measured seconds of an update without its passes. None if nothing similar was measured."""


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
        "pipeline": strategy.tensor * strategy.fsdp * strategy.data,
    }[axis]
    size = strategy.num_row_shards if axis == "rows" else getattr(strategy, axis)
    within = max(1, min(size, devices_per_node // inner)) if inner <= devices_per_node else 1
    while size % within:
        within -= 1
    return Span(size, within)


class CostModel:
    """Costs of calls on a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        work: WorkSource = analytic_work,
        measured: MeasuredPass | None = None,
        measured_update: MeasuredUpdate | None = None,
    ) -> None:
        self.cluster = cluster
        self._work = work
        self._measured = measured
        self._measured_update = measured_update
        self._works: dict[tuple[object, ...], tuple[ModelCall, LayerWork]] = {}
        self._kind = functools.cache(cluster.slowest)
        """The kind of devices that the others wait for."""
        self._network = functools.cache(cluster.network)
        """The same of the networks of their nodes."""

    def on(self, cluster: Cluster) -> "CostModel":
        """The same on another cluster."""
        return CostModel(cluster, self._work, self._measured, self._measured_update)

    def seconds(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        """The seconds of one call."""
        of_kind = {"generate": self._generate, "train": self._train}.get(call.kind, self._infer)
        seconds, kind = of_kind(call, devices, strategy), self._kind(devices)
        host = len(devices) * kind.coefficients.host_seconds
        return dataclasses.replace(seconds, merge=self._merge(call, kind, strategy), host=host)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _infer(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        rows = call.part_rows(strategy)
        passes = self._stages(call, "forward", devices, strategy, rows)
        return self._through_stages(call, devices, strategy, passes, rows, directions=1)

    def _train(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        rows = _rows_of_micro_batch(call, strategy)
        passes = self._stages(call, "gradient", devices, strategy, rows)
        one = self._through_stages(call, devices, strategy, passes, rows, directions=2)
        trained = trained_on_device(call, strategy)
        kind = self._kind(devices)
        update = trained * ADAM_BYTES / memory_rate(kind) + 12 * kind.coefficients.kernel_seconds
        reduction = self._reduction(call, devices, strategy)
        measured = self._measured_update(call, strategy) if self._measured_update is not None else None
        if measured is not None:
            update = max(_by_device(call, strategy, measured.optimizer))
            reduction = 0.0 if measured.includes_reduction else reduction
        return _times(dataclasses.replace(one, reduction=reduction, update=update), call.updates)

    def _reduction(self, call: ModelCall, devices: range, strategy: Strategy) -> float:
        """Seconds of adding up gradients over copies of weights. Those scattered over `fsdp` are in the passes."""
        split, whole = reduced_bytes(call, strategy)
        over_data, over_rows = (span(strategy, axis, self.cluster.devices_per_node) for axis in ("data", "rows"))
        return self.all_reduce(devices, over_data, split) + self.all_reduce(devices, over_rows, whole)

    def _generate(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        kind, stages = self._kind(devices), strategy.pipeline
        if strategy.slots:
            dispatch = kind.coefficients.dispatch_seconds
            if stages > 1:
                return dataclasses.replace(self._in_slots_of_stages(call, devices, strategy), dispatch=dispatch)
            return CallSeconds(passes=self._in_slots(call, devices, strategy), dispatch=dispatch)
        prompts = call.part_rows(strategy)
        rows = prompts * call.num_samples
        prefill = max(self._stages(call, "prefill", devices, strategy, prompts))
        steps, turns = float(call.response), len(decoding_stages(call.prompt, call.response))
        if call.lengths is None:
            step = max(self._stages(call, "decode", devices, strategy, rows))
        else:
            expected = self.rollout_steps(call, devices, strategy)
            steps, step = expected.steps, self._step(call, devices, strategy, rows, expected.columns)
        size = call.model.hidden_size * call.model.itemsize
        send = self._send(devices, strategy, rows * size) if stages > 1 else 0.0
        first = self._send(devices, strategy, prompts * call.prompt * size) if stages > 1 else 0.0
        return _times(
            CallSeconds(
                passes=stages * (prefill + steps * step),
                bubbles=(stages - 1) * (prefill + turns * step),
                # every tick of the ring begins with what the one before sent
                sends=(2 * stages - 1) * first + stages * (steps + turns) * send,
                dispatch=kind.coefficients.dispatch_seconds,
            ),
            strategy.micro_batches,
        )

    def rollout_steps(self, call: ModelCall, devices: range, strategy: Strategy) -> RolloutSteps:
        """The decoding steps that a generate call is expected to take; of micro-batches, each. All rows at once go on
        until the longest response of all row shards has ended; in slots each shard ends by itself."""
        prompts, shards = math.ceil(call.part_rows(strategy)), strategy.num_row_shards
        if strategy.slots:
            on_gpu = self._kind(devices).target is not None
            lengths = call.lengths, call.prompt, call.response
            queue = prompts * strategy.pipeline
            return steps_in_slots(*lengths, queue, call.num_samples, shards, slots_of(strategy), on_gpu)
        rows = prompts * call.num_samples * shards * strategy.pipeline
        return steps_at_once(call.lengths, call.prompt, call.response, rows)

    def _in_slots(self, call: ModelCall, devices: range, strategy: Strategy) -> float:
        """Seconds of a rollout in slots: of its steps, as wide as there are slots, and of the groups that enter."""
        expected, slots = self.rollout_steps(call, devices, strategy), strategy.slots
        rows = {"slot_prefill": strategy.prefill_rows, "slot_step": slots, "slot_column": slots}
        measured = [
            self._measured(call, phase, strategy, rows[phase]) if self._measured is not None else None
            for phase in SLOT_PHASES
        ]
        if all(each is not None for each in measured):
            prefill, step, column = (_by_device(call, strategy, each)[0] for each in measured if each is not None)
            return expected.groups * prefill + expected.steps * (step + expected.columns * column)
        prefill = max(self._stages(call, "prefill", devices, strategy, strategy.prefill_rows))
        return expected.groups * prefill + expected.steps * self._step(call, devices, strategy, slots, expected.columns)

    def _in_slots_of_stages(self, call: ModelCall, devices: range, strategy: Strategy) -> CallSeconds:
        """Seconds of a rollout in slots over stages, as `generation.pipelined_batching` takes turns. A group for each
        micro-batch is prefilled in as many ticks as it takes its chunks to pass all stages."""
        expected, stages = self.rollout_steps(call, devices, strategy), strategy.pipeline
        rows, turns = strategy.slots // stages, expected.steps / Slots.steps
        fills, chunks = (
            math.ceil(expected.groups / stages),
            math.ceil(call.prompt / (strategy.prefill_tokens or call.prompt)),
        )
        step = self._step(call, devices, strategy, rows, expected.columns)
        prefill = max(self._stages(call, "prefill", devices, strategy, strategy.prefill_rows))
        size = call.model.hidden_size * call.model.itemsize
        chunk = self._send(devices, strategy, strategy.prefill_rows * math.ceil(call.prompt / chunks) * size)
        sends = fills * (stages * chunks + stages - 1) * chunk
        return CallSeconds(
            passes=stages * (expected.steps * step + fills * prefill),
            bubbles=(stages - 1) * (turns * step + fills * prefill / chunks),
            sends=sends + turns * (Slots.steps + 1) * stages * self._send(devices, strategy, rows * size),
        )

    def _step(self, call: ModelCall, devices: range, strategy: Strategy, rows: float, columns: float) -> float:
        """Seconds of a decoding step of the slowest stage that reads so many columns of the cache. What it takes more,
        or less, than a step of full-length responses is modelled, within what reading the cache alone could make of
        it."""
        one, usual = self._pass(call, "decode", devices, strategy, rows), mean_columns(call.prompt, call.response)
        layers = [decode_work(call, tensor=strategy.tensor, slots=slots).layer for slots in (columns, usual)]
        now, then = (self._work_seconds(call, "decode", devices, strategy, rows, layer) for layer in layers)
        least, most = sorted((one.layer, one.layer * columns / usual))
        layer = min(max(one.layer + now - then, least), most)
        return max(_by_device(call, strategy, dataclasses.replace(one, layer=layer)))

    def _merge(self, call: ModelCall, kind: Kind, strategy: Strategy) -> float:
        """Seconds of adding adapters into a copy of the weights: their product in float32, and the sum."""
        if call.lora is None or not has_merged_copy(call, strategy):
            return 0.0
        model, rank = call.model, call.lora.rank
        targets, layers = call.lora.targets, model.num_layers / strategy.pipeline
        numbers = layers * matrix_numbers(model, targets) / (strategy.tensor * strategy.fsdp)
        product = 2 * numbers * rank / kind.matmul_flops("float32")
        moved = numbers * (2 * 4 + 2 * call.model.itemsize) / memory_rate(kind)
        return max(product + moved, 2 * layers * len(targets) * kind.coefficients.kernel_seconds)

    def _through_stages(
        self, call: ModelCall, devices: range, strategy: Strategy, passes: Sequence[float], rows: float, directions: int
    ) -> CallSeconds:
        """Micro-batches through the stages of a call: forward, or forward and back.

        They follow one another as the slowest stage lets them, and the first or the last of them passes the others.

        Args:
            passes: Seconds of a micro-batch on the devices of each stage.
        """
        kind = self._kind(devices)
        dispatch = kind.coefficients.dispatch_seconds
        count, stages = strategy.micro_batches, strategy.pipeline
        if stages == 1:
            return CallSeconds(passes=count * passes[0], dispatch=dispatch)
        activations = rows * call.columns * call.model.hidden_size * call.model.itemsize
        send = self._send(devices, strategy, activations)
        busy, waiting = count * max(passes), (sum(passes) - max(passes)) / strategy.chunks
        programs = count * strategy.num_stages * directions * strategy.data
        held_up = max(0.0, programs * dispatch - busy - waiting)  # one thread starts them all
        sends = self._sends(call, devices, strategy, max(passes), rows, send)
        if kind.target is None:  # sends take time from the processor that all stages share
            sends = count * (strategy.num_stages - 1) * directions * send
        return CallSeconds(busy, waiting, sends=sends, dispatch=dispatch + held_up)

    def _sends(
        self, call: ModelCall, devices: range, strategy: Strategy, stage: float, rows: float, send: float
    ) -> float:
        """Seconds of sends that stages wait for.

        Args:
            stage: Seconds of a micro-batch on a device, through all its chunks, forward and back.
            send: Seconds of one send.
        """
        one, count = stage / strategy.chunks, strategy.micro_batches
        if not call.trains:
            return exposed_in_inference(strategy.pipeline, strategy.chunks, count, forward=one, send=send)
        forward = one * self._forward_share(call, devices, strategy, rows)
        times = dict(forward=forward, backward=one - forward, send=send)
        return exposed_in_training(strategy.schedule, strategy.pipeline, strategy.chunks, count, **times)

    def stage_seconds(self, call: ModelCall, devices: range, strategy: Strategy) -> tuple[StageSeconds, ...]:
        """Both passes of a micro-batch through each stage of a train call, as its programs make them: the last stage
        runs forward and backward in one, in its backward.

        What a forward takes of both passes is its part of the work of a layer.
        """
        rows = _rows_of_micro_batch(call, strategy)
        one = self._pass(call, "gradient", devices, strategy, rows)
        share = self._forward_share(call, devices, strategy, rows)
        *others, last = (len(part) for part in layers_of_stages(call.model.num_layers, strategy.num_stages))
        seconds = [StageSeconds(n * one.layer * share, n * one.layer * (1 - share)) for n in others]
        return (*seconds, StageSeconds(0.0, last * one.layer + one.rest))

    def _forward_share(self, call: ModelCall, devices: range, strategy: Strategy, rows: float) -> float:
        """The part of both passes through a layer that is the forward one. By formulas: compiled programs and
        measurements have no forward of a train call by itself."""

        def layer(phase: Phase) -> float:
            work, _ = self._work_of(analytic_work, call, phase, strategy)
            return self._work_seconds(call, phase, devices, strategy, rows, work)

        return layer("forward") / layer("gradient")

    # -- passes --------------------------------------------------------------------------------------------------------

    def _stages(
        self, call: ModelCall, phase: Phase, devices: range, strategy: Strategy, rows: float
    ) -> Sequence[float]:
        """A pass of a micro-batch on the devices of each stage, all their chunks together."""
        return _by_device(call, strategy, self._pass(call, phase, devices, strategy, rows))

    def _pass(self, call: ModelCall, phase: Phase, devices: range, strategy: Strategy, rows: float) -> PassSeconds:
        if self._measured is not None:
            measured = self._measured(call, phase, strategy, rows)
            if measured is not None:
                return measured
        layer, rest = self._work_of(self._work, call, phase, strategy)
        seconds = functools.partial(self._work_seconds, call, phase, devices, strategy, rows)
        kind = self._kind(devices)
        waits = kind.coefficients.step_seconds if phase == "decode" else 0.0
        one = seconds(layer)
        return PassSeconds(one, seconds(layer + rest) - one + waits)

    def _work_of(self, source: WorkSource, call: ModelCall, phase: Phase, strategy: Strategy) -> LayerWork:
        """The work of a row of a pass, counted once for all devices and micro-batches."""
        key = source, id(call), phase, strategy.tensor, strategy.fsdp, strategy.remat
        if key not in self._works:
            work = source(call, phase, tensor=strategy.tensor, fsdp=strategy.fsdp, remat=strategy.remat)
            self._works[key] = call, work  # with the call, so that no other one gets its identity
        return self._works[key][1]

    def _work_seconds(
        self, call: ModelCall, phase: Phase, devices: range, strategy: Strategy, rows: float, work: Work
    ) -> float:
        kind = self._kind(devices)
        costs, memory = kind.coefficients, memory_rate(kind)
        launch = costs.graph_kernel_seconds if phase == "decode" else costs.kernel_seconds
        operations = work.flops + costs.half_dim * work.narrow_flops
        products = max(operations * rows / kind.matmul_flops(call.model.dtype), work.weight_bytes / memory)
        others = work.row_bytes * rows / memory
        seconds = max(products + others, work.kernels * launch)
        per_node = self.cluster.devices_per_node
        if work.tensor_collectives:
            group = span(strategy, "tensor", per_node)
            seconds += self.all_reduce(devices, group, work.tensor_bytes * rows, work.tensor_collectives)
        if work.fsdp_collectives:
            group = span(strategy, "fsdp", per_node)
            seconds += self.all_gather(devices, group, work.fsdp_bytes, work.fsdp_collectives)
        return seconds

    # -- communication -------------------------------------------------------------------------------------------------

    def all_reduce(self, devices: range, group: Span, size: float, count: float = 1.0) -> float:
        """Seconds of `count` all-reduces of `size` bytes in all: each is a reduce-scatter and an all-gather."""
        return self.all_gather(devices, group, 2 * size, count)

    def all_gather(self, devices: range, group: Span, size: float, count: float = 1.0) -> float:
        """Seconds of `count` all-gathers, or reduce-scatters, in rings within nodes and between them.

        Args:
            size: Bytes of the whole arrays of all of them.
        """
        if group.size == 1:
            return 0.0
        kind = self._kind(devices)
        costs = kind.coefficients
        local, nodes = group.per_node, group.nodes
        seconds = (local - 1) / local * size / (kind.link.bandwidth * costs.link_efficiency)
        latency = costs.collective_seconds * math.log2(local)
        if nodes > 1:
            network = self._network(devices)
            share = network.shared_by(min(len(devices), self.cluster.devices_per_node))
            seconds += (nodes - 1) / nodes * size / local / (share * costs.network_efficiency)
            latency += costs.network_collective_seconds * math.log2(nodes)
        return seconds + count * latency

    def _send(self, devices: range, strategy: Strategy, size: float) -> float:
        """Seconds of a send from a device of one stage to its neighbor of the next."""
        kind = self._kind(devices)
        costs = kind.coefficients
        per_stage, per_node = len(devices) // strategy.pipeline, self.cluster.devices_per_node
        size /= strategy.tensor  # each of a tensor group sends its part
        if per_stage * strategy.pipeline <= per_node:
            return costs.collective_seconds + size / (kind.link.bandwidth * costs.link_efficiency)
        network = self._network(devices)
        rate = network.shared_by(min(per_stage, per_node)) * costs.network_efficiency
        return costs.network_collective_seconds + size / rate

    def host_copy(self, devices: range, size: float) -> float:
        """Seconds of copying `size` bytes of every device from host memory, or to it."""
        return size / self._kind(devices).coefficients.host_bandwidth

    def way_between(self, source: range, target: range) -> tuple[float, float]:
        """Seconds until the first byte of a call's outputs arrives from some devices at others, and bytes a second from
        then on: every target device may get all of them. From devices to themselves it takes no time."""
        if source == target:
            return 0.0, math.inf
        both = range(min(source.start, target.start), max(source.stop, target.stop))
        kind, per_node = self._kind(both), self.cluster.devices_per_node
        costs = kind.coefficients
        if both.start // per_node == (both.stop - 1) // per_node:
            return costs.collective_seconds, kind.link.bandwidth * costs.link_efficiency
        network = self._network(both)
        return costs.network_collective_seconds, network.bandwidth * costs.network_efficiency


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


def _rows_of_micro_batch(call: ModelCall, strategy: Strategy) -> float:
    """Rows of a micro-batch of a train call on each row shard."""
    return call.rows / call.mini_batches / (strategy.micro_batches * strategy.num_row_shards)


def _by_device(call: ModelCall, strategy: Strategy, one: PassSeconds) -> list[float]:
    """Seconds of a pass on the devices of each stage, all their chunks together; the last has the head."""
    counts = [len(layers) for layers in layers_of_stages(call.model.num_layers, strategy.num_stages)]
    per_device = [sum(counts[i :: strategy.pipeline]) * one.layer for i in range(strategy.pipeline)]
    return [*per_device[:-1], per_device[-1] + one.rest]


def _times(seconds: CallSeconds, times: float) -> CallSeconds:
    return CallSeconds(**{name: part * times for name, part in vars(seconds).items()})
