"""Times steps of PPO in two processes with a device each, one of which trains while the other generates and infers:
synchronously, and with generation one step stale, beside what the planner's simulation expects of both.

    scripts/launch_local --processes 2 -- python -m scripts.bench_staleness                  # some minutes
    scripts/launch_local --processes 2 -- python -m scripts.bench_staleness --new-tokens 96 --json

Each process has a core of its own, as nodes have. Rounds of some steps alternate between the ways; seconds are those
from a common start until both processes have everything, over the steps. The first step of a round has nothing to
overlap with. The forecast is from measurements of single calls (`jaxrlhf.calibration`), for steps without an end.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

if "JAX_PROCESS_ID" in os.environ:  # before JAX makes its threads
    os.sched_setaffinity(0, {int(os.environ["JAX_PROCESS_ID"]) % (os.cpu_count() or 1)})

import jax
import numpy as np

from jaxrlhf.algorithms.importance_weights import corrected
from jaxrlhf.algorithms.policy import PolicyUpdate
from jaxrlhf.algorithms.ppo import PPOConfig, ValueUpdate
from jaxrlhf.calibration.measure_calls import jobs, measure
from jaxrlhf.calibration.measure_machine import measure_machine
from jaxrlhf.calibration.timing import OthersLoad
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.algorithm_loading import load_algorithm
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.config.schema import OptimizerConfig
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.experience import Rollout, Sampling
from jaxrlhf.models.params import init_params
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.costs.calibration import Calibration, this_machine
from jaxrlhf.planner.costs.cost_model import CostModel, MeasuredPhase, PassSeconds
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Plan, resolve
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import ModelCall, step_workload
from jaxrlhf.programs.roles import FunctionRole, HostScores, ModelRole
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import join, rendezvous_of
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import StaleGeneration, trace
from scripts.bench_primitives import SIZES, language_model, random_prompts

ONE = Strategy()
TRAIN, INFER = Placement((0,), ONE), Placement((1,), ONE)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse(arguments), Console()
    mesh.use_virtual_cpu_devices(1)
    rendezvous = rendezvous_of(os.environ, detect=False)
    if rendezvous is None or rendezvous.count != 2:
        raise SystemExit("bench_staleness: runs in two processes. Start it with scripts/launch_local.")
    join(rendezvous)
    channel, timeline = Channel.open(), Timeline()
    lm = language_model(options)
    scalar = dataclasses.replace(lm, head="scalar", tie_embeddings=False)
    models = {"actor": lm, "reference": lm, "critic": scalar}
    optimizer = OptimizerConfig(learning_rate=1e-5)
    roles: dict[str, Any] = {name: ModelRole(model, optimizer, 1000) for name, model in models.items()}
    roles["reference"] = ModelRole(lm)
    roles["reward"] = FunctionRole(lambda rollout: HostScores(mean_token(rollout)))
    prompts = jax.device_get(random_prompts(options))
    config = PPOConfig(
        sampling=Sampling(max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens),
        actor_update=PolicyUpdate(mini_batches=1),
        critic_update=ValueUpdate(mini_batches=1),
    )
    algorithm = load_algorithm("ppo")
    first_state = jax.tree.map(np.asarray, algorithm.init_state(config))
    methods = {name: role.methods(name) for name, role in roles.items()}
    correct = functools.partial(corrected, max_weight=2.0)
    graphs = {
        name: trace(algorithm.step, methods, first_state, prompts, config, stale=stale)
        for name, stale in {
            "synchronous": None,
            "1 step stale": StaleGeneration(1),
            "1 step stale, corrected": StaleGeneration(1, correct),
        }.items()
    }
    plans = {name: planned(graph) for name, graph in graphs.items()}
    executors, states = {}, dict.fromkeys(graphs, first_state)
    for name, graph in graphs.items():
        check(plans[name], graph, models, 2, 1)
        executors[name] = executor = Executor(roles, seed=0, timeline=timeline, channel=channel)
        for i, (role, model) in enumerate(models.items()):
            home = Layout.over((1 if role == "reference" else 0,), ONE)
            params = jax.tree.map(np.asarray, init_params(model, jax.random.key(i)))
            executor.weights.load(role, home, reallocate(params, executor.weights.sets[role].shardings(home)))

    clocks: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(options.rounds + 1):  # the first compiles
        for name, graph in graphs.items():
            executor, count = executors[name], options.steps if i else 2
            channel.share(lambda: None)
            started, unread = time.perf_counter(), None
            for step in range(count):
                result = executor.run(graph, plans[name], states[name], prompts, step=step)
                states[name] = result.state
                if unread is not None:  # as a run does, a step late
                    unread.fetch()
                unread = result
            assert unread is not None
            unread.fetch()
            executor.wait()
            channel.share(lambda: None)
            clocks[name] += [(time.perf_counter() - started) / count] if i else []
    for executor in executors.values():
        executor.close()
    expected = channel.share(lambda: forecasts(graphs, plans, roles, options, console))
    seconds = {name: statistics.median(each) for name, each in clocks.items()}
    rows = [
        {
            "way": name,
            "seconds a step": round(seconds[name], 3),
            "of synchronous": round(seconds[name] / seconds["synchronous"], 3),
            "forecast": round(expected[name], 3),
            "forecast of synchronous": round(expected[name] / expected["synchronous"], 3),
            "spread": round((max(clocks[name]) - min(clocks[name])) / seconds[name], 3),
        }
        for name in graphs
    ]
    if channel.is_first:
        console.table(f"{options.rows} responses of {options.new_tokens} tokens, rounds of {options.steps} steps", rows)
        if options.json:
            print(json.dumps({"options": vars(options), "jax": jax.__version__, "rows": rows}, indent=2))
    channel.close()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=2.0, help="as of jaxrlhf.calibrate")
    parser.add_argument("--json", action="store_true", help="print JSON after the table")
    options = parser.parse_args(arguments)
    defaults = {"tied": False, "dtype": "float32", "scan_layers": False, **SIZES[options.size], **vars(options)}
    return argparse.Namespace(**{**defaults, "batch": options.rows, "samples": 1})


def planned(graph: Any) -> Plan:
    """Training on the first device, all else on the second."""
    return resolve(graph, INFER, {call.plan_name: TRAIN for call in graph.calls if call.kind == "train"})


def mean_token(rollout: Rollout) -> np.ndarray:
    """A score that costs next to nothing."""
    return np.asarray(rollout.tokens, np.float32).mean(axis=1)


def forecasts(
    graphs: dict[str, Any], plans: dict[str, Plan], roles: dict[str, Any], options: argparse.Namespace, console: Console
) -> dict[str, float]:
    """Way -> the seconds of a step that the planner expects, from measurements of single calls on this process's
    device."""
    every = {name: step_workload(graph, roles) for name, graph in graphs.items()}
    workload, watched, points = every["1 step stale, corrected"], OthersLoad(), []
    rates = measure_machine(patience_seconds=options.patience)
    for job in jobs(workload, {call.name: [ONE] for call in workload.calls}):
        if not job.strategy.slots:
            points += measure(job, dispatch_seconds=rates.dispatch_seconds, patience_seconds=options.patience)
    console.line(f"Measured; {watched.load()}")
    measured = Calibration(datetime.date.today().isoformat(), this_machine(), rates, watched.load()).with_points(points)

    def on_own_core(call: ModelCall, phase: MeasuredPhase, strategy: Strategy, rows: float) -> PassSeconds | None:
        """As if it had been measured in both: forecasts take virtual devices to share the CPUs of all processes."""
        return measured(call, phase, dataclasses.replace(strategy, data=1), rows)

    costs = CostModel(measured.on(read_cluster("2x1:cpu")), measured=on_own_core)
    found = {}
    for name, graph in graphs.items():
        problem = PartsForecast(graph, roles, costs, None).problem(plans[name])
        found[name] = steady_state(problem, (0,) * len(problem.calls)).seconds
    return found


if __name__ == "__main__":
    raise SystemExit(main())
