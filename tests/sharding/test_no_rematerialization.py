"""Weights and their gradients move between devices that have different rows; activations do not.

Where XLA cannot get from one sharding of an array to another, it copies the whole onto every device ("involuntary full
rematerialization") or sends parts of it around. Only some versions warn; the collectives show it in all.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.experience import Sequences
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.heads import policy_outputs
from jaxrlhf.models.params import abstract_params, param_shardings
from jaxrlhf.planner.compiled import hlo
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Remat, Strategy
from tests.generation.test_layout_invariance import CONFIG
from tests.planner.compiled.device_groups import device_groups

COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
LAYOUT = Layout.over(tuple(range(8)), Strategy(data=2, fsdp=2, tensor=2))
UNEVEN = dataclasses.replace(CONFIG, num_kv_heads=1, vocab_size=CONFIG.vocab_size - 1)
"""With a head that is repeated, and a vocabulary that is padded, for `tensor` 2."""
WEIGHTS = [x.shape for model in (CONFIG, UNEVEN) for x in jax.tree.leaves(abstract_params(model))]
B, T, R = 8, 10, 7
"""Columns (T - 1, R) and tokens (B * R) divide no dim of a weight, so that its shape tells an activation. Few rows:
with many, activations are the larger, and XLA gathers the weights of itself."""


def compile_gradient(remat: Remat, config: ModelConfig = CONFIG) -> jax.stages.Compiled:
    """A gradient as a train call takes it: weights and their gradients rest split."""
    shardings = param_shardings(config, LAYOUT)

    def aval(dtype, *shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=LAYOUT.rows)

    def loss(params, sequences):
        outputs = policy_outputs(params, sequences, config, LAYOUT, remat=remat)
        return (outputs.logprobs * jnp.arange(R)[None] + outputs.entropy).sum()

    def gradient(params, sequences):
        grads = jax.grad(loss)(params, sequences)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, shardings)

    def at_rest(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(at_rest, abstract_params(config), shardings)
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


@pytest.mark.parametrize(("remat", "config"), [("none", CONFIG), ("layer", CONFIG), ("none", UNEVEN)])
def test_gradients_of_policy_outputs(remat, config):
    compiled = compile_gradient(remat, config)
    assert activations_moved(compiled) == []
    trees = (compiled.output_shardings, param_shardings(config, LAYOUT), abstract_params(config))
    for given, sharding, x in zip(*map(jax.tree.leaves, trees), strict=True):
        assert given.is_equivalent_to(sharding, len(x.shape))
        assert math.prod(given.shard_shape(x.shape)) == math.prod(x.shape) // (4 if len(x.shape) == 2 else 1)


def test_uneven_weights_are_exchanged_and_copied_nowhere():
    """Those that `tensor` does not divide go from where they rest to the devices that use them, as all others do."""
    module = hlo.parse(compile_gradient("none", UNEVEN).as_text() or "")
    instructions = [x for computation in module.computations.values() for x in computation.instructions]
    assert "all-to-all" in {x.op for x in instructions}
    whole = {(UNEVEN.vocab_size, 32), (UNEVEN.vocab_size + 1, 32)}
    assert not any({shape.dims, shape.dims[::-1]} & whole for x in instructions for shape in x.shapes)


def test_activations_move_where_weights_are_not_gathered(monkeypatch):
    monkeypatch.setattr(Layout, "at_use", lambda self, weight, declared: weight)
    assert len(activations_moved(compile_gradient("none"))) > 1
