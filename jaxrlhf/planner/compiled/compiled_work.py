"""The work of calls, counted in their compiled programs instead of computed by formulas.

A program is compiled for two depths; their difference is a layer, the remainder the rest. It is compiled for few
rows and for each `tensor` degree: operations, activations and collectives grow with the rows, weights do not. What does
not depend on the compiler still comes from formulas: bytes of weights, and communication over `fsdp`.

    work, notes = compile_work(workload, cluster, cache=CostCache(default_folder()))
    CostModel(cluster, work).seconds(...)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.generation.rollout_settings import decoding_stages
from jaxrlhf.planner.compiled.compiler import Question, compile_all
from jaxrlhf.planner.compiled.described_devices import DescribedDevices
from jaxrlhf.planner.compiled.program_counts import Counts, ProgramCounts
from jaxrlhf.planner.costs.cache import CostCache
from jaxrlhf.planner.costs.cost_model import WorkSource
from jaxrlhf.planner.costs.work import LayerWork, Phase, Work, analytic_work
from jaxrlhf.planner.plans.splits import divisors, undivided_sizes
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.programs.ahead_of_time import DescribedCall, call_program
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import mesh_over
from jaxrlhf.sharding.strategy import Remat, Strategy

ROWS = {"generate": 16, "infer": 4, "train": 4}
"""Rows on each device for which calls are compiled: enough for products to be large."""


@dataclasses.dataclass(frozen=True)
class CallAtDepth:
    """A call whose program is compiled for few layers and rows."""

    call: DescribedCall
    num_layers: int
    rows: int
    tensor: int


Counted = Mapping[tuple[str, int, int], ProgramCounts]
"""(call, layers, tensor degree) -> counts of its program."""


def work_from_counts(
    counts: Counted, call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat
) -> LayerWork:
    """The work of a phase of a call, from the counts of its programs. A `WorkSource`, once it has the counts."""
    formula = analytic_work(call, phase, tensor=tensor, fsdp=fsdp, remat=remat)
    if call.described is None:
        return formula
    (less, more), rows = depths(call), _rows(call, phase)
    one, two = (_whole(call, phase, remat, tensor, counts[call.name, n, tensor]) for n in (less, more))
    layer = (two - one) * (1 / (more - less))  # can be negative: the last layer computes less
    compiled = layer, one - layer * less
    return LayerWork(*(_with_weights(a, b, rows) for a, b in zip(compiled, formula, strict=True)))


def lower_program(program: CallAtDepth, described: DescribedDevices) -> Any:
    """Lowers a program for described devices. Where cuDNN's attention cannot be lowered, it is matrix products."""
    call = program.call
    model = call.role.model
    if model.attention == "auto" and not described.has_cudnn:
        call = dataclasses.replace(
            call, role=dataclasses.replace(call.role, model=dataclasses.replace(model, attention="xla"))
        )
    strategy = Strategy(tensor=program.tensor)
    layout = Layout(mesh_over(described.devices[: program.tensor], strategy), strategy)
    return call_program(call, layout, num_layers=program.num_layers, rows=program.rows).lower()


def depths(call: ModelCall) -> tuple[int, int]:
    """The numbers of layers for which a call is compiled. A loop over a single layer would be unrolled."""
    return (2, 3) if call.model.scan_layers and call.kind != "generate" else (1, 2)


def compile_work(
    workload: Workload, cluster: Cluster, *, cache: CostCache | None, say: Callable[[str], None] = lambda line: None
) -> tuple[WorkSource, tuple[str, ...]]:
    """The work of all calls of a workload that have programs, for every `tensor` degree that a plan may give them.

    In a mixed cluster, programs are compiled for the slowest kind of device: counts hardly differ between kinds.

    Returns:
        The work, and notes on how it was counted.

    Raises:
        CompileError: A program does not compile.
    """
    kind, per_node = cluster.slowest(range(cluster.num_devices)), cluster.devices_per_node
    asked = {
        (call.name, num_layers, tensor): Question(
            f"{call.name}, {num_layers} layers, tensor {tensor}",
            lower_program,
            CallAtDepth(call.described, num_layers, ROWS[call.kind], tensor),
            kind,
            tensor,
        )
        for call in workload.calls
        if call.described is not None
        for tensor in tensor_degrees(call, per_node)
        for num_layers in depths(call)
    }
    answers = compile_all(list(asked.values()), cache=cache, say=say)
    counts = {key: answer.counts for key, answer in zip(asked, answers, strict=True)}
    unknown = {name: None for answer in answers for name in answer.counts.unknown}
    notes = dict.fromkeys(note for answer in answers for note in answer.notes)
    notes |= {f"work of {name} is not counted: nobody here knows what it computes": None for name in unknown}
    return functools.partial(work_from_counts, counts), tuple(notes)


def tensor_degrees(call: ModelCall, devices_per_node: int) -> list[int]:
    """The `tensor` degrees that divide the devices of a node and the sizes that a model splits."""
    return [n for n in divisors(devices_per_node) if not undivided_sizes(call.model, tensor=n)]


def _whole(call: ModelCall, phase: Phase, remat: Remat, tensor: int, counts: ProgramCounts) -> Work:
    """The work of a phase in a program, per row; weights are counted with the rows."""
    parts = counts.by_label(rounds=0)
    if phase == "decode":
        counted = [_decoding(call, counts)]
    elif phase == "prefill":
        counted = [part for label, part in parts.items() if label != "decode"]
    elif phase == "forward":
        counted = list(parts.values())
    else:
        again = ["forward"] if remat == "layer" else []
        counted = [parts[label] for label in ("forward", "backward", *again) if label in parts]
    return _per_row(sum(counted, Counts()), _rows(call, phase), tensor)


def _decoding(call: ModelCall, counts: ProgramCounts) -> Counts:
    """Counts of a decoding step: the mean over the loops, each of which continues with a larger cache."""
    loops = [loop for loop in counts.loops if loop.label == "decode" and loop.trips is None]
    steps = [num_steps for _, num_steps in decoding_stages(call.prompt, call.response)]
    assert len(loops) == len(steps), (call.name, len(loops), len(steps))
    total = sum((loop.round.total(rounds=1) * n for loop, n in zip(loops, steps, strict=True)), Counts())
    return total * (1 / max(1, sum(steps)))


def _per_row(counts: Counts, rows: int, tensor: int) -> Work:
    """Work per row, from the counts of a program for `rows` rows on one device."""
    times, operands = 0.0, 0.0
    if tensor > 1:
        as_all_reduce = 2 * (tensor - 1) / tensor
        times = sum(counts.collectives.values())
        operands = sum(n * each.wire_bytes(tensor) for each, n in counts.collectives.items()) / as_all_reduce
    return Work(
        flops=counts.flops / rows,
        row_bytes=counts.bytes / rows,
        kernels=counts.kernels - times,
        tensor_collectives=times,
        tensor_bytes=operands / rows,
    )


def _with_weights(compiled: Work, formula: Work, rows: int) -> Work:
    """Compiled work, with the bytes of weights apart and, like communication over `fsdp`, from the formula."""
    all_bytes = compiled.row_bytes * rows
    return dataclasses.replace(
        compiled,
        narrow_flops=formula.narrow_flops,
        row_bytes=(all_bytes - formula.weight_bytes) / rows,
        weight_bytes=formula.weight_bytes,
        fsdp_collectives=formula.fsdp_collectives,
        fsdp_bytes=formula.fsdp_bytes,
    )


def _rows(call: ModelCall, phase: Phase) -> int:
    """Rows of a phase on each device in the programs that are compiled: decoding has one for every sample."""
    return ROWS[call.kind] * (call.num_samples if phase == "decode" else 1)
