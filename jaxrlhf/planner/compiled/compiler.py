"""Counts of programs compiled for described devices: cached on disk, and compiled in several processes.

questions = [Question("train, 2 layers", lower_program, CallAtDepth(call, 2, 4, 8), kind, num_devices=8)]
for compilation in compile_all(questions, cache=CostCache(default_folder())):
    print(compilation.counts.total().flops, compilation.notes)
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax

from jaxrlhf.brief import cut
from jaxrlhf.cluster.hardware import Kind
from jaxrlhf.config.reading import build, to_tree
from jaxrlhf.config.schema import MAX_VIRTUAL_DEVICES
from jaxrlhf.importing import import_files, imported_files
from jaxrlhf.planner.compiled.described_devices import (
    DescribedDevices,
    described_devices,
    has_gpu_compiler,
    target_config,
)
from jaxrlhf.planner.compiled.hlo_counts import count
from jaxrlhf.planner.compiled.program_counts import ProgramCounts
from jaxrlhf.planner.costs.cache import CostCache, fingerprint, source_digest
from jaxrlhf.sharding.mesh import use_virtual_cpu_devices
from jaxrlhf.xla_flags import known_flags

PROCESSES = 2
"""Processes that compile side by side."""
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")
"""JAX settings that change programs."""
_FUSED_ATTENTION = ("__cudnn$fmha", "CustomSPMDPartitioning")
"""Names of cuDNN's attention in StableHLO: on one device, and on several."""
_WITHOUT_SOFTMAX_SEARCH = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}
"""XLA takes a minute to fuse the softmax of attention as matrix products. Without it, bytes are 10 % more."""


class CompileError(RuntimeError):
    """A program that does not compile, or whose process has ended."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A program to lower, compile and count, and the devices to compile it for."""

    name: str
    """Its name in progress and errors: 'actor.train, 2 layers'."""
    lower: Callable[[Any, DescribedDevices], jax.stages.Lowered]
    """Lowers `subject`. A function of a module, so that it can be pickled."""
    subject: Any
    """The argument of `lower`: data that can be pickled and that `fingerprint` knows."""
    kind: Kind
    num_devices: int
    """Devices of one node."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_VIRTUAL_DEVICES:
            raise ValueError(f"num_devices: must be 1 to {MAX_VIRTUAL_DEVICES}. Got {self.num_devices}.")

    @property
    def key(self) -> str:
        """The key of its answer in the cache, made of all that the answer depends on."""
        target = self.kind.target
        devices = target and target_config(self.kind, target), has_gpu_compiler(), self.num_devices
        versions = (jax.__version__, source_digest(), os.environ.get("XLA_FLAGS", ""), _settings())
        return fingerprint((self.lower, self.subject, devices, versions))


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The counts of a compiled program."""

    counts: ProgramCounts
    notes: tuple[str, ...] = ()
    """Caveats of these counts."""


def compile_all(
    questions: Sequence[Question], *, cache: CostCache | None, say: Callable[[str], None] = lambda line: None
) -> list[Compilation]:
    """The answers, in the order of the questions. Those in the cache are not compiled again, equal ones are compiled
    once. A process takes about half a gigabyte. Raises CompileError if a program cannot be lowered or compiled; those
    that were done before are in the cache."""
    keys = [question.key for question in questions]
    kept = {key: cache.get(key) for key in keys} if cache else {}
    answers = {key: build(Compilation, tree, where=key) for key, tree in kept.items() if tree is not None}
    open_ = {key: question for key, question in zip(keys, questions, strict=True) if key not in answers}
    if not open_:
        return [answers[key] for key in keys]
    total = len(set(keys))
    devices = max(question.num_devices for question in open_.values())
    pool = concurrent.futures.ProcessPoolExecutor(
        min(PROCESSES, len(open_)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_process,
        initargs=(devices, _settings(), imported_files()),
    )
    with pool:
        tasks = {pool.submit(_answer_pickled, _pickled(question)): key for key, question in open_.items()}
        try:
            for task in concurrent.futures.as_completed(tasks):
                key = tasks[task]
                answers[key] = task.result()
                if cache:
                    cache.put(key, to_tree(answers[key]))
                say(f"Compiled {len(answers)} of {total}: {open_[key].name}")
        except BrokenProcessPool as error:
            raise CompileError(
                f"A process that compiles programs has ended before its time, one of {PROCESSES}. It may have had too "
                "little memory: use fewer."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return [answers[key] for key in keys]


def answer(question: Question) -> Compilation:
    """The answer to one question, compiled in this process. Raises CompileError if its program cannot be."""
    try:
        described = described_devices(question.kind, question.num_devices)
        return compile_counts(question.lower(question.subject, described), described)
    except Exception as error:
        raise CompileError(f"{question.name}: must compile. Got {type(error).__name__}: {cut(str(error))}.") from error


def compile_counts(lowered: jax.stages.Lowered, described: DescribedDevices) -> Compilation:
    """Compiles and counts a program that was lowered for described devices."""
    program = lowered.as_text()
    options = dict(described.options)
    if described.is_gpu and not any(name in program for name in _FUSED_ATTENTION):
        options |= known_flags(_WITHOUT_SOFTMAX_SEARCH)
    text = lowered.compile(compiler_options=options).as_text()
    assert text is not None
    return Compilation(count(text, widened=described.stands_in and "bf16>" in program), described.notes)


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _SETTINGS}


def _start_process(num_devices: int, settings: dict[str, Any], files: Sequence[str]) -> None:
    """Prepares a new process for compiling: for described devices, or for as many virtual ones."""
    os.environ.setdefault("NPROC", "2")  # threads of XLA's pools: the processes are many already
    jax.config.update("jax_enable_compilation_cache", False)
    for name, value in settings.items():
        jax.config.update(name, value)
    use_virtual_cpu_devices(num_devices)
    import_files(files)


def _pickled(question: Question) -> bytes:
    try:
        return pickle.dumps(question)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CompileError(f"{question.name}: must go to another process. Got {cut(str(error))}.") from error


def _answer_pickled(data: bytes) -> Compilation:
    return answer(pickle.loads(data))
