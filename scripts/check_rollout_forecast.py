"""Compares the seconds that the planner predicts for rollouts with those that they take, for three distributions of
response lengths, in every number of slots that a search looks at and with all rows at once.

    python -m scripts.check_rollout_forecast                          # a CPU, half an hour
    python -m scripts.check_rollout_forecast --only "nearly equal"    # one distribution
    python -m scripts.check_rollout_forecast --rows 128 --json

The phases of a rollout are measured as `jaxrlhf.calibrate` measures them, in turn with that rollout, since a virtual
machine is faster or slower some minutes later. Of more prompts than are timed, those are
taken whose responses come nearest to the quantiles of a distribution, lognormal or geometric, since a forecast is of
what is expected, and the longest of some responses is a matter of chance. Forecasts know the mean and the 99th
percentile alone. The exit status is 1 where a rollout in slots is out by more than 20 %, or what the planner would
choose takes more than 10 % longer than the fastest. Where other processes had more than a twentieth of the CPUs, that
says little.
"""

import argparse
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.calibration.measure_calls import jobs, measure_beside
from jaxrlhf.calibration.measure_machine import measure_machine
from jaxrlhf.calibration.timing import OthersLoad, Timing
from jaxrlhf.cluster.cluster_text import local_cluster
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import Params, init_params
from jaxrlhf.observe.console import Console
from jaxrlhf.planner.costs.calibration import Calibration, Case, Point, this_machine
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.rollout_steps import simulate_slots, slot_choices
from jaxrlhf.planner.workload import ModelCall, Workload, step_workload
from jaxrlhf.programs.call_programs import slots_of
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from jaxrlhf.tracing import trace
from scripts.bench_primitives import SIZES, generate_step, language_model, random_prompts
from scripts.bench_rollouts import POOL, lognormal_sigma, nearest

WITHIN, NEAR_BEST = 0.2, 0.1
NOISE, TEMPERATURE = jnp.array([0, 0, 0], jnp.uint32), jnp.float32(1.0)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long responses are made."""

    name: str
    mean_more: float
    """Tokens on average beyond the fewest, if there were no limit: a fraction of the limit, as below."""
    fewest: float = 0.0
    lognormal: bool = False
    """With the 99.9th percentile at ten times the median. Otherwise the tokens beyond the fewest are geometric."""

    def of_rows(self, rows: int, limit: int) -> np.ndarray:
        """As many lengths, each of an equal part of the distribution, in an order by chance."""
        parts, mean = np.random.default_rng(0).permutation((np.arange(rows) + 0.5) / rows), self.mean_more * limit
        if self.lognormal:
            scores, sigma = np.array([NormalDist().inv_cdf(part) for part in parts]), lognormal_sigma()
            more = np.round(mean * np.exp(sigma * scores - sigma**2 / 2))
        else:
            more = np.ceil(np.log1p(-parts) / np.log1p(-1 / mean))
        return np.clip(round(self.fewest * limit) + more, 1, limit).astype(int)


DISTRIBUTIONS = (
    Lengths("long-tailed", 1 / 8, lognormal=True),
    Lengths("some cut off", 3 / 8),
    Lengths("nearly equal", 1 / 16, 3 / 8),
)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse(arguments), Console()
    model, prompts = language_model(options), random_prompts(options)
    pool = random_prompts(argparse.Namespace(**{**vars(options), "batch": POOL * options.rows}))
    sampling = Sampling(max_new_tokens=options.new_tokens)
    call = described(options, sampling, prompts, None)
    long_tailed = ResponseLengths(mean=options.new_tokens / 8, p99=options.new_tokens // 2)
    known = dataclasses.replace(call, lengths=long_tailed)  # of equal lengths no slots would be looked at
    ways = [Strategy(), *slot_choices(known, Strategy())]
    params = jax.device_put(init_params(model, jax.random.key(0)))
    params["lm_head" if not model.tie_embeddings else "embedding"] *= 0.1  # every token is nearly as likely
    results = []
    for drawn in (each for each in DISTRIBUTIONS if options.only in ("", each.name)):
        mean = drawn.mean_more * options.new_tokens * (2 if drawn.lognormal else 1)  # enough long ones to choose from
        stop_ids = tuple(range(max(1, round(model.vocab_size / mean))))
        fewest = round(drawn.fewest * options.new_tokens)
        given = dataclasses.replace(sampling, stop_ids=stop_ids, min_new_tokens=fewest)
        whole = program(Strategy(), given, model)
        seen = [whole(params, jax.tree.map(lambda x, i=i: x[i::POOL], pool)).lengths for i in range(POOL)]
        chosen = nearest(drawn.of_rows(options.rows, options.new_tokens), np.stack(seen, axis=1).ravel())
        prompts = jax.tree.map(lambda x, chosen=chosen: x[chosen], pool)
        programs = [functools.partial(program(way, given, model), params, prompts) for way in ways]
        lengths = np.asarray(programs[0]().lengths)
        p99 = int(np.quantile(lengths, 0.99, method="inverted_cdf"))
        forecast_of = dataclasses.replace(call, lengths=ResponseLengths(mean=float(lengths.mean()), p99=p99))
        before = OthersLoad()
        calibration, seen = measured_in_turn(known, ways, programs, options.patience, console)
        model_costs = CostModel(calibration.on(local_cluster()), measured=calibration)
        rows = [
            {
                "lengths": drawn.name,
                "slots": way.slots or "all rows",
                "steps": round(model_costs.of(forecast_of, range(1), way).rollout_steps().steps),
                "steps made": steps_made(lengths, way),
                "predicted s": round(predicted := model_costs.seconds(forecast_of, range(1), way).total, 3),
                "measured s": round(took.seconds, 3),
                "off": round(predicted / took.seconds - 1, 3),
                "spread": round(took.spread, 3),
            }
            for way, took in zip(ways, seen, strict=True)
        ]
        console.table(f"{drawn.name}: mean {lengths.mean():.1f}, 99 % at most {p99}; {before.load()}", rows)
        results.append(judged(rows) | {"load": str(before.load()), "mean": float(lengths.mean()), "p99": p99})
        console.line(results[-1]["summary"])
    if options.json:
        print(json.dumps({"options": vars(options), "jax": jax.__version__, "results": results}, indent=2))
    return 0 if all(result["holds"] for result in results) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256, help="the most")
    parser.add_argument("--patience", type=float, default=3.0, help="as of jaxrlhf.calibrate")
    parser.add_argument("--only", default="", choices=[each.name for each in DISTRIBUTIONS], help="a distribution")
    parser.add_argument("--json", action="store_true", help="print JSON after the tables")
    options = parser.parse_args(arguments)
    defaults = {"tied": False, "dtype": "float32", "scan_layers": False, **SIZES[options.size], **vars(options)}
    return argparse.Namespace(**{**defaults, "batch": options.rows})


def described(
    options: argparse.Namespace, sampling: Sampling, prompts: Prompts, lengths: ResponseLengths | None
) -> ModelCall:
    """The generate call as the planner sees it."""
    roles = {"actor": ModelRole(language_model(options))}
    graph = trace(generate_step, {"actor": roles["actor"].methods("actor")}, (), prompts, sampling)
    return step_workload(graph, roles, lengths).calls[0]


def measured_in_turn(
    call: ModelCall, ways: Sequence[Strategy], programs: Sequence[Callable[[], Any]], patience: float, console: Console
) -> tuple[Calibration, list[Timing]]:
    """What is measured of a call on one device for each way to roll out, and the times of these rollouts, each in turn
    with the measurements for it."""
    rates, points, took = measure_machine(patience_seconds=patience), list[tuple[Case, Point]](), dict[int, Timing]()
    watched = OthersLoad()
    for job in jobs(Workload((call,)), {call.name: [Strategy()]}):
        slots = job.strategy.slots
        beside = [way.slots for way in ways].index(slots)
        others = [programs[beside]] if slots or job.rows == call.rows else []
        given = {"dispatch_seconds": rates.dispatch_seconds, "patience_seconds": patience}
        found, seconds = measure_beside(job, others, **given)
        if seconds:
            (took[beside],) = seconds
        whole = ", ".join(f"{c.phase} {1e3 * (p.layer * call.model.num_layers + p.rest):.3g} ms" for c, p in found)
        console.line(f"{slots or 'no'} slots, {job.rows} rows: {whole}; {watched.load()}")
        points += found
    made = Calibration(datetime.date.today().isoformat(), this_machine(), rates, watched.load()).with_points(points)
    return made, [took[number] for number in range(len(ways))]


def program(way: Strategy, sampling: Sampling, model: ModelConfig) -> Callable[..., Rollout]:
    """A rollout with all rows at once, or in slots."""
    layout = Layout.over((0,), Strategy())

    def run(params: Params, prompts: Prompts) -> Rollout:
        given = (params, prompts, NOISE, TEMPERATURE, sampling)
        return generate(*given, model, layout, slots_of(way))

    return jax.jit(run)


def steps_made(lengths: np.ndarray, way: Strategy) -> int:
    """The decoding steps of a rollout whose responses have these lengths."""
    slots = slots_of(way) if way.slots else None
    return int(lengths.max()) - 1 if slots is None else simulate_slots(lengths, 1, slots).rounds * slots.steps


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether rollouts in slots take as long as predicted, and what is predicted to be fastest nearly is."""
    worst = max((row for row in rows if row["slots"] != "all rows"), key=lambda row: abs(row["off"]))
    chosen, best = (min(rows, key=lambda row: row[name]) for name in ("predicted s", "measured s"))
    longer = chosen["measured s"] / best["measured s"] - 1
    return {
        "rows": list(rows),
        "holds": abs(worst["off"]) <= WITHIN and longer <= NEAR_BEST,
        "summary": f"Out by at most {worst['off']:+.0%} in slots ({worst['slots']}); chosen: {chosen['slots']}, which "
        f"takes {longer:.0%} longer than the best, {best['slots']}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
