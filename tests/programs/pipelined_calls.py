"""Calls over stages beside the same calls on one device: train, loss and infer, alone and fused."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.call_graph import split_args
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.execution.fused_training import FusedTraining
from jaxrlhf.experience import Max, Sequences, Term
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import init_params, param_shardings
from jaxrlhf.planner.costs.stage_costs import StageCost
from jaxrlhf.planner.fusion.fusible import find_schedules, fused_order, opposite
from jaxrlhf.planner.plans.plan import Placement
from jaxrlhf.programs.call_programs import infer_program, loss_program, train_program
from jaxrlhf.programs.optimizer import init_optimizer, optimizer_shardings
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import is_here
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=2, num_kv_heads=2)
# a gradient that is all but zero becomes a whole step where Adam divides it by its own size
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3, max_grad_norm=0.5)
B, P, R = 16, 3, 4
NOISE = np.array([1, 2, 3], np.uint32)


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 1


def likelihood(outputs: Any, batch: Any, update: Any) -> Any:
    """A loss of a language model whose tokens count differently, so that wrong averaging shows."""
    weight_BR = batch["weight"][:, None] * batch["sequences"].response
    loss = -(outputs.logprobs * weight_BR).sum() + batch["scale"] * (outputs.entropy * weight_BR).sum()
    return loss, weight_BR.sum(), {"nll": loss, "largest": Max(weight_BR.max())}


def squares(outputs: Any, batch: Any, update: Any) -> Any:
    """A loss of a critic."""
    weight_BR = batch["weight"][:, None] * batch["sequences"].response
    return (jnp.square(outputs - 1) * weight_BR).sum(), weight_BR.sum(), {"largest": Max(weight_BR.max())}


def ranking(outputs: Any, batch: Any, update: Any) -> Any:
    """A loss of a reward model, on pairs."""
    loss = jax.nn.softplus(outputs["rejected"] - outputs["chosen"]).sum()
    return loss, jnp.float32(outputs["chosen"].shape[0]), {}


def sequences(seed: int = 0) -> Sequences:
    rng = np.random.default_rng(seed)
    response_BR = np.arange(R)[None] < rng.integers(1, R + 1, B)[:, None]
    prompt_BP = np.arange(P)[None] >= rng.integers(0, P, B)[:, None]
    tokens_BT = rng.integers(0, MODEL.vocab_size, (B, P + R)).astype(np.int32)
    arrays: Any = dict(tokens=tokens_BT, mask=np.concatenate([prompt_BP, response_BR], 1), response=response_BR)
    return Sequences(**arrays)


def terms(config: ModelConfig, count: int = 1) -> tuple[Term, ...]:
    """Losses that a model of that head is trained by; the second is on pairs, or weighs less."""
    weight = np.random.default_rng(9).integers(1, 4, B).astype(np.float32)  # whole, so that sums are exact
    batch = {"sequences": sequences(), "weight": weight, "scale": np.float32(0.25)}
    if config.head == "scalar":
        pairs = {"sequences": {"chosen": sequences(1), "rejected": sequences(2)}}
        return (Term(squares, batch), Term(ranking, pairs, weight=0.5, of="scores", name="pairs"))[:count]
    return (Term(likelihood, batch), Term(likelihood, batch, weight=np.float32(0.5), name="again"))[:count]


def alone() -> Layout:
    """The first device of this process."""
    own = [i for i, device in enumerate(jax.devices()) if device.process_index == jax.process_index()]
    return Layout.over((own[0],), Strategy())


def over(strategy: Strategy, devices: tuple[int, ...] = ()) -> Layout:
    return Layout.over(devices or tuple(range(strategy.num_devices)), strategy)


def place(tree: Any, shardings: Any) -> Any:
    """Laid out from the host, where every process has it whole."""

    def put(x: Any, sharding: Any) -> jax.Array:
        x = np.asarray(x)
        if not is_here(sharding):
            return jax.make_array_from_single_device_arrays(x.shape, sharding, [], dtype=x.dtype)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree, shardings)


def first_weights(config: ModelConfig) -> Any:
    """Random ones, in the precision that the model computes in."""
    params = init_params(config, jax.random.key(0), random_value_head=True)
    return jax.tree.map(lambda x: np.asarray(x, config.compute_dtype), params)


class TrainCall:
    """A train call with what it is called with."""

    def __init__(self, config: ModelConfig, layout: Layout, count: int = 1, update: Update = Update()) -> None:
        role = ModelRole(config, OPTIMIZER, num_updates=10)
        arrays, _, rebuild = split_args((terms(config, count), update))
        has_rows = [np.ndim(x) > 0 for x in arrays]
        self._layout, self._arrays, self._has_rows = layout, arrays, has_rows
        self.program: Any = train_program(role, rebuild, has_rows, layout)
        params = first_weights(config)
        shardings = param_shardings(config, layout)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        state_shardings = optimizer_shardings(OPTIMIZER, abstract, shardings, layout)
        state = jax.device_get(init_optimizer(OPTIMIZER, params))
        self.params, self.state = place(params, shardings), place(state, state_shardings)

    @property
    def arguments(self) -> tuple[Any, ...]:
        shardings = [self._layout.rows if rows else self._layout.replicated for rows in self._has_rows]
        return self.params, self.state, NOISE, place(self._arrays, shardings), None

    def run(self, times: int = 1) -> Any:
        """Weights, optimizer state and metrics after so many calls of two updates each."""
        metrics = None
        for _ in range(times):
            self.params, self.state, metrics = self.program(*self.arguments)
        return self.params, self.state, metrics


def trained(config: ModelConfig, layout: Layout, count: int = 1, update: Update = Update()) -> Any:
    return TrainCall(config, layout, count, update).run()


@functools.cache
def trained_alone(config: ModelConfig, count: int = 1, update: Update = Update()) -> Any:
    """The same on one device, whole."""
    return jax.device_get(trained(config, alone(), count, update))


def fused(configs: tuple[ModelConfig, ModelConfig], strategies: tuple[Strategy, Strategy]) -> tuple[Any, Any]:
    """What two train calls give as one pipeline, the second in the opposite direction."""
    first, second = (Placement(tuple(range(s.num_devices)), s) for s in strategies)
    second = opposite(first, second)
    schedules = find_schedules(first, second, (StageCost(5, 10, 2), StageCost(4, 8, 1)))
    order = fused_order(first, second, schedules)
    calls = [TrainCall(c, over(p.strategy, p.devices)) for c, p in zip(configs, (first, second), strict=True)]
    return FusedTraining(calls[0].program, calls[1].program, order)(calls[0].arguments, calls[1].arguments)


def inferred(config: ModelConfig, method: str, layout: Layout) -> Any:
    """What an inference call gives."""
    arrays, _, rebuild = split_args((sequences(),))
    program = infer_program(ModelRole(config), method, rebuild, layout)
    return program(
        place(first_weights(config), param_shardings(config, layout)), place(arrays, [layout.rows] * len(arrays))
    )


def loss_of(config: ModelConfig, layout: Layout) -> Any:
    """The metrics of a loss of two terms, without an update."""
    arrays, _, rebuild = split_args((terms(config, 2), Update()))
    has_rows = [np.ndim(x) > 0 for x in arrays]
    program: Callable[..., Any] = loss_program(ModelRole(config), rebuild, has_rows, layout)
    shardings = [layout.rows if rows else layout.replicated for rows in has_rows]
    return program(place(first_weights(config), param_shardings(config, layout)), place(arrays, shardings))


def assert_same(got: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Asserts that the parts of arrays in this process equal those of others that are whole on one device.

    Tolerances are relative to the largest number of an array.
    """
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, x), want in zip(paths, jax.tree.leaves(expected), strict=True):
        want = np.asarray(want)
        most = rtol * float(np.abs(want).max(initial=0.0)) + atol
        for shard in x.addressable_shards:
            error = np.abs(np.asarray(shard.data) - want[shard.index]).max(initial=0.0)
            assert error <= most, f"{jax.tree_util.keystr(path)}: {error} beside {most}"
