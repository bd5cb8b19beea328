"""Workloads to check the planner with: some by name, and as many by chance as are asked for.

Each is a shipped config with some of its values set, and a cluster: what `python -m jaxrlhf.plan` is given. So every
case can be planned by the command that it prints.
"""

import dataclasses
import math
import random
import shlex
from pathlib import Path

from jaxrlhf.cluster.cluster_text import kinds, read_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.size_overrides import with_response_tokens, with_synthetic_prompts
from jaxrlhf.run.step_draft import StepDraft, draft_step

KINDS = ("a100-80g", "h100", "a100-40g")


@dataclasses.dataclass(frozen=True)
class Machines:
    """Nodes that are alike, of a kind that is known or of one with a part of its memory, or faster links."""

    nodes: int
    devices_per_node: int
    kind: str
    memory: float = 1.0
    """Factor of the memory that a plan may fill."""
    links: float = 1.0
    """Factor of the bandwidth of links and networks."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        memory = f", {self.memory:g} x memory" if self.memory != 1 else ""
        links = f", {self.links:g} x links" if self.links != 1 else ""
        return f"{self.nodes}x{self.devices_per_node}:{self.kind}{memory}{links}"

    def text(self, folder: Path) -> str:
        """The value of `--cluster`. The description of an unknown kind is written to a folder."""
        if self.memory == self.links == 1:
            return str(self)
        base = kinds()[self.kind]
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.nodes}x{self.devices_per_node}-{self.kind}-memory-{self.memory:g}-links-{self.links:g}.yaml"
        (folder / name).write_text(
            "kinds:\n"
            "  changed:\n"
            f"    base: {self.kind}\n"
            f"    memory: {{bytes: {round(base.memory.bytes * self.memory)}}}\n"
            f"    link: {{bandwidth: {base.link.bandwidth * self.links}}}\n"
            f"    network: {{bandwidth: {base.network.bandwidth * self.links}}}\n"
            "groups:\n"
            f"  - {{nodes: {self.nodes}, devices_per_node: {self.devices_per_node}, kind: changed}}\n"
        )
        return str(folder / name)

    def cluster(self, folder: Path) -> Cluster:
        return read_cluster(self.text(folder))


@dataclasses.dataclass(frozen=True)
class Case:
    """A run and the machines that it is planned for."""

    name: str
    config: str
    values: tuple[str, ...]
    """Values of the config to override, `a.b=c`."""
    machines: Machines
    prompt: int
    response: int | None = None
    """Tokens. None: as the config says."""

    def on(self, **changes: float) -> "Case":
        """The same on other machines."""
        return dataclasses.replace(self, machines=dataclasses.replace(self.machines, **changes))

    def draft(self) -> StepDraft:
        """The step, traced."""
        config = load_run(self.config, self.values)
        if self.response is not None:
            config = with_response_tokens(config, self.response)
        config, tables = with_synthetic_prompts(config, self.prompt)
        return draft_step(config, tables=tables, on_cpu=False)

    def command(self, folder: Path, strategy: str) -> str:
        """The command that plans it. A description of its machines, where they need one, is written to a folder."""
        words = ["python", "-m", "jaxrlhf.plan", "--config", self.config]
        for value in self.values:
            words += ["--set", value]
        words += ["--cluster", self.machines.text(folder), "--prompt-tokens", str(self.prompt)]
        if self.response is not None:
            words += ["--response-tokens", str(self.response)]
        return shlex.join([*words, "--costs", "analytic", "--strategy", strategy])


# -- by name -----------------------------------------------------------------------------------------------------------


def _ppo(name: str, actor: str, critic: str, machines: Machines, *, rows: int = 512) -> Case:
    values = (f"roles.actor.model.preset={actor}", f"roles.critic.model.preset={critic}", f"batch_size={rows}")
    reward = (f"roles.reward.model.preset={critic}",)
    return Case(name, "ppo_70b_128gpus", values + reward, machines, prompt=1024)


NAMED = (
    _ppo("7b and 7b, 4 H100", "7b", "7b", Machines(1, 4, "h100")),
    _ppo("34b and 34b, 16 A100", "34b", "34b", Machines(2, 8, "a100-80g"), rows=1024),
    _ppo("13b and 70b, 32 A100", "13b", "70b", Machines(4, 8, "a100-80g")),
    _ppo("13b and 34b, 32 A100", "13b", "34b", Machines(4, 8, "a100-80g")),
    _ppo("70b and 7b, 32 A100", "70b", "7b", Machines(4, 8, "a100-80g")),
    _ppo("70b and 7b, 64 A100", "70b", "7b", Machines(8, 8, "a100-80g")),
    _ppo("70b and 7b, 128 A100", "70b", "7b", Machines(16, 8, "a100-80g")),
)
"""Cases in which plans were lost once: scarce memory, which the fastest choices do not share; groups of models that fit
only together."""


# -- by chance ---------------------------------------------------------------------------------------------------------

_MODELS = {
    "1b": (1.2, "{preset: 7b, hidden_size: 2048, intermediate_size: 8192, num_layers: 16}"),
    "3b": (3.2, "{preset: 7b, hidden_size: 3072, intermediate_size: 8192, num_layers: 28, num_heads: 24}"),
    "7b": (8.0, "{preset: 7b}"),
    "13b": (13.9, "{preset: 13b}"),
    "34b": (36.0, "{preset: 34b}"),
    "70b": (70.6, "{preset: 70b}"),
}
"""Name -> billions of parameters, fields of the model."""
_ALGORITHMS = ("ppo", "grpo", "safe_rlhf", "ppo", "remax")
_SIZES = ((1, 4), (1, 8), (2, 8), (3, 8), (4, 8), (6, 8), (8, 8), (12, 8), (16, 8))
"""Nodes and devices of each."""
_BYTES_TRAINED, _BYTES_READ = 18, 2
"""Bytes of a parameter: master weights, moments, gradients and a copy to compute with; that copy alone."""


def random_cases(number: int, seed: int, *, most_devices: int = 128, most_billions: float = 71) -> list[Case]:
    """Cases by chance. The first ones are the same, whatever their number.

    Args:
        most_devices: Of machines.
        most_billions: Parameters of a model.
    """
    return [_random_case(k, seed, most_devices, most_billions) for k in range(number)]


def _random_case(number: int, seed: int, most_devices: int, most_billions: float) -> Case:
    chance = random.Random(f"{seed}/{number}")
    models = [name for name, (billions, _) in _MODELS.items() if billions <= most_billions]
    algorithm = _ALGORITHMS[number % len(_ALGORITHMS)]
    actor, critic = chance.choice(models), chance.choice(models)
    reward = chance.choice([*models, None])
    rows, mini_batches = chance.choice((32, 64, 96, 128, 256, 480, 512, 1024)), chance.choice((1, 2, 4, 8))
    lora = chance.random() < 0.3
    values = [f"batch_size={rows}", f"roles.actor.model={_MODELS[actor][1]}"]
    trained, read = _MODELS[actor][0], _MODELS[actor][0]
    if lora:
        values.append("roles.actor.lora={rank: 16}")
        trained, read = 0.1, 2 * read
    scorers = ["reward", "cost"] if algorithm == "safe_rlhf" else ["reward"]
    critics = {"ppo": ["critic"], "safe_rlhf": ["critic", "cost_critic"]}.get(algorithm, [])
    for role in critics:
        model = f"{{model: {_MODELS[critic][1]}, head: scalar, optimizer: {{learning_rate: 1.0e-6}}}}"
        values += [f"roles.{role}={model}", f"settings.{role.removeprefix('cost_')}_update.mini_batches={mini_batches}"]
        trained += _MODELS[critic][0]
    for role in scorers:
        if reward is not None:
            values.append(f"roles.{role}={{model: {_MODELS[reward][1]}, head: scalar}}")
            read += _MODELS[reward][0]
        elif algorithm == "ppo":
            values.append(f"roles.{role}={{function: exact_answer}}")
    values.append(f"settings.actor_update.mini_batches={mini_batches}")
    if algorithm == "grpo":
        values.append(f"settings.sampling.num_samples={chance.choice((4, 8))}")
    if algorithm != "ppo":
        values += ["warm_start=null", "evaluation=null"]
    sizes = dict(prompt=chance.choice((128, 512, 1024, 2048)), response=chance.choice((128, 512, 1024, 2048, 4096)))
    needed = (_BYTES_TRAINED * trained + _BYTES_READ * read) * 1e9
    config = "ppo_70b_128gpus" if algorithm == "ppo" else f"{algorithm}_arithmetic"
    billions = " and ".join(dict.fromkeys((actor, *([critic] if critics else []), *([reward] if reward else []))))
    machines = _machines(chance, needed, most_devices)
    name = f"{seed}/{number}: {algorithm}{' lora' if lora else ''} {billions}, {rows} rows"
    return Case(name, config, tuple(dict.fromkeys(values)), machines, **sizes)


def _machines(chance: random.Random, needed: float, most_devices: int) -> Machines:
    """Machines with memory for 1.2 to 12 times what weights and optimizer take, as nearly as there are."""
    times, memory = 1.2 * 10 ** chance.random(), chance.choice((1.0, 1.0, 0.8))

    def off(machines: Machines) -> float:
        room = machines.num_devices * machines.memory * kinds()[machines.kind].capacity
        return abs(math.log(room / (needed * times)))

    sizes = [size for size in _SIZES if math.prod(size) <= most_devices]
    nearest = [min((Machines(*size, kind, memory) for size in sizes), key=off) for kind in KINDS]
    return chance.choice(sorted(nearest, key=off)[:2])


# -- small ones by chance ----------------------------------------------------------------------------------------------

_SMALL = ("ppo", "grpo", "dpo", "ppo", "remax", "grpo with a reward model")


def small_cases(number: int, seed: int) -> list[Case]:
    """Cases by chance of three to five calls on two or four devices, with few rows, whose number has few divisors; with
    memory from scarce to plenty. The first ones are the same, whatever their number."""
    return [_small_case(k, seed) for k in range(number)]


def _small_case(number: int, seed: int) -> Case:
    chance = random.Random(f"small {seed}/{number}")
    kind = _SMALL[number % len(_SMALL)]
    algorithm = kind.partition(" ")[0]
    model, other, mini_batches = chance.choice(("1b", "3b", "7b")), chance.choice(("1b", "3b")), chance.choice((1, 2))
    values = [f"batch_size={dict(ppo=2, dpo=8).get(algorithm, 4)}", f"roles.actor.model={_MODELS[model][1]}"]
    updates = dict(ppo=("actor_update", "critic_update"), dpo=("update",)).get(algorithm, ("actor_update",))
    values += [f"settings.{update}.mini_batches={mini_batches}" for update in updates]
    trained, read = _MODELS[model][0], _MODELS[model][0]
    if lora := algorithm != "dpo" and chance.random() < 0.3:
        values.append("roles.actor.lora={rank: 16}")
        trained, read = 0.1, 2 * read
    if algorithm == "ppo":
        values += [f"roles.critic.model={_MODELS[other][1]}", "roles.reward={function: exact_answer}"]
        trained += _MODELS[other][0]
    else:
        values += ["warm_start=null", "evaluation=null"]
    if algorithm == "grpo":
        values.append("settings.sampling.num_samples=2")
    if kind != algorithm:
        values.append(f"roles.reward={{model: {_MODELS[other][1]}, head: scalar}}")
        read += _MODELS[other][0]
    size = chance.choice(((1, 4), (2, 2)) if kind in ("grpo", "dpo") else ((1, 2),))
    machines = Machines(*size, chance.choice(KINDS))
    room = machines.num_devices * kinds()[machines.kind].capacity
    needed = (_BYTES_TRAINED * trained + _BYTES_READ * read) * 1e9
    machines = dataclasses.replace(machines, memory=round(needed / room * 1.1 * 2.5 ** chance.random(), 3))
    billions = " and ".join(dict.fromkeys((model, *([other] if algorithm == "ppo" or kind != algorithm else []))))
    name = f"small {seed}/{number}: {algorithm}{' lora' if lora else ''} {billions}"
    config = "ppo_70b_128gpus" if algorithm == "ppo" else f"{algorithm}_arithmetic"
    return Case(name, config, tuple(values), machines, 512, chance.choice((128, 512, 2048)))
