"""Which version of which weights lives where.

A trained role has master weights (float32) and optimizer state in the layout of its last train call. Every other call
gets a copy in the compute precision in its own layout, made when it is first asked for, and dropped when training makes
a new version. A role that is never trained has such copies only.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.params import Params, abstract_params, init_params, param_shardings, with_layers
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.runtime.optimizer import OptimizerState, init_optimizer, optimizer_shardings
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.sharding.layout import Layout


@dataclasses.dataclass
class _Held:
    """What is held of one role."""

    version: int
    home: Layout
    """Where the master weights are, or the first copy of weights that are never trained."""
    master: Params | None
    optimizer: OptimizerState | None
    copies: dict[tuple[Layout, bool], Params]
    """(layout, stacked) -> weights in the compute precision."""


class WeightStore:
    """The weights of all roles."""

    def __init__(self, roles: Mapping[str, ModelRole]) -> None:
        self._roles = roles
        self._held: dict[str, _Held] = {}

    def version(self, role: str) -> int:
        """How many train calls the role has seen."""
        return self._held[role].version

    def initialize(self, role: str, layout: Layout, key: jax.Array) -> None:
        """Random weights, made in place: the whole model is never on one device."""
        model = self._roles[role].model
        shardings = param_shardings(model, layout, stacked=model.scan_layers)
        never_trained = self._roles[role].optimizer is None

        def make(key: jax.Array) -> Params:
            return with_layers(init_params(model, key, random_value_head=never_trained), stacked=model.scan_layers)

        self.load(role, layout, jax.jit(make, out_shardings=shardings)(key))

    def load(
        self, role: str, layout: Layout, params: Params, *, optimizer: OptimizerState | None = None, version: int = 0
    ) -> None:
        """Take weights over, float32 and resting in `layout`. They belong to the store from now on."""
        model, config = self._roles[role].model, self._roles[role].optimizer
        params = _stack_if(params, model.scan_layers)
        if config is None:
            copy = _compute_form(params, self._roles[role], stacked=model.scan_layers)
            self._held[role] = _Held(version, layout, None, None, {(layout, model.scan_layers): copy})
            return
        if optimizer is None:
            init = jax.jit(
                lambda p: init_optimizer(config, p), out_shardings=optimizer_shardings(config, model, layout)
            )
            optimizer = init(params)
        self._held[role] = _Held(version, layout, params, optimizer, {})

    def snapshot(self, role: str) -> tuple[Layout, Params]:
        """A copy of a role's weights that shares nothing with it, in float32."""
        held = self._held[role]
        params = held.master if held.master is not None else next(iter(held.copies.values()))
        return held.home, jax.jit(lambda p: jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), p))(params)

    def state(self, role: str) -> dict[str, Any]:
        """All arrays of a role that a checkpoint must hold."""
        held = self._held[role]
        if held.master is None:
            return {"params": next(iter(held.copies.values()))}
        return {"params": held.master, "optimizer": held.optimizer}

    def abstract_state(self, role: str, layout: Layout) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what `state` gives where the role's weights rest in `layout`."""
        model, config = self._roles[role].model, self._roles[role].optimizer
        shardings = param_shardings(model, layout, stacked=model.scan_layers)
        if config is None:
            return {
                "params": _placed(abstract_params(model, model.compute_dtype, stacked=model.scan_layers), shardings)
            }
        params = abstract_params(model, stacked=model.scan_layers)
        optimizer = jax.eval_shape(lambda p: init_optimizer(config, p), params)
        return {
            "params": _placed(params, shardings),
            "optimizer": _placed(optimizer, optimizer_shardings(config, model, layout)),
        }

    def restore(self, role: str, layout: Layout, state: dict[str, Any], version: int) -> None:
        """Take over what `state` gave, resting in `layout` as `abstract_state` says."""
        if self._roles[role].optimizer is None:
            copies = {(layout, self._roles[role].model.scan_layers): state["params"]}
            self._held[role] = _Held(version, layout, None, None, copies)
        else:
            self._held[role] = _Held(version, layout, state["params"], state["optimizer"], {})

    def for_inference(self, role: str, layout: Layout, *, stacked: bool) -> tuple[Params, bool]:
        """Present weights in the compute precision in a layout, and whether they had to be moved there."""
        held = self._held[role]
        if (layout, stacked) in held.copies:
            return held.copies[layout, stacked], False
        if held.master is not None:
            source = _compute_form(held.master, self._roles[role], stacked=stacked)
        else:
            source = _stack_if(next(iter(held.copies.values())), stacked)
        copy = reallocate(source, param_shardings(self._roles[role].model, layout, stacked=stacked))
        held.copies[layout, stacked] = copy
        return copy, layout != held.home

    def take_for_training(self, role: str, layout: Layout) -> tuple[Params, OptimizerState, bool]:
        """Master weights and optimizer state in a layout, to be donated to a train call, and whether they were moved.

        The store holds none of either until `trained` brings the new version.
        """
        held = self._held[role]
        params, optimizer = held.master, held.optimizer
        assert params is not None and optimizer is not None, f"{role} is already being trained"
        moved = layout != held.home
        if moved:
            model, config = self._roles[role].model, self._roles[role].optimizer
            assert config is not None
            params = reallocate(params, param_shardings(model, layout, stacked=model.scan_layers))
            optimizer = reallocate(optimizer, optimizer_shardings(config, model, layout))
        held.master = held.optimizer = None
        held.copies.clear()
        return params, optimizer, moved

    def trained(self, role: str, layout: Layout, params: Params, optimizer: OptimizerState) -> None:
        """A train call's new version."""
        self._held[role] = _Held(self._held[role].version + 1, layout, params, optimizer, {})


def _placed(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes with the shardings of the arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )


def _stack_if(params: Params, stacked: bool) -> Params:
    if isinstance(params["layers"], dict) == stacked:
        return params
    return jax.jit(lambda p: with_layers(p, stacked=stacked))(params)


def _compute_form(params: Params, role: ModelRole, *, stacked: bool) -> Params:
    """In the compute precision; the same arrays where nothing is to be done."""
    dtype = role.model.compute_dtype
    if isinstance(params["layers"], dict) == stacked and all(x.dtype == dtype for x in jax.tree.leaves(params)):
        return params
    cast = jax.jit(lambda p: with_layers(jax.tree.map(lambda x: x.astype(dtype), p), stacked=stacked))
    return cast(params)
