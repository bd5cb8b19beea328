"""Which version of which weights lives where.

A trained role has master weights (float32) and optimizer state in the layout of its last train call. Every other call
gets a copy in the compute precision in its own layout, made when it is first asked for, and dropped when training makes
a new version. A role that is never trained has such copies only.

A role that is offloaded rests in host memory: master weights and optimizer state, or, where it is never trained, each
of its copies, which stay there for good. What a call needs is brought to the devices before it, and let go after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params, abstract_params, init_params, param_shardings, with_layers
from jaxrlhf.reshard.offload import rests_on_host, to_device_memory, to_host_memory
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import bytes_received_here
from jaxrlhf.runtime.optimizer import OptimizerState, init_optimizer, optimizer_shardings
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here


@dataclasses.dataclass
class _Held:
    """What is held of one role."""

    version: int
    home: Layout
    """Where the master weights are, or the first copy of weights that are never trained."""
    master: Params | None
    optimizer: OptimizerState | None
    copies: dict[tuple[Layout, bool], Params]
    """(layout, stacked) -> weights in the compute precision, on the devices."""
    resting: dict[tuple[Layout, bool], Params] = dataclasses.field(default_factory=dict)
    """The same in host memory, of a role that is never trained."""

    @property
    def source(self) -> Params:
        """Weights of the present version on the devices of `home`, to make others from."""
        if self.master is not None:
            return to_device_memory(self.master)
        held = self.resting | self.copies
        return to_device_memory(next(params for (layout, _), params in held.items() if layout == self.home))


class WeightStore:
    """The weights of all roles."""

    def __init__(self, roles: Mapping[str, ModelRole]) -> None:
        self._roles = roles
        self._held: dict[str, _Held] = {}

    def version(self, role: str) -> int:
        """How many train calls the role has seen."""
        return self._held[role].version

    def home(self, role: str) -> Layout:
        """Where its weights rest, or whence their copies came."""
        return self._held[role].home

    def initialize(self, role: str, layout: Layout, key: jax.Array) -> None:
        """Random weights, made in place: the whole model is never on one device."""
        model = self._roles[role].model
        shardings = param_shardings(model, layout, stacked=model.scan_layers)
        never_trained = self._roles[role].optimizer is None

        def make(key: jax.Array) -> Params:
            return with_layers(init_params(model, key, random_value_head=never_trained), stacked=model.scan_layers)

        self.load(role, layout, run_at(layout, make, key, shardings))

    def load(
        self, role: str, layout: Layout, params: Params, *, optimizer: OptimizerState | None = None, version: int = 0
    ) -> None:
        """Take weights over, float32 and resting in `layout`. They belong to the store from now on."""
        model, config = self._roles[role].model, self._roles[role].optimizer
        params = _in_form(params, model, layout, stacked=model.scan_layers)
        if config is None:
            copy = _in_form(params, model, layout, stacked=model.scan_layers, dtype=model.compute_dtype)
            self._held[role] = _Held(version, layout, None, None, {(layout, model.scan_layers): copy})
            return
        if optimizer is None:
            shardings = optimizer_shardings(config, model, layout)
            optimizer = run_at(layout, lambda p: init_optimizer(config, p), params, shardings)
        self._held[role] = _Held(version, layout, params, optimizer, {})

    def snapshot(self, role: str) -> tuple[Layout, Params]:
        """A copy of a role's weights that shares nothing with it, in float32."""
        held = self._held[role]
        model = self._roles[role].model
        shardings = param_shardings(model, held.home, stacked=model.scan_layers)
        copy = run_at(
            held.home, lambda p: jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), p), held.source, shardings
        )
        return held.home, copy

    def state(self, role: str) -> dict[str, Any]:
        """All arrays of a role that a checkpoint must hold, on the devices."""
        held = self._held[role]
        if held.master is None:
            return {"params": held.source}
        return {"params": held.source, "optimizer": to_device_memory(held.optimizer)}

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

    def for_inference(self, role: str, layout: Layout, *, stacked: bool) -> tuple[Params, int | None]:
        """Present weights in the compute precision in a layout, and the bytes that devices of this process had to
        receive for it; None where they were there."""
        held = self._held[role]
        if (layout, stacked) in held.copies:
            return held.copies[layout, stacked], None
        if (layout, stacked) in held.resting:
            held.copies[layout, stacked] = to_device_memory(held.resting[layout, stacked])
            return held.copies[layout, stacked], None
        model = self._roles[role].model
        # in the compute precision before it is moved, so that less is moved
        source = _in_form(held.source, model, held.home, stacked=stacked, dtype=model.compute_dtype)
        shardings = param_shardings(model, layout, stacked=stacked)
        received = None if layout == held.home else bytes_received_here(source, shardings)
        held.copies[layout, stacked] = reallocate(source, shardings)
        return held.copies[layout, stacked], received

    def take_for_training(self, role: str, layout: Layout) -> tuple[Params, OptimizerState, int | None]:
        """Master weights and optimizer state in a layout, to be donated to a train call, and the bytes that devices of
        this process had to receive for it; None where they were there.

        The store holds none of either until `trained` brings the new version.
        """
        held = self._held[role]
        params, optimizer = to_device_memory((held.master, held.optimizer))
        assert params is not None and optimizer is not None, f"{role} is already being trained"
        received = None
        held.copies.clear()
        if layout != held.home:
            model, config = self._roles[role].model, self._roles[role].optimizer
            assert config is not None
            state = (params, optimizer)
            shardings = (
                param_shardings(model, layout, stacked=model.scan_layers),
                optimizer_shardings(config, model, layout),
            )
            received = bytes_received_here(state, shardings)
            params, optimizer = reallocate(state, shardings, donate=True)
        held.master = held.optimizer = None
        return params, optimizer, received

    def trained(self, role: str, layout: Layout, params: Params, optimizer: OptimizerState) -> None:
        """A train call's new version."""
        self._held[role] = _Held(self._held[role].version + 1, layout, params, optimizer, {})

    def offload(self, role: str) -> Any:
        """Lets a role rest in host memory: what is needed later is moved there, and no copy stays on the devices.

        Programs that were dispatched keep what they read until they are done.

        Returns:
            Arrays that are now on their way there; None if nothing has to go.
        """
        held = self._held.get(role)
        if held is None:  # of another part of the run
            return None
        moving = None
        if held.master is not None and not rests_on_host(held.master):
            held.master, held.optimizer = moving = to_host_memory((held.master, held.optimizer))
        elif self._roles[role].optimizer is None:
            new = {key: to_host_memory(copy) for key, copy in held.copies.items() if key not in held.resting}
            held.resting |= new
            moving = list(new.values()) or None
        held.copies.clear()
        return moving

    def prefetch(self, role: str, layout: Layout, *, stacked: bool, for_training: bool) -> Any:
        """Starts bringing an offloaded role back, in the layout of the call that comes next.

        Returns:
            Arrays that are now on their way; None if they are there.
        """
        held = self._held[role]
        if for_training:
            if held.master is None or not rests_on_host(held.master):
                return None
            held.master, held.optimizer = to_device_memory((held.master, held.optimizer))
            return held.master
        if (layout, stacked) in held.copies:
            return None
        return self.for_inference(role, layout, stacked=stacked)[0]


def _placed(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes with the shardings of the arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )


def _in_form(
    params: Params, model: ModelConfig, layout: Layout, *, stacked: bool, dtype: jax.typing.DTypeLike | None = None
) -> Params:
    """Weights with layers as asked for, in the dtype (None: as it is): the same arrays where nothing is to be done."""
    same_dtype = dtype is None or all(x.dtype == dtype for x in jax.tree.leaves(params))
    if isinstance(params["layers"], dict) == stacked and same_dtype:
        return params
    if not is_here(layout.mesh):
        return absent(abstract_params(model, dtype, stacked=stacked), param_shardings(model, layout, stacked=stacked))
    return _form_program(model, layout, stacked, None if dtype is None else jnp.dtype(dtype))(params)


@functools.lru_cache(maxsize=64)
def _form_program(model: ModelConfig, layout: Layout, stacked: bool, dtype: jnp.dtype | None) -> Any:
    def change(params: Params) -> Params:
        return with_layers(jax.tree.map(lambda x: x.astype(dtype or x.dtype), params), stacked=stacked)

    return jax.jit(change, out_shardings=param_shardings(model, layout, stacked=stacked))


def run_at(layout: Layout, function: Callable[[Any], Any], argument: Any, shardings: Any) -> Any:
    """What a function gives, computed where its arrays lie: in the processes that own devices of a layout."""
    if is_here(layout.mesh):
        return jax.jit(function, out_shardings=shardings)(argument)
    return absent(jax.eval_shape(function, argument), shardings)
