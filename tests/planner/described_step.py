"""PPO of described sizes, for tests of the planner: a traced graph, its roles and its work. No arrays are made."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.policy import PolicyUpdate
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, ppo_step
from jaxrlhf.call_graph import CallGraph
from jaxrlhf.config.algorithm_loading import load_algorithm
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Prompts, Sampling, Sequences
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.workload import Workload, step_workload
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.tracing import trace

TINY = ModelConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2,
    max_position_embeddings=64,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DescribedStep:
    graph: CallGraph
    roles: Mapping[str, ModelRole]
    workload: Workload

    @property
    def models(self) -> dict[str, ModelConfig]:
        return {name: role.model for name, role in self.roles.items()}


@functools.cache
def ppo(
    actor: ModelConfig = TINY,
    critic: ModelConfig | None = None,
    *,
    rows: int = 16,
    prompt: int = 8,
    response: int = 8,
    mini_batches: int = 2,
    num_samples: int = 1,
    lora: LoRAConfig | None = None,
    whiten: bool = True,
    state_dtype: Literal["float32", "bfloat16"] = "float32",
) -> DescribedStep:
    """One step of PPO whose reference is as large as its actor, and its reward model as its critic. With `lora`, actor
    and critic train adapters of the weights that the reference reads."""
    critic = dataclasses.replace(critic or actor, head="scalar")
    base = "" if lora is None else "actor.base"
    roles = {
        "actor": ModelRole(actor, OptimizerConfig(state_dtype=state_dtype), lora=lora, base=base),
        "reference": ModelRole(actor, weights=base),
        "critic": ModelRole(critic, OptimizerConfig(state_dtype=state_dtype), lora=lora, base=base),
        "reward": ModelRole(critic),
    }
    config = PPOConfig(
        sampling=Sampling(max_new_tokens=response, num_samples=num_samples),
        whiten_advantages=whiten,
        actor_update=PolicyUpdate(mini_batches=mini_batches),
        critic_update=ValueUpdate(mini_batches=mini_batches),
    )
    return traced(ppo_step, roles, load_algorithm("ppo").init_state(config), config, rows=rows, prompt=prompt)


def traced(
    step: Callable[..., Any],
    roles: Mapping[str, ModelRole],
    state: Any,
    config: Any,
    *,
    rows: int,
    prompt: int = 8,
    response: int = 0,
) -> DescribedStep:
    """A step that is given prompts, or demonstrations with so many columns of a response."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, mask = array(rows, prompt + response), array(rows, prompt + response, dtype=jnp.bool)
    data = Prompts(tokens=tokens, mask=mask, row=array(rows), id=array(rows, dtype=jnp.uint32))
    if response:
        data = Sequences(tokens=tokens, mask=mask, response=array(rows, response, dtype=jnp.bool))
    methods = {name: role.methods(name) for name, role in roles.items()}
    graph = trace(step, methods, jax.tree.map(jnp.asarray, state), data, config)
    return DescribedStep(graph, roles, step_workload(graph, roles))
