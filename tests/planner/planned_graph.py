"""A traced step and plans of it, for tests of what a plan may say."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.reading import build
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanData
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import Method, RoleMethods, compute, trace
from tests.made_up_step import one_term

ROWS, COLUMNS = 24, 7
ONE = Placement((0,), Strategy())
MODELS = {"actor": ModelConfig(vocab_size=96, hidden_size=48, intermediate_size=64, num_heads=4, num_kv_heads=2)}


@dataclasses.dataclass(frozen=True)
class Update:
    mini_batches: int = 2
    epochs: int = 3


def halve(tokens):
    return {"tokens": tokens, "half": tokens // 2}


def count_up(count):
    return count + 1


def step(roles, state, prompts, update):
    rollout = roles.actor.generate(prompts)
    roles.actor.generate(prompts)
    roles.judge.scores(rollout)
    batch = compute(halve, rollout)
    return roles.actor.train("loss", batch, update), compute(count_up, state)


def make_graph(update: Update = Update()) -> CallGraph:
    tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    methods = {
        "generate": Method("generate", lambda prompts: tokens, tokens=lambda args, drawn: (drawn,)),
        "train": Method(
            "train", lambda terms, update: scalar, row_wise=False, bind=one_term,
            tokens=lambda args, _: tuple(term.batch["tokens"] for term in args[0]),
        ),
    }  # fmt: skip
    scores = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    roles = {
        "actor": RoleMethods(methods, weights="actor"),
        "judge": RoleMethods({"scores": Method("host", lambda rollout: scores, tokens=lambda args, _: args)}),
    }
    return trace(step, roles, scalar, jax.ShapeDtypeStruct((ROWS, 3), jnp.int32), update)


GRAPH = make_graph()
NAMES = ["actor.generate", "actor.generate#2", "halve", "actor.train", "count_up"]


def over(num_devices: int, **strategy: Any) -> Placement:
    return Placement(tuple(range(num_devices)), Strategy(**strategy))


def read(data: Any) -> Plan:
    """A plan from plain data."""
    return build(PlanData, data, where="plan").plan()


def plan_with(name: str, placement: Placement) -> Plan:
    return Plan({**dict.fromkeys(NAMES, ONE), name: placement})
