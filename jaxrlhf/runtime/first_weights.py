"""Where every role's weights come from at the start: random numbers, a checkpoint, or another role."""

import zlib
from pathlib import Path

import jax

from jaxrlhf.config.schema import RunConfig
from jaxrlhf.models.huggingface import holds_value_head, load_params
from jaxrlhf.models.params import Params, declare, init_params, param_shardings, with_layers
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.runtime.assembly import Phase
from jaxrlhf.runtime.executor import Executor
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.weights import run_at
from jaxrlhf.sharding.layout import Layout

Placed = tuple[Layout, Params]
"""Float32 weights and the layout that they rest in."""


def load_first_weights(executor: Executor, phase: Phase, config: RunConfig, known: dict[str, Placed]) -> None:
    """Give every role of a phase its first weights, those that start from other roles after these.

    Args:
        known: Weights that are there already, such as a warm-started actor's. They are left as they are.
    """
    ready = dict(known)
    waiting = [name for name, role in phase.roles.items() if isinstance(role, ModelRole)]
    while waiting:
        name = next(n for n in waiting if config.roles[n].init not in waiting)  # assembly has refused circles
        waiting.remove(name)
        source = config.roles[name].init
        if name in known:
            _adopt(executor, phase, config, name, *known[name])
        elif source in ready:
            _adopt(executor, phase, config, name, *ready[source])
        else:
            _make(executor, phase, config, name)
        if any(config.roles[n].init == name for n in waiting) and name not in ready:
            ready[name] = executor.weights.snapshot(name)


def home_layout(phase: Phase, role: str) -> Layout:
    """Where a role's weights start: where it is trained, or else where it is first used."""
    calls = [call for call in phase.graph.calls if call.role == role]
    trained = [call for call in calls if call.kind == "train"]
    if not calls:  # a role that no call of this step uses rests beside the others
        calls = [call for call in phase.graph.calls if call.kind != "host"]
    placement = phase.plan[(trained or calls)[0]]
    return Layout.over(placement.devices, placement.strategy)


def _make(executor: Executor, phase: Phase, config: RunConfig, name: str) -> None:
    """Random weights, or those of a checkpoint."""
    layout, role = home_layout(phase, name), phase.roles[name]
    assert isinstance(role, ModelRole)
    source = config.roles[name].init
    if source == "random":
        executor.weights.initialize(name, layout, _key(config, name))
        return
    params = load_params(Path(source), role.model, layout)
    if role.model.head == "scalar" and not holds_value_head(Path(source)):
        del params["value_head"]
        params = _with_own_head(params, role, layout, _key(config, name))
    executor.weights.load(name, layout, params)


def _adopt(executor: Executor, phase: Phase, config: RunConfig, name: str, layout: Layout, params: Params) -> None:
    """A role's own copy of weights, brought to its home."""
    role, home = phase.roles[name], home_layout(phase, name)
    assert isinstance(role, ModelRole)
    own = _with_own_head(params, role, layout, _key(config, name))
    shardings = param_shardings(role.model, home, stacked=role.model.scan_layers)
    executor.weights.load(name, home, reallocate(own, shardings))


def _with_own_head(params: Params, role: ModelRole, layout: Layout, key: jax.Array) -> Params:
    """Copies of weights, under a new head where the role's model declares one that they do not have."""
    model = role.model
    wanted = declare(model)

    def copy(params: Params) -> Params:
        own = {name: jax.tree.map(lambda x: x.copy(), value) for name, value in params.items() if name in wanted}
        if wanted.keys() - own.keys():
            new = init_params(model, key, random_value_head=role.optimizer is None)
            own |= {name: new[name] for name in wanted.keys() - own.keys()}
        return with_layers(own, stacked=model.scan_layers)

    return run_at(layout, copy, params, param_shardings(model, layout, stacked=model.scan_layers))


def _key(config: RunConfig, name: str) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(name.encode()))
