"""Calls of a small model, described and lowered: what is compiled to see what is counted."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Prompts, Sampling, Sequences, Term
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.compiled.described_devices import DescribedDevices, has_gpu_compiler
from jaxrlhf.programs.ahead_of_time import DescribedCall, DescribedRows, call_program
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import mesh_over
from jaxrlhf.sharding.strategy import Strategy


def require_gpu_compiler() -> None:
    """Fails a test where JAX's CUDA plugin is missing that should be there, and skips it where there is none."""
    if has_gpu_compiler():
        return
    if sys.platform != "linux":
        pytest.skip("JAX's CUDA plugin, which compiles for GPUs, is for Linux")
    pytest.fail("JAX's CUDA plugin, which compiles for GPUs, must be installed: pip install -e '.[test]'")


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 1
    epochs: int = 1


def weighted(outputs: Any, batch: Any, update: Update) -> Any:
    """A loss of what the heads of a model say: log-probabilities, values, or their sum."""
    both = [outputs] if isinstance(outputs, jax.Array) else [outputs.logprobs, getattr(outputs, "values", 0.0)]
    return (sum(both) * batch["weights"]).sum(), batch["weights"].sum(), {}


def described(
    kind: str,
    model: ModelConfig,
    *,
    rows: int,
    columns: int,
    response: int,
    method: str = "logprobs",
    num_samples: int = 1,
) -> DescribedCall:
    """A call that infers what heads say of responses, by a method; trains on it; or generates them."""
    tokens, mask, wanted = (
        DescribedRows((rows, n), dtype)
        for n, dtype in ((columns, jnp.int32), (columns, jnp.bool), (response, jnp.bool))
    )
    sequences = Sequences(tokens=tokens, mask=mask, response=wanted)  # pyright: ignore[reportArgumentType]
    if kind == "infer":
        return DescribedCall(f"actor.{method}", kind, method, (sequences,), ModelRole(model), rows * columns)
    if kind == "train":
        batch = {"sequences": sequences, "weights": DescribedRows((rows, response), jnp.float32)}
        role = ModelRole(model, OptimizerConfig(), 10)
        args = ((Term(weighted, batch),), Update())
        return DescribedCall("actor.train", kind, "train", args, role, rows * columns)
    prompts = Prompts(
        tokens=DescribedRows((rows, columns - response), jnp.int32),  # pyright: ignore[reportArgumentType]
        mask=DescribedRows((rows, columns - response), jnp.bool),  # pyright: ignore[reportArgumentType]
        row=DescribedRows((rows,), jnp.int32),  # pyright: ignore[reportArgumentType]
        id=DescribedRows((rows,), jnp.uint32),  # pyright: ignore[reportArgumentType]
    )
    args = (prompts, Sampling(max_new_tokens=response, num_samples=num_samples))
    return DescribedCall("actor.generate", "generate", "generate", args, ModelRole(model), rows * columns)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A call over tensor shards, with all its layers and rows."""

    call: DescribedCall
    tensor: int = 1


def lower(subject: Subject, devices: DescribedDevices) -> jax.stages.Lowered:
    """For described devices."""
    call, strategy = subject.call, Strategy(tensor=subject.tensor)
    if not devices.has_cudnn:
        role = dataclasses.replace(call.role, model=dataclasses.replace(call.role.model, attention="xla"))
        call = dataclasses.replace(call, role=role)
    layout = Layout(mesh_over(devices.devices, strategy), strategy)
    return call_program(call, layout, num_layers=call.role.model.num_layers, rows=call.num_rows).lower()
