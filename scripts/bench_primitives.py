"""Times the primitives of training: generation, log-probabilities, train steps, a whole iteration of PPO.

    python scripts/bench_primitives.py --size small                   # a processor, two minutes
    python scripts/bench_primitives.py --size 1.5b --batch 32         # a GPU
    python scripts/bench_primitives.py --gpu-suite                    # a GPU: two sizes, two batches each
    python scripts/bench_primitives.py --gpu-suite --tiny             # the same with tiny models, anywhere

Runs `ppo_step` through the call graph, the plan and the executor of real training, with actor, critic, reference and
reward model all of one size and random weights. No sequence stops early, so that figures compare. Rounds alternate
between a whole iteration, dispatched as in training, and one that waits after every call, which gives the seconds of
each; what the whole takes beyond the sum is `overhead`. Prints one JSON object.

Bounds are null where they are not known: name `--bandwidth` and `--peak-flops` for another device than those below.
"""

import argparse
import dataclasses
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.algorithms.policy import PolicyUpdate, policy_state
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate, ppo_step
from jaxrlhf.call_graph import Call, CallGraph
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.execution.executor import Executor
from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.models.architecture import cached_numbers, forward_flops, num_parameters
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Placement, Plan, resolve
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import trace

SIZES: Mapping[str, Mapping[str, Any]] = {
    "small": dict(layers=4, hidden=256, ffn=688, heads=8, kv_heads=4, vocab=2048, prompt=64, new_tokens=64),
    "medium": dict(layers=8, hidden=512, ffn=1376, heads=8, kv_heads=8, vocab=8192, prompt=128, new_tokens=128),
    "0.5b": dict(
        layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, vocab=151936, prompt=512, new_tokens=512,
        tied=True, dtype="bfloat16",
    ),
    "1.5b": dict(
        layers=28, hidden=1536, ffn=8960, heads=12, kv_heads=2, vocab=151936, prompt=512, new_tokens=512,
        tied=True, dtype="bfloat16",
    ),
    "7b": dict(
        layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064, prompt=512, new_tokens=512,
        dtype="bfloat16",
    ),
    "tiny": dict(
        layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocab=97, prompt=8, new_tokens=4, tied=True,
        dtype="bfloat16", batch=4, rounds=1,
    ),
}  # fmt: skip
"""Options by name; what is given on the command line comes before them. 0.5b, 1.5b and 7b are Qwen 2.5's."""

GPU_SUITE = [
    {"size": "0.5b", "batch": 32, "micro_batches": 4},
    {"size": "0.5b", "batch": 128, "micro_batches": 16},
    {"size": "1.5b", "batch": 32, "micro_batches": 4},
    {"size": "1.5b", "batch": 128, "micro_batches": 16},
]

BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}
"""Bytes a second from device memory, for a word in JAX's device kind: the SXM versions, of the A100 that with 80 GB."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Operations a second in bfloat16 without sparsity."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.gpu_suite:
        results = run_suite(tiny=options.tiny, rounds=options.rounds)
        print(json.dumps(results, indent=2))
        return 1 if any("failed" in result for result in results) else 0
    if options.platform == "cpu":
        mesh.use_virtual_cpu_devices(options.devices)
    print(json.dumps(measure(options), indent=2))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, those of a named size filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="the options below that are not given")
    for name in ("layers", "hidden", "ffn", "heads", "kv-heads", "vocab", "batch", "prompt", "new-tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--tied", action="store_true", default=None, help="the head is the transposed embedding")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--micro-batches", type=int, default=1, help="of all calls but generation")
    parser.add_argument("--mini-batches", type=int, default=1, help="updates of an iteration")
    parser.add_argument("--remat", choices=("none", "dots", "layer"), default="none")
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--platform", choices=("cpu", "auto"), default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, help="bytes a second from the memory of one device")
    parser.add_argument("--peak-flops", type=float, help="operations a second of one device, in the model's precision")
    parser.add_argument("--gpu-suite", action="store_true", help="0.5b and 1.5b at batches 32 and 128, a process each")
    parser.add_argument("--tiny", action="store_true", help="the suite with tiny models, on a processor")
    options = parser.parse_args(arguments)
    defaults = {"batch": 32, "rounds": 5, "tied": False, "dtype": "float32", **SIZES[options.size]}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.devices % (options.fsdp * options.tensor):
        parser.error(
            f"--devices: must be a multiple of --fsdp x --tensor = {options.fsdp * options.tensor}. Got "
            f"{options.devices}."
        )
    return options


def run_suite(*, tiny: bool, rounds: int) -> list[dict[str, Any]]:
    """Every setting in a process of its own: a device's peak memory is that of its process."""
    results = []
    for setting in GPU_SUITE:
        if tiny:
            setting = setting | {"size": "tiny", "batch": setting["batch"] // 16, "micro_batches": 2, "platform": "cpu"}
        else:
            setting = setting | {"rounds": rounds}
        words = [word for name, value in setting.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
        results.append(json.loads(done.stdout) if done.returncode == 0 else {"failed": words})
    return results


def language_model(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=options.ffn,
        num_layers=options.layers, num_heads=options.heads, num_kv_heads=options.kv_heads,
        max_position_embeddings=options.prompt + options.new_tokens, tie_embeddings=options.tied,
        dtype=options.dtype, scan_layers=options.scan_layers,
    )  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one setting."""
    lm = language_model(options)
    scalar = dataclasses.replace(lm, head="scalar", tie_embeddings=False)
    trained = OptimizerConfig(weight_decay=0.01)
    models = {"actor": lm, "critic": scalar, "reference": lm, "reward": scalar}
    roles = {
        name: ModelRole(model, trained if name in ("actor", "critic") else None, num_updates=1000)
        for name, model in models.items()
    }
    settings = PPOConfig(
        sampling=Sampling(max_new_tokens=options.new_tokens),
        actor_update=PolicyUpdate(mini_batches=options.mini_batches),
        critic_update=ValueUpdate(mini_batches=options.mini_batches),
    )
    prompts = random_prompts(options)
    methods = {name: role.methods(name) for name, role in roles.items()}
    graph = trace(ppo_step, methods, policy_state(settings), prompts, settings)
    prefill = trace(generate_step, methods, (), prompts, Sampling(max_new_tokens=1))
    plan, prefill_plan = plan_of(graph, options), plan_of(prefill, options)
    check(plan, graph, models, mesh.num_devices())

    executor = MeasuringExecutor(roles, seed=0)
    layout = Layout.over(plan[graph.calls[0]].devices, plan[graph.calls[0]].strategy)
    for i, name in enumerate(roles):
        executor.weights.initialize(name, layout, jax.random.key(i))

    def step(graph: CallGraph, plan: Plan, *, waits: bool, number: int, state: Any) -> tuple[Clocks, Any]:
        executor.waits = waits
        started = Clocks.now()
        result = executor.run(graph, plan, state, prompts, step=number)
        jax.block_until_ready((result.state, executor.weights.state("actor"), executor.weights.state("critic")))
        executor.wait()
        return Clocks.now() - started, result.state

    state: Any = policy_state(settings)
    wholes: list[Clocks] = []
    for i in range(options.rounds + 1):  # the first compiles
        if i == 1:
            executor.clocks.clear()
        _, state = step(graph, plan, waits=True, number=3 * i, state=state)
        whole, state = step(graph, plan, waits=False, number=3 * i + 1, state=state)
        step(prefill, prefill_plan, waits=True, number=3 * i + 2, state=())
        wholes += [whole] if i else []
    device = layout.mesh.devices.flat[0]
    device_memory = device.memory_stats() or {}
    executor.close()

    calls = {call.name: summary(executor.clocks[call.name]) for call in graph.calls}
    total = sum(clock["wall_s"] for clock in calls.values())
    for clock in calls.values():
        clock["fraction"] = clock["wall_s"] / total
    iteration = summary(wholes)
    iteration["overhead_wall_s"] = iteration["wall_s"] - total
    iteration["overhead_cpu_s"] = iteration["cpu_s"] - sum(clock["cpu_s"] for clock in calls.values())
    prefill_clock = summary(executor.clocks["prefill"])
    return {
        "options": {name: value for name, value in vars(options).items() if name not in ("gpu_suite", "tiny")},
        "device": {"kind": device.device_kind, "platform": device.platform, "count": options.devices},
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "parameters": num_parameters(lm),
        "iteration": iteration,
        "calls": calls,
        "prefill": prefill_clock,
        "bounds": bounds(options, lm, device.device_kind, calls, prefill_clock),
        "compile_s": executor.compile_seconds,
        "memory": {
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_peak_bytes": device_memory.get("peak_bytes_in_use"),
            "compiler_forecast_bytes": executor.forecast_bytes,
        },
    }


def generate_step(roles: Any, state: Any, prompts: Prompts, sampling: Sampling) -> tuple[dict[str, Any], Any]:
    """A step that only generates."""
    return {"rollout": roles.actor.generate(prompts, sampling)}, state


def random_prompts(options: argparse.Namespace) -> Prompts:
    """Full rows of random tokens."""
    tokens_BP = np.random.default_rng(0).integers(0, options.vocab, (options.batch, options.prompt)).astype(np.int32)
    rows_B = np.arange(options.batch)
    arrays = (tokens_BP, np.ones_like(tokens_BP, bool), rows_B.astype(np.int32), rows_B.astype(np.uint32))
    return Prompts(*map(jnp.asarray, arrays))


def plan_of(graph: CallGraph, options: argparse.Namespace) -> Plan:
    """Every call on all devices; generation in one piece, for it is bound by what it reads, not by what it keeps."""
    devices = tuple(range(options.devices))
    strategy = Strategy(
        data=options.devices // (options.fsdp * options.tensor), fsdp=options.fsdp, tensor=options.tensor,
        micro_batches=options.micro_batches, remat=options.remat,
    )  # fmt: skip
    whole = dataclasses.replace(strategy, micro_batches=1)
    return resolve(graph, Placement(devices, strategy), {"actor.generate": Placement(devices, whole)})


@dataclasses.dataclass(frozen=True)
class Clocks:
    """Seconds on the wall, and seconds of processors that this process used."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Clocks":
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall - other.wall, self.cpu - other.cpu)


def summary(clocks: Sequence[Clocks]) -> dict[str, float]:
    """Medians and minima."""
    wall, cpu = [c.wall for c in clocks], [c.cpu for c in clocks]
    return {
        "wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu),
        "wall_min_s": min(wall), "cpu_min_s": min(cpu),
    }  # fmt: skip


class MeasuringExecutor(Executor):
    """An executor that compiles its programs before it first runs them, and can wait after every call."""

    def __init__(self, roles: Mapping[str, ModelRole], *, seed: int) -> None:
        super().__init__(roles, seed=seed)
        self.waits = False
        self.clocks: dict[str, list[Clocks]] = {}
        """Call -> one entry each time that it ran and was waited for."""
        self.compile_seconds: dict[str, float] = {}
        self.forecast_bytes: dict[str, int] = {}
        """Call -> arguments, outputs and temporary arrays of its program on one device, as the compiler plans them."""
        self._calling = ""

    def _call_device(self, call: Call, plan: Plan, values: dict[str, Any], step: int) -> list[Any]:
        self._calling = "prefill" if call.kind == "generate" and call.args[1].max_new_tokens == 1 else call.name
        started = Clocks.now()
        outputs = super()._call_device(call, plan, values, step)
        if self.waits:
            jax.block_until_ready(outputs)
            self.clocks.setdefault(self._calling, []).append(Clocks.now() - started)
        return outputs

    def _new_program(self, ready: Any) -> Callable[..., Any]:
        return self._compiled_when_called(super()._new_program(ready), self._calling)

    def _compiled_when_called(self, jitted: Any, name: str) -> Callable[..., Any]:
        compiled: Any = None

        def program(*arguments: Any) -> Any:
            nonlocal compiled
            if compiled is None:
                started = time.perf_counter()
                compiled = jitted.lower(*arguments).compile()
                self.compile_seconds[name] = time.perf_counter() - started
                memory = compiled.memory_analysis()
                if memory is not None:
                    self.forecast_bytes[name] = (
                        memory.argument_size_in_bytes + memory.output_size_in_bytes
                        + memory.temp_size_in_bytes - memory.alias_size_in_bytes
                    )  # fmt: skip
            return compiled(*arguments)

        return program


def decode_step_bytes(config: ModelConfig, *, rows: int, tokens: float) -> float:
    """Bytes that one decoding step must read: all weights, and the keys and values of `tokens` tokens a row.

    Of an embedding that is not the head too, a step reads the rows of its tokens alone.
    """
    embedding = config.vocab_size * config.hidden_size
    weights = num_parameters(config) - (0 if config.tie_embeddings else embedding - rows * config.hidden_size)
    return config.itemsize * (weights + config.num_layers * rows * cached_numbers(config) * tokens)


def bounds(
    options: argparse.Namespace, lm: ModelConfig, kind: str, calls: Mapping[str, Any], prefill: Mapping[str, float]
) -> dict[str, float | None]:
    """Against what the devices could do: reading memory while decoding, matrix products otherwise."""
    bandwidth = options.bandwidth or known(BANDWIDTH, kind)
    peak = options.peak_flops or (known(PEAK_FLOPS, kind) if lm.dtype == "bfloat16" else None)
    columns = options.prompt + options.new_tokens - 1
    work = dict(rows=options.batch, columns=columns, scored=options.new_tokens)
    decode_seconds = calls["actor.generate"]["wall_s"] - prefill["wall_s"]
    steps = options.new_tokens - 1
    rate = options.batch * steps / decode_seconds if steps and decode_seconds > 0 else math.nan
    read = decode_step_bytes(lm, rows=options.batch, tokens=options.prompt + options.new_tokens / 2)
    most = bandwidth and options.devices * bandwidth / read * options.batch

    def utilisation(flops: int, call: str) -> float | None:
        return peak and flops / calls[call]["wall_s"] / (options.devices * peak)

    forward = forward_flops(lm, **work)
    train = 3 * forward  # the backward pass has two products for each of the forward's
    return {
        "decode_tokens_per_s": rate,
        "decode_bytes_per_step": read,
        "bandwidth_bytes_per_s": bandwidth,
        "decode_tokens_per_s_bound": most,
        "decode_fraction_of_bound": most and rate / most,
        "forward_flops": forward,
        "train_flops": train,
        "peak_flops_per_s": peak,
        "forward_utilisation": utilisation(forward, "reference.logprobs"),
        "train_utilisation": utilisation(train, "actor.train"),
    }


def known(table: Mapping[str, float], kind: str) -> float | None:
    return next((value for word, value in table.items() if word in kind), None)


if __name__ == "__main__":
    sys.exit(main())
