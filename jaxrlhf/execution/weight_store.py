"""Weights of all roles, by version and layout.

Weights are stored in sets (`weight_sets`). A trained set has master weights (float32) and optimizer state in the layout
of its last train call. Every other call gets a copy in the compute precision in its own layout, made on first use and
dropped when training makes a new version, but where older versions are still to be read. A set that never changes has
only such copies. A moving average has master weights too, in addition to those that it follows.

In a pipelined layout every weight is on the devices of its stage: see `weight_forms`.

An offloaded role rests in host memory: its master weights and optimizer state, or, for a set that never changes, its
copies, which remain there. Weights are moved to the devices before a call that needs them, and dropped after it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.models.lora import adapt, init_adapters
from jaxrlhf.models.params import LayerForm, Params, init_params, with_layers
from jaxrlhf.programs.arrays import Program, with_shardings
from jaxrlhf.programs.optimizer import OptimizerState, init_optimizer
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_forms import (
    arranged,
    form_between,
    in_form,
    merge_program,
    moved,
    program_at,
    to_ring,
    without_stages,
)
from jaxrlhf.programs.weight_sets import BASE, Form, WeightSet, sets_owned, sets_read, weight_sets
from jaxrlhf.reshard.offload import rests_on_host, to_device_memory, to_host_memory
from jaxrlhf.reshard.reallocate import on_some_devices, reallocate
from jaxrlhf.reshard.traffic import bytes_received_here
from jaxrlhf.sharding.layout import Layout


@dataclasses.dataclass
class _Held:
    """The arrays of one set."""

    version: int
    home: Layout
    """The layout of the master weights, or of the first copy of weights that never change."""
    master: Params | None
    optimizer: OptimizerState | None
    copies: dict[Form, Params]
    """Weights in the compute precision, on the devices."""
    resting: dict[Form, Params] = dataclasses.field(default_factory=dict)
    """The same in host memory, for a set that never changes."""
    merged: dict[tuple[int, Form], Params] = dataclasses.field(default_factory=dict)
    """Base weights with these adapters merged in, by the adapters' version and the form."""
    pinned: dict[tuple[int, Form], Params] = dataclasses.field(default_factory=dict)
    """Copies of versions that calls of this step or, where generation is stale, of later ones read after training."""

    @property
    def source(self) -> Params:
        """Weights of the current version on the devices of `home`, from which copies are made."""
        if self.master is not None:
            return to_device_memory(self.master)
        held = self.resting | self.copies
        return to_device_memory(
            next(x for (layout, layers), x in held.items() if layout == self.home and layers != "ring")
        )


class WeightStore:
    """The weights of all roles. Calls read them by role; checkpoints save and restore them by set."""

    def __init__(self, roles: Mapping[str, ModelRole]) -> None:
        self._roles = roles
        self.sets = weight_sets(roles)
        self._held: dict[str, _Held] = {}

    def version(self, name: str) -> int:
        """The number of train calls that a set has seen; for a moving average, those of the set that it follows."""
        return self._held[name].version

    def oldest(self, name: str) -> int:
        """The oldest version of a set that can be read."""
        held = self._held[name]
        return min((held.version, *(version for version, _ in held.pinned)))

    def versions(self) -> dict[str, int]:
        """The version of every set."""
        return {name: held.version for name, held in self._held.items()}

    def home(self, name: str) -> Layout:
        """The layout in which a set rests, or of its first copy."""
        return self._held[name].home

    def read_by(self, role: str) -> tuple[str, ...]:
        """The sets that a role's calls read."""
        return sets_read(role, self._roles[role])

    def owned_by(self, role: str) -> tuple[str, ...]:
        """The sets that exist because of a role; none if the role belongs to another part of the run."""
        return sets_owned(role, self._roles[role]) if role in self._roles else ()

    # -- sets: first weights, and what is saved of them ----------------------------------------------------------------

    def initialize(self, name: str, layout: Layout, key: jax.Array) -> None:
        """Random weights, made in place: the whole model is never on one device."""
        self.load(name, layout, _random_weights_program(self.sets[name], layout, self.random_head(name))(key))

    def random_head(self, name: str) -> bool:
        """True if a new scalar head of this set starts from random numbers: only where the set is never trained."""
        return not self.sets[name].rests_in_float32 and not name.endswith(BASE)

    def load(self, name: str, layout: Layout, params: Params) -> None:
        """Takes over weights that rest in `layout`: in float32, or, of a set that never changes, in its compute
        precision. The caller must not use them afterwards."""
        weight_set = self.sets[name]
        form: Form = (layout, weight_set.resting_form(layout))
        params = in_form(params, weight_set, form)
        if not weight_set.rests_in_float32:
            copy = in_form(params, weight_set, form, weight_set.model.compute_dtype)
            self._held[name] = _Held(0, layout, None, None, {form: copy})
            return
        optimizer = None if weight_set.optimizer is None else _first_optimizer_program(weight_set, layout)(params)
        self._held[name] = _Held(0, layout, params, optimizer, {})

    def snapshot(self, name: str) -> tuple[Layout, Params]:
        """A copy of a set in float32 that shares no memory with it."""
        held = self._held[name]
        return held.home, _copy_program(self.sets[name], held.home)(held.source)

    def resting(self, name: str) -> Params:
        """The weights of a set as they rest, on devices or in host memory, to be read before the next call of its
        roles: not a copy."""
        held = self._held[name]
        if held.master is not None:
            return held.master
        return next(x for (_, layers), x in (held.resting | held.copies).items() if layers != "ring")

    def state(self, name: str) -> dict[str, Any]:
        """All arrays of a set that a checkpoint must hold, on the devices."""
        held, weight_set = self._held[name], self.sets[name]
        if held.optimizer is None:
            return {"params": held.source}
        state = {"params": held.source, "optimizer": to_device_memory(held.optimizer)}
        resting = held.home, weight_set.resting_form(held.home)
        older = {version: form for version, form in held.pinned if version != held.version and form[1] != "ring"}
        if older:
            state["older"] = {
                str(version): moved(held.pinned[version, form], weight_set, form[0], resting)
                for version, form in older.items()
            }
        return state

    def abstract_state(
        self, name: str, layout: Layout, *, saved: LayerForm | None = None, older: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what `state` gives where the set rests in `layout`.

        Args:
            saved: Form of the layers in the checkpoint to be read. If `layout` cannot hold that form, the shardings are
                of another layout over the same devices that can. None means the form in which they rest.
            older: The older versions in the checkpoint.
        """
        weight_set = self.sets[name]
        layers = saved or weight_set.resting_form(layout)
        if layers == "stacked" and layout.is_pipelined:
            layout = without_stages(layout, weight_set.model)
        dtype = None if weight_set.rests_in_float32 else weight_set.model.compute_dtype
        shardings = weight_set.shardings(layout, layers=layers)
        state = {"params": with_shardings(weight_set.abstract(dtype, layers=layers), shardings)}
        if older:
            copy = with_shardings(weight_set.abstract(weight_set.model.compute_dtype, layers=layers), shardings)
            state["older"] = dict.fromkeys(older, copy)
        if weight_set.optimizer is not None:
            abstract = weight_set.abstract_optimizer(layers=layers)
            state["optimizer"] = with_shardings(abstract, weight_set.optimizer_shardings(layout, layers=layers))
        return state

    def restore(self, name: str, layout: Layout, state: dict[str, Any], version: int) -> None:
        """Takes over the arrays of `state`, to rest in `layout`. The caller must not use them afterwards. `state`:
        arrays as in `abstract_state`, with layers in any form."""
        weight_set = self.sets[name]
        layers = weight_set.resting_form(layout)
        if layout.is_pipelined and isinstance(state["params"]["layers"], dict):
            shardings = {"params": weight_set.shardings(layout)}
            if "optimizer" in state:
                shardings["optimizer"] = weight_set.optimizer_shardings(layout)
            if "older" in state:
                shardings["older"] = dict.fromkeys(state["older"], shardings["params"])
            state = reallocate(arranged(state, layers), shardings, donate=True)
        else:
            state = arranged(state, layers)
        if weight_set.rests_in_float32:
            form: Form = (layout, layers)
            pinned = {(int(older), form): x for older, x in state.get("older", {}).items()}
            self._held[name] = _Held(version, layout, state["params"], state.get("optimizer"), {}, pinned=pinned)
        else:
            self._held[name] = _Held(version, layout, None, None, {(layout, layers): state["params"]})

    # -- roles: what their calls read ----------------------------------------------------------------------------------

    def for_inference(
        self, role: str, layout: Layout, *, layers: LayerForm, version: int | None = None, merged: bool = False,
        inside: Layout | None = None,
    ) -> tuple[Params, int | None]:  # fmt: skip
        """A role's weights in the compute precision in a layout.

        Args:
            layers: Form of the layers. Those of a `ring` always have their adapters merged in.
            version: Of the first set that the role reads. None means the current one; any other must have been pinned,
                in any layout.
            merged: Adapters are merged into a copy of the base weights, not left beside them.
            inside: A layout over these devices and more. If a copy in it has what each device is to have, both share
                its memory.

        Returns:
            The weights, and the bytes that devices of this process received for them; None if they were there already.
        """
        own, *base = self.read_by(role)
        held = self._held[own]
        form: Form = (layout, layers)
        version = held.version if version is None else version
        if not base:
            return self._copy(own, form, version, inside)
        merged = merged or layers == "ring"
        if merged and (version, form) in held.merged:
            return held.merged[version, form], None
        beside = _beside(form)
        params, received = self._copy(own, beside, version, inside)
        config, lora = self._roles[role].model, self._roles[role].lora
        assert lora is not None
        base_params, base_received = self._copy(base[0], beside, None, inside)
        if base_received is not None:
            received = (received or 0) + base_received
        adapted = adapt(base_params, params, config, lora)
        if merged:
            adapted = merge_program(config, beside)(adapted)
            if layers == "ring":
                adapted, more = to_ring(adapted, config, layout)
                received = (received or 0) + more
            held.merged[version, form] = adapted
        return adapted, received

    def _copy(
        self, name: str, form: Form, version: int | None, inside: Layout | None = None
    ) -> tuple[Params, int | None]:
        """One set in the compute precision, on the devices."""
        held = self._held[name]
        if version is not None and version != held.version:
            return self._older(name, form, version)
        if form in held.copies:
            return held.copies[form], None
        if form in held.resting:
            held.copies[form] = to_device_memory(held.resting[form])
            return held.copies[form], None
        layout, layers = form
        if layers != "ring" and inside is not None and (whole := held.copies.get((inside, layers))) is not None:
            part = on_some_devices(whole, self.sets[name].shardings(layout, layers=layers))
            if part is not None:
                held.copies[form] = part
                return part, None
        held.copies[form], received = self._made(name, form)
        return held.copies[form], received

    def _made(self, name: str, form: Form) -> tuple[Params, int | None]:
        """A copy of the current version, and the bytes received for it; None if nothing had to be moved."""
        held, weight_set, (layout, layers) = self._held[name], self.sets[name], form
        if layers == "ring":
            as_list: Form = (layout, "list")
            there = held.copies.get(as_list)
            params, received = (there, None) if there is not None else self._made(name, as_list)
            ring, more = to_ring(params, weight_set.model, layout)
            return ring, (received or 0) + more
        # cast to the compute precision before the move, so that less is moved
        by = form_between(weight_set, held.home, layout, layers)
        source = in_form(held.source, weight_set, (held.home, by), weight_set.model.compute_dtype)
        shardings = weight_set.shardings(layout, layers=by)
        received = None if layout == held.home else bytes_received_here(source, shardings)
        return in_form(reallocate(source, shardings), weight_set, form), received

    def _older(self, name: str, form: Form, version: int) -> tuple[Params, int | None]:
        """A copy of an older version, and the bytes received for it; None if it was there."""
        held, weight_set, (layout, layers) = self._held[name], self.sets[name], form
        if (version, form) in held.pinned:
            return held.pinned[version, form], None
        if layers == "ring":
            params, received = self._older(name, (layout, "list"), version)
            held.pinned[version, form], more = to_ring(params, weight_set.model, layout)
            return held.pinned[version, form], (received or 0) + more
        there = {at: x for (number, (at, kind)), x in held.pinned.items() if number == version and kind != "ring"}
        if not there:
            raise KeyError(f"Version {version} of '{name}' was not pinned. Version {held.version} is the current one.")
        source, params = next(iter(there.items()))
        by = form_between(weight_set, source, layout, layers)
        received = bytes_received_here(
            in_form(params, weight_set, (source, by)), weight_set.shardings(layout, layers=by)
        )
        held.pinned[version, form] = moved(params, weight_set, source, form)
        return held.pinned[version, form], received

    def pin(self, role: str, layout: Layout, *, layers: LayerForm) -> tuple[Params, int | None]:
        """Keeps the current version of a role's weights for a call after training has made a new one. Returns what is
        kept, and the bytes received for it; None if it was there."""
        name, form = self.read_by(role)[0], _beside((layout, layers))
        held, weight_set = self._held[name], self.sets[name]
        if (held.version, form) in held.pinned:
            return held.pinned[held.version, form], None
        params, received = self._copy(name, form, None)
        if held.master is not None and weight_set.model.compute_dtype == jnp.float32:  # training overwrites its memory
            params = jax.tree.map(_copied, params)
        held.pinned[held.version, form] = params
        return params, received

    def unpin(self, oldest: Mapping[str, int] = MappingProxyType({})) -> None:
        """Drops all older versions, of some sets only those before a version."""
        for name, held in self._held.items():
            first = oldest.get(name, held.version + 1)
            held.pinned = {key: params for key, params in held.pinned.items() if key[0] >= first}
            held.merged = {key: params for key, params in held.merged.items() if key[0] == held.version}

    # -- training ------------------------------------------------------------------------------------------------------

    def adapted_by(self, role: str, layout: Layout) -> tuple[Params | None, int | None]:
        """The base weights of a role's adapters, for a train call, and the bytes received for them; `(None, None)` if
        the role has no adapters."""
        base = self.read_by(role)[1:]
        if not base:
            return None, None
        return self._copy(base[0], (layout, self.sets[base[0]].resting_form(layout)), None)

    def take_for_training(self, role: str, layout: Layout) -> tuple[Params, OptimizerState, int | None]:
        """Master weights and optimizer state in a layout, to be donated to a train call, and the bytes that devices of
        this process received for them; None if they were there already.

        The store has neither until `trained` returns the new version.
        """
        held = self._held[role]
        held.copies.clear()
        received = self._bring_home(role, layout, donate=True)
        params, optimizer = held.master, held.optimizer
        assert params is not None and optimizer is not None
        held.master = held.optimizer = None
        return params, optimizer, received

    def for_gradients(self, role: str, layout: Layout) -> tuple[Params, int | None]:
        """Master weights in a layout, for a part of a train call, and the bytes that devices of this process received;
        None if they were there already. They rest there from then on, with the optimizer's state."""
        received = self._bring_home(role, layout, donate=False)  # copies in float32 may share their memory
        params = self._held[role].master
        assert params is not None
        return params, received

    def _bring_home(self, role: str, layout: Layout, *, donate: bool) -> int | None:
        """Moves master weights and optimizer state to the devices, in a layout. Returns the bytes received."""
        held, weight_set = self._held[role], self.sets[role]
        params, optimizer = to_device_memory((held.master, held.optimizer))
        assert params is not None and optimizer is not None, f"{role} is already being trained"
        received = None
        if layout != held.home:
            by = form_between(weight_set, held.home, layout)
            state = arranged((params, optimizer), by)
            shardings = (weight_set.shardings(layout, layers=by), weight_set.optimizer_shardings(layout, layers=by))
            received = bytes_received_here(state, shardings)
            state = reallocate(state, shardings, donate=donate)
            params, optimizer = arranged(state, weight_set.resting_form(layout))
        held.master, held.optimizer, held.home = params, optimizer, layout
        return received

    def trained(self, role: str, layout: Layout, params: Params, optimizer: OptimizerState) -> None:
        """Stores the new version of a train call, and updates moving averages of it."""
        before = self._held[role]
        self._held[role] = _Held(before.version + 1, layout, params, optimizer, {}, pinned=before.pinned)
        for name, weight_set in self.sets.items():
            if weight_set.average is not None and weight_set.average.of == role:
                self._follow(name, before.version + 1, layout, params)

    def _follow(self, name: str, version: int, layout: Layout, params: Params) -> None:
        """Updates a moving average with a new version."""
        held, weight_set = self._held[name], self.sets[name]
        assert weight_set.average is not None
        held.version = version
        if version % weight_set.average.every:
            return
        params = moved(params, weight_set, layout, (held.home, weight_set.resting_form(held.home)))
        average = _average_program(weight_set, held.home)
        held.master = average(to_device_memory(held.master), params, jnp.float32(weight_set.average.decay))
        held.copies.clear()

    # -- host memory ---------------------------------------------------------------------------------------------------

    def offload(self, role: str) -> Any:
        """Moves the weights that a role owns to host memory, and drops its copies on the devices.

        Dispatched programs keep their inputs alive until they are done.

        Returns:
            Arrays that are being moved; None if there are none.
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

    def prefetch(self, role: str, layout: Layout, *, layers: LayerForm, for_training: bool) -> Any:
        """Starts to reload a role's weights from host memory, in the layout of the next call.

        Returns:
            Arrays that are being moved; None if there are none.
        """
        own, *base = self.read_by(role)
        moving = []
        if for_training:
            held = self._held[own]
            if held.master is not None and rests_on_host(held.master):
                held.master, held.optimizer = to_device_memory((held.master, held.optimizer))
                moving.append(held.master)
        form = _beside((layout, layers)) if base else (layout, layers)
        for name in base if for_training else (own, *base):
            if form not in self._held[name].copies:
                moving.append(self._copy(name, form, None)[0])
        return (moving[0] if len(moving) == 1 else moving) or None


def _copied(x: jax.Array) -> jax.Array:
    """An array of its own memory."""
    return _copying(x.sharding)(x) if x.sharding.addressable_devices else x


@functools.lru_cache(maxsize=64)
def _copying(sharding: jax.sharding.Sharding) -> Program:
    return jax.jit(jnp.copy, out_shardings=sharding)


def _beside(form: Form) -> Form:
    """The form that adapters and base weights must have to be merged into a form."""
    return (form[0], "list") if form[1] == "ring" else form


@functools.lru_cache(maxsize=64)
def _random_weights_program(weight_set: WeightSet, layout: Layout, random_head: bool) -> Program:
    def make(key: jax.Array) -> Params:
        if weight_set.lora is not None:
            made = init_adapters(weight_set.model, weight_set.lora, key)
        else:
            made = init_params(weight_set.model, key, random_value_head=random_head)
        return with_layers(made, stacked=weight_set.resting_form(layout) == "stacked")

    return program_at(layout, make, weight_set.shardings(layout))


@functools.lru_cache(maxsize=64)
def _copy_program(weight_set: WeightSet, layout: Layout) -> Program:
    def copy(params: Params) -> Params:
        return jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), params)

    return program_at(layout, copy, weight_set.shardings(layout))


@functools.lru_cache(maxsize=64)
def _first_optimizer_program(weight_set: WeightSet, layout: Layout) -> Program:
    config = weight_set.optimizer
    assert config is not None

    def first(params: Params) -> OptimizerState:
        return init_optimizer(config, params)

    return program_at(layout, first, weight_set.optimizer_shardings(layout))


@functools.lru_cache(maxsize=64)
def _average_program(weight_set: WeightSet, layout: Layout) -> Program:
    def averaged(average: Params, params: Params, decay: jax.Array) -> Params:
        return jax.tree.map(lambda a, x: decay * a + (1 - decay) * x, average, params)

    return program_at(layout, averaged, weight_set.shardings(layout))
