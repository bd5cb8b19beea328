"""Weights and their gradients move between devices that have different rows; activations do not.

Where XLA cannot get from one sharding of an array to another, it copies the whole onto every device ("involuntary full
rematerialization") or sends parts of it around. Only some versions warn; the collectives show it in all.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import Sequences
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import abstract_params, param_shardings
from jaxrlhf.planner.compiled import hlo
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat, Strategy
from tests.generation.test_layout_invariance import CONFIG
from tests.planner.compiled.device_groups import device_groups

COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
LAYOUT = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
SHARDINGS = param_shardings(CONFIG, LAYOUT)
WEIGHTS = [x.shape for x in jax.tree.leaves(abstract_params(CONFIG))]
B, T, R = 8, 10, 7
"""Columns (T - 1, R) and tokens (B * R) divide no dim of a weight, so that its shape tells an activation. Few rows:
with many, activations are the larger, and XLA gathers the weights of itself."""


def compile_gradient(remat: Remat) -> jax.stages.Compiled:
    """A gradient as a train call takes it: weights and their gradients rest split."""

    def aval(dtype, *shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=LAYOUT.rows)

    def loss(params, sequences):
        outputs = policy_outputs(params, sequences, CONFIG, LAYOUT, remat=remat)
        return (outputs.logprobs * jnp.arange(R)[None] + outputs.entropy).sum()

    def gradient(params, sequences):
        grads = jax.grad(loss)(params, sequences)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, SHARDINGS)

    def at_rest(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(at_rest, abstract_params(CONFIG), SHARDINGS)
    sequences = Sequences(tokens=aval(jnp.int32, B, T), mask=aval(jnp.bool, B, T), response=aval(jnp.bool, B, R))
    return jax.jit(gradient).lower(params, sequences).compile()


def is_part_of_a_weight(shape: hlo.Shape) -> bool:
    """True for a part of a weight, of its gradient, or of either transposed."""
    return any(
        len(dims) == len(shape.dims) and all(whole % part == 0 for whole, part in zip(dims, shape.dims, strict=True))
        for weight in WEIGHTS
        for dims in (weight, weight[::-1])
    )


def activations_moved(compiled: jax.stages.Compiled) -> list[str]:
    """Collectives between devices of different rows that take anything but parts of weights."""
    module = hlo.parse(compiled.as_text() or "")
    same_rows = [set(group) for group in np.arange(8).reshape(-1, 2).tolist()]  # those along `tensor`
    found = []
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if instruction.op not in COLLECTIVES:
                continue
            groups = device_groups(instruction.attributes, 8)
            is_across_rows = not all(any(set(group) <= rows for rows in same_rows) for group in groups)
            if is_across_rows and not all(map(is_part_of_a_weight, instruction.shapes)):
                found.append(f"{instruction.op} {instruction.type_text} {groups}")
    return found


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_gradients_of_policy_outputs(remat):
    compiled = compile_gradient(remat)
    assert activations_moved(compiled) == []
    trees = (compiled.output_shardings, SHARDINGS, abstract_params(CONFIG))
    for given, sharding, x in zip(*map(jax.tree.leaves, trees), strict=True):
        assert given.is_equivalent_to(sharding, len(x.shape))
        assert math.prod(given.shard_shape(x.shape)) == math.prod(x.shape) // (4 if len(x.shape) == 2 else 1)


def test_activations_move_where_weights_are_not_gathered(monkeypatch):
    monkeypatch.setattr(Layout, "at_use", lambda self, weight, axes: weight)
    assert len(activations_moved(compile_gradient("none"))) > 1
