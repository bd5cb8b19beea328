"""Memory, from compiled programs, and seconds of a train call over the stages of a pipeline.

    python scripts/bench_pipelines.py                           # on eight virtual devices of this processor
    python scripts/bench_pipelines.py --platform auto --size 1b --stages 1 2 4 8      # on the GPUs that there are
    python scripts/bench_pipelines.py --json

One mini-batch of a language model on one device for each stage, under every schedule; one stage is the program without
a pipeline, in as many micro-batches. Memory is that of the device with the most. `kept` is what micro-batches leave on
it between their forwards and backwards; of the program without a pipeline it is in `working`. Seconds are the least of
the rounds after the first, which compiles. On a processor stages do not run beside one another: seconds tell what
the instructions cost, not what a pipeline gains.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import experience
from jaxrlhf.call_graph import split_args
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params
from jaxrlhf.models.stage_weights import pick, pick_virtual
from jaxrlhf.programs.call_programs import train_program
from jaxrlhf.programs.pipelined_training import PipelinedTraining, schedule_of
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.stage_programs import TrainPrograms
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.schedules.instructions import Schedule
from jaxrlhf.schedules.schedule import bubble_fraction
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=8, hidden=32, vocab=97, rows=8, columns=16, dtype="float32"),
    "small": dict(layers=8, hidden=256, vocab=2048, rows=32, columns=128, dtype="float32"),
    "1b": dict(layers=16, hidden=2048, vocab=128256, rows=64, columns=1024, dtype="bfloat16"),
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-4)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 1
    epochs: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--remat", choices=("none", "dots", "layer"), nargs="+", default=["none", "layer"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--platform", choices=("cpu", "auto"), default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if min(options.stages) < 1 or max(options.stages) > SIZES[options.size]["layers"]:
        layers = SIZES[options.size]["layers"]
        parser.error(f"--stages: must lie between 1 and the {layers} layers of {options.size}. Got {options.stages}.")
    if options.platform == "cpu":
        mesh.use_virtual_cpu_devices(max(options.stages), or_more=True)
    rows = [
        measure(strategy, options)
        for remat in options.remat
        for stages in options.stages
        for strategy in strategies(stages, options.micro_batches, remat, SIZES[options.size]["layers"])
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{options.size}: {SIZES[options.size]}, {options.micro_batches} micro-batches, {mesh.device_kind()}")
    names = ("weights", "optimizer", "gradients", "kept", "working", "total")
    print("stages  schedule     remat   " + "".join(f"{name:>11}" for name in names) + "   bubbles  seconds")
    for row in rows:
        sizes = "".join(f"{row[name] / MIB:>8.1f} MB" if row[name] is not None else f"{'-':>11}" for name in names)
        print(
            f"{row['stages']:>6}  {row['schedule']:<12} {row['remat']:<7}{sizes}   {row['bubbles']:>6.0%}"
            f"  {row['seconds']:>7.3f}"
        )
    return 0


def strategies(stages: int, micro_batches: int, remat: Any, layers: int) -> list[Strategy]:
    """Every schedule for as many stages."""
    plain = Strategy(pipeline=stages, micro_batches=micro_batches, remat=remat)
    if stages == 1:
        return [plain]
    interleaved = [dataclasses.replace(plain, chunks=2)] if layers >= 2 * stages else []
    return [dataclasses.replace(plain, schedule="gpipe"), plain, *interleaved]


def measure(strategy: Strategy, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a device and seconds of an update under a strategy."""
    size = SIZES[options.size]
    model = ModelConfig(
        vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=8 * size["hidden"] // 3 // 16 * 16,
        num_layers=size["layers"], num_heads=max(2, size["hidden"] // 64), num_kv_heads=2, dtype=size["dtype"],
        max_position_embeddings=size["columns"], logits_chunk_tokens=1024,
    )  # fmt: skip
    role = ModelRole(model, OPTIMIZER, num_updates=1)
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    arrays, _, rebuild = split_args(((experience.Term(likelihood, batch(size)),), Update()))
    arrays = [jax.device_put(x, layout.rows) for x in arrays]
    store = WeightStore({"actor": role})
    store.initialize("actor", layout, jax.random.key(0))
    params, state, _ = store.take_for_training("actor", layout)
    program: Any = train_program(role, rebuild, [True] * len(arrays), layout)
    seconds = []
    noise = np.zeros(3, np.uint32)
    memory = None
    if not layout.is_pipelined:
        memory = program.lower(params, state, noise, arrays, None).compile().memory_analysis()
    for _ in range(options.rounds + 1):
        started = time.perf_counter()
        params, state, metrics = program(params, state, noise, arrays, None)
        jax.block_until_ready((params, metrics))
        seconds.append(time.perf_counter() - started)
    row = {"stages": strategy.pipeline, "remat": strategy.remat, "seconds": min(seconds[1:])}
    if isinstance(program, PipelinedTraining):
        schedule, names = schedule_of(strategy), {"1f1b": "1F1B", "gpipe": "GPipe"}
        name = f"1F1B x {strategy.chunks}" if strategy.chunks > 1 else names[strategy.schedule]
        most = max(stage_memory(program.programs, schedule), key=lambda stage: stage.total)
        sizes = dataclasses.asdict(most) | {"total": most.total}
        return {**row, "schedule": name, **sizes, "bubbles": bubble_fraction(schedule)}
    weights = nbytes(abstract_params(model))
    optimizer = nbytes(set_of(role).abstract_optimizer())
    working = memory.temp_size_in_bytes if memory is not None else None  # its gradients among it
    total = weights + optimizer + (working or 0)
    sizes = {"weights": weights, "optimizer": optimizer, "gradients": None, "kept": None, "working": working}
    return {**row, "schedule": "-", **sizes, "total": total, "bubbles": 0.0}


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage."""

    weights: int
    """Master weights."""
    optimizer: int
    gradients: int
    """Accumulated gradients."""
    kept: int
    """Stage inputs and residuals of all micro-batches that are in flight at a time, at most."""
    working: int
    """The most that a program of the stage takes beside its arguments."""

    @property
    def total(self) -> int:
        """With what there is most of at a time: what is kept and worked with, or, at the end of a mini-batch, the sum
        of the gradients beside those of the groups."""
        return self.weights + self.optimizer + self.gradients + max(self.kept + self.working, self.gradients)


def stage_memory(programs: TrainPrograms, schedule: Schedule) -> list[StageMemory]:
    """The memory of every stage, of programs that have been compiled in this process, for the first term of the loss.

    Kept of a micro-batch is what its forward gave for its backward and what the stage was given; of the last stage, the
    latter. Programs of the first data-parallel group are asked: all are alike.
    """
    role, layout = programs.role, programs.layout
    abstract, state = set_of(role).abstract(layers="list"), set_of(role).abstract_optimizer(layers="list")
    memories = []
    for stage in range(layout.strategy.pipeline):
        virtual = range(stage, programs.num_stages, layout.strategy.pipeline)
        kept, working = _kept(programs, schedule, stage), max(_working(programs, v) for v in virtual)
        weights, optimizer = (
            sum(jax.tree.leaves(jax.tree.map(_bytes, *(pick(x, stage, programs.num_layers, layout) for x in both))))
            for both in ((abstract, programs.shardings), (state, programs.state_shardings))
        )
        gradients = sum(
            sum(jax.tree.leaves(jax.tree.map(lambda x, s: _bytes(x, s) * 4 // x.dtype.itemsize, *each)))
            for v in virtual
            for each in [
                [pick_virtual(x, v, programs.num_layers, programs.num_stages) for x in (abstract, programs.shardings)]
            ]
        )
        memories.append(StageMemory(weights, optimizer, gradients, kept, working))
    return memories


def _kept(programs: TrainPrograms, schedule: Schedule, worker: int) -> int:
    """The most that a worker keeps for backwards, as its instructions come."""
    now = most = 0
    for instruction in schedule.orders[worker]:
        size = _kept_of(programs, instruction.stage)
        now += size if instruction.forward else -size
        most = max(most, now)
    return most


def _kept_of(programs: TrainPrograms, stage: int) -> int:
    """Bytes of a virtual stage's input and residuals of a micro-batch."""
    given = _size(programs.forward(0, stage - 1, 0).outputs[0]) if stage else 0  # tokens are few bytes
    last = stage == programs.num_stages - 1
    return given + (0 if last else _size(programs.forward(0, stage, 0).outputs[1]))


def _working(programs: TrainPrograms, stage: int) -> int:
    if stage == programs.num_stages - 1:
        of_stage = [programs.last_backward(0, 0)]
    else:
        of_stage = [programs.forward(0, stage, 0), programs.backward(0, stage, 0)]
    memory: list[Any] = [program.compiled.memory_analysis() for program in of_stage]
    return max(each.temp_size_in_bytes for each in memory)


def _size(tree: Any) -> int:
    return sum(_bytes(x, x.sharding) for x in jax.tree.leaves(tree))


def _bytes(x: Any, sharding: Any) -> int:
    """On one device."""
    size = x.dtype.itemsize
    for dim in sharding.shard_shape(x.shape):
        size *= dim
    return size


def batch(size: dict[str, Any]) -> dict[str, Any]:
    """Full rows of random tokens, the second half of them responses."""
    rows, columns = size["rows"], size["columns"]
    tokens = np.random.default_rng(0).integers(0, size["vocab"], (rows, columns)).astype(np.int32)
    ones: Any = np.ones((rows, columns), bool)
    return {"sequences": experience.Sequences(jnp.asarray(tokens), ones, ones[:, : columns // 2])}


def likelihood(outputs: Any, batch: Any, update: Any) -> Any:
    """The negative log-likelihood of the responses."""
    response_BR = batch["sequences"].response
    return -(outputs.logprobs * response_BR).sum(), response_BR.sum(), {}


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


if __name__ == "__main__":
    raise SystemExit(main())
