"""Every kind of program, compiled for GPUs that are only described: what each does, counted, and what none may do.

    python -m tests.described_gpus.programs h100      # prints JSON: program -> figures

In a process of its own, whose devices are the described ones: one that runs programs must not load their compiler.
"""

import collections
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.call_graph import split_args
from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.generation.decoding_weights import declare_ring, ring_shardings
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.models.params import abstract_of, abstract_params, param_shardings
from jaxrlhf.models.stage_weights import pick, pick_virtual
from jaxrlhf.planner.compiled.described_devices import described_devices
from jaxrlhf.planner.compiled.hlo import Computation, HloInstruction, Module, parse, scopes
from jaxrlhf.planner.compiled.hlo_counts import _roots, _through_bitcasts, count
from jaxrlhf.programs.ahead_of_time import DescribedCall, DescribedRows, call_program
from jaxrlhf.programs.arrays import with_shardings
from jaxrlhf.programs.call_programs import generate_program
from jaxrlhf.programs.pipeline import StageProgram
from jaxrlhf.programs.pipelined_inference import PipelinedInference
from jaxrlhf.programs.stage_programs import StageArguments, TrainPrograms
from jaxrlhf.programs.weight_sets import set_of
from jaxrlhf.reshard import exchange
from jaxrlhf.reshard.reallocate import in_buckets
from jaxrlhf.reshard.tree_moves import Signature
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from tests.planner.compiled.described_programs import described

MODEL = ModelConfig(
    vocab_size=272, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    dtype="bfloat16", logits_chunk_tokens=128,
)  # fmt: skip
ROWS, PROMPT, RESPONSE = 16, 31, 24
"""Odd, so that lengths which kernels want even, or a multiple of eight, are made so by the package."""
CACHE = ROWS // 2 * MODEL.num_kv_heads // 2 * (PROMPT + RESPONSE) * MODEL.head_size
"""Elements of a layer's keys on a device, where rows and heads are split in two."""
WEIGHTS = {
    (*dims[:dim], dims[dim] // split, *dims[dim + 1 :])
    for dims in (x.shape for x in jax.tree.leaves(abstract_params(MODEL)) if x.ndim == 2)
    for dim in (0, 1) for split in (1, 2)
}  # fmt: skip
"""The shapes of matrices as they are used: whole, or split over `tensor`."""
LOOPS = {
    "generate": ["decode"],
    "generate, ring": ["decode"],
    "generate, slots": ["decode", "prefill"],
    "generate, slots in a ring": ["decode", "prefill"],
}
"""Programs with caches -> the scopes of their loops in which none is written anew."""
NO_KERNELS = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant"}
Compile = Callable[..., Any]
"""(stage program, *arguments) -> shapes, dtypes and shardings of its outputs; compiles it for the described devices."""
MARK, CONTROL = "##", "copied onto every device"
"""In what is printed beside the figures: the program that is compiled next; and the one that is made to be wrong."""

# -- programs ----------------------------------------------------------------------------------------------------------


def in_one_piece() -> dict[str, tuple[DescribedCall, Strategy]]:
    """Calls of every kind and with every head, in layouts that between them have all mesh axes."""

    def call(
        kind: str, head: Any = "lm", method: str = "", lora: LoRAConfig | None = None, num_samples: int = 1
    ) -> DescribedCall:
        model, sizes = dataclasses.replace(MODEL, head=head), {"columns": PROMPT + RESPONSE, "response": RESPONSE}
        made = described(kind, model, rows=ROWS, **sizes, method=method, num_samples=num_samples)
        return dataclasses.replace(made, role=dataclasses.replace(made.role, lora=lora))

    return {
        "generate": (call("generate"), Strategy(data=2, tensor=2)),
        "generate, slots": (call("generate"), Strategy(data=2, tensor=2, slots=8, prefill_rows=4, prefill_tokens=8)),
        "generate, shared prompts": (
            call("generate", num_samples=4),
            Strategy(data=2, tensor=2, slots=16, prefill_rows=2, shared_prompts=6),
        ),
        "generate, slots in a ring": (call("generate"), Strategy(pipeline=2, tensor=2, slots=16, prefill_rows=4)),
        "generate, ring": (call("generate"), Strategy(pipeline=2, tensor=2)),
        "logprobs": (call("infer", method="logprobs"), Strategy(fsdp=2, tensor=2)),
        "values": (call("infer", "scalar", "values"), Strategy(data=2, fsdp=2)),
        "scores": (call("infer", "scalar", "scores"), Strategy(fsdp=2, tensor=2)),
        "policy_and_values": (call("infer", "both", "policy_and_values"), Strategy(tensor=2)),
        "train": (call("train"), Strategy(data=2, fsdp=2, tensor=2, micro_batches=4)),
        "train, scalar head": (call("train", "scalar"), Strategy(data=2, tensor=2, micro_batches=2)),
        "train, both heads": (call("train", "both"), Strategy(data=2, fsdp=2, remat="layer")),
        "train, LoRA": (call("train", lora=LoRAConfig(rank=8)), Strategy(fsdp=2, tensor=2, remat="dots")),
        "loss": (dataclasses.replace(call("train"), kind="infer", method="loss"), Strategy(data=2, tensor=2)),
    }


def lowered(call: DescribedCall, strategy: Strategy) -> jax.stages.Lowered:
    layout = Layout.over(tuple(range(strategy.num_devices)), strategy)
    if not layout.is_pipelined:
        return call_program(call, layout, num_layers=MODEL.num_layers, rows=ROWS).lower()
    # a layer more than the stages divide: one of the stages has none in its place
    model = dataclasses.replace(MODEL, num_layers=3)
    arrays, _, rebuild = split_args(placed(call.args, layout))
    weights = abstract_of(declare_ring(model, strategy.pipeline), model.compute_dtype)
    params = with_shardings(weights, ring_shardings(model, layout))
    noise, temperature = whole(layout, (3,), jnp.uint32), whole(layout, ())
    program: Any = generate_program(dataclasses.replace(call.role, model=model), rebuild, layout)
    return program.lower(params, noise, temperature, arrays)


STAGES = Strategy(pipeline=2, data=2, micro_batches=2)


def inferred_by_stages(call: DescribedCall, compiled: Compile) -> dict[str, StageProgram]:
    """The programs of an inference call over two stages."""
    layout = Layout.over((0, 1, 2, 3), STAGES)
    arrays, _, rebuild = split_args(placed(call.args, layout))
    program, own = PipelinedInference(call.role, call.method, rebuild, layout), set_of(call.role)
    weights = with_shardings(own.abstract(MODEL.compute_dtype), own.shardings(layout))

    def on(stage: int, x: Any) -> Any:
        rows = layout.stage(stage).rows
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), x)

    (dealt, *_), _ = compiled(program._deal, arrays)
    first, last = program._pass._programs
    of_stages = [pick(weights, stage, MODEL.num_layers, layout) for stage in (0, 1)]
    hidden = compiled(first, of_stages[0], on(0, dealt["tokens"]), on(0, dealt["mask"]))
    compiled(last, of_stages[1], on(1, hidden), on(1, dealt["mask"]), on(1, dealt["own"]))
    return {"first stage": first, "last stage": last}


def trained_by_stages(call: DescribedCall, compiled: Compile) -> dict[str, StageProgram]:
    """The programs of a train call over two stages: those of the first and the last, and of the update of the first."""
    layout = Layout.over((0, 1, 2, 3), STAGES)
    arrays, _, rebuild = split_args(placed(call.args, layout))
    programs, own = TrainPrograms(call.role, rebuild, [True] * len(arrays), layout), set_of(call.role)
    of_group = with_shardings(own.abstract(), programs.group_shardings[0])
    weights = [pick_virtual(of_group, stage, MODEL.num_layers, 2) for stage in (0, 1)]
    first, last = (programs.groups[0].stage(stage) for stage in (0, 1))

    def rows(x: jax.ShapeDtypeStruct, stage: Layout) -> jax.ShapeDtypeStruct:
        """The rows of one of the two groups of an array."""
        return jax.ShapeDtypeStruct((x.shape[0] // 2, *x.shape[1:]), x.dtype, sharding=stage.rows)

    ((dealt, _),) = compiled(programs.deal(1), whole(layout, (3,), jnp.uint32), arrays, whole(layout, (), jnp.int32))
    zeros = [compiled(programs.zeros(stage, 0, weights[stage])) for stage in (0, 1)]
    tokens, mask = (rows(dealt[name], first) for name in ("tokens", "mask"))
    arguments = StageArguments(weights[0], None, tokens, mask)  # pyright: ignore[reportArgumentType]
    hidden, residuals = compiled(programs.forward(0, 0, 0), arguments)
    compiled(programs.backward(0, 0, 0), zeros[0], arguments, residuals, hidden)
    received = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=last.rows)
    arguments = StageArguments(weights[1], None, received, rows(dealt["mask"], last))  # pyright: ignore
    of_loss = [rows(x, last) for x in dealt["own"]]
    compiled(programs.last_backward(0, 0), zeros[1], arguments, of_loss)

    stage = layout.stage(0)
    groups = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (2, *x.shape[1:]), x.dtype, sharding=NamedSharding(stage.mesh, x.sharding.spec)
        ),
        zeros[0],
    )  # fmt: skip
    sums, _ = compiled(programs.sum_over_groups(0, 0), groups, whole(stage, ()), [None] * len(arrays), None)
    trained = own.abstract(), own.abstract_optimizer()
    kept = with_shardings(trained, (programs.shardings, programs.state_shardings))
    compiled(programs.update(0), *(pick(x, 0, MODEL.num_layers, layout) for x in kept), sums, whole(stage, ()))
    return {
        "deal": programs.deal(1), "forward": programs.forward(0, 0, 0), "backward": programs.backward(0, 0, 0),
        "last stage": programs.last_backward(0, 0), "reduction": programs.sum_over_groups(0, 0),
        "update": programs.update(0),
    }  # fmt: skip


def reallocation() -> jax.stages.Lowered:
    """Lowers a reallocation of bfloat16 weights, from four devices that train to four others that generate."""
    layouts = (
        Layout.over((0, 1, 2, 3), Strategy(fsdp=2, tensor=2)),
        Layout.over((4, 5, 6, 7), Strategy(data=2, tensor=2)),
    )
    shapes = [x.shape for x in jax.tree.leaves(abstract_params(MODEL))]
    shardings = [jax.tree.leaves(param_shardings(MODEL, layout)) for layout in layouts]
    signatures = tuple(map(Signature, shapes, [np.dtype(jnp.bfloat16)] * len(shapes), *shardings))
    (bucket,) = (bucket for bucket in in_buckets(signatures, 2**30) if bucket.method == "exchange")
    mesh = Mesh(np.array(bucket.devices), (exchange.AXIS,), axis_types=(AxisType.Auto,))
    held = [signatures[i].source.shard_shape(signatures[i].shape) for i in bucket.members]
    sharding = NamedSharding(mesh, PartitionSpec(exchange.AXIS))
    shards = [jax.ShapeDtypeStruct((8 * n, *rest), jnp.bfloat16, sharding=sharding) for n, *rest in held]
    program: Any = exchange.exchange_program(bucket.lots, bucket.devices)
    return program.lower(shards)


def copied_onto_every_device() -> jax.stages.Lowered:
    """What none may be: XLA cannot get from one of these layouts to the other, and says so."""
    mesh = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2)).mesh

    def in_layout(x: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def program(x: jax.Array) -> jax.Array:
        return in_layout(jnp.cos(in_layout(jnp.sin(x), "data", None, "tensor")), ("fsdp", "data"), "tensor", None)

    return jax.jit(program).lower(
        jax.ShapeDtypeStruct((6, 10, 12), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    )


def placed(args: Any, layout: Layout) -> Any:
    """Described arrays of a call, with their rows split."""

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.rows) if isinstance(x, DescribedRows) else x

    return jax.tree.map(shape, args, is_leaf=lambda x: isinstance(x, DescribedRows))


def whole(layout: Layout, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.replicated)


# -- what they do ------------------------------------------------------------------------------------------------------


def figures(name: str, compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Counts of a program, with loops that end by a condition gone around once, and what it does that none may do."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    counts, module = count(text), parse(text)
    assert not counts.unknown, counts.unknown
    total = counts.total(rounds=1)
    collectives: collections.Counter[str] = collections.Counter()
    for each, times in total.collectives.items():
        collectives[f"{each.kind} {each.dtype}"] += int(times)
        collectives[f"{each.kind} {each.dtype} bytes"] += int(times * each.bytes)
    return {
        "counts": {
            "flops": int(total.flops),
            "bytes": int(total.bytes),
            "kernels": int(total.kernels),
            "argument bytes": memory.argument_size_in_bytes,
            "donated bytes": memory.alias_size_in_bytes,
            "temporary bytes": memory.temp_size_in_bytes,
            **{name: collectives[name] for name in sorted(collectives)},
        },
        "copies of caches": written_in_decoding(module, CACHE, loops_of=LOOPS[name]) if name in LOOPS else [],
        "wide gathers": wide_gathers(module),
    }


def written_in_decoding(module: Module, elements: int, *, loops_of: Collection[str] = ("decode",)) -> list[str]:
    """Arrays of so many elements at least that loops of decoding write in a round, but for those that they update in
    place, and space that cuBLAS only works in."""
    loops = [i for i in instructions(module, module.entry) if i.op == "while" and {*loops_of} & {*scopes(i.op_name)}]
    assert loops
    found = []
    for instruction in itertools.chain(*(instructions(module, loop.called("body") or "") for loop in loops)):
        if instruction.op in NO_KERNELS or instruction.op.endswith("-done"):
            continue
        made = instruction.shapes
        if instruction.op == "fusion":
            fused = module.computations[instruction.called("calls") or ""]
            roots = [_through_bitcasts(fused, root) for root in _roots(fused)]
            made = [s for root in roots for s in root.shapes if not is_in_place(fused, root)]
        found += [f"{instruction.op} {s.dtype}{list(s.dims)}" for s in made if s.size >= elements and s.dtype != "s8"]
    return found


def is_in_place(fused: Computation, root: HloInstruction) -> bool:
    """True of an input of a fusion with a slice replaced, or with values scattered into it."""
    return (
        root.op in ("dynamic-update-slice", "scatter")
        and _through_bitcasts(fused, fused.operand(root, 0)).op == "parameter"
    )


def wide_gathers(module: Module) -> list[str]:
    """Matrices that are gathered in float32: all rest in bfloat16, or are used in it."""
    gathers = [i for i in instructions(module, module.entry) if i.op == "all-gather"]
    return [f"f32{list(s.dims)}" for i in gathers for s in i.shapes if s.dtype == "f32" and s.dims in WEIGHTS]


def instructions(module: Module, name: str) -> Iterator[HloInstruction]:
    """The instructions of a computation and of all that it calls, except those inside fusions."""
    for instruction in module.computations[name].instructions:
        yield instruction
        if instruction.op in ("while", "call", "conditional"):
            called = [instruction.called(attribute) for attribute in ("body", "condition", "to_apply")]
            for each in (*called, *instruction.branches):
                yield from instructions(module, each) if each else ()


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    devices = described_devices(kinds()[sys.argv[1]], 8)
    assert devices.is_gpu and devices.has_cudnn, devices
    jax.devices = lambda *_: list(devices.devices)  # layouts name devices by their positions there
    calls = in_one_piece()
    programs = {name: functools.partial(lowered, *each) for name, each in calls.items()}
    programs |= {"reallocation": reallocation, CONTROL: copied_onto_every_device}
    found = {}
    for name, lower in programs.items():
        print(MARK, name, file=sys.stderr, flush=True)  # before what XLA has to say of it
        found[name] = figures(name, lower().compile(compiler_options=dict(devices.options)))
    del found[CONTROL]

    def compiled(program: StageProgram, *arguments: Any) -> Any:
        program.compile(*arguments, options=dict(devices.options))
        return program.outputs

    for name, by_stages in (("logprobs", inferred_by_stages), ("train", trained_by_stages)):
        print(MARK, f"{name} by stages", file=sys.stderr, flush=True)
        for part, program in by_stages(calls[name][0], compiled).items():
            found[f"{name} by stages, {part}"] = figures(name, program.compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
