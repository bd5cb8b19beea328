"""What a tail is forecast to bring to the settings of RLHFuse's evaluation, beside its figures.

    python -m scripts.check_fused_generation                      # 12 settings, a few minutes
    python -m scripts.check_fused_generation --lengths 1024 --pairs 13B/33B --curve

PPO with the paper's four pairs of actor and critic on 32 nodes of 8 H100s, batches of 512 in 8 mini-batches, and at
most 512, 1,024 and 2,048 new tokens, whose lengths are lognormal with the 99.9th percentile, which is the most, at ten
times the median. Prompts have 256 tokens. The plan without a tail has every call on all devices, as the paper's has.

Prints, for each setting, the seconds of generation and inference without and with the best tail, its sequences and
devices; those of training without and with both train calls as one pipeline; and how much faster a step is with both.
`--curve` prints all fractions, as the paper's Figure 9.

Reference:
    Zhong et al. 2024 (RLHFuse), arXiv:2409.13221, sections 7.1 to 7.3.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.policy import PolicyUpdate
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, ppo_step
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.algorithm_loading import load_algorithm
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.console import Console
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.fusion.fused_choice import best_fused
from jaxrlhf.planner.fusion.fused_generation import fuse_generation
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.tracing import trace

SIZES = {"13B": (40, 40, 5120, 13824), "33B": (60, 52, 6656, 17920), "65B": (80, 64, 8192, 22016)}
"""Layers, heads, hidden size; and the MLP's columns of LLaMA, whose three matrices have as many numbers as the two that
the paper's table gives."""
PAIRS = ("13B/33B", "33B/13B", "33B/65B", "65B/33B")
ROWS, MINI_BATCHES, PROMPT = 512, 8, 256
CLUSTER = "32x8:h100"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], help="the most new tokens")
    parser.add_argument("--curve", action="store_true", help="print all fractions")
    options, console = parser.parse_args(arguments), Console()
    rows = []
    for most in options.lengths:
        for pair in options.pairs:
            rows.append(of_setting(pair, most, console, curve=options.curve))
    console.table(f"PPO on {CLUSTER}, {ROWS} responses", rows)
    return 0


def of_setting(pair: str, most: int, console: Console, *, curve: bool) -> dict[str, object]:
    """One row of the table."""
    actor, critic = (model(size, most) for size in pair.split("/"))
    scalar = dataclasses.replace(critic, head="scalar")
    roles = {
        "actor": ModelRole(actor, OptimizerConfig()), "reference": ModelRole(actor),
        "critic": ModelRole(scalar, OptimizerConfig()), "reward": ModelRole(scalar),
    }  # fmt: skip
    config = PPOConfig(
        sampling=Sampling(max_new_tokens=most),
        actor_update=PolicyUpdate(mini_batches=MINI_BATCHES),
        critic_update=ValueUpdate(mini_batches=MINI_BATCHES),
    )
    shape: Any = jax.ShapeDtypeStruct
    prompts = Prompts(
        tokens=shape((ROWS, PROMPT), jnp.int32), mask=shape((ROWS, PROMPT), jnp.bool), row=shape((ROWS,), jnp.int32),
        id=shape((ROWS,), jnp.uint32),
    )  # fmt: skip
    methods = {name: role.methods(name) for name, role in roles.items()}
    graph = trace(ppo_step, methods, load_algorithm("ppo").init_state(config), prompts, config)
    lengths = long_tailed(most)
    costs = CostModel(read_cluster(CLUSTER))
    planned = plan_workload(step_workload(graph, roles, lengths), costs.cluster, method="colocate", costs=costs)
    fused = fuse_generation(graph, roles, planned.plan_for(graph), costs, lengths)
    if curve:
        console.table(f"{pair}, at most {most} tokens", fused.rows)
        print(fused.reason)
    both = [call.name for call in planned.workload.calls if not call.trains]
    before = sum(planned.call_seconds(name) for name in both)
    best = min(fused.rows, key=lambda row: row["seconds"], default=None)
    saved = max(0.0, fused.seconds - best["seconds"]) if best is not None else 0.0
    one = best_fused(planned.problem, planned.workload, costs, [planned.result.plan], beat=planned.seconds)
    training = sum(planned.call_seconds(call.name) for call in planned.workload.calls if call.trains)
    saved_training = 0.0 if one is None else planned.seconds - one.simulation.seconds
    return {
        "actor/critic": pair,
        "tokens": most,
        "generation s": round(planned.call_seconds("actor.generate"), 2),
        "inference s": round(before - planned.call_seconds("actor.generate"), 2),
        "with a tail s": round(before - saved, 2),
        "times as fast": round(before / (before - saved), 2),
        "move": best["sequences that move"] if best is not None else "-",
        "tail": best["devices of the tail"] if best is not None else "-",
        "training s": round(training, 2),
        "as one pipeline s": round(training - saved_training, 2),
        "step s": round(fused.seconds, 2),
        "step with both s": round(fused.seconds - saved - saved_training, 2),
        "step times as fast": round(fused.seconds / (fused.seconds - saved - saved_training), 2),
    }


def model(size: str, most: int) -> ModelConfig:
    """A LLaMA of the paper's Table 2."""
    layers, heads, hidden, columns = SIZES[size]
    return ModelConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=columns, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, max_position_embeddings=PROMPT + most, dtype="bfloat16",
    )  # fmt: skip


def long_tailed(most: int) -> ResponseLengths:
    """Lognormal lengths whose 99.9th percentile is the most, ten times the median."""
    normal = statistics.NormalDist()
    sigma = math.log(10) / normal.inv_cdf(0.999)
    median = most / 10
    return ResponseLengths(
        mean=median * math.exp(sigma**2 / 2), p99=round(median * math.exp(sigma * normal.inv_cdf(0.99)))
    )


if __name__ == "__main__":
    raise SystemExit(main())
