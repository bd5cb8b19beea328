"""Our forecast beside the seconds that ReaL published: Table 6 of its appendix, for the plans of its Tables 4 and 5.

    python scripts/compare_real.py                # each row from coefficients that were fitted without it
    python scripts/compare_real.py --json
    python scripts/compare_real.py --search       # and the plan that our search finds, under the same model

Two plans for PPO with a 7B actor and a 7B critic on two nodes of 8 GPUs: the one that ReaL found, and its heuristic.
The paper says A100s, whose peak cannot give these seconds: reward inference alone does 320 TFLOP/s on each GPU. The
seconds fit GPUs with the arithmetic of an H100 and NVLink of 200 GB/s in a direction, as the H800 has.

How fast a device is beside its peaks is fitted: `COEFFICIENTS`, from assumed first values that the fit is held to. So
that no row is claimed that was fitted, each row is forecast from coefficients fitted to the other eleven. How the
system is described is not fitted:

- its network is the one of the paper: 200 Gbit/s a node;
- a micro-batch of its tables is cut again for the pipeline, into as many parts as there are stages (inference,
  generation) or twice as many (training), and fills and drains the stages by itself;
- its stages hold equal parts of the weights, the embedding and the head among them;
- a stage sends and receives between its passes, not beside them;
- logits of all columns are computed; activations are kept, not recomputed;
- its attention, FlashAttention with the lengths of the sequences, decodes over the tokens that are there, on average
  those of the prompt and half of the response;
- its decoding loop runs on the host, which every step waits for.

Reference:
    Mei et al. 2024, arXiv:2406.14088, appendix, Tables 1, 4, 5 and 6.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.cluster.hardware import Cluster, Network
from jaxrlhf.models.architecture import matrix_numbers
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.planner.costs.cost_model import CallCosts, CostModel
from jaxrlhf.planner.costs.work import LayerWork, Phase, analytic_work, decode_work
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.plans.plan import Placement
from jaxrlhf.planner.search.choices import make_problem
from jaxrlhf.planner.search.simulate import steady_state
from jaxrlhf.planner.workload import ModelCall, Workload
from jaxrlhf.sharding.strategy import Remat, Strategy


class Row(NamedTuple):
    """A row of Table 4 or 5."""

    devices: range
    tensor: int
    pipeline: int
    data: int
    micro_batches: int
    seconds: float


SEARCHED = {
    "actor.generate": Row(range(16), 2, 2, 4, 1, 16.3),
    "reward.scores": Row(range(8), 2, 1, 4, 16, 6.0),
    "reference.logprobs": Row(range(8, 16), 1, 2, 4, 16, 8.0),
    "critic.values": Row(range(16), 1, 2, 8, 8, 4.7),
    "critic.train": Row(range(8, 16), 4, 2, 1, 2, 28.1),
    "actor.train": Row(range(8), 2, 4, 1, 2, 26.6),
}
HEURISTIC = {
    "actor.generate": Row(range(16), 8, 1, 2, 4, 44.2),
    "reward.scores": Row(range(16), 8, 1, 2, 4, 7.3),
    "reference.logprobs": Row(range(16), 8, 1, 2, 4, 7.6),
    "critic.values": Row(range(16), 8, 1, 2, 4, 6.8),
    "critic.train": Row(range(16), 8, 1, 2, 4, 24.3),
    "actor.train": Row(range(16), 8, 1, 2, 4, 24.7),
}
TABLES = {"searched": SEARCHED, "heuristic": HEURISTIC}
ITERATIONS = {"searched": 64.0, "heuristic": 122.6}
"""Seconds of a whole iteration, End2End (with CUDAGraph) in Table 6."""

COEFFICIENTS = {
    "matmul_efficiency": 0.45,
    "memory_efficiency": 0.7,
    "link_efficiency": 0.8,
    "graph_kernel_seconds": 5e-6,
    "collective_seconds": 12e-6,
    "half_dim": 200.0,
    "step_seconds": 2.5e-3,
}
"""Fitted coefficient -> its initial value: what large products, copies and NCCL usually reach; kernels of an unfused
decoder; a Python loop with sampling between decoding steps."""
HELD = 0.3
"""Weight of a coefficient that is off by a factor of e, relative to a row that is."""


def workload() -> Workload:
    """The base setting of the appendix: 512 prompts of 1024 tokens, 1024 new tokens, 8 mini-batches."""
    sizes = {head: ModelConfig(**{**PRESETS["7b"], "head": head}) for head in ("lm", "scalar")}
    common: dict[str, Any] = dict(rows=512, prompt=1024, response=1024)
    rollout, judged = ("actor.generate",), ("reference.logprobs", "critic.values", "reward.scores")

    def call(name: str, kind: Any, head: str, needs: tuple[str, ...] = (), **more: Any) -> ModelCall:
        role = name.split(".")[0]
        return ModelCall(
            name, role, kind, sizes[head], role, needs=needs, output_bytes=512 * 1024 * 4, **common, **more
        )

    return Workload(
        (
            call("actor.generate", "generate", "lm"),
            call("reward.scores", "infer", "scalar", rollout, scored=1),
            call("reference.logprobs", "infer", "lm", rollout, scored=2048),
            call("critic.values", "infer", "scalar", rollout),
            call("critic.train", "train", "scalar", judged, mini_batches=8),
            call("actor.train", "train", "lm", judged, mini_batches=8, scored=2048),
        )
    )


def cluster(coefficients: Mapping[str, float]) -> Cluster:
    """Two nodes with the paper's network, of devices that reach what `coefficients` say of their peaks."""
    described = read_cluster("2x8:h800")
    (group,) = described.groups
    launch = coefficients["graph_kernel_seconds"]
    kind = dataclasses.replace(
        group.kind,
        coefficients=dataclasses.replace(group.kind.coefficients, kernel_seconds=launch, **coefficients),
    )
    network = Network(bandwidth=25e9, source="arXiv:2406.14088, section 8: InfiniBand with 200 Gbps")
    return Cluster((dataclasses.replace(group, kind=kind, network=network),))


def real_work(call: ModelCall, phase: Phase, *, tensor: int, fsdp: int, remat: Remat) -> LayerWork:
    """The work of a phase in ReaL: as ours, but for the tokens over which it decodes."""
    if phase == "decode":
        return decode_work(call, tensor=tensor, slots=call.prompt + call.response / 2)
    return analytic_work(call, phase, tensor=tensor, fsdp=fsdp, remat=remat)


class RealCosts(CallCosts):
    """Costs with stages as ReaL cuts them, equal parts of the weights, which send when they have computed."""

    def _stages(self, phase: Phase, rows: float) -> Sequence[float]:
        one, model, stages = self._pass(phase, rows), self.call.model, self.strategy.pipeline
        if model.head == "lm":
            return [(model.num_layers * one.layer + one.rest) / stages] * stages
        embedding = model.vocab_size * model.hidden_size / matrix_numbers(model) if stages > 1 else 0.0
        return [(model.num_layers + embedding) / stages * one.layer + one.rest] * stages

    def _sends(self, stage: float, rows: float, send: float) -> float:
        return (self.strategy.pipeline - 1 + self.strategy.micro_batches) * send * (2 if self.call.trains else 1)


class RealSystem(CostModel):
    """The cost model of such a system."""

    def of(self, call: ModelCall, devices: range, strategy: Strategy) -> CallCosts:
        return RealCosts(self, call, devices, strategy)

    def row_seconds(self, call: ModelCall, row: Row) -> float:
        """The seconds of a row of the tables."""
        parts = {"generate": 1, "infer": row.pipeline, "train": 2 * row.pipeline if row.pipeline > 1 else 1}[call.kind]
        strategy = Strategy(data=row.data, tensor=row.tensor, pipeline=row.pipeline, micro_batches=parts)
        part = dataclasses.replace(call, rows=call.rows // row.micro_batches)
        seconds = self.seconds(part, row.devices, strategy)
        once = seconds.update + seconds.reduction
        return row.micro_batches * (seconds.total - once) + once


def fit(rows: Sequence[tuple[str, str]]) -> dict[str, float]:
    """The coefficients that fit some rows of the tables, each given by table and call."""
    calls = {call.name: call for call in workload().calls}
    first = np.log(list(COEFFICIENTS.values()))

    def residuals(logs: np.ndarray) -> np.ndarray:
        model = RealSystem(cluster(_coefficients(logs)), real_work)
        off = [
            np.log(model.row_seconds(calls[name], TABLES[table][name]) / TABLES[table][name].seconds)
            for table, name in rows
        ]
        return np.array([*off, *(HELD * (logs - first))])

    return _coefficients(least_squares(residuals, first).x)


def _coefficients(logs: np.ndarray) -> dict[str, float]:
    values = dict(zip(COEFFICIENTS, np.exp(logs).tolist(), strict=True))
    return {name: min(x, 1.0) if name.endswith("efficiency") else x for name, x in values.items()}


def left_out() -> list[dict[str, Any]]:
    """Every row, forecast from coefficients fitted to all others."""
    every = [(table, name) for table in TABLES for name in TABLES[table]]
    calls = {call.name: call for call in workload().calls}
    results = []
    for table, name in every:
        coefficients = fit([row for row in every if row != (table, name)])
        row = TABLES[table][name]
        forecast = RealSystem(cluster(coefficients), real_work).row_seconds(calls[name], row)
        results.append(
            {
                "plan": table,
                "call": name,
                "published": row.seconds,
                "forecast": forecast,
                "off": forecast / row.seconds - 1,
                "coefficients": coefficients,
            }
        )
    return results


def iteration_seconds(seconds: Mapping[str, float], table: str) -> float:
    """An iteration in which calls on disjoint devices run side by side, each as soon as it can."""
    devices, end = dict.fromkeys(range(16), 0.0), {}
    for call in workload().calls:
        mesh = TABLES[table][call.name].devices
        start = max([end[need] for need in call.needs] + [devices[d] for d in mesh])
        end[call.name] = start + seconds[call.name]
        devices |= dict.fromkeys(mesh, end[call.name])
    return max(end.values())


def under_our_model(seconds: float) -> dict[str, float]:
    """Seconds of an iteration under our own cost model, with coefficients fitted to all rows: of both published plans,
    and of the plan that our search finds.

    Args:
        seconds: The most that the search may take.
    """
    described = cluster(fit([(table, name) for table in TABLES for name in TABLES[table]]))
    work, costs, found = workload(), CostModel(described), {}
    for table, rows in TABLES.items():
        fixed = {}
        for name, row in rows.items():
            parts = {"generate": 1, "infer": row.pipeline, "train": 2 * row.pipeline if row.pipeline > 1 else 1}
            strategy = Strategy(
                data=row.data, tensor=row.tensor, pipeline=row.pipeline,
                micro_batches=row.micro_batches * parts[work.call(name).kind],
            )  # fmt: skip
            fixed[name] = Placement(tuple(row.devices), strategy)
        problem = make_problem(work, described, costs, fixed=fixed)
        found[table] = steady_state(problem, [0] * len(problem.calls)).seconds
    return found | {"ours": plan_workload(work, described, costs=costs, seconds=seconds).seconds}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument(
        "--search", action="store_true", help="search for a plan, and compare it with the published ones"
    )
    options = parser.parse_args(arguments)
    results = left_out()
    iterations = {
        table: iteration_seconds({r["call"]: r["forecast"] for r in results if r["plan"] == table}, table)
        for table in TABLES
    }
    if options.json:
        print(json.dumps({"rows": results, "iterations": iterations}, indent=2))
        return 0
    for r in results:
        print(f"{r['plan']:10s} {r['call']:20s} {r['published']:6.1f} s {r['forecast']:6.1f} s {r['off']:+6.0%}")
    for table, seconds in iterations.items():
        off = seconds / ITERATIONS[table] - 1
        print(f"{table:10s} {'iteration':20s} {ITERATIONS[table]:6.1f} s {seconds:6.1f} s {off:+6.0%}")
    fitted = fit([(table, name) for table in TABLES for name in TABLES[table]])
    if options.search:
        plans = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in under_our_model(60.0).items())
        print(f"\nplans under our own model: {plans}")
    print("\nfitted to all rows:", ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
