"""What placement strategies are forecast to bring to the settings of FlexRLHF's evaluation, beside its figures.

    python -m scripts.compare_flexrlhf                               # 16 settings, a quarter of an hour
    python -m scripts.compare_flexrlhf --nodes 4 --sizes 33B 65B --seconds 10

PPO with four LLaMAs of one size on nodes of 8 A100s, prompts of 256 tokens and responses of exactly 256, adapters of
rank 4, one update a step. The paper raises the batch until memory is full and does not say to what; here all
placements of a setting have as many sequences a device (`--rows`), so that ratios compare placements alone.

`deepspeed-chat` is the paper's baseline as it describes it: 7B trained with ZeRO-2, all else under ZeRO-3, where each
decoding step gathers the weights of all layers; calls run one after another. Prints samples a second, each placement's
ratio to `colocate`, and the paper's ratios.

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, Tables I and II.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.policy import PolicyUpdate
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, ppo_step
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.algorithm_loading import load_algorithm
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.observe.console import Console
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.memory import call_memory, weight_bytes
from jaxrlhf.planner.make_plan import SEARCH, plan_workload
from jaxrlhf.planner.placement.guideline import guideline
from jaxrlhf.planner.placement.pipelined import pipelined
from jaxrlhf.planner.plans.plan import PlanError
from jaxrlhf.planner.search.methods import PLACEMENT
from jaxrlhf.planner.workload import ModelCall, step_workload
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import trace

SIZES = {
    "7B": (32, 32, 4096, 11008),
    "13B": (40, 40, 5120, 13824),
    "33B": (60, 52, 6656, 17920),
    "65B": (80, 64, 8192, 22016),
}
"""Layers, heads, hidden size and columns of the MLP."""
PROMPT, RESPONSE, RANK = 256, 256, 4
PUBLISHED: dict[tuple[int, str], dict[str, float | None]] = {
    (1, "7B"): {"deepspeed-chat": 16.12, "interleaving": 17.35},
    (1, "13B"): {"deepspeed-chat": 7.32, "interleaving": 7.63},
    (1, "33B"): {"deepspeed-chat": 0.69, "interleaving": 0.69},
    (2, "7B"): {"deepspeed-chat": 32.15, "interleaving": 34.70, "interleaving-2": 18.27},
    (2, "13B"): {"deepspeed-chat": 15.35, "interleaving": 15.66, "interleaving-2": 8.27},
    (2, "33B"): {"deepspeed-chat": 0.64, "interleaving": 0.64, "interleaving-2": 0.97},
    (2, "65B"): {"deepspeed-chat": 0.14, "interleaving": 0.14, "interleaving-2": 0.24},
    (4, "7B"): {"deepspeed-chat": 61.95, "interleaving": 69.44},
    (4, "13B"): {"deepspeed-chat": 28.60, "interleaving": 28.54},
    (4, "33B"): {"deepspeed-chat": 0.93, "interleaving": 0.95, "disaggregated": 4.76},
    (4, "65B"): {"deepspeed-chat": 0.20, "interleaving": 0.20, "disaggregated": 1.75},
    (16, "33B"): {"deepspeed-chat": 2.11, "disaggregated": 10.07},
    (16, "65B"): {"deepspeed-chat": 0.55, "disaggregated": 6.80},
}  # fmt: skip
"""(Nodes, size) -> placement -> samples a second."""
PLACEMENTS = ("deepspeed-chat", "colocate", "interleaving", "interleaving-2", "disaggregated", SEARCH)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 16])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", type=int, default=16, help="sequences a device")
    parser.add_argument("--seconds", type=float, help="the most that each search may take")
    parser.add_argument("--json", action="store_true", help="print JSON after the tables")
    options, console = parser.parse_args(arguments), Console()
    found = []
    for nodes, size in itertools.product(options.nodes, options.sizes):
        began = time.perf_counter()
        found.append(Setting(nodes, size, options.rows, options.seconds).row())
        print(f"{nodes} x 8, {size}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    console.table(f"Samples a second, {options.rows} sequences a device", [each["samples"] for each in found])
    console.table("Times colocate, and how they run", [each["ratios"] for each in found])
    console.table("Times deepspeed-chat, forecast / published", [each["published"] for each in found])
    if options.json:
        print(json.dumps({"options": vars(options), "settings": found}, indent=2))
    return 0


class Setting:
    """One size of models on some nodes."""

    def __init__(self, nodes: int, size: str, rows: int, seconds: float | None) -> None:
        self.nodes, self.size, self.seconds = nodes, size, seconds
        self.cluster = read_cluster(f"{nodes}x8:a100-80g")
        self.costs, self.rows = CostModel(self.cluster), rows * self.cluster.num_devices
        self.graph, self.roles = ppo(size, self.rows)
        self.workload = step_workload(self.graph, self.roles)

    def row(self) -> dict[str, Any]:
        """The rows of this setting in each table."""
        ways: dict[str, Callable[[], tuple[float, str]]] = {
            "deepspeed-chat": self.deepspeed_chat,
            "colocate": lambda: self.by_method("colocate"),
            "interleaving": lambda: self.placed(PlacementStrategy("interleaving")),
            "interleaving-2": lambda: self.placed(PlacementStrategy("interleaving-2")),
            "disaggregated": self.disaggregated,
            SEARCH: lambda: self.by_method(SEARCH),
        }
        seconds, notes = dict[str, float](), dict[str, str]()
        for name, way in ways.items():
            try:
                seconds[name], notes[name] = way()
            except PlanError as error:
                notes[name] = "no room" if "too much" in str(error) or "fit" in str(error) else str(error)[:60]
        here = {"nodes": self.nodes, "size": self.size}
        base, baseline = seconds.get("colocate"), seconds.get("deepspeed-chat")
        published = PUBLISHED.get((self.nodes, self.size), {})
        theirs = published.get("deepspeed-chat")
        samples = {name: f"{self.rows / seconds[name]:.3g}" if name in seconds else "-" for name in PLACEMENTS}
        ratios = {
            name: f"{base / seconds[name]:.2f}{notes[name]}" if base and name in seconds else notes[name]
            for name in PLACEMENTS
        }
        beside = {}
        for name in PLACEMENTS[1:]:
            ours = f"{baseline / seconds[name]:.2f}" if baseline and name in seconds else "-"
            value = published.get(name)
            beside[name] = f"{ours} / {value / theirs:.2f}" if value and theirs else ours
        return {"samples": here | samples, "ratios": here | ratios, "published": here | beside}

    def by_method(self, method: str) -> tuple[float, str]:
        """Seconds of an iteration under the plan of a method."""
        planned = plan_workload(
            self.workload, self.cluster, method=method, costs=self.costs, seconds=self.seconds, compare=False
        )
        return planned.seconds, ""

    def placed(self, strategy: PlacementStrategy) -> tuple[float, str]:
        """The same under a placement strategy, with parts and replicas where they are faster."""
        planned = plan_workload(
            self.workload, self.cluster, method=PLACEMENT, placement=strategy, costs=self.costs, compare=False
        )
        plan = planned.plan_for(self.graph)
        found = pipelined(self.graph, self.roles, plan, planned.groups, self.costs, None, strategy)
        return (planned.seconds, "") if found.plan is None else (found.seconds_in_parts, " in parts")

    def disaggregated(self) -> tuple[float, str]:
        """The fastest of training and inference apart: halves, roles apart from generation, and what the guideline
        advises."""
        apart = [each for each in guideline(self.workload, self.cluster).strategies if each and each.is_disaggregated]
        quarters = {"critic": 0.25, "reference": 0.25, "reward": 0.25}
        described = [
            {"train": 0.5},
            {"train": 0.5, "actor": 0.25, **quarters},
            {"train": 0.25, "actor": 0.5, **quarters},
        ]
        tried, refusal = [], PlanError("No placement was tried.")
        for strategy in [*map(PlacementStrategy.from_data, described), *apart]:
            assert strategy is not None
            try:
                tried.append(self.placed(strategy))
            except PlanError as error:
                refusal = error
        if not tried:
            raise refusal
        return min(tried)

    def deepspeed_chat(self) -> tuple[float, str]:
        """Every call on all devices, rows split over all of them, one after another. Under ZeRO-3 a decoding step waits
        for the weights of every layer, which come over the network to each node, and from there to each device."""
        devices = range(self.cluster.num_devices)
        replicated = self.size == "7B"
        total = 0.0
        for call in self.workload.calls:
            strategy = self._fitting(call, replicated=replicated)
            seconds = self.costs.seconds(call, devices, strategy).total
            if call.kind == "generate" and not replicated:
                steps = self.costs.of(call, devices, strategy).rollout_steps().steps
                seconds += steps * self._gather_seconds(call)
            total += seconds
        return total, ""

    def _fitting(self, call: ModelCall, *, replicated: bool) -> Strategy:
        """Rows over all devices, in the fewest micro-batches for which half of the memory is enough. Raises PlanError
        if none are enough."""
        count, room = self.cluster.num_devices, self.cluster.capacity(0) / 2
        trained = call.weights in self.workload.trained
        split = not replicated and call.kind != "generate"
        for remat, micro_batches in itertools.product(
            ("none", "layer") if call.trains else ("none",), (1, 2, 4, 8, 16)
        ):
            strategy = Strategy(
                data=1 if split else count, fsdp=count if split else 1, micro_batches=micro_batches, remat=remat
            )
            if not call.can_split(count * micro_batches):
                continue
            memory = call_memory(call, strategy, is_trained=trained)
            weights = 0 if call.kind == "generate" and not replicated else memory.copy
            if memory.working + weights <= room:
                return strategy
        raise PlanError(f"{call.name}: must fit. Got too much.")

    def _gather_seconds(self, call: ModelCall) -> float:
        """Of all weights to every device."""
        size = weight_bytes(call.model, Strategy(), call.model.itemsize)
        kind, nodes = self.cluster.groups[0].kind, self.cluster.num_nodes
        costs = kind.coefficients
        within = size * 7 / 8 / (kind.link.bandwidth * costs.link_efficiency)
        between = size * (nodes - 1) / nodes / (kind.network.bandwidth * costs.network_efficiency)
        return max(within, between)


def ppo(size: str, rows: int) -> tuple[Any, dict[str, ModelRole]]:
    """A step of PPO whose actor and critic train adapters."""
    model, lora = llama(size), LoRAConfig(rank=RANK)
    scalar = dataclasses.replace(model, head="scalar")
    roles = {
        "actor": ModelRole(model, OptimizerConfig(), lora=lora, base="actor.base"),
        "reference": ModelRole(model, weights="actor.base"),
        "critic": ModelRole(scalar, OptimizerConfig(), lora=lora, base="critic.base"),
        "reward": ModelRole(scalar),
    }
    config = PPOConfig(
        sampling=Sampling(max_new_tokens=RESPONSE, min_new_tokens=RESPONSE),
        actor_update=PolicyUpdate(mini_batches=1),
        critic_update=ValueUpdate(mini_batches=1),
        whiten_advantages=False,
    )
    shape: Any = jax.ShapeDtypeStruct
    prompts = Prompts(
        tokens=shape((rows, PROMPT), jnp.int32), mask=shape((rows, PROMPT), jnp.bool), row=shape((rows,), jnp.int32),
        id=shape((rows,), jnp.uint32),
    )  # fmt: skip
    methods = {name: role.methods(name) for name, role in roles.items()}
    return trace(ppo_step, methods, load_algorithm("ppo").init_state(config), prompts, config), roles


def llama(size: str) -> ModelConfig:
    layers, heads, hidden, columns = SIZES[size]
    return ModelConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=columns, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, max_position_embeddings=PROMPT + RESPONSE, dtype="bfloat16",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
