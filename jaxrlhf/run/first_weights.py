"""The first weights of a run: random numbers, those of a folder, or those of another role."""

import functools
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrlhf.config.schema import RunConfig
from jaxrlhf.execution.executor import Executor
from jaxrlhf.models.adapter_files import load_adapters
from jaxrlhf.models.huggingface import holds_value_head, load_params
from jaxrlhf.models.params import Params, init_params, with_layers
from jaxrlhf.programs.arrays import Program
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.programs.weight_forms import moved, program_at
from jaxrlhf.programs.weight_sets import BASE, WeightSet, sets_read, weight_sets
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.run.assembly import Phase
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import is_here

Placed = tuple[Layout, Params]
"""Float32 weights and their layout at rest."""


def load_first_weights(executor: Executor, phase: Phase, config: RunConfig, known: dict[str, Placed]) -> None:
    """Loads the first weights of all sets of a phase, in the order in which they depend on one another. `known` whole
    weights of roles, such as a warm-started actor's, are copied.
    """
    store = executor.weights
    ready = {name + BASE if name + BASE in store.sets else name: placed for name, placed in known.items()}
    given = set(ready)
    waiting = [name for name, each in store.sets.items() if each.lora is None and each.average is None]
    sources = {name: _nearest_source(executor, phase, config, name, given) for name in waiting}
    while waiting:
        name = next(n for n in waiting if sources[n] not in waiting)  # there are no cycles: assembly checks that
        waiting.remove(name)
        origin = name if name in given else sources[name]
        if origin in ready:
            _adopt(executor, phase, config, name, *ready[origin])
        else:
            _make(executor, phase, config, name, origin)
        if name in (sources[n] for n in waiting) and name not in ready:
            ready[name] = store.snapshot(name)
    for name, weight_set in store.sets.items():
        if weight_set.lora is not None and weight_set.average is None:
            _make_adapters(executor, phase, config, name)
    for name, weight_set in store.sets.items():
        if weight_set.average is not None:
            home = home_layout(phase, name)
            layout, params = store.snapshot(weight_set.average.of)
            store.load(name, home, moved(params, weight_set, layout, (home, weight_set.resting_form(home))))


def home_layout(phase: Phase, name: str) -> Layout:
    """The first layout of a set of weights: that of its training, or else of its first use."""
    models = {role: x for role, x in phase.roles.items() if isinstance(x, ModelRole)}
    average = weight_sets(models)[name].average
    if average is not None:
        return home_layout(phase, average.of)
    readers = {role for role, x in models.items() if name in sets_read(role, x)}
    calls = [call for call in phase.graph.calls if call.role in readers and call.kind != "host"]
    trained = [call for call in calls if call.kind == "train"]
    if not calls:  # a set that no call of this step uses rests on the devices of the first call
        calls = [call for call in phase.graph.calls if call.kind != "host"]
    placement = phase.plan[(trained or calls)[0]]
    return Layout.over(placement.devices, placement.strategy)


def source_of(phase: Phase, config: RunConfig, name: str) -> str:
    """The set that a set starts from, or its role's `init`: `random` or a folder."""
    source = config.roles[name.removesuffix(BASE)].init
    role = phase.roles.get(source)
    if not isinstance(role, ModelRole):
        return source
    return role.base or role.weights or source


def _nearest_source(executor: Executor, phase: Phase, config: RunConfig, name: str, given: set[str]) -> str:
    """The set that a set is copied from, `random` or a folder. Weights that a set would copy from another one, which
    has them from a folder, come from that folder: no copy of the other set is needed."""
    sets, direct = executor.weights.sets, source_of(phase, config, name)
    source = direct
    while source in sets and source not in given:
        source = source_of(phase, config, source)
    if name in given or source in sets or source == "random" or direct not in sets:
        return direct
    wanted, there = sets[name].declare().keys(), sets[direct].declare().keys()
    # a head that the folder lacks is a random one of the other set, or one of its own
    same_heads = "value_head" not in wanted & there or holds_value_head(Path(source))
    return source if same_heads and "lm_head" not in wanted - there else direct


def _make(executor: Executor, phase: Phase, config: RunConfig, name: str, source: str) -> None:
    """Loads random weights, or those of a folder, in the form and precision in which they rest."""
    layout, weight_set = home_layout(phase, name), executor.weights.sets[name]
    if source == "random":
        executor.weights.initialize(name, layout, _key(config, name))
        return
    dtype = jnp.float32 if weight_set.rests_in_float32 else weight_set.model.compute_dtype
    stacked = weight_set.resting_form(layout) == "stacked"
    params = load_params(Path(source), weight_set.model, layout, stacked=stacked, dtype=dtype)
    if "value_head" in params and not holds_value_head(Path(source)) and executor.weights.random_head(name):
        sharding, model = params["value_head"].sharding, weight_set.model
        if is_here(sharding):  # of a pipeline, on the last stage

            def head(key: jax.Array) -> jax.Array:
                return init_params(model, key, random_value_head=True)["value_head"].astype(dtype)

            params["value_head"] = jax.jit(head, out_shardings=sharding)(_key(config, name))
    executor.weights.load(name, layout, params)


def _adopt(executor: Executor, phase: Phase, config: RunConfig, name: str, layout: Layout, params: Params) -> None:
    """Loads a copy of other weights, moved to the set's home layout."""
    home, weight_set = home_layout(phase, name), executor.weights.sets[name]
    own = _with_own_head(executor, params, name, layout, _key(config, name))
    executor.weights.load(name, home, moved(own, weight_set, layout, (home, weight_set.resting_form(home))))


def _make_adapters(executor: Executor, phase: Phase, config: RunConfig, name: str) -> None:
    """Loads new adapters, or saved ones. A scalar head starts as that of the base weights."""
    store, layout, weight_set = executor.weights, home_layout(phase, name), executor.weights.sets[name]
    assert weight_set.lora is not None
    if weight_set.lora.init:
        store.load(name, layout, load_adapters(Path(weight_set.lora.init), weight_set.model, weight_set.lora, layout))
        return
    store.initialize(name, layout, _key(config, name))
    base = store.read_by(name)[1]
    if "value_head" in weight_set.declare() and base == name + BASE and "value_head" in store.sets[base].declare():
        shardings = weight_set.shardings(layout)
        head = reallocate(store.snapshot(base)[1]["value_head"], shardings["value_head"])
        store.load(name, layout, {**store.snapshot(name)[1], "value_head": head})


def _with_own_head(executor: Executor, params: Params, name: str, layout: Layout, key: jax.Array) -> Params:
    """Copies of weights, with a new head if the set's model declares one that they lack."""
    weights = executor.weights
    return _own_head_program(weights.sets[name], layout, weights.random_head(name))(params, key)


@functools.lru_cache(maxsize=64)
def _own_head_program(weight_set: WeightSet, layout: Layout, random_head: bool) -> Program:
    wanted = weight_set.declare()

    def copy(params: Params, key: jax.Array) -> Params:
        own = {name: jax.tree.map(lambda x: x.copy(), value) for name, value in params.items() if name in wanted}
        if wanted.keys() - own.keys():
            new = init_params(weight_set.model, key, random_value_head=random_head)
            own |= {name: new[name] for name in wanted.keys() - own.keys()}
        return with_layers(own, stacked=weight_set.resting_form(layout) == "stacked")

    return program_at(layout, copy, weight_set.shardings(layout))


def _key(config: RunConfig, name: str) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(name.removesuffix(BASE).encode()))
