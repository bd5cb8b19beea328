"""A made-up step over roles with made-up methods, for tests of tracing: no model, no mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.call_graph import Call, CallGraph, GraphError
from jaxrlhf.experience import Term
from jaxrlhf.tracing import Method, RoleMethods, compute, trace

B, T = 6, 5


@dataclasses.dataclass(frozen=True)
class Settings:
    length: int = T


@dataclasses.dataclass
class Unhashable:
    length: int = T


def shape(*dims: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


def sampled(prompts, settings):
    return {"tokens": shape(prompts.shape[0], settings.length, dtype=jnp.int32)}


def scored(rollout):
    return shape(rollout["tokens"].shape[0])


def trained(terms, update):
    return {"loss": shape()}


def one_term(loss, batch, update):
    return (Term(loss, batch),), update


GENERATE, INFER, HOST = Method("generate", sampled), Method("infer", scored), Method("host", scored)
TRAIN = Method("train", trained, row_wise=False, bind=one_term)
ROLES = {
    "actor": RoleMethods({"generate": GENERATE, "train": TRAIN}, weights="actor"),
    "critic": RoleMethods({"values": INFER, "train": TRAIN}, weights="critic"),
    "reward": RoleMethods({"scores": HOST}, missing={"train": "Give it weights."}),
}
STATE = {"coef": np.float32(0.1)}
PROMPTS = shape(B, 3, dtype=jnp.int32)


def make_batch(rollout, values, scores, state):
    advantages = scores - values * state["coef"]
    return {"rollout": rollout, "advantages": advantages}, {"coef": state["coef"] * 2}, advantages.mean()


def follow(prompts, state):
    total = prompts.sum()
    return {
        "each": prompts[:, 0],
        "wider": jnp.concatenate([prompts, prompts], axis=1),
        "twice": jnp.tile(prompts, (2, 1)),
        "total": total,
        "pair": jnp.stack([total, total]),
        "state": state["coef"],
    }


def a_loss():
    raise AssertionError("tracing must not run a loss")


def actor_critic(roles, state, prompts, settings):
    rollout = roles.actor.generate(prompts, settings)
    values = roles.critic.values(rollout)
    scores = roles.reward.scores(rollout)
    batch, state, metric = compute(make_batch, rollout, values, scores, state)
    results = {
        "actor": roles.actor.train(a_loss, batch, settings),
        "critic": roles.critic.train(a_loss, batch, settings),
        "metric": metric,
    }
    return results, state


def trace_step(
    step, *, state: Any = STATE, data: Any = PROMPTS, config: Any = Settings(), iterations: int = 1
) -> CallGraph:
    return trace(step, ROLES, state, data, config, iterations=iterations)


def error_of(step, **changes: Any) -> str:
    with pytest.raises(GraphError) as raised:
        trace_step(step, **changes)
    return str(raised.value)


def call_named(graph: CallGraph, name: str) -> Call:
    return next(call for call in graph.calls if call.name == name)


def needs(graph: CallGraph) -> dict[str, tuple[str, ...]]:
    return {call.name: graph.dependencies(call) for call in graph.calls}


def must_wait_for(graph: CallGraph, name: str) -> set[str]:
    """Everything that comes before a call, directly or not."""
    before = set(needs(graph)[name])
    return before.union(*(must_wait_for(graph, earlier) for earlier in before))
