"""Programs compiled for described GPUs and for virtual devices, in processes of their own and with a cache."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.config.reading import build
from jaxrlhf.importing import find_function
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.compiled import compiler
from jaxrlhf.planner.compiled import described_devices as described
from jaxrlhf.planner.compiled.compiler import Compilation, CompileError, Question, answer, compile_all
from jaxrlhf.planner.compiled.described_devices import (
    NO_COMPILER,
    NO_CUDNN,
    DescribedDevices,
    described_devices,
    target_config,
)
from jaxrlhf.planner.costs.cache import CostCache
from tests.planner.compiled import described_programs
from tests.planner.compiled.described_programs import Subject, require_gpu_compiler
from tests.planner.compiled.device_groups import device_groups
from tests.planner.compiled.program_flops import program_flops

MODEL = ModelConfig(
    vocab_size=264, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    dtype="bfloat16",
)  # fmt: skip
ROWS, COLUMNS, RESPONSE = 8, 201, 96


def question(kind: str, device: str, tensor: int) -> Question:
    call = described_programs.described(kind, MODEL, rows=ROWS, columns=COLUMNS, response=RESPONSE)
    return Question(
        f"{kind} on {device}", described_programs.lower, Subject(call, tensor), kinds()[device], num_devices=tensor
    )


def lower_product(subject: str, devices: DescribedDevices) -> jax.stages.Lowered:
    """A product whose rows are split over two devices, which all of them get."""
    mesh = jax.sharding.Mesh(devices.devices, ("x",))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["x"], []))
    x = jax.ShapeDtypeStruct((16, 32), jnp.dtype(subject), sharding=rows)
    w = jax.ShapeDtypeStruct((32, 8), jnp.dtype(subject), sharding=whole)
    return jax.jit(lambda x, w: x @ w, out_shardings=whole).lower(x, w)


def fail(subject: str, devices: DescribedDevices) -> jax.stages.Lowered:
    raise ValueError("no such program")


def leave(subject: str, devices: DescribedDevices) -> jax.stages.Lowered:
    os._exit(1)


def small(lower: Any, subject: Any = "float32", device: str = "cpu", name: str = "small") -> Question:
    return Question(name, lower, subject, kinds()[device], num_devices=2)


def test_programs_for_gpus_that_are_not_there(tmp_path):
    """Attention is cuDNN's where it can be, and products are cuBLAS's: their operations are those of the formulas, 200
    columns of 201 being fed. This process itself describes no device."""
    require_gpu_compiler()
    before = described_devices.cache_info()
    questions = [question("train", "h100", 2), question("infer", "a100-80g", 1), question("infer", "v100-32g", 2)]
    seen = []

    def ask() -> list[Compilation]:
        return compile_all(questions, cache=CostCache(tmp_path), say=seen.append)

    answers = ask()
    assert ask() == answers  # from the cache, and nothing is seen of it
    assert [line.partition(":")[0] for line in seen] == [f"Compiled {done} of 3" for done in (1, 2, 3)]
    assert {line.partition(": ")[2] for line in seen} == {asked.name for asked in questions}
    assert described_devices.cache_info() == before
    for asked, got in zip(questions, answers, strict=True):
        gradient, attention = "train" in asked.name, "xla" if "v100" in asked.name else "cudnn"
        expected = program_flops(
            MODEL, rows=ROWS, columns=COLUMNS - 1, scored=RESPONSE, attention=attention, gradient=gradient
        )
        assert got.counts.unknown == ()
        assert got.counts.total().flops == pytest.approx(expected / asked.num_devices, rel=0.01), asked.name
        groups = {c.groups for c in got.counts.total().collectives}
        assert {len(g) for each in groups for g in device_groups(each, 2)} == ({2} if asked.num_devices == 2 else set())
        assert got.notes == ((NO_CUDNN,) if attention == "xla" else ())


def test_a_processor_is_compiled_for_as_it_is():
    compilation = answer(small(lower_product, "bfloat16"))
    assert compilation.notes == ()
    counts = compilation.counts.total()
    assert counts.flops == 2 * 8 * 32 * 8
    (collective,) = counts.collectives
    assert (collective.kind, collective.dtype) == ("all-gather", "f32")  # widened
    assert device_groups(collective.groups, 2) == ((0, 1),)


def test_without_a_compiler_for_gpus_virtual_devices_stand_in_and_say_so(monkeypatch):
    def missing(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(described.topologies, "get_topology_desc", missing)
    described_devices.cache_clear()
    try:
        compilation = answer(question("infer", "a100-80g", 2))
        as_it_is = answer(question("infer", "cpu", 2))
    finally:
        described_devices.cache_clear()
    assert compilation.notes == (NO_COMPILER,)
    halved, whole = compilation.counts.total(), as_it_is.counts.total()
    assert (halved.flops, halved.bytes, halved.kernels) == (whole.flops, whole.bytes / 2, whole.kernels)
    assert {c.dtype for c in whole.collectives} == {"f32"}
    assert {c.dtype for c in halved.collectives} == {"bf16"}
    assert [2 * c.bytes for c in halved.collectives] == [c.bytes for c in whole.collectives]


def test_devices_are_as_many_as_there_are():
    message = "devices: JAX runs with 8 virtual CPU devices already, and 9 are asked for."
    with pytest.raises(ValueError, match=re.escape(message)):
        described_devices(kinds()["cpu"], 9)
    with pytest.raises(ValueError, match=re.escape("num_devices: must be 1 to 1024. Got 0.")):
        dataclasses.replace(small(lower_product), num_devices=0)


def test_keys_are_of_what_decides_the_program():
    base = small(lower_product, device="h100")
    h100 = base.kind
    faster = dataclasses.replace(h100, coefficients=dataclasses.replace(h100.coefficients, matmul_efficiency=0.5))
    assert base.key == dataclasses.replace(base, name="other", kind=faster).key
    others = [
        dataclasses.replace(base, subject="bfloat16"),
        dataclasses.replace(base, kind=kinds()["a100-80g"]),
        dataclasses.replace(base, kind=kinds()["cpu"]),
        dataclasses.replace(base, num_devices=4),
        dataclasses.replace(base, lower=fail),
    ]
    assert len({other.key for other in [base, *others]}) == len(others) + 1


def test_a_program_that_does_not_compile_is_an_error_and_the_others_are_kept(tmp_path, monkeypatch):
    """Also from a file of the user's own, which other processes find by its path."""
    monkeypatch.setattr(compiler, "PROCESSES", 1)
    own = tmp_path / "own.py"
    own.write_text("from tests.planner.compiled.test_compiler import lower_product\n\n\ndef lower(subject, devices):\n"
                   "    return lower_product(subject, devices)\n")  # fmt: skip
    lower = find_function(f"{own}:lower", what="Program")
    good = dataclasses.replace(small(lower_product), lower=lower)
    bad, cache = small(fail, name="actor.train"), CostCache(tmp_path / "cache")
    with pytest.raises(CompileError, match=re.escape("actor.train: must compile. Got ValueError: no such program.")):
        compile_all([good, good, bad], cache=cache)
    kept = cache.get(good.key)
    assert kept is not None
    assert compile_all([good], cache=cache) == [build(Compilation, kept, where="")]


def test_a_process_that_ends_before_its_time_is_an_error():
    message = "A process that compiles programs has ended before its time, one of 2. It may have had too little memory"
    with pytest.raises(CompileError, match=re.escape(message)):
        compile_all([small(leave)], cache=None)


def test_what_cannot_go_to_another_process_is_an_error():
    here = dataclasses.make_dataclass("Here", [])
    with pytest.raises(CompileError, match=re.escape("small: must go to another process. Got ")):
        compile_all([small(lower_product, here())], cache=None)


def test_a_gpu_is_described_to_xla_in_its_own_words():
    h100 = kinds()["h100"]
    assert h100.target is not None
    text = target_config(h100, h100.target)
    for line in (
        "core_count: 132",
        "memory_bandwidth: 3352000000000",
        "device_memory_size: 84942979072",
        "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in text


def test_the_assembler_that_stands_in_says_its_version_and_writes_a_file(tmp_path):
    assembler = Path(described._toolkit().name) / "bin" / "ptxas"
    assert b"release 13.0, V13.0.0" in subprocess.run([assembler, "--version"], capture_output=True).stdout
    subprocess.run([assembler, "in.ptx", "-o", tmp_path / "out", "-arch=sm_80"], check=True)
    assert (tmp_path / "out").read_bytes() == b""


def test_a_jax_that_cannot_be_told_of_cudnn(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.cudnn", None)
    assert not described._assume_cudnn()
