"""Problems made of formulas instead of costs, like those that the planner makes of a graph and a cluster."""

import dataclasses
import itertools
import random
from typing import Any

import numpy as np

from jaxrlhf.call_graph import CallKind
from jaxrlhf.planner.search.problem import CallChoices, Choice, PairSeconds, Problem
from jaxrlhf.sharding.strategy import Strategy

GIB = 2**30
STEP: tuple[tuple[str, CallKind, str, bool, tuple[str, ...], float, int], ...] = (
    # name, kind, weights, trains, needs, floating point operations per parameter and token, activations
    ("actor.generate", "generate", "actor", False, (), 6.0, 2),
    ("reference.logprobs", "infer", "reference", False, ("actor.generate",), 2.0, 1),
    ("critic.values", "infer", "critic", False, ("actor.generate",), 2.0, 1),
    ("reward.scores", "infer", "reward", False, ("actor.generate",), 2.0, 1),
    ("actor.train", "train", "actor", True, (), 6.0, 4),
    ("critic.train", "train", "critic", True, (), 6.0, 4),
)
INFERENCE = ("actor.generate", "reference.logprobs", "critic.values", "reward.scores")


def meshes(num_nodes: int, devices_per_node: int) -> list[tuple[int, int]]:
    """(first, end) of all aligned power-of-two parts of one node, and of consecutive whole nodes."""
    sizes = [size for size in (1, 2, 4) if size < devices_per_node]
    parts = [(first, first + size) for size in sizes for first in range(0, num_nodes * devices_per_node, size)]
    nodes = itertools.combinations(range(num_nodes + 1), 2)
    return parts + [(first * devices_per_node, end * devices_per_node) for first, end in nodes]


def strategies(num_devices: int, devices_per_node: int, micro_batches: tuple[int, ...]) -> list[Strategy]:
    """All with tensor parallelism within a node and no more than 8 stages."""
    found = []
    for tensor, pipeline in itertools.product((1, 2, 4, 8), repeat=2):
        if num_devices % (tensor * pipeline) == 0 and tensor <= devices_per_node:
            data = num_devices // (tensor * pipeline)
            found += [Strategy(data=data, tensor=tensor, pipeline=pipeline, micro_batches=n) for n in micro_batches]
    return found


def ppo_problem(
    num_nodes: int = 1,
    devices_per_node: int = 8,
    *,
    actor: float = 7.0,
    critic: float = 7.0,
    memory: float = 80.0,
    micro_batches: tuple[int, ...] = (1, 4),
    seed: int | None = None,
    offload: bool = False,
) -> Problem:
    """PPO for models of so many billion parameters on devices of so many GiB.

    Args:
        seed: Of factors on every choice's seconds, between 0.8 and 1.25. None: no such factors.
        offload: Whether there are also choices with weights in host memory, of the models that are not trained.
    """
    chance = random.Random(seed)
    sizes = {"actor": actor, "reference": actor, "critic": critic, "reward": critic}
    places = meshes(num_nodes, devices_per_node)
    calls = []
    for name, kind, weights, trains, _, per_token, kept in STEP:
        size, choices = sizes[weights], []
        for first, end in places:
            for strategy in strategies(end - first, devices_per_node, micro_batches):
                factor = chance.uniform(0.8, 1.25) if seed is not None else 1.0
                seconds = factor * _seconds(kind, size * per_token, strategy)
                weight_bytes = int(2 * size * 1e9 / (strategy.tensor * strategy.pipeline))
                rows = kept * size**0.5 * 40 / (strategy.data * strategy.tensor * strategy.micro_batches)
                held: dict[str, Any]
                working = int(rows * GIB)
                if trains:
                    held = dict(resting=2 * weight_bytes + 6 * weight_bytes // strategy.data)
                else:
                    held = {"copy" if weights in ("actor", "critic") else "resting": weight_bytes}
                choices.append(Choice(first, end, strategy, seconds, **held, working=working))
                if offload and weights in ("reference", "reward"):
                    load, working = weight_bytes / 20e9, working + weight_bytes
                    moved: dict[str, Any] = dict(load=load, unload=load, offloaded=True)
                    choices.append(Choice(first, end, strategy, seconds, working=working, **moved))
        needs = INFERENCE if trains else () if kind == "generate" else ("actor.generate",)
        calls.append(CallChoices(name, kind, weights, weights, trains, needs, tuple(choices)))
    positions = {call.name: i for i, call in enumerate(calls)}
    reallocations = {}
    for train, reader in (("actor.train", "actor.generate"), ("critic.train", "critic.values")):
        i, j = positions[train], positions[reader]
        size = sizes[calls[i].weights]
        reallocations[i, j] = _reallocation(calls[i].choices, calls[j].choices, 2e9 * size, devices_per_node)
    transfers = {}
    for name in INFERENCE[1:]:
        transfers[0, positions[name]] = _transfer(calls[0].choices, calls[positions[name]].choices, 2e-2)
    for name in INFERENCE:
        for train in ("actor.train", "critic.train"):
            i, j = positions[name], positions[train]
            transfers[i, j] = _transfer(calls[i].choices, calls[j].choices, 1e-2)
    num_devices = num_nodes * devices_per_node
    capacity = (int(memory * GIB),) * num_devices
    return Problem(tuple(calls), num_devices, devices_per_node, capacity, reallocations, transfers, tokens=512 * 2048)


def _seconds(kind: str, work: float, strategy: Strategy) -> float:
    """Work over devices, longer by what tensor parallelism, stages and small parts cost."""
    slow = 1 + 0.08 * (strategy.tensor - 1) ** 0.7 + 0.01 * strategy.data**0.5
    stages, parts = strategy.pipeline, strategy.micro_batches
    if kind == "generate":  # reads its weights for every token: tensor parallelism helps, stages do not
        return work / strategy.num_devices * slow * stages**0.5 + 20 / (strategy.tensor * stages**0.5)
    bubble = 1 + (stages - 1) / (parts * stages)
    return work / strategy.num_devices * slow * bubble + 0.05 * parts + 0.3


def _columns(choices: tuple[Choice, ...]) -> np.ndarray:
    return np.array([(c.first, c.end, c.strategy.pipeline, c.strategy.data, c.strategy.tensor) for c in choices])


def _reallocation(
    sources: tuple[Choice, ...], targets: tuple[Choice, ...], weight_bytes: float, devices_per_node: int
) -> PairSeconds:
    source, target = _columns(sources)[:, None], _columns(targets)[None]
    same = (source == target).all(-1)
    across = (
        np.minimum(source[..., 0], target[..., 0]) // devices_per_node
        != (np.maximum(source[..., 1], target[..., 1]) - 1) // devices_per_node
    )
    received = weight_bytes / (target[..., 2] * target[..., 4])
    return PairSeconds.of(np.where(same, 0.0, 1e-3 + received / np.where(across, 20e9, 150e9)))


def _transfer(sources: tuple[Choice, ...], targets: tuple[Choice, ...], seconds: float) -> PairSeconds:
    source, target = _columns(sources)[:, None], _columns(targets)[None]
    same = (source[..., :2] == target[..., :2]).all(-1) & (source[..., 3] == target[..., 3])
    return PairSeconds.of(np.where(same, 0.0, seconds / target[..., 3]))


def random_problem(seed: int, *, most_choices: int = 6) -> Problem:
    """A step of a few calls that need each other in any way, on up to eight devices, with whole seconds: many ties."""
    chance = random.Random(seed)
    devices_per_node = chance.choice((2, 4))
    num_nodes = chance.choice((1, 2))
    places = meshes(num_nodes, devices_per_node)
    num_calls = chance.randint(1, 7)
    sets = [chance.choice("abc") for _ in range(num_calls)]
    trained = {name for name in "abc" if chance.random() < 0.7}
    trains = [name in trained and chance.random() < 0.5 for name in sets]
    never = sorted(set("abc") - {name for name, train in zip(sets, trains, strict=True) if train})
    adapts = random.Random(-seed)
    bases = [adapts.choice(never) if never and name not in never and adapts.random() < 0.5 else "" for name in sets]
    calls = []
    for j in range(num_calls):
        choices = []
        for _ in range(chance.randint(1, most_choices)):
            first, end = chance.choice(places)
            strategy = chance.choice(strategies(end - first, devices_per_node, (1, 2)))
            load = chance.choice((0.0, 0.0, 1.0))
            choices.append(
                Choice(
                    first,
                    end,
                    strategy,
                    float(chance.randint(1, 9)),
                    *(sizes := [chance.randint(0, 9) for _ in range(3)]),
                    shared_with_training=adapts.randint(0, sizes[2]),
                    base=adapts.randint(0, 3) if bases[j] else 0,
                    load=load,
                    unload=load,
                    offloaded=load > 0,
                )
            )
        needs = tuple(f"call{i}" for i in range(j) if chance.random() < 0.4)
        kind = "train" if trains[j] else "infer"
        calls.append(CallChoices(f"call{j}", kind, sets[j], sets[j], trains[j], needs, tuple(choices), bases[j]))
    table = np.random.default_rng(seed)

    def seconds(i: int, j: int) -> PairSeconds:
        return PairSeconds.of(table.integers(0, 3, (len(calls[i].choices), len(calls[j].choices))).astype(float))

    pairs = itertools.product(range(num_calls), repeat=2)
    reallocations = {
        (i, j): seconds(i, j) for i, j in pairs if i != j and trains[i] and sets[i] == sets[j] and chance.random() < 0.8
    }
    transfers = {
        (i, j): seconds(i, j)
        for j in range(num_calls)
        for i in range(j)
        if f"call{i}" in calls[j].needs and chance.random() < 0.6
    }
    capacity = tuple(chance.choice((20, 25)) for _ in range(num_nodes) for _ in range(devices_per_node))
    return Problem(
        tuple(calls), num_nodes * devices_per_node, devices_per_node, capacity, reallocations, transfers, tokens=1
    )


def sharing_memory(problem: Problem) -> Problem:
    """The same where the devices of a node share one memory, as large as two of theirs."""
    per_node = problem.devices_per_node
    capacity = tuple(2 * size for size in problem.capacity[::per_node])
    return dataclasses.replace(problem, capacity=capacity, devices_per_memory=per_node)
