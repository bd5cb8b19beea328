"""Folders of runs with made-up numbers, and a made-up plan of a traced PPO step: nothing is trained."""

import functools
import json
import math
from pathlib import Path
from typing import Any

from jaxrlhf.call_graph import CallGraph
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.observe.chrome_trace import write_chrome_trace
from jaxrlhf.observe.events import Event, ProcessEvents
from jaxrlhf.observe.metrics import metrics_record, sample_record
from jaxrlhf.planner.make_plan import Planned, plan_workload
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.planner.plans.saved_plan import write_plan
from tests.planner.described_step import DescribedStep, ppo

HOSTILE = "</script><script>console.error('escaped')</script><b>\"'&"
"""Text that would break a page that does not escape it."""
CALLS = (
    "actor.generate", "reference.logprobs", "critic.values", "reward.scores", "ppo_batch", "actor.train",
    "critic.train",
)  # fmt: skip


@functools.cache
def planned_step() -> tuple[DescribedStep, Planned, Plan]:
    """A step of PPO, its plan by interleaving on 8 GPUs, and its placements."""
    step = ppo(rows=32)
    planned = plan_workload(step.workload, read_cluster("1x8:h100"), method="interleaving", compare=False)
    return step, planned, planned.plan_for(step.graph)


def events(num_steps: int) -> list[Event]:
    """On 4 devices: the actor generates, then it trains on two of them beside the critic on the others."""
    found = []
    for step in range(1, num_steps + 1):
        start = 10.0 * step
        found += [
            Event("actor.reallocate", "reallocate", (0, 1, 2, 3), step, start, start + 0.5, bytes=10**6),
            Event("actor.generate", "generate", (0, 1, 2, 3), step, start + 0.5, start + 5),
            Event("reward.scores", "host", (), step, start + 5, start + 6),
            Event("reward.scores", "wait", (), step, start + 5, start + 6),
            Event("actor.train", "train", (0, 1), step, start + 6, start + 10),
            Event("critic.train", "train", (2, 3), step, start + 6, start + 9),
        ]
    return found


def write_run(folder: Path, *, num_steps: int = 6, seed: int = 0, whole: bool = True) -> Path:
    """The folder of a run of so many steps. If not `whole`, it was killed: half a last line, and no timeline, outcome,
    plan or samples."""
    folder.mkdir(parents=True)
    config = {"algorithm": "ppo", "steps": num_steps, "batch_size": 32, "seed": seed, "devices": "cpu:4"}
    (folder / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    records = [metrics_record(0, {"eval/exact_match": 0.1})]
    for step in range(1, num_steps + 1):
        records.append(metrics_record(step, _metrics(step, seed)))
        if step % 2 == 0:
            records.append(metrics_record(step, {"eval/exact_match": 0.1 + 0.01 * step + 0.05 * seed}))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines if whole else lines + '{"step": 7, "ti')
    (folder / "versions.json").write_text(json.dumps({"python": "3.11", "jax": "0.10.2", "git": {"commit": "a" * 40}}))
    if not whole:
        return folder
    samples = [
        sample_record(step, split, _sample(f"{split} {i}", step, seed))
        for step in (2, num_steps)
        for split in ("held-out", "train")
        for i in range(2)
    ]
    samples.append(sample_record(num_steps, "train", _sample(HOSTILE, num_steps, seed)))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    write_chrome_trace(folder / "timeline.json", [ProcessEvents(tuple(events(num_steps)), 0.0)])
    step, planned, plan = planned_step()
    (folder / "graph.json").write_text(json.dumps({"step": step.graph.to_rows()}))
    (folder / "plan.json").write_text(json.dumps({"step": plan.to_json()}))
    write_plan(folder / "planned.json", planned.saved(plan))
    (folder / "outcome.json").write_text(json.dumps({"steps": num_steps, "rewards": []}))
    return folder


def _metrics(step: int, seed: int) -> dict[str, float]:
    return {
        "critic/score/mean": 1 - math.exp(-step / 20) + 0.1 * seed,
        "actor/loss": -0.1 / step,
        "critic/loss": 1.0 / step,
        "kl/mean": 0.01 * step,
        "response_length/mean": 9.0,
        "actor/grad_norm": math.nan if step == 3 else 0.5,
        "another/version's": 1.0 * step,
        "timing_s/step": 10.0,
        "timing_s/gen": 4.5,
        "timing_s/update_actor": 4.0,
        "perf/throughput": 1000.0 + step,
        "perf/busy_fraction": 0.9,
        "perf/overlap": 0.3,
        "perf/reallocation_share": 0.05,
        "perf/reallocated_bytes": 1e6,
    }


def _sample(prompt: str, step: int, seed: int) -> dict[str, Any]:
    return {"prompt": prompt, "completion": f"after {step}, seed {seed}", "scores": {"exact": 0.5}, "finish": "stop"}


def graph() -> CallGraph:
    return planned_step()[0].graph
