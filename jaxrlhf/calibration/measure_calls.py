"""Seconds of the passes of a step's calls, measured: the real programs on the devices at hand, with made-up arguments.

A model of up to `WHOLE_LAYERS` layers is run whole: one program to compile, and nothing to extrapolate. The seconds of
a deeper one are extrapolated from two depths, neither a single layer, whose scan would not be compiled as a loop.

A decoding step is the difference between a response of some tokens and one of a single token. It reads the whole cache,
which grows in stages, so prompts are made as long as it takes for the cache to have the number of slots that a step of
the call sees on average. Where lengths of responses are known, rollouts in slots are measured too: `measure_slots`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.calibration.measure_slots import num_rounds, of_phases, runs, slot_program
from jaxrlhf.calibration.timing import Timing, time_in_turn
from jaxrlhf.experience import Sampling
from jaxrlhf.generation.rollout_settings import mean_columns
from jaxrlhf.planner.costs.calibration import Case, MeasuredPhase, Point, case_of
from jaxrlhf.planner.costs.rollout_steps import slot_choices
from jaxrlhf.planner.costs.work import PHASES, SLOT_PHASES, Phase, analytic_work
from jaxrlhf.planner.plans.splits import undivided_sizes
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.programs.ahead_of_time import CallProgram, DescribedCall, DescribedRows, call_program, update_program
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat, Strategy

WHOLE_LAYERS = 4
DEPTHS = (2, 4)
"""Layers of the two programs from which the seconds of a deeper model are extrapolated."""
DECODED = 32
"""Tokens of the longer response: as many as a cache has room for before it grows."""
ROWS_APART = 4
"""Ratio of the rows of two neighbouring measurements of a case."""
ROW_COUNTS = 3
MOST_UPDATES = 4
"""The most updates of a train program that is measured. Work that a program of several updates does only once is shared
among them, as in the run."""


@dataclasses.dataclass(frozen=True)
class Degrees:
    """The degrees at which calls are measured, in all valid combinations."""

    data: tuple[int, ...] = (1,)
    fsdp: tuple[int, ...] = (1,)
    tensor: tuple[int, ...] = (1,)
    remat: tuple[Remat, ...] = ("none",)

    def strategies(self, call: ModelCall, num_devices: int) -> list[Strategy]:
        """The valid strategies of a call on at most `num_devices` devices."""
        remats = self.remat if call.trains else ("none",)
        every = itertools.product(self.data, self.fsdp, self.tensor, remats)
        found = [Strategy(data=d, fsdp=f, tensor=t, remat=remat) for d, f, t, remat in every]
        return [s for s in found if s.num_devices <= num_devices and divides(call, s)]


def divides(call: ModelCall, strategy: Strategy) -> bool:
    """True if a call's model and rows can be split in this way."""
    is_split = not undivided_sizes(call.model, tensor=strategy.tensor, fsdp=strategy.fsdp)
    return is_split and not any(rows % strategy.num_row_shards for rows in call.divisible)


@dataclasses.dataclass(frozen=True)
class Job:
    """One measurement to be made."""

    call: ModelCall
    strategy: Strategy
    """Its micro-batches are those of the program that is run."""
    rows: int
    """Rows of a micro-batch over all row shards, of the array with most rows; with slots, these of all row shards."""

    @property
    def rows_per_shard(self) -> float:
        """Rows of a micro-batch on one row shard, as the cost model counts them."""
        return self.rows * self.call.rows / self.described.num_rows / self.strategy.num_row_shards

    @property
    def described(self) -> DescribedCall:
        return self.call.require_described()

    @property
    def phases(self) -> tuple[MeasuredPhase, ...]:
        """The phases that it measures."""
        if self.strategy.slots:
            return SLOT_PHASES
        if self.call.trains:
            return "gradient", "update"
        return PHASES[self.call.kind]

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases that it measures."""
        return tuple(case_of(self.call, phase, self.strategy) for phase in self.phases)


_ALIKE: dict[MeasuredPhase, Phase] = {
    **{phase: phase for phases in PHASES.values() for phase in phases},
    "update": "gradient", "slot_prefill": "prefill", "slot_step": "decode", "slot_column": "decode",
}  # fmt: skip
"""Phase -> one with formulas whose operations are split between layers and the rest as its seconds are."""


def jobs(workload: Workload, strategies: Mapping[str, Iterable[Strategy]]) -> list[Job]:
    """The measurements of each call under each strategy, the most important first.

    The rows of a shard are first all of them, without micro-batches, then a `ROWS_APART`-th of that, as a power of
    two, and so on. These are measured as micro-batches of one program, since a loop over them is faster than as many
    programs. Calls of equal models and shapes are measured once. Rollouts in slots are measured last, with every number
    of slots that a search looks at, and that of the strategy. Of strategies only degrees, remat and slots matter.
    """
    found: dict[tuple[Any, ...], tuple[int, Job]] = {}
    for call in workload.calls:
        for given in strategies[call.name]:
            strategy = Strategy(data=given.data, fsdp=given.fsdp, tensor=given.tensor, remat=given.remat)
            entering = {name: getattr(given, name) for name in ("slots", "prefill_rows", "prefill_tokens")}
            own = [dataclasses.replace(strategy, **entering)] if given.slots else []
            for each in [*own, *(each for each in slot_choices(call, strategy) if not each.shared_prompts)]:
                if num_rounds(call) > 1 and not call.sequences % each.num_row_shards:
                    job = Job(call, each, each.slots * each.num_row_shards)
                    found.setdefault((job.cases, job.rows, each.prefill_rows), (ROW_COUNTS, job))
            for level, rows in enumerate(_row_counts(call, strategy)):
                job = Job(call, dataclasses.replace(strategy, micro_batches=ROWS_APART if level else 1), rows)
                found.setdefault((job.cases, rows), (level, job))
    return [job for _, job in sorted(found.values(), key=lambda item: item[0])]


def _row_counts(call: ModelCall, strategy: Strategy) -> list[int]:
    shards, most = strategy.num_row_shards, max(call.divisible)
    each = [most // shards]
    each += [2 ** int(math.log2(each[0] / ROWS_APART**i)) for i in range(1, ROW_COUNTS) if each[0] >= ROWS_APART**i]

    def splits(rows: int) -> bool:
        return all(count * rows % (most * shards) == 0 for count in call.divisible)

    return [n * shards for n in each if splits(n * shards)]


def measure(job: Job, *, dispatch_seconds: float, patience_seconds: float = 3.0) -> list[tuple[Case, Point]]:
    """Runs a job on the first devices and times its phases. From each measurement, the seconds of a program that does
    nothing are subtracted. Raises JaxRuntimeError if a program fails, for example because it does not fit into memory.
    """
    return measure_beside(job, (), dispatch_seconds=dispatch_seconds, patience_seconds=patience_seconds)[0]


def measure_beside(
    job: Job, others: Sequence[Callable[[], Any]], *, dispatch_seconds: float, patience_seconds: float = 3.0
) -> tuple[list[tuple[Case, Point]], list[Timing]]:
    """The same, and the times of other programs that run in turn with it, so that changes of the machine affect all."""
    layout = Layout.over(tuple(range(job.strategy.num_devices)), job.strategy)
    num_layers = job.call.model.num_layers
    depths = (num_layers,) if num_layers <= WHOLE_LAYERS else DEPTHS
    programs = [program for depth in depths for program in _programs(job, layout, depth)]
    every = time_in_turn([*programs, *others], patience_seconds=patience_seconds)
    timed, beside = every[: len(programs)], every[len(programs) :]
    timed = [dataclasses.replace(t, seconds=max(t.seconds - dispatch_seconds, 0.0)) for t in timed]
    each = len(programs) // len(depths)
    of_depths = [timed[i : i + each] for i in range(0, len(timed), each)]
    measured = []
    for phase, case in zip(job.phases, job.cases, strict=True):
        timings = [_of_phase(job, phase, of_depth, on_gpu=layout.is_on_gpu) for of_depth in of_depths]
        measured.append((case, _point(job, phase, depths, timings)))
    return measured, beside


def _programs(job: Job, layout: Layout, depth: int) -> list[Callable[[], Any]]:
    """The programs for a depth on made-up arguments, in the order in which `_of_phase` reads them."""
    call, described, rows = job.call, job.described, job.rows * job.strategy.micro_batches
    program_of = functools.partial(call_program, layout=layout, num_layers=depth, rows=rows)
    if job.strategy.slots:
        program = slot_program(call, layout, depth)
        arguments = made_up(program.arguments, call.model.vocab_size)
        return [functools.partial(program.program, *arguments, np.array(begin, np.int32)) for begin in runs(call)]
    if call.kind == "generate":
        prompt = _decoding_prompt(call)
        sizes = [(call.prompt, 1), (prompt, _decoded(call)), *([(prompt, 1)] if prompt != call.prompt else [])]
        programs = [program_of(_responding(described, *each)) for each in sizes]
    elif call.trains:
        update = update_program(described, layout, num_layers=depth)
        programs = [program_of(described, updates=_updates(call)), update]
    else:
        programs = [program_of(described)]
    return [_repeatable(program, trains=call.trains, vocab_size=call.model.vocab_size) for program in programs]


def _updates(call: ModelCall) -> int:
    """The number of updates in the train program that is measured."""
    return min(call.updates, MOST_UPDATES)


def _of_phase(job: Job, phase: MeasuredPhase, timings: Sequence[Timing], *, on_gpu: bool) -> Timing:
    """The time of a phase, from the runs of `_programs`."""
    if phase in SLOT_PHASES:
        seconds = of_phases(timings, job.call, slots_of(job.strategy), on_gpu=on_gpu)[phase]
        return Timing(seconds, max(t.spread for t in timings), max(t.others for t in timings))
    if phase == "update":
        return timings[1]
    passes, whole = job.strategy.micro_batches, timings[0]
    if phase == "gradient":
        whole = _less(dataclasses.replace(whole, seconds=whole.seconds / _updates(job.call)), timings[1])
    elif phase in ("prefill", "decode"):
        steps = _less(timings[1], timings[2] if len(timings) > 2 else timings[0])
        step = dataclasses.replace(steps, seconds=steps.seconds / (_decoded(job.call) - 1))
        whole = step if phase == "decode" else _less(whole, step)
    return dataclasses.replace(whole, seconds=whole.seconds / passes)


def _less(one: Timing, other: Timing) -> Timing:
    """The difference of two timings, at least 0."""
    seconds = max(one.seconds - other.seconds, 0.0)
    spread = math.hypot(one.seconds * one.spread, other.seconds * other.spread)
    return Timing(seconds, spread / seconds if seconds else 0.0, max(one.others, other.others))


def _point(job: Job, phase: MeasuredPhase, depths: tuple[int, ...], timings: Sequence[Timing]) -> Point:
    num_layers, spread = job.call.model.num_layers, max(t.spread for t in timings)
    if len(depths) == 1:  # divided between the layers and the rest by their operations
        degrees: dict[str, Any] = {name: getattr(job.strategy, name) for name in ("tensor", "fsdp", "remat")}
        work = analytic_work(job.call, _ALIKE[phase], **degrees)
        whole = timings[0].seconds
        layer = whole * work.layer.flops / (work.layer.flops * num_layers + work.rest.flops)
        rest = whole - layer * num_layers
    else:
        layer = max(0.0, timings[1].seconds - timings[0].seconds) / (depths[1] - depths[0])
        rest = timings[0].seconds - layer * depths[0]
    rows = {
        "update": 0, "decode": job.rows_per_shard * job.call.num_samples, "slot_prefill": job.strategy.prefill_rows,
        "slot_step": job.strategy.slots, "slot_column": job.strategy.slots,
    }.get(phase, job.rows_per_shard)  # fmt: skip
    return Point(float(rows), layer, rest, spread, max(t.others for t in timings))


def _decoding_prompt(call: ModelCall) -> int:
    """Columns of a prompt after which `_decoded` tokens read the columns of an average step of the call."""
    return round(mean_columns(call.prompt, call.response)) - _decoded(call)


def _decoded(call: ModelCall) -> int:
    """Tokens of the longer response that is measured."""
    return min(max(call.response, 2), DECODED)


def _responding(call: DescribedCall, prompt: int, response: int) -> DescribedCall:
    """A generate call with prompts and responses of given lengths, none of which ends early."""
    prompts, sampling = call.args
    assert isinstance(sampling, Sampling)

    def with_columns(x: Any) -> Any:
        return dataclasses.replace(x, shape=(x.shape[0], prompt)) if len(x.shape) == 2 else x

    prompts = jax.tree.map(with_columns, prompts, is_leaf=lambda x: isinstance(x, DescribedRows))
    sampling = dataclasses.replace(sampling, max_new_tokens=response, min_new_tokens=response)
    return dataclasses.replace(call, args=(prompts, sampling))


def _repeatable(program: CallProgram, *, trains: bool, vocab_size: int) -> Callable[[], Any]:
    """Returns a function that runs a program on made-up arguments. Weights and optimizer state, which it donates, are
    the outputs of its last run."""
    arguments = list(made_up(program.arguments, vocab_size))
    if trains:  # squares of gradients are not negative
        arguments[1] = jax.tree.map(jnp.zeros_like, arguments[1])

    def run() -> Any:
        outputs = program.program(*arguments)
        if trains:
            arguments[:2] = outputs[:2]
        return outputs

    return run


def made_up(described: Any, vocab_size: int) -> Any:
    """Arrays of the described shapes and shardings: random token ids, masks without padding, small random numbers of
    either sign."""
    rng = np.random.default_rng(0)

    def array(x: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == jnp.bool:
            values = np.ones(x.shape, bool)
        elif jnp.issubdtype(x.dtype, jnp.integer):
            values = rng.integers(0, vocab_size, x.shape).astype(x.dtype) if x.shape else np.zeros((), x.dtype)
        else:
            values = 0.02 * rng.standard_normal(x.shape, np.float32) if x.shape else np.ones(())
        return jax.device_put(np.asarray(values, x.dtype), x.sharding)

    return jax.tree.map(array, described)
