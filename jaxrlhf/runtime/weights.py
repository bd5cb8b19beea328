"""Which version of which weights lives where.

Weights are held in sets (`weight_sets`). A set that is trained has master weights (float32) and optimizer state in the
layout of its last train call. Every other call gets a copy in the compute precision in its own layout, made when it is
first asked for, and dropped when training makes a new version. A set that never changes has such copies only. A moving
average has master weights too, beside those that it follows.

A role that is offloaded rests in host memory: master weights and optimizer state, or, of a set that never changes, each
of its copies, which stay there for good. What a call needs is brought to the devices before it, and let go after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import adapt, init_adapters, merge
from jaxrlhf.models.params import Params, abstract_params, init_params, param_shardings, with_layers
from jaxrlhf.reshard.offload import rests_on_host, to_device_memory, to_host_memory
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import bytes_received_here
from jaxrlhf.runtime.optimizer import OptimizerState, init_optimizer, optimizer_shardings
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weight_sets import BASE, WeightSet, sets_owned, sets_read, weight_sets
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import absent, is_here

Form = tuple[Layout, bool]
"""A layout, and whether layers are stacked."""


@dataclasses.dataclass
class _Held:
    """What is held of one set."""

    version: int
    home: Layout
    """Where the master weights are, or the first copy of weights that never change."""
    master: Params | None
    optimizer: OptimizerState | None
    copies: dict[Form, Params]
    """Weights in the compute precision, on the devices."""
    resting: dict[Form, Params] = dataclasses.field(default_factory=dict)
    """The same in host memory, of a set that never changes."""
    merged: dict[tuple[int, Form], Params] = dataclasses.field(default_factory=dict)
    """Of adapters, by their version: the weights that they adapt, with them added in."""
    pinned: dict[tuple[int, Form], Params] = dataclasses.field(default_factory=dict)
    """Copies of older versions that calls of this step still read."""

    @property
    def source(self) -> Params:
        """Weights of the present version on the devices of `home`, to make others from."""
        if self.master is not None:
            return to_device_memory(self.master)
        held = self.resting | self.copies
        return to_device_memory(next(params for (layout, _), params in held.items() if layout == self.home))


class WeightStore:
    """The weights of all roles. What is read is asked for by role; what is saved and restored, by set."""

    def __init__(self, roles: Mapping[str, ModelRole]) -> None:
        self._roles = roles
        self.sets = weight_sets(roles)
        self._held: dict[str, _Held] = {}

    def version(self, name: str) -> int:
        """How many train calls a set has seen; of a moving average, those that it follows has."""
        return self._held[name].version

    def versions(self) -> dict[str, int]:
        """The version of every set."""
        return {name: held.version for name, held in self._held.items()}

    def home(self, name: str) -> Layout:
        """Where a set rests, or whence its copies came."""
        return self._held[name].home

    def read_by(self, role: str) -> tuple[str, ...]:
        """The sets that a role's calls read."""
        return sets_read(role, self._roles[role])

    def owned_by(self, role: str) -> tuple[str, ...]:
        """The sets that are there because of a role; none where it is of another part of the run."""
        return sets_owned(role, self._roles[role]) if role in self._roles else ()

    # -- sets: first weights, and what is saved of them ----------------------------------------------------------------

    def initialize(self, name: str, layout: Layout, key: jax.Array) -> None:
        """Random weights, made in place: the whole model is never on one device."""
        kind = self.sets[name]

        def make(key: jax.Array) -> Params:
            if kind.lora is not None:
                made = init_adapters(kind.model, kind.lora, key)
            else:
                made = init_params(kind.model, key, random_value_head=self.random_head(name))
            return with_layers(made, stacked=kind.model.scan_layers)

        self.load(name, layout, run_at(layout, make, kind.shardings(layout), key))

    def random_head(self, name: str) -> bool:
        """Whether a scalar head that nothing is known of is random: where it is never trained."""
        return not self.sets[name].rests_in_float32 and not name.endswith(BASE)

    def load(
        self, name: str, layout: Layout, params: Params, *, optimizer: OptimizerState | None = None, version: int = 0
    ) -> None:
        """Take weights over, float32 and resting in `layout`. They belong to the store from now on."""
        kind = self.sets[name]
        params = _in_form(params, kind, layout, stacked=kind.model.scan_layers)
        if not kind.rests_in_float32:
            copy = _in_form(params, kind, layout, stacked=kind.model.scan_layers, dtype=kind.model.compute_dtype)
            self._held[name] = _Held(version, layout, None, None, {(layout, kind.model.scan_layers): copy})
            return
        config = kind.optimizer
        if optimizer is None and config is not None:
            optimizer = run_at(
                layout, lambda p: init_optimizer(config, p), self._optimizer_shardings(kind, layout), params
            )
        self._held[name] = _Held(version, layout, params, optimizer, {})

    def snapshot(self, name: str) -> tuple[Layout, Params]:
        """A copy of a set that shares nothing with it, in float32."""
        held = self._held[name]

        def copy(params: Params) -> Params:
            return jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)

        return held.home, run_at(held.home, copy, self.sets[name].shardings(held.home), held.source)

    def state(self, name: str) -> dict[str, Any]:
        """All arrays of a set that a checkpoint must hold, on the devices."""
        held = self._held[name]
        if held.optimizer is None:
            return {"params": held.source}
        return {"params": held.source, "optimizer": to_device_memory(held.optimizer)}

    def abstract_state(self, name: str, layout: Layout) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what `state` gives where the set rests in `layout`."""
        kind, config = self.sets[name], self.sets[name].optimizer
        dtype = None if kind.rests_in_float32 else kind.model.compute_dtype
        params = {"params": _placed(kind.abstract(dtype), kind.shardings(layout))}
        if config is None:
            return params
        optimizer = jax.eval_shape(lambda p: init_optimizer(config, p), kind.abstract())
        return params | {"optimizer": _placed(optimizer, self._optimizer_shardings(kind, layout))}

    def restore(self, name: str, layout: Layout, state: dict[str, Any], version: int) -> None:
        """Take over what `state` gave, resting in `layout` as `abstract_state` says."""
        kind = self.sets[name]
        if kind.rests_in_float32:
            self._held[name] = _Held(version, layout, state["params"], state.get("optimizer"), {})
        else:
            copies = {(layout, kind.model.scan_layers): state["params"]}
            self._held[name] = _Held(version, layout, None, None, copies)

    # -- roles: what their calls read ----------------------------------------------------------------------------------

    def for_inference(
        self, role: str, layout: Layout, *, stacked: bool, version: int | None = None, merged: bool = False
    ) -> tuple[Params, int | None]:
        """A role's weights in the compute precision in a layout.

        Args:
            version: Of the first set that it reads. None: the present one; another must have been pinned.
            merged: Adapters are added into a copy of the weights that they adapt, not left beside them.

        Returns:
            The weights, and the bytes that devices of this process had to receive for them; None where they were there.
        """
        own, *base = self.read_by(role)
        held, form = self._held[own], (layout, stacked)
        version = held.version if version is None else version
        if base and merged and (version, form) in held.merged:
            return held.merged[version, form], None
        params, received = self._copy(own, form, version)
        if not base:
            return params, received
        config, lora = self._roles[role].model, self._roles[role].lora
        assert lora is not None
        base_params, base_received = self._copy(base[0], form, None)
        if base_received is not None:
            received = (received or 0) + base_received
        adapted = adapt(base_params, params, config, lora)
        if merged:
            shardings = param_shardings(config, layout, stacked=stacked)
            if is_here(layout.mesh):
                adapted = _merge_program(config, layout, stacked)(adapted)
            else:
                adapted = absent(abstract_params(config, config.compute_dtype, stacked=stacked), shardings)
            held.merged[version, form] = adapted
        return adapted, received

    def _copy(self, name: str, form: Form, version: int | None) -> tuple[Params, int | None]:
        """One set in the compute precision, on the devices."""
        held, kind, (layout, stacked) = self._held[name], self.sets[name], form
        if version not in (None, held.version):
            return held.pinned[version, form], None
        if form in held.copies:
            return held.copies[form], None
        if form in held.resting:
            held.copies[form] = to_device_memory(held.resting[form])
            return held.copies[form], None
        # in the compute precision before it is moved, so that less is moved
        source = _in_form(held.source, kind, held.home, stacked=stacked, dtype=kind.model.compute_dtype)
        shardings = kind.shardings(layout, stacked=stacked)
        received = None if layout == held.home else bytes_received_here(source, shardings)
        held.copies[form] = reallocate(source, shardings)
        return held.copies[form], received

    def pin(self, role: str, layout: Layout, *, stacked: bool) -> None:
        """Keeps the present version of what a role reads for a call that comes after training made a new one."""
        name, form = self.read_by(role)[0], (layout, stacked)
        held = self._held[name]
        held.pinned[held.version, form] = self._copy(name, form, None)[0]

    def unpin(self) -> None:
        """Lets all older versions go."""
        for held in self._held.values():
            held.pinned.clear()
            held.merged = {key: params for key, params in held.merged.items() if key[0] == held.version}

    # -- training ------------------------------------------------------------------------------------------------------

    def adapted_by(self, role: str, layout: Layout) -> tuple[Params | None, int | None]:
        """The weights that a role's adapters adapt, for a train call, and the bytes received for them. None: it has no
        adapters."""
        base = self.read_by(role)[1:]
        return self._copy(base[0], (layout, self._roles[role].model.scan_layers), None) if base else (None, None)

    def take_for_training(self, role: str, layout: Layout) -> tuple[Params, OptimizerState, int | None]:
        """Master weights and optimizer state in a layout, to be donated to a train call, and the bytes that devices of
        this process had to receive for it; None where they were there.

        The store holds none of either until `trained` brings the new version.
        """
        held, kind = self._held[role], self.sets[role]
        params, optimizer = to_device_memory((held.master, held.optimizer))
        assert params is not None and optimizer is not None, f"{role} is already being trained"
        received = None
        held.copies.clear()
        if layout != held.home:
            state = (params, optimizer)
            shardings = (kind.shardings(layout), self._optimizer_shardings(kind, layout))
            received = bytes_received_here(state, shardings)
            params, optimizer = reallocate(state, shardings, donate=True)
        held.master = held.optimizer = None
        return params, optimizer, received

    def trained(self, role: str, layout: Layout, params: Params, optimizer: OptimizerState) -> None:
        """A train call's new version. Moving averages of it follow."""
        before = self._held[role]
        self._held[role] = _Held(before.version + 1, layout, params, optimizer, {}, pinned=before.pinned)
        for name, kind in self.sets.items():
            if kind.average is not None and kind.average.of == role:
                self._follow(name, before.version + 1, layout, params)

    def _follow(self, name: str, version: int, layout: Layout, params: Params) -> None:
        """Moves an average towards a new version of what it follows."""
        held, kind = self._held[name], self.sets[name]
        assert kind.average is not None
        held.version = version
        if version % kind.average.every:
            return
        shardings, decay = kind.shardings(held.home), jnp.float32(kind.average.decay)
        if layout != held.home:
            params = reallocate(params, shardings)
        held.master = run_at(held.home, _averaged, shardings, to_device_memory(held.master), params, decay)
        held.copies.clear()

    # -- host memory ---------------------------------------------------------------------------------------------------

    def offload(self, role: str) -> Any:
        """Lets what a role owns rest in host memory: what is needed later is moved there, and no copy stays on the
        devices.

        Programs that were dispatched keep what they read until they are done.

        Returns:
            Arrays that are now on their way there; None if nothing has to go.
        """
        moving = []
        for name in self.owned_by(role):
            held = self._held[name]
            if held.master is not None and not rests_on_host(held.master):
                held.master, held.optimizer = to_host_memory((held.master, held.optimizer))
                moving.append((held.master, held.optimizer))
            elif not self.sets[name].rests_in_float32:
                new = {key: to_host_memory(copy) for key, copy in held.copies.items() if key not in held.resting}
                held.resting |= new
                moving += list(new.values())
            held.copies.clear()
            held.merged.clear()
        return moving or None

    def prefetch(self, role: str, layout: Layout, *, stacked: bool, for_training: bool) -> Any:
        """Starts bringing what a role reads back from host memory, in the layout of the call that comes next.

        Returns:
            Arrays that are now on their way; None if they are there.
        """
        own, *base = self.read_by(role)
        moving = []
        if for_training:
            held = self._held[own]
            if held.master is not None and rests_on_host(held.master):
                held.master, held.optimizer = to_device_memory((held.master, held.optimizer))
                moving.append(held.master)
        for name in base if for_training else (own, *base):
            if (layout, stacked) not in self._held[name].copies:
                moving.append(self._copy(name, (layout, stacked), None)[0])
        return (moving[0] if len(moving) == 1 else moving) or None

    def _optimizer_shardings(self, kind: WeightSet, layout: Layout) -> Any:
        assert kind.optimizer is not None
        return optimizer_shardings(kind.optimizer, kind.abstract(), kind.shardings(layout), layout)


def _averaged(average: Params, params: Params, decay: jax.Array) -> Params:
    return jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, params)


def _placed(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes with the shardings of the arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )


def _in_form(
    params: Params, kind: WeightSet, layout: Layout, *, stacked: bool, dtype: jax.typing.DTypeLike | None = None
) -> Params:
    """Weights with layers as asked for, in the dtype (None: as it is): the same arrays where nothing is to be done."""
    same_dtype = dtype is None or all(x.dtype == dtype for x in jax.tree.leaves(params))
    if isinstance(params["layers"], dict) == stacked and same_dtype:
        return params
    if not is_here(layout.mesh):
        return absent(kind.abstract(dtype, stacked=stacked), kind.shardings(layout, stacked=stacked))
    return _form_program(kind, layout, stacked, None if dtype is None else jnp.dtype(dtype))(params)


@functools.lru_cache(maxsize=64)
def _form_program(kind: WeightSet, layout: Layout, stacked: bool, dtype: jnp.dtype | None) -> Any:
    def change(params: Params) -> Params:
        return with_layers(jax.tree.map(lambda x: x.astype(dtype or x.dtype), params), stacked=stacked)

    return jax.jit(change, out_shardings=kind.shardings(layout, stacked=stacked))


@functools.lru_cache(maxsize=64)
def _merge_program(model: ModelConfig, layout: Layout, stacked: bool) -> Any:
    return jax.jit(merge, out_shardings=param_shardings(model, layout, stacked=stacked))


def run_at(layout: Layout, function: Callable[..., Any], shardings: Any, *arguments: Any) -> Any:
    """What a function gives, computed where its arrays lie: in the processes that own devices of a layout."""
    if is_here(layout.mesh):
        return jax.jit(function, out_shardings=shardings)(*arguments)
    return absent(jax.eval_shape(function, *arguments), shardings)
