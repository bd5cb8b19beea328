"""Weights as decoding reads them: ready for use, and over the stages of a pipeline in one form for all of them.

In a pipelined layout a weight rests on the devices of its stage. Generation is one program over all of them, so it
reads arrays that span them: slot j has, along a leading axis that is split over `pipeline`, the j-th layer of each
stage. If a stage has one layer less, its part of the last slot is zeros. The embedding, the final norm and the
language-model head are whole on every stage, since a tied embedding is read on the first and on the last.

    {"embedding": [V, D], "final_norm": [D], "lm_head": [D, V], "layers": [{"query": [stages, D, H], ...}, ...]}
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.architecture import Declared, Weight, declare, declare_layer, map_weights, with_leading_axis
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import LayerWeights
from jaxrlhf.models.params import Params, Shardings, abstract_of, use, use_layer, with_layers
from jaxrlhf.models.stage_weights import whole_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here
from jaxrlhf.sharding.stage_layers import layers_of_stages


def prepare(params: Params, config: ModelConfig, layout: Layout) -> Params:
    """Weights as decoding uses them: gathered, in the compute precision, one dict a layer, joined where possible."""
    declared = declare(config)
    others = {name: w for name, w in params.items() if name != "layers"}
    ready = use(others, {name: declared[name] for name in others}, layout, config.compute_dtype)
    unstacked = with_layers(params, stacked=False)["layers"]
    return {**ready, "layers": [use_layer(weights, config, layout) for weights in unstacked]}


def declare_ring(config: ModelConfig, num_stages: int) -> Declared:
    """The weights in the form that the program reads, as declarations. A value head is not among them."""
    slot = with_leading_axis(declare_layer(config), num_stages, "stages")
    others = {name: w for name, w in declare(config).items() if name not in ("layers", "value_head")}
    return {**others, "layers": [slot for _ in layers_of_stages(config.num_layers, num_stages)[0]]}


def ring_shardings(config: ModelConfig, layout: Layout) -> Shardings:
    """The shardings of `declare_ring`."""
    return map_weights(layout.weight, declare_ring(config, layout.strategy.pipeline))


def ring_params(params: Params, config: ModelConfig, layout: Layout, *, move: Callable[[Any, Any], Any]) -> Params:
    """Converts weights that rest by stages to the form that pipelined generation reads.

    A layer is copied on the devices that have it. All processes that own a device of the layout call this.

    Args:
        params: In the compute precision, each on the devices of its stage, layers as a list.
        move: `(tree, shardings) -> tree`, which brings arrays from some devices to others.
    """
    shardings = ring_shardings(config, layout)
    layers, others = shardings.pop("layers"), shardings
    moved = move({name: params[name] for name in others}, others)
    every_stage = [_slots_of(stage, params, config, layout) for stage in range(layout.strategy.pipeline)]
    joined = [
        {name: whole_of([slots[j][name] for slots in every_stage], sharding) for name, sharding in slot.items()}
        for j, slot in enumerate(layers)
    ]
    return {**moved, "layers": joined}


def _slots_of(stage: int, params: Params, config: ModelConfig, layout: Layout) -> list[LayerWeights]:
    """One stage's part of every slot, `[1, ...]` on its devices: its layers, and zeros where it has one less."""
    own = layout.stage(stage)
    numbers = layers_of_stages(config.num_layers, layout.strategy.pipeline)
    slots, shardings = _declared_slots(config, len(numbers[0]), own)
    if not is_here(own.mesh):
        return absent(abstract_of(slots, config.compute_dtype), shardings)
    return _slots_program(config, own, len(numbers[0]))([params["layers"][number] for number in numbers[stage]])


@functools.lru_cache(maxsize=128)
def _slots_program(config: ModelConfig, stage: Layout, num_slots: int) -> Callable[[Any], Any]:
    """`layers -> slots`, on the devices of a stage."""
    slots, shardings = _declared_slots(config, num_slots, stage)

    def program(layers: list[LayerWeights]) -> list[LayerWeights]:
        missing = map_weights(lambda w: jnp.zeros(w.shape, config.compute_dtype), slots[len(layers) :])
        return [*jax.tree.map(lambda x: x[None], layers), *missing]

    return jax.jit(program, out_shardings=shardings)


def _declared_slots(config: ModelConfig, num_slots: int, stage: Layout) -> tuple[list[dict[str, Weight]], Any]:
    """One stage's part of every slot, as declarations, and their shardings."""
    slots = [with_leading_axis(declare_layer(config), 1, "stages") for _ in range(num_slots)]
    return slots, map_weights(stage.weight, slots)
