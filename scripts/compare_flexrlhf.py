"""What placement strategies are forecast to bring to the settings of FlexRLHF's evaluation, beside its figures.

    python -m scripts.compare_flexrlhf                               # all settings, a quarter of an hour
    python -m scripts.compare_flexrlhf --nodes 4 --sizes 33B 65B --seconds 10

PPO with four LLaMAs of one size on nodes of 8 A100s, prompts of 256 tokens and responses of exactly 256, adapters of
rank 4, one update a step. The paper raises the batch until memory is full and does not say to what; here all
placements of a setting have as many sequences a device (`--rows`), so that ratios compare placements alone.

`deepspeed-chat` is the paper's baseline as it describes it: 7B trained with ZeRO-2, all else under ZeRO-3, where each
decoding step gathers the weights of all layers; calls run one after another. `trlx` has actor and critic on one trunk,
and the reward model on one device. Prints samples a second, each placement's ratio to `colocate`, the paper's ratios,
and whether what the guideline advises is within 10 % of what the search finds.

Reference:
    Xiao et al. 2023 (FlexRLHF), arXiv:2312.11819, Tables I to V.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.algorithms.policy import PolicyUpdate
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate
from jaxrlhf.algorithms.ppo_shared import PPOSharedConfig, SharedUpdate
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
"""(Nodes, size) -> placement -> samples a second: Tables I and II."""
PUBLISHED_SHARED = {
    (1, "7B"): (6.21, 27.27), (2, "7B"): (7.76, 54.71), (4, "7B"): (8.87, None),
    (1, "13B"): (2.22, 11.76), (2, "13B"): (3.23, 24.63), (4, "13B"): (4.24, None),
}  # fmt: skip
"""(Nodes, size) -> samples a second of trlX, its reward model beside others, and of interleaving: Table V."""
PUBLISHED_UNLIKE = 0.69, 0.79
"""Samples a second of 33B on 8 A100s, and with 2 x 4 V100s beside them: Table III."""
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
        found.append(row(nodes, size, options.rows, options.seconds))
        print(f"{nodes} x 8, {size}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    console.table(f"Samples a second, {options.rows} sequences a device", [each["samples"] for each in found])
    console.table("Times colocate, and how they run", [each["ratios"] for each in found])
    console.table("Times deepspeed-chat, forecast / published", [each["published"] for each in found])
    shared = [
        row_shared(nodes, size, options.rows, options.seconds)
        for nodes, size in itertools.product(options.nodes, options.sizes)
        if (nodes, size) in PUBLISHED_SHARED
    ]
    console.table("Actor and critic on one trunk, samples a second", shared)
    unlike = rows_unlike(options.rows, options.seconds) if 1 in options.nodes and "33B" in options.sizes else []
    console.table("33B with 2 x 4 V100s beside 8 A100s", unlike)
    if options.json:
        tables = {"options": vars(options), "settings": found, "shared": shared, "unlike": unlike}
        print(json.dumps(tables, indent=2))
    return 0


def row(nodes: int, size: str, rows: int, seconds: float | None) -> dict[str, Any]:
    """The rows of a size of models on some nodes in each table."""
    setting = Setting(f"{nodes}x8:a100-80g", size, rows * nodes * 8, seconds)
    ways: dict[str, Callable[[], tuple[float, str]]] = {
        "deepspeed-chat": setting.deepspeed_chat,
        "colocate": lambda: setting.by_method("colocate"),
        "interleaving": lambda: setting.placed("interleaving"),
        "interleaving-2": lambda: setting.placed("interleaving-2"),
        "disaggregated": setting.disaggregated,
        SEARCH: lambda: setting.by_method(SEARCH),
    }
    times, notes = setting.each_of(ways)
    here = {"nodes": nodes, "size": size}
    base, baseline = times.get("colocate"), times.get("deepspeed-chat")
    published = PUBLISHED.get((nodes, size), {})
    theirs = published.get("deepspeed-chat")
    ratios = {way: f"{base / times[way]:.2f}{notes[way]}" if base and way in times else notes[way] for way in ways}
    beside = {}
    for name in PLACEMENTS[1:]:
        ours = f"{baseline / times[name]:.2f}" if baseline and name in times else "-"
        value = published.get(name)
        beside[name] = f"{ours} / {value / theirs:.2f}" if value and theirs else ours
    advised = min((times[name] for name in setting.advised() if name in times), default=None)
    return {
        "samples": here | {name: setting.samples(times.get(name)) for name in ways},
        "ratios": here | ratios | {"guideline / search": f"{advised / times[SEARCH]:.2f}" if advised else "-"},
        "published": here | beside,
    }


def row_shared(nodes: int, size: str, rows: int, seconds: float | None) -> dict[str, Any]:
    """The row of actor and critic on one trunk."""
    setting = Setting(f"{nodes}x8:a100-80g", size, rows * nodes * 8, seconds, shared=True)
    times, _ = setting.each_of(
        {
            "trlx": lambda: setting.placed({"reward": "0"}),
            "colocate": lambda: setting.by_method("colocate"),
            "interleaving": lambda: setting.placed("interleaving"),
            SEARCH: lambda: setting.by_method(SEARCH),
        }
    )
    there, interleaved = PUBLISHED_SHARED[nodes, size]
    ratio = f"{times['trlx'] / times['interleaving']:.2f}" if {"trlx", "interleaving"} <= times.keys() else "-"
    return {
        "nodes": nodes,
        "size": size,
        **{name: setting.samples(times.get(name)) for name in ("trlx", "colocate", "interleaving", SEARCH)},
        "interleaving / trlx": ratio,
        "published": f"{interleaved / there:.2f}" if there and interleaved else "-",
    }


def rows_unlike(rows: int, seconds: float | None) -> list[dict[str, Any]]:
    """33B on 8 A100s, and with V100s beside them that have the reference and the reward model, as many sequences."""
    a100s = Setting("1x8:a100-80g", "33B", rows * 8, seconds)
    both = Setting("1x8:a100-80g+2x4:v100-32g", "33B", rows * 8, seconds)
    on_a100s = {"actor": "0-7", "critic": "0-7"}
    apart = {"train": "0-3", "actor": "4-7", "critic": "4-7", "reference": "8-11", "reward": "12-15"}
    ways: dict[str, tuple[Setting, Callable[[], tuple[float, str]]]] = {
        "8 A100s: deepspeed-chat": (a100s, a100s.deepspeed_chat),
        "8 A100s: colocate": (a100s, lambda: a100s.by_method("colocate")),
        "8 A100s: search": (a100s, lambda: a100s.by_method(SEARCH)),
        "with V100s: reference and reward on them": (
            both, lambda: both.placed({**on_a100s, "reference": "8-11", "reward": "12-15"}),
        ),
        "with V100s: training apart from inference": (both, lambda: both.placed(apart)),
        "with V100s: search": (both, lambda: both.by_method(SEARCH)),
    }  # fmt: skip
    found = []
    for name, (setting, way) in ways.items():
        times, notes = setting.each_of({name: way})
        found.append({"placement": name, "samples a second": setting.samples(times.get(name)), "how": notes[name]})
    alone, with_v100s = PUBLISHED_UNLIKE
    found.append({"placement": "published: deepspeed-chat", "samples a second": f"{alone}", "how": ""})
    found.append({"placement": "published: heterogeneous", "samples a second": f"{with_v100s}", "how": ""})
    return found


class Setting:
    """One size of models on a cluster."""

    def __init__(self, cluster: str, size: str, rows: int, seconds: float | None, *, shared: bool = False) -> None:
        self.size, self.rows, self.seconds = size, rows, seconds
        self.cluster = read_cluster(cluster)
        self.costs = CostModel(self.cluster)
        self.graph, self.roles = ppo(size, rows, shared=shared)
        self.workload = step_workload(self.graph, self.roles)

    def each_of(self, ways: Mapping[str, Callable[[], tuple[float, str]]]) -> tuple[dict[str, float], dict[str, str]]:
        """Name -> seconds of an iteration, where there is a plan, and how it runs, or why there is none."""
        seconds, notes = dict[str, float](), dict[str, str]()
        for name, way in ways.items():
            try:
                seconds[name], notes[name] = way()
            except PlanError as error:
                notes[name] = "no room" if "too much" in str(error) or "fit" in str(error) else str(error)[:60]
        return seconds, notes

    def samples(self, seconds: float | None) -> str:
        """Samples a second."""
        return "-" if seconds is None else f"{self.rows / seconds:.3g}"

    def advised(self) -> list[str]:
        """The placements of the first table that the guideline advises."""
        strategies = guideline(self.workload, self.cluster).strategies
        names = ["colocate" if each is None else each.name for each in strategies]
        apart = any(each is not None and each.is_disaggregated for each in strategies)
        return [name for name in names if name] + (["disaggregated"] if apart else [])

    def by_method(self, method: str) -> tuple[float, str]:
        """Seconds of an iteration under the plan of a method."""
        planned = plan_workload(
            self.workload, self.cluster, method=method, costs=self.costs, seconds=self.seconds, compare=False
        )
        return planned.seconds, ""

    def placed(self, data: Any) -> tuple[float, str]:
        """The same under a placement strategy, with parts and replicas where they are faster."""
        strategy = data if isinstance(data, PlacementStrategy) else PlacementStrategy.from_data(data)
        assert strategy is not None
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
        for strategy in [*described, *apart]:
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
            # under ZeRO-3, generation holds the weights of a layer at a time
            by_layer = call.kind == "generate" and not replicated
            if memory.working + (-memory.gathered if by_layer else memory.copy) <= room:
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


def ppo(size: str, rows: int, *, shared: bool = False) -> tuple[Any, dict[str, ModelRole]]:
    """A step of PPO whose actor and critic train adapters, of one trunk or of two."""
    model, lora = llama(size), LoRAConfig(rank=RANK)
    scalar, both = (dataclasses.replace(model, head=head) for head in ("scalar", "both"))
    adapted: dict[str, Any] = {"lora": lora, "base": "actor.base"}
    roles = {
        "actor": ModelRole(both if shared else model, OptimizerConfig(), **adapted),
        "reference": ModelRole(model, weights="actor.base"),
        "critic": ModelRole(scalar, OptimizerConfig(), lora=lora, base="critic.base"),
        "reward": ModelRole(scalar),
    }
    common: dict[str, Any] = {
        "sampling": Sampling(max_new_tokens=RESPONSE, min_new_tokens=RESPONSE), "whiten_advantages": False,
    }  # fmt: skip
    if shared:
        roles["critic"] = ModelRole(both, weights="actor", view="scalar", **adapted)
        config: Any = PPOSharedConfig(actor_update=SharedUpdate(mini_batches=1), **common)
    else:
        updates = {"actor_update": PolicyUpdate(mini_batches=1), "critic_update": ValueUpdate(mini_batches=1)}
        config = PPOConfig(**updates, **common)
    shape: Any = jax.ShapeDtypeStruct
    prompts = Prompts(
        tokens=shape((rows, PROMPT), jnp.int32), mask=shape((rows, PROMPT), jnp.bool), row=shape((rows,), jnp.int32),
        id=shape((rows,), jnp.uint32),
    )  # fmt: skip
    methods = {name: role.methods(name) for name, role in roles.items()}
    algorithm = load_algorithm("ppo_shared" if shared else "ppo")
    return trace(algorithm.step, methods, algorithm.init_state(config), prompts, config), roles


def llama(size: str) -> ModelConfig:
    layers, heads, hidden, columns = SIZES[size]
    return ModelConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=columns, num_layers=layers, num_heads=heads,
        num_kv_heads=heads, max_position_embeddings=PROMPT + RESPONSE, dtype="bfloat16",
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
