"""Times a rollout and what follows it (reference, reward model, a Python function) in two processes with a device each:
one call after another, and with the last sequences in a tail on one device while the other begins with inference.

    scripts/launch_local --processes 2 -- python -m scripts.bench_fused_generation                  # some minutes
    scripts/launch_local --processes 2 -- python -m scripts.bench_fused_generation --rows 128 --json

Each process has a core of its own, as nodes have. Lengths are lognormal, the 99.9th percentile ten times the median, as
in `bench_rollouts`. Rounds alternate between the ways; seconds are those from a common start until both processes have
everything. All ways must give the same tokens. `hidden` is the fraction of the seconds of inference calls that lie
within generation, from the timeline of the process without the tail. `--forecast` measures the calls by themselves, in
one of the processes, and prints what the planner's simulation expects of each way, and how near the best the one is
that it would choose. It knows nothing of the Python function.
"""

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import time
import zlib
from collections.abc import Sequence
from typing import Any

if "JAX_PROCESS_ID" in os.environ:  # before JAX makes its threads
    os.sched_setaffinity(0, {int(os.environ["JAX_PROCESS_ID"]) % (os.cpu_count() or 1)})

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.calibration.measure_calls import jobs, measure
from jaxrlhf.calibration.measure_machine import measure_machine
from jaxrlhf.calibration.timing import OthersLoad
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.plan_config import Placement, ResponseLengths, Tail
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.models.params import Params, init_params
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import Event
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.costs.calibration import Calibration, this_machine
from jaxrlhf.planner.costs.cost_model import CostModel, MeasuredPhase, PassSeconds
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import Plan, resolve
from jaxrlhf.planner.search.problem import Problem
from jaxrlhf.planner.workload import ModelCall, step_workload
from jaxrlhf.programs.roles import FunctionRole, HostScores, ModelRole
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.rewards.workers import Workers
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.processes import join, rendezvous_of
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import trace
from scripts.bench_primitives import SIZES, language_model, random_prompts
from scripts.bench_rollouts import POOL, drawn_lengths, nearest

BOTH, ONE = Strategy(data=2), Strategy()
INFERENCES = ("reference.logprobs", "reward.scores")


def rollout_and_inference(roles: Any, state: Any, prompts: Prompts, sampling: Sampling) -> tuple[dict[str, Any], Any]:
    """The first half of a GRPO step."""
    rollout = roles.actor.generate(prompts, sampling)
    found = {"logprobs": roles.reference.logprobs(rollout), "scores": roles.reward.scores(rollout)}
    found |= {"judged": roles.judge.scores(rollout)}
    return {"tokens": rollout.tokens, "response": rollout.response, **found}, state


def judge(seconds: float, workers: int) -> FunctionRole:
    """A Python function that takes so long for a response, of which it judges some at a time."""
    pool = Workers("judge", workers)

    def score(rollout: Rollout) -> HostScores:
        def one(index: int) -> float:
            time.sleep(seconds)
            return float(rollout.response[index].sum())

        count, described = len(rollout.tokens), lambda index: f" for response {index}"
        return HostScores(np.array(pool.run(one, count, describe=described, timeout_seconds=0, late=[]), np.float32))

    return FunctionRole(score)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse(arguments), Console()
    mesh.use_virtual_cpu_devices(1)
    rendezvous = rendezvous_of(os.environ, detect=False)
    if rendezvous is None or rendezvous.count != 2:
        raise SystemExit("bench_fused_generation: runs in two processes. Start it with scripts/launch_local.")
    join(rendezvous)
    channel = Channel.open()
    lm = language_model(options)
    scalar = dataclasses.replace(lm, head="scalar", tie_embeddings=False, num_layers=max(1, lm.num_layers // 4))
    models = {"actor": lm, "reference": lm, "reward": scalar}
    roles: dict[str, Any] = {name: ModelRole(model) for name, model in models.items()}
    roles["judge"] = judge(options.judge_seconds, options.workers)
    weights = {name: init_params(model, jax.random.key(i)) for i, (name, model) in enumerate(models.items())}
    weights["actor"]["lm_head"] *= 0.1  # every token is nearly as likely
    stop_ids = tuple(range(max(1, round(lm.vocab_size / (2 * options.mean)))))
    sampling = Sampling(max_new_tokens=options.new_tokens, stop_ids=stop_ids)
    prompts = long_tailed(options, weights["actor"], sampling, lm)
    graph = trace(rollout_and_inference, {n: r.methods(n) for n, r in roles.items()}, (), prompts, sampling)
    ways = {name: planned(graph, placements) for name, placements in plans(options).items()}
    for plan in ways.values():
        check(plan, graph, models, 2, 1)

    timeline = Timeline()
    executor = Executor(roles, seed=0, timeline=timeline, channel=channel)
    for name, params in weights.items():
        layout = Layout.over((0, 1), BOTH)
        shardings = executor.weights.sets[name].shardings(layout)
        executor.weights.load(name, layout, reallocate(jax.tree.map(np.asarray, params), shardings))
    clocks: dict[str, list[float]] = {name: [] for name in ways}
    hidden: dict[str, list[float]] = {name: [] for name in ways}
    tokens: dict[str, Any] = {}
    for i in range(options.rounds + 1):  # the first compiles
        for name, plan in ways.items():
            channel.share(lambda: None)
            before, started = len(timeline.events()), time.perf_counter()
            result = executor.run(graph, plan, (), prompts, step=0)
            executor.wait()
            result.fetch()
            channel.share(lambda: None)
            clocks[name] += [time.perf_counter() - started] if i else []
            events = timeline.events()[before:]
            ended = channel.share(lambda events=events: max(e.end for e in events if e.kind == "generate"))
            hidden[name] += [fraction_before(ended, [e for e in events if e.kind == "infer"])] if i else []
            if i and options.events:
                console.table(f"{name}, process {jax.process_index()}", described(events))
            got = result.fetch()
            tokens.setdefault("tokens", got["tokens"])
            tokens["lengths"] = got["response"].sum(axis=1)
            assert (got["tokens"] == tokens["tokens"]).all(), f"{name}: other tokens"
    executor.close()
    seconds = {name: statistics.median(each) for name, each in clocks.items()}
    unfused = min(seconds[name] for name in ways if "tail" not in name)
    expected: dict[str, float] = {}
    if options.forecast:
        lengths = ResponseLengths(
            mean=float(tokens["lengths"].mean()),
            p99=int(np.quantile(tokens["lengths"], 0.99, method="inverted_cdf")),
        )
        expected = channel.share(lambda: forecasts(graph, roles, ways, lengths, options, console))
    rows = [
        {
            "way": name,
            "seconds": round(seconds[name], 3),
            "of the best unfused": round(seconds[name] / unfused, 3),
            **({"forecast s": round(expected[name], 3)} if expected else {}),
            "hidden": round(statistics.median(hidden[name]), 2),
            "spread": round((max(clocks[name]) - min(clocks[name])) / seconds[name], 3),
        }
        for name in ways
    ]
    if jax.process_index() == 1:  # that without the tail
        lengths = tokens["lengths"]
        title = f"{options.rows} responses, mean {lengths.mean():.1f}, longest {lengths.max()}"
        console.table(title, rows)
        if expected:
            tails = [name for name in ways if "tail" in name]
            choice, best = min(tails, key=lambda name: expected[name]), min(tails, key=lambda name: seconds[name])
            console.line(
                f"By the forecast: {choice}, which takes {seconds[choice] / seconds[best]:.3f} of the fastest, {best}"
            )
        if options.json:
            print(json.dumps({"options": vars(options), "jax": jax.__version__, "rows": rows}, indent=2))
    channel.close()
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256, help="the most")
    parser.add_argument("--mean", type=float, default=33.0, help="of the new tokens")
    parser.add_argument(
        "--slots", type=int, nargs="*", default=[32], help="of a process, as further ways without a tail"
    )
    parser.add_argument("--tails", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.4, 0.6])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3], help="of the rows, inferred after the tail")
    parser.add_argument("--judge-seconds", type=float, default=0.0, help="of a Python function, for each response")
    parser.add_argument("--workers", type=int, default=16, help="responses that it judges at a time")
    parser.add_argument("--parts", type=int, default=2, help="before the tail")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forecast", action="store_true", help="beside what the planner expects; some minutes more")
    parser.add_argument("--patience", type=float, default=2.0, help="as of jaxrlhf.calibrate, for --forecast")
    parser.add_argument("--events", action="store_true", help="print what each process does when")
    parser.add_argument("--json", action="store_true", help="print JSON after the table")
    options = parser.parse_args(arguments)
    defaults = {"tied": False, "dtype": "float32", "scan_layers": False, **SIZES[options.size], **vars(options)}
    return argparse.Namespace(**{**defaults, "batch": options.rows, "samples": 1})


def long_tailed(options: argparse.Namespace, params: Params, sampling: Sampling, model: Any) -> Prompts:
    """Prompts with lognormal lengths, found on the first device of each process alike."""
    layout = Layout.over(mesh.own_positions(), ONE)
    noise: Any = np.array([0, 0, zlib.crc32(b"actor.generate")], np.uint32)
    run = jax.jit(lambda some: generate(params, some, noise, jnp.float32(1), sampling, model, layout).lengths)
    pool = jax.device_get(random_prompts(argparse.Namespace(**{**vars(options), "batch": POOL * options.rows})))
    parts = [jax.tree.map(lambda x, i=i: x[i::POOL], pool) for i in range(POOL)]
    lengths = np.stack([np.asarray(run(part)) for part in parts], axis=1).ravel()
    targets = drawn_lengths(options)
    assert targets is not None
    return jax.tree.map(lambda x: x[nearest(targets, lengths)], pool)


def plans(options: argparse.Namespace) -> dict[str, dict[str, Placement]]:
    """Way -> placements of its calls."""
    both = dict.fromkeys(INFERENCES, Placement((0, 1), BOTH))
    found = {"all at once": {"actor.generate": Placement((0, 1), BOTH), **both}}
    for slots in options.slots:
        found[f"{slots} slots"] = {"actor.generate": Placement((0, 1), Strategy(data=2, slots=slots)), **both}
    for rows in options.tails:
        tail = Tail((0,), ONE, rows=rows)
        generation = Placement((0, 1), BOTH, parts=options.parts, tail=tail)
        for share in options.shares:
            shares = Placement((1,), ONE, parts=options.parts, shares=(Placement((0,), ONE, rows=max(rows, share)),))
            name = f"tail of {rows:.0%}, {max(rows, share):.0%} of inference after it"
            judged = Placement(parts=options.parts + 1)
            found[name] = {"actor.generate": generation, "judge.scores": judged, **dict.fromkeys(INFERENCES, shares)}
    return found


def forecasts(
    graph: Any, roles: dict[str, Any], ways: dict[str, Plan], lengths: ResponseLengths, options: argparse.Namespace,
    console: Console,
) -> dict[str, float]:  # fmt: skip
    """Way -> the seconds that the planner expects, from measurements of single calls on this process's device."""
    workload, watched, points = step_workload(graph, roles, lengths), OthersLoad(), []
    rates = measure_machine(patience_seconds=options.patience)
    for job in jobs(workload, {call.name: [ONE] for call in workload.calls}):
        if job.strategy.slots <= options.rows // 2:  # a process has no more
            points += measure(job, dispatch_seconds=rates.dispatch_seconds, patience_seconds=options.patience)
    console.line(f"Measured; {watched.load()}")
    measured = Calibration(datetime.date.today().isoformat(), this_machine(), rates, watched.load()).with_points(points)

    def on_own_core(call: ModelCall, phase: MeasuredPhase, strategy: Strategy, rows: float) -> PassSeconds | None:
        """As if it had been measured in both: forecasts take virtual devices to share the CPUs of all processes."""
        return measured(call, phase, dataclasses.replace(strategy, data=1), rows)

    costs = CostModel(measured.on(read_cluster("2x1:cpu")), measured=on_own_core)
    forecast = PartsForecast(graph, roles, costs, lengths)
    return {name: alone(forecast.problem(plan)) for name, plan in ways.items()}


def alone(problem: Problem) -> float:
    """Seconds of one iteration by itself, each device working in the order of dispatch. (Nothing is trained here, so
    that in consecutive iterations the next one would begin to generate before this one has ended.)"""
    ends, free = dict[str, float](), [0.0] * problem.num_devices
    for call in problem.calls:
        (choice,) = call.choices
        start = max([*(ends[name] for name in call.needs), *(free[device] for device in choice.devices)])
        ends[call.name] = start + choice.seconds
        for device in choice.devices:
            free[device] = ends[call.name]
    return max(free)


def planned(graph: Any, placements: dict[str, Placement]) -> Plan:
    return resolve(graph, Placement((0, 1), BOTH), placements)


def described(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Events as a table."""
    first = min(event.start for event in events)
    return [
        {
            "event": e.name,
            "kind": e.kind,
            "start": round(e.start - first, 3),
            "end": round(e.end - first, 3),
            "": e.part,
        }
        for e in sorted(events, key=lambda event: event.start)
    ]


def fraction_before(moment: float, events: Sequence[Event]) -> float:
    """The fraction of the seconds of some events that lies before a moment."""
    total = sum(event.end - event.start for event in events)
    return sum(max(0.0, min(event.end, moment) - event.start) for event in events) / total if total else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
