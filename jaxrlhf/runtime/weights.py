"""Which version of which weights lives where.

Weights are held in sets (`weight_sets`). A set that is trained has master weights (float32) and optimizer state in the
layout of its last train call. Every other call gets a copy in the compute precision in its own layout, made when it is
first asked for, and dropped when training makes a new version. A set that never changes has such copies only. A moving
average has master weights too, beside those that it follows.

In a pipelined layout every weight is on the devices of its stage: `weight_forms` says what that asks for.

A role that is offloaded rests in host memory: master weights and optimizer state, or, of a set that never changes, each
of its copies, which stay there for good. What a call needs is brought to the devices before it, and let go after it.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.lora import adapt, init_adapters
from jaxrlhf.models.params import Params, init_params, with_layers
from jaxrlhf.reshard.offload import rests_on_host, to_device_memory, to_host_memory
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import bytes_received_here
from jaxrlhf.runtime.optimizer import OptimizerState, init_optimizer, optimizer_shardings
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weight_forms import (
    Form,
    arranged,
    form_between,
    in_form,
    merge_program,
    moved,
    program_at,
    run_at,
    to_ring,
    without_stages,
)
from jaxrlhf.runtime.weight_sets import BASE, How, WeightSet, sets_owned, sets_read, weight_sets
from jaxrlhf.sharding.layout import Layout


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
        return to_device_memory(next(x for (layout, how), x in held.items() if layout == self.home and how != "ring"))


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
            return with_layers(made, stacked=kind.resting_form(layout) == "stacked")

        self.load(name, layout, run_at(layout, make, kind.shardings(layout), key))

    def random_head(self, name: str) -> bool:
        """Whether a scalar head that nothing is known of is random: where it is never trained."""
        return not self.sets[name].rests_in_float32 and not name.endswith(BASE)

    def load(
        self, name: str, layout: Layout, params: Params, *, optimizer: OptimizerState | None = None, version: int = 0
    ) -> None:
        """Take weights over, float32 and resting in `layout`. They belong to the store from now on."""
        kind = self.sets[name]
        form: Form = (layout, kind.resting_form(layout))
        params = in_form(params, kind, form)
        if not kind.rests_in_float32:
            copy = in_form(params, kind, form, kind.model.compute_dtype)
            self._held[name] = _Held(version, layout, None, None, {form: copy})
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

    def abstract_state(self, name: str, layout: Layout, *, saved: How | None = None) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what `state` gives where the set rests in `layout`.

        Args:
            saved: How layers lie in what is to be read. Where they cannot lie so in `layout`, it is a layout of the
                same devices in which they can. None: as they rest.
        """
        kind, config = self.sets[name], self.sets[name].optimizer
        how = saved or kind.resting_form(layout)
        if how == "stacked" and layout.is_pipelined:
            layout = without_stages(layout, kind.model)
        dtype = None if kind.rests_in_float32 else kind.model.compute_dtype
        params = {"params": _placed(kind.abstract(dtype, how=how), kind.shardings(layout, how=how))}
        if config is None:
            return params
        optimizer = jax.eval_shape(lambda p: init_optimizer(config, p), kind.abstract(how=how))
        return params | {"optimizer": _placed(optimizer, self._optimizer_shardings(kind, layout, how))}

    def restore(self, name: str, layout: Layout, state: dict[str, Any], version: int) -> None:
        """Take over what `state` gave, to rest in `layout`. It is given up.

        Args:
            state: As `abstract_state` says, with layers in any form.
        """
        kind = self.sets[name]
        how = kind.resting_form(layout)
        if layout.is_pipelined and isinstance(state["params"]["layers"], dict):
            shardings = {"params": kind.shardings(layout)}
            if "optimizer" in state:
                shardings["optimizer"] = self._optimizer_shardings(kind, layout)
            state = reallocate(arranged(state, how), shardings, donate=True)
        else:
            state = arranged(state, how)
        if kind.rests_in_float32:
            self._held[name] = _Held(version, layout, state["params"], state.get("optimizer"), {})
        else:
            self._held[name] = _Held(version, layout, None, None, {(layout, how): state["params"]})

    # -- roles: what their calls read ----------------------------------------------------------------------------------

    def for_inference(
        self, role: str, layout: Layout, *, how: How, version: int | None = None, merged: bool = False
    ) -> tuple[Params, int | None]:
        """A role's weights in the compute precision in a layout.

        Args:
            how: Layers lie. A `ring` never has adapters beside its weights, but added in.
            version: Of the first set that it reads. None: the present one; another must have been pinned.
            merged: Adapters are added into a copy of the weights that they adapt, not left beside them.

        Returns:
            The weights, and the bytes that devices of this process had to receive for them; None where they were there.
        """
        own, *base = self.read_by(role)
        held = self._held[own]
        form: Form = (layout, how)
        version = held.version if version is None else version
        if not base:
            return self._copy(own, form, version)
        merged = merged or how == "ring"
        if merged and (version, form) in held.merged:
            return held.merged[version, form], None
        beside = _beside(form)
        params, received = self._copy(own, beside, version)
        config, lora = self._roles[role].model, self._roles[role].lora
        assert lora is not None
        base_params, base_received = self._copy(base[0], beside, None)
        if base_received is not None:
            received = (received or 0) + base_received
        adapted = adapt(base_params, params, config, lora)
        if merged:
            adapted = merge_program(config, beside)(adapted)
            if how == "ring":
                adapted, more = to_ring(adapted, config, layout)
                received = (received or 0) + more
            held.merged[version, form] = adapted
        return adapted, received

    def _copy(self, name: str, form: Form, version: int | None) -> tuple[Params, int | None]:
        """One set in the compute precision, on the devices."""
        held = self._held[name]
        if version not in (None, held.version):
            return held.pinned[version, form], None
        if form in held.copies:
            return held.copies[form], None
        if form in held.resting:
            held.copies[form] = to_device_memory(held.resting[form])
            return held.copies[form], None
        held.copies[form], received = self._made(name, form)
        return held.copies[form], received

    def _made(self, name: str, form: Form) -> tuple[Params, int | None]:
        """A copy of the present version, and the bytes received for it; None where nothing had to be moved."""
        held, kind, (layout, how) = self._held[name], self.sets[name], form
        if how == "ring":
            as_list: Form = (layout, "list")
            there = held.copies.get(as_list)
            params, received = (there, None) if there is not None else self._made(name, as_list)
            ring, more = to_ring(params, kind.model, layout)
            return ring, (received or 0) + more
        # in the compute precision before it is moved, so that less is moved
        by = form_between(kind, held.home, layout, how)
        source = in_form(held.source, kind, (held.home, by), kind.model.compute_dtype)
        shardings = kind.shardings(layout, how=by)
        received = None if layout == held.home else bytes_received_here(source, shardings)
        return in_form(reallocate(source, shardings), kind, form), received

    def pin(self, role: str, layout: Layout, *, how: How) -> None:
        """Keeps the present version of what a role reads for a call that comes after training made a new one."""
        name, *base = self.read_by(role)
        form: Form = (layout, how)
        form = _beside(form) if base else form
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
        if not base:
            return None, None
        return self._copy(base[0], (layout, self.sets[base[0]].resting_form(layout)), None)

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
            by = form_between(kind, held.home, layout)
            state = arranged((params, optimizer), by)
            shardings = (kind.shardings(layout, how=by), self._optimizer_shardings(kind, layout, by))
            received = bytes_received_here(state, shardings)
            state = reallocate(state, shardings, donate=True)
            params, optimizer = arranged(state, kind.resting_form(layout))
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
        params = moved(params, kind, layout, (held.home, kind.resting_form(held.home)))
        average = _average_program(kind, held.home)
        held.master = average(to_device_memory(held.master), params, jnp.float32(kind.average.decay))
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

    def prefetch(self, role: str, layout: Layout, *, how: How, for_training: bool) -> Any:
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
        form: Form = (layout, how)
        form = _beside(form) if base else form
        for name in base if for_training else (own, *base):
            if form not in self._held[name].copies:
                moving.append(self._copy(name, form, None)[0])
        return (moving[0] if len(moving) == 1 else moving) or None

    def _optimizer_shardings(self, kind: WeightSet, layout: Layout, how: How | None = None) -> Any:
        assert kind.optimizer is not None
        how = how or kind.resting_form(layout)
        return optimizer_shardings(kind.optimizer, kind.abstract(how=how), kind.shardings(layout, how=how), layout)


def _beside(form: Form) -> Form:
    """The form of adapters and of what they adapt, of which merged weights of a form are made."""
    return (form[0], "list") if form[1] == "ring" else form


@functools.lru_cache(maxsize=64)
def _average_program(kind: WeightSet, layout: Layout) -> Any:
    def averaged(average: Params, params: Params, decay: jax.Array) -> Params:
        return jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, params)

    return program_at(layout, averaged, kind.shardings(layout))


def _placed(abstract: Any, shardings: Any) -> Any:
    """Shapes and dtypes with the shardings of the arrays."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )
