"""Low-rank adapters: what they are, how they start, and how they join the weights that they adapt.

    W' = W + alpha / rank * down @ up

Letters: D_in, D_out sizes of a weight, r rank.

Adapters are a tree of weights of their own, `{"layers": [{"query": {"down": ..., "up": ...}, ...}, ...]}`, trained,
moved and saved without the weights that they adapt. A scalar head is trained whole, so it is among them.

Reference:
    Hu et al. 2021, arXiv:2106.09685.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrlhf.brief import did_you_mean
from jaxrlhf.models.architecture import (
    CHECKPOINT_NAMES,
    MATRICES,
    Declared,
    Matrix,
    declare,
    every_layer,
    is_weight,
    matrices,
)
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layers import Adapted, LayerWeights
from jaxrlhf.models.params import Params, declare_adapted
from jaxrlhf.require import require, require_at_least_one, require_positive


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters in place of the weights: only they are trained.

    >>> LoRAConfig(rank=8, alpha=16.0).merge
    'auto'
    """

    rank: int = 16
    alpha: float = 32.0
    """The product of an adapter is scaled by alpha / rank."""
    targets: tuple[Matrix, ...] = MATRICES
    """The weights of each layer that have one."""
    merge: Literal["auto", "always", "never"] = "auto"
    """When calls that do not train add adapters into a copy of the weights first. `auto` means where the call has so
    many tokens that applying them to each would cost more."""
    init: str = ""
    """A folder with saved adapters, as `output.export` writes them. Empty means new ones, which change nothing."""

    def __post_init__(self) -> None:
        require_at_least_one(self.rank, "rank")
        require_positive(self.alpha, "alpha")
        for target in self.targets:
            if target not in MATRICES:
                here = [name for name in MATRICES if CHECKPOINT_NAMES[name].endswith(f".{target}")]
                remedy = f" Here it is called {here[0]}." if here else did_you_mean(str(target), MATRICES)
                raise ValueError(f"targets: must be some of {', '.join(MATRICES)}. Got {target!r}.{remedy}")
        each_once = 0 < len(self.targets) == len(set(self.targets))
        require(each_once, "targets", "must name at least one weight, each once", list(self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def declare_adapters(config: ModelConfig, lora: LoRAConfig, *, stacked: bool = False) -> Declared:
    """The tree of a model's adapters, as declarations."""
    adapted = {name: declare_adapted(matrices(config)[name], lora.rank, lora.scale) for name in lora.targets}
    adapters = {name: {"down": a.down, "up": a.up} for name, a in adapted.items()}
    tree: Declared = {"layers": every_layer(adapters, config, stacked=stacked)}
    head = declare(config).get("value_head")
    return tree if head is None else tree | {"value_head": head}


def adapt(base: Params, adapters: Params, config: ModelConfig, lora: LoRAConfig) -> Params:
    """The weights of a model whose layers apply the adapters beside their own weights. Moves and computes nothing."""

    def layer(weights: LayerWeights, own: dict[str, Any]) -> LayerWeights:
        adapted = {name: Adapted(weights[name], x["down"], x["up"], lora.scale) for name, x in own.items()}
        return {**weights, **adapted}

    layers, own = base["layers"], adapters["layers"]
    if isinstance(layers, dict):
        both: Any = layer(layers, own)
    else:
        both = [layer(weights, x) for weights, x in zip(layers, own, strict=True)]
    return {name: both if name == "layers" else {**base, **adapters}[name] for name in declare(config)}


def merge(adapted: Params) -> Params:
    """The same weights with the adapters added in, computed in float32."""

    def merged(x: Any) -> jax.Array:
        if not isinstance(x, Adapted):
            return x
        change = jnp.matmul(x.down, x.up, preferred_element_type=jnp.float32) * x.scale
        return (x.weight.astype(jnp.float32) + change).astype(x.weight.dtype)

    return jax.tree.map(merged, adapted, is_leaf=lambda x: isinstance(x, Adapted))


def reads_merged(config: ModelConfig, lora: LoRAConfig | None, num_tokens: int) -> bool:
    """True if a call on so many tokens, which trains nothing, reads adapters added into a copy of the weights.

    By default that is where adding them once costs less than applying them to each token: merging takes 2 r D_in D_out
    operations a weight, applying them 2 r (D_in + D_out) a token. Merging also takes the memory of the copy.
    """
    if lora is None:
        return False
    if lora.merge != "auto":
        return lora.merge == "always"
    sizes = [matrices(config)[name].shape for name in lora.targets]
    once = sum(size_in * size_out for size_in, size_out in sizes)
    return num_tokens * sum(size_in + size_out for size_in, size_out in sizes) > once


def init_adapters(config: ModelConfig, lora: LoRAConfig, key: jax.Array) -> Params:
    """New adapters, float32, layers as a list: `down` is random, `up` is zero, and so is a scalar head."""
    declared = declare_adapters(config, lora)
    leaves, structure = jax.tree.flatten(declared, is_leaf=is_weight)
    keys = jax.random.split(key, len(leaves))
    made = [
        w.stddev * jax.random.normal(k, w.shape) if w.stddev else jnp.zeros(w.shape)
        for w, k in zip(leaves, keys, strict=True)
    ]
    return structure.unflatten(made)
