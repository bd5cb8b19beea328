"""Tests for algorithms, built in or a user's own: the results are the same under any plan, and the algorithm learns.

    from jaxrlhf.testing import check_plan_invariance, learning_curve

    def test_no_plan_matters():
        check_plan_invariance("my_module:my_step", settings={"clip": 0.1})

    def test_it_learns():
        scores = learning_curve("my_module:my_step", metric="critic/score/mean", steps=40)
        assert max(scores[-5:]) > max(scores[:5]) + 0.3

Both run a small model on virtual CPU devices, through the assembly and the executor of any run, without a run
folder. Most of the time is compilation, a few seconds for each plan.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrlhf.algorithms.algorithm import Algorithm
from jaxrlhf.brief import did_you_mean
from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.algorithm_loading import load_algorithm
from jaxrlhf.config.device_text import devices_to_text
from jaxrlhf.config.placement_strategy import INTERLEAVING, STRATEGIES, PlacementStrategy
from jaxrlhf.config.plan_config import Tail
from jaxrlhf.config.reading import build, merge, to_tree
from jaxrlhf.config.schema import RunConfig, build_run
from jaxrlhf.execution.executor import Executor
from jaxrlhf.experience import Sampling
from jaxrlhf.importing import name_of
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.observe.metrics import flatten
from jaxrlhf.planner.costs.stage_costs import reference_costs
from jaxrlhf.planner.fusion.fusible import check_fusion, oppose, with_schedules
from jaxrlhf.planner.placement.role_groups import devices_of_calls
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.device_order import reuse_training_shards, training_placements
from jaxrlhf.planner.plans.plan import Placement, Plan, PlanError, resolve
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.programs.roles import GAP_METRIC, ModelRole
from jaxrlhf.programs.weight_sets import BASE
from jaxrlhf.run.assembly import Phase, assemble
from jaxrlhf.run.checkpoints import weight_sets_of
from jaxrlhf.run.first_weights import Placed, load_first_weights
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Strategy

NUM_DEVICES, DEVICES_PER_NODE = 8, 4
ROWS = 16
AlgorithmOrName = str | Callable[..., Any] | Algorithm
"""An algorithm by its name in a config, such as `ppo` or `my_module:my_step`; or, as in a notebook, itself."""
_MOST_TRIES = 100
"""Random placements in parts of a call that are tried; the rows may be too few for any."""
RTOL, ATOL = 1e-5, 1e-6
"""The tolerance of metrics under two plans: sums of float32 in another order."""

SMALL_MODEL = {
    "vocab_size": 264, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
}  # fmt: skip
SMALL_SAMPLING = {"max_new_tokens": 6, "stop_ids": [10, 32, *range(43, 57, 2), *range(90, 160, 5)]}
"""Short responses, some of which an untrained model ends before the limit."""


def share_of_digits(completions: list[str]) -> list[float]:
    """The fraction of digits in a completion, a reward that an untrained model also earns."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def share_of_letters(completions: list[str]) -> list[float]:
    """The fraction of letters in a completion."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def mean_of_characters(completions: list[str]) -> list[float]:
    """A reward that is positive for almost every completion, and different for almost every two."""
    return [sum(ord(c) % 16 for c in text) / (16 * max(len(text), 1)) for text in completions]


def small_run(
    algorithm: AlgorithmOrName,
    *,
    learning_rate: float = 3e-4,
    num_layers: int = 2,
    reward: Callable[[list[str]], list[float]] = share_of_digits,
    **config: Any,
) -> RunConfig:
    """A small run of an algorithm: few layers, few rows, short responses, one device.

    Args:
        algorithm: The algorithm.
        learning_rate, num_layers: Of the small roles.
        reward: A function of this module, for the small role `reward`.
        config: Other keys of the run. `settings` are merged over the small ones. A role replaces the small one of its
            name; None removes it.
    """
    name = _name(algorithm)
    known = load_algorithm(name)
    small = _small_roles(learning_rate, num_layers, reward)
    named = {role: small[role] for role in known.roles or small if role in small}
    roles = {key: role for key, role in {**named, **config.pop("roles", {})}.items() if role is not None}
    wanted, where = config.pop("settings", {}), f"test of {name}"
    settings = _shortened(to_tree(build(known.config, wanted, where=where, path="settings")))
    tree = {
        "name": "test",
        "algorithm": name,
        "steps": 1,
        "batch_size": ROWS,
        "devices": f"cpu:{NUM_DEVICES}",
        "data": {"task": "arithmetic"},
        "plan": {"default": {"data": 1}},
        "compilation_cache": "",
        **config,
        "roles": roles,
        "settings": merge(settings, dict(wanted)),
    }
    return build_run(tree, where=where)


def _name(algorithm: AlgorithmOrName) -> str:
    return algorithm if isinstance(algorithm, str) else name_of(algorithm)


def check_plan_invariance(
    algorithm: AlgorithmOrName, *, num_plans: int = 3, steps: int = 2, seed: int = 0, strategy: str = "", **config: Any
) -> None:
    """Checks that some steps give the same tokens, metrics and state on one device and under random plans for eight.

    Args:
        algorithm: The algorithm.
        num_plans: The number of random plans.
        seed: The seed of the plans. A placement also depends on the name of its call, so that algorithms share
            programs.
        strategy: A placement strategy, whose devices all plans have. Empty means that of some of them.
        config: Keys of the run, as in `small_run`.

    Raises:
        AssertionError: A result differs under a plan, or training changes no weights.
        ValueError: The algorithm or the config is invalid.
    """
    # In a mini-batch without rewards, the gradient of a new value head would be rounding of log-probabilities, which
    # Adam would scale up to steps.
    algorithm = _name(algorithm)
    run = small_run(algorithm, steps=steps, reward=mean_of_characters, **config)
    mesh.use_virtual_cpu_devices(NUM_DEVICES, or_more=True)
    assembly = assemble(run, NUM_DEVICES, DEVICES_PER_NODE)
    alone = _Trial(run, assembly.train, assembly.train_rows)
    assert alone.moved, f"{algorithm}: training must change weights. Got the same after {steps} steps."
    for number in range(num_plans):
        plan = random_plan(assembly.train, seed=seed + number, strategy=strategy)
        phase = dataclasses.replace(assembly.train, plan=plan)
        _Trial(run, phase, assembly.train_rows, alone.first_weights).assert_same(
            alone, f"{algorithm}, random plan {seed + number} ({_in_short(plan)})"
        )


def learning_curve(
    algorithm: AlgorithmOrName, *, metric: str, steps: int, learning_rate: float = 1e-2, **config: Any
) -> list[float]:
    """A metric of every step, on one device.

    Args:
        learning_rate: That of the small roles; high, so that few steps show whether the algorithm learns.
        config: Keys of the run, as in `small_run`.

    Raises:
        KeyError: The algorithm has no such metric.
        ValueError: The algorithm or the config is invalid.
    """
    algorithm = _name(algorithm)
    run = small_run(algorithm, steps=steps, learning_rate=learning_rate, num_layers=1, **config)
    mesh.use_virtual_cpu_devices(NUM_DEVICES, or_more=True)
    assembly = assemble(run, NUM_DEVICES, DEVICES_PER_NODE)
    metrics = _Trial(run, assembly.train, assembly.train_rows).metrics
    if metric not in metrics[0]:
        raise KeyError(
            f"{algorithm}: must have the metric. Got {metric!r}. It has: {', '.join(metrics[0])}."
            f"{did_you_mean(metric, metrics[0])}"
        )
    return [numbers[metric] for numbers in metrics]


class _Trial:
    """Some steps of a phase, and their results."""

    def __init__(
        self, run: RunConfig, phase: Phase, rows: Any, first_weights: Mapping[str, Placed] | None = None
    ) -> None:
        executor = Executor(phase.roles, seed=run.seed)
        self.metrics: list[dict[str, float]] = []
        self.states: list[dict[str, float]] = []
        self.sampled: list[dict[str, np.ndarray]] = []
        try:
            load_first_weights(executor, phase, run, dict(first_weights or {}))
            store, changing = executor.weights, weight_sets_of(phase, changing=True)
            whole = [name for name, own in store.sets.items() if own.lora is None and own.average is None]
            self.first_weights = first_weights or {name.removesuffix(BASE): store.snapshot(name) for name in whole}
            before = {name: store.snapshot(name)[1] for name in changing if first_weights is None}
            state = phase.first_state
            for step in range(run.steps):
                result = executor.run(phase.graph, phase.plan, state, rows(step), step=step)
                state = result.state
                self.metrics.append(flatten(result.fetch()))
                self.states.append(_numbered(result.read(phase.graph.state)))
                generated = [call.name for call in phase.graph.calls if call.kind == "generate"]
                self.sampled.append({name: result.outputs(name).tokens for name in generated})
            self.moved = first_weights is None and all(
                _differ(store.snapshot(name)[1], before[name])
                for name in changing
                if any(call.weights == name and call.kind == "train" for call in phase.graph.calls)
            )
        finally:
            executor.close()

    def assert_same(self, want: "_Trial", under: str) -> None:
        """Checks that the results are those of another trial, and names the first difference."""
        for step, tokens_of in enumerate(want.sampled):
            where = f"{under}: step {step + 1}"
            for call, tokens in tokens_of.items():
                np.testing.assert_array_equal(self.sampled[step][call], tokens, err_msg=f"{where}: {call}")
            metrics, states = (self.metrics[step], want.metrics[step]), (self.states[step], want.states[step])
            for numbers, expected in (metrics, states):
                assert numbers.keys() == expected.keys(), where
                for name in expected:
                    if not name.endswith(GAP_METRIC):  # it is rounding
                        message = f"{where}: {name}"
                        np.testing.assert_allclose(numbers[name], expected[name], RTOL, ATOL, err_msg=message)


def random_plan(phase: Phase, *, seed: int, strategy: str = "") -> Plan:
    """A random valid plan over two nodes of four devices, under some seeds with the devices of a placement strategy,
    or of the one that is given. Some of the others train two roles in one fused pipeline."""
    graph, models = phase.graph, {n: role.model for n, role in phase.roles.items() if isinstance(role, ModelRole)}
    one_device = Placement((0,), Strategy())
    by_strategy = random.Random(f"{seed} placement strategy")
    if not strategy and by_strategy.random() > 0.8:
        strategy = by_strategy.choice(STRATEGIES)
    within = _devices_by(strategy, phase)
    placements: dict[str, Placement] = {}
    for call in graph.calls:
        draw = random.Random(f"{seed} {call.plan_name.partition('#')[0]}")
        if call.kind == "host" and draw.random() < 0.5:
            placements[call.plan_name] = Placement(parts=draw.choice((2, 3)))
        tries = itertools.count() if call.row_wise and draw.random() < 0.4 else itertools.repeat(_MOST_TRIES)
        while call.kind != "host" and call.plan_name not in placements:
            placement = _random_placement(call, draw, within.get(call.plan_name))
            if next(tries) < _MOST_TRIES:
                placement = _random_parts(call, placement, draw, may_move=call.plan_name not in within)
            try:
                plan = resolve(graph, one_device, {call.plan_name: placement})
                check(plan, graph, models, NUM_DEVICES, DEVICES_PER_NODE)
            except PlanError:
                continue
            placements[call.plan_name] = placement
    offload = tuple(role for role in models if random.Random(f"{seed} {role}").random() < 0.2)
    plan = resolve(graph, one_device, placements, offload=offload)
    plan = plan if within else _with_fusion(plan, graph, models, seed)
    plan = _with_training_in_parts(plan, graph, models, seed)
    if plan.fuse:
        costs = reference_costs(NUM_DEVICES, DEVICES_PER_NODE)
        plan = with_schedules(plan, graph, step_workload(graph, phase.roles), costs)
    return reuse_training_shards(plan, graph, training_placements(plan, graph), DEVICES_PER_NODE)


def _devices_by(strategy: str, phase: Phase) -> dict[str, range]:
    """Call -> its devices under a placement strategy; none if there is no strategy, or it is not for these roles."""
    cluster = read_cluster(f"{NUM_DEVICES // DEVICES_PER_NODE}x{DEVICES_PER_NODE}:a100-80g")
    if not strategy or (strategy == INTERLEAVING and not _has_fixed_roles(phase)):
        return {}
    found = devices_of_calls(PlacementStrategy(strategy), step_workload(phase.graph, phase.roles), cluster)
    return {name: ranges[0] for name, ranges in found.items()}


def _has_fixed_roles(phase: Phase) -> bool:
    """True if the step reads weights that it does not train."""
    workload = step_workload(phase.graph, phase.roles)
    return any(call.weights not in workload.trained for call in workload.calls)


def _with_training_in_parts(plan: Plan, graph: CallGraph, models: Mapping[str, ModelConfig], seed: int) -> Plan:
    """The plan, under some seeds with all calls in at least two parts up to the train calls, if that is possible."""
    if random.Random(f"{seed} training").random() < 0.5:
        return plan
    placements = dict(plan.placements)
    for call in graph.calls:
        if call.kind != "compute":
            placement = placements.get(call.plan_name, Placement())
            placements[call.plan_name] = dataclasses.replace(placement, parts=max(2, placement.parts))
    in_parts = dataclasses.replace(plan, placements=placements)
    try:
        check(in_parts, graph, models, NUM_DEVICES, DEVICES_PER_NODE)
    except PlanError:  # the algorithm makes several updates, or needs all rows, or a placement has stages
        return plan
    return in_parts


def _with_fusion(plan: Plan, graph: CallGraph, models: Mapping[str, ModelConfig], seed: int) -> Plan:
    """The plan, under some seeds with its first two train calls fused, if that is possible."""
    draw = random.Random(f"{seed} fuse")
    calls = list(dict.fromkeys(call.plan_name for call in graph.calls if call.kind == "train"))[:2]
    if len(calls) < 2 or draw.random() < 0.5:
        return plan
    devices = tuple(range(4)) if draw.random() < 0.5 else tuple(range(4, 8))
    first = Strategy(pipeline=2, tensor=2, micro_batches=draw.choice((1, 2)))
    second = draw.choice((first, Strategy(pipeline=2, data=2, micro_batches=2), Strategy(pipeline=2, fsdp=2)))
    both = {name: Placement(devices, strategy) for name, strategy in zip(calls, (first, second), strict=True)}
    fused = dataclasses.replace(plan, placements={**plan.placements, **both}, fuse=tuple(calls))
    try:
        check(fused, graph, models, NUM_DEVICES, DEVICES_PER_NODE)
        check_fusion(fused, graph)
    except PlanError:  # they share weights, or one needs the other
        return plan
    return oppose(fused, graph)


def _in_short(plan: Plan) -> str:
    """A plan in an error message: the devices of each call, with the settings that are not defaults."""
    parts = [f"{call} on {_placed_in_short(placement)}" for call, placement in plan.placements.items()]
    lists = {"offload": plan.offload, "fuse": plan.fuse}
    return "; ".join(parts + [f"{key} {', '.join(names)}" for key, names in lists.items() if names])


def _placed_in_short(placement: Placement | Tail) -> str:
    usual, words = to_tree(type(placement)()), [devices_to_text(placement.devices) or "the host"]
    changed = {key: value for key, value in to_tree(placement).items() if value != usual[key]}
    words += [f"{key}={value}" for key, value in changed.items() if key not in ("devices", "tail", "shares")]
    if isinstance(placement, Placement):
        words += [f"(tail on {_placed_in_short(placement.tail)})"] if placement.tail is not None else []
        words += [f"(share on {_placed_in_short(share)})" for share in placement.shares]
    return " ".join(words)


def _random_placement(call: Call, draw: random.Random, within: range | None = None) -> Placement:
    """A random placement, on given devices if there are any, which may not fit the call's rows or model."""
    computes, trains = call.kind == "compute", call.kind == "train"
    uneven = () if computes or trains else (3,)  # a degree that need not divide the rows
    count = draw.choice((1, 2, 4, 8, *uneven))
    first = draw.randrange(0, NUM_DEVICES, DEVICES_PER_NODE if count == 3 else count)
    if within is not None:
        count, first = len(within), within.start
    tensor = draw.choice([n for n in (1, 2) if count % n == 0])
    pipeline, stages = 1, {}
    if not computes and (count // tensor) % 2 == 0 and draw.random() < 0.5:
        pipeline, chunks = 2, 2 if trains and draw.random() < 0.3 else 1
        schedule = draw.choice(("1f1b", "gpipe")) if trains and chunks == 1 else "1f1b"
        stages = {"pipeline": pipeline, "chunks": chunks, "schedule": schedule}
    shards = count // tensor // pipeline
    data = draw.choice([n for n in (1, 2, 3, 4, 8) if shards % n == 0])
    strategy = Strategy(
        **stages,
        data=data,
        fsdp=shards // data,
        tensor=tensor,
        micro_batches=1 if computes else draw.choice((1, 1, 2, 4, *uneven)),
        remat=draw.choice(("none", "dots", "layer")) if trains else "none",
        balance=call.kind in ("train", "infer") and draw.random() < 0.3,
    )
    if call.kind == "generate" and strategy.micro_batches == 1:
        slots, together = draw.choice((0, 2, 4, 6)), draw.choice((1, 3))
        strategy = dataclasses.replace(strategy, slots=slots, prefill_rows=together)
        if slots and max((x.num_samples for x in jax.tree.leaves(call.args) if isinstance(x, Sampling)), default=1) > 1:
            strategy = dataclasses.replace(strategy, shared_prompts=draw.choice((0, 2, 4)))
    return Placement(tuple(range(first, first + count)), strategy)


def _random_parts(call: Call, placement: Placement, draw: random.Random, *, may_move: bool = True) -> Placement:
    """A call in random parts, perhaps with another share or a tail on other devices, which may not fit."""
    placement = dataclasses.replace(placement, parts=draw.choice((1, 2, 3)))
    if not may_move:
        return placement
    if draw.random() < 0.4:
        share = dataclasses.replace(_random_placement(call, draw), rows=draw.choice((0.25, 0.5)))
        placement = dataclasses.replace(placement, shares=(dataclasses.replace(share, parts=draw.choice((1, 2))),))
    if call.kind == "generate" and draw.random() < 0.6:
        on = _random_placement(call, draw)
        strategy = dataclasses.replace(on.strategy, slots=0, shared_prompts=0, micro_batches=1)
        migrate = draw.choice(("cache", "prefill"))
        tail = Tail(on.devices, strategy, draw.choice((1, 2)), draw.choice((0.2, 0.5)), migrate)
        placement = dataclasses.replace(placement, tail=tail)
    return placement


def _small_roles(learning_rate: float, num_layers: int, reward: Callable[[list[str]], list[float]]) -> dict[str, Any]:
    """The default roles."""
    # Adam divides a gradient by its own size, so that rounding becomes whole steps if the gradient is almost zero. A
    # larger eps prevents that.
    optimizer = {"learning_rate": learning_rate, "eps": 1e-5}
    return {
        "actor": {"model": {**SMALL_MODEL, "num_layers": num_layers}, "optimizer": optimizer},
        "critic": {"init": "actor", "head": "scalar", "optimizer": optimizer},
        "reference": {"init": "actor"},
        "reward": {"function": f"{__name__}:{reward.__name__}"},
        "cost": {"function": "jaxrlhf.testing:share_of_letters"},
        "cost_critic": {"init": "actor", "head": "scalar", "optimizer": optimizer},
    }


def _shortened(settings: Any) -> Any:
    """Settings with short responses and at most two mini-batches."""
    if not isinstance(settings, dict):
        return settings
    if "temperature" in settings and "stop_ids" in settings:
        return {**settings, **SMALL_SAMPLING, "min_new_tokens": 0}
    most = {"mini_batches": 2, "max_new_tokens": 10}
    return {name: min(x, most[name]) if name in most else _shortened(x) for name, x in settings.items()}


def _numbered(tree: Any) -> dict[str, float]:
    """Every number of a tree by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"state{jax.tree_util.keystr(path)}[{i}]": x for path, leaf in leaves for i, x in enumerate(np.ravel(leaf))}


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(np.abs(np.asarray(x) - np.asarray(y)).max() > 1e-6 for x, y in pairs)
