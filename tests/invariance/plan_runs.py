"""The run whose results no plan may change, random plans for it, and running it under many of them in one go.

As a script, in one process or in several that `scripts/launch_local` starts:

    python tests/invariance/plan_runs.py FOLDER PLAN [PLAN ...]

where a plan is YAML. Each plan's run is in a folder of its own, by the plan's position.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config.schema import load_run
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.train import execute, prepare, start

STEPS, ROWS = 3, 32
MODEL = "{vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}"
REWARD = Path(__file__).parent / "digits.py"

# Adam divides a gradient by its own size: where one is all but zero, it turns rounding into whole steps. A larger eps
# keeps the comparison about the plan.
RUN = f"""
name: invariance
steps: {STEPS}
batch_size: {ROWS}
seed: 3
devices: cpu:8
data: {{task: arithmetic}}
roles:
  actor: {{model: {MODEL}, optimizer: &optimizer {{learning_rate: 5.0e-4, eps: 1.0e-5}}}}
  critic: {{init: actor, head: scalar, optimizer: *optimizer}}
  reference: {{init: actor}}
  reward: {{function: "{REWARD}:share_of_digits"}}
settings:
  sampling: {{max_new_tokens: 8, stop_ids: [10, 32, 43, 48, 50, 52, 54, 56, 90, 95, 100, 110, 120, 130, 140, 150]}}
  kl: {{coef: 0.1, adaptive: true}}
  actor_update: {{mini_batches: 2, entropy_coef: 0.01}}
  critic_update: {{mini_batches: 2}}
"""
ONE_DEVICE = "{default: {data: 1}}"
CALLS = (
    "actor.generate",
    "reference.logprobs",
    "critic.values",
    "ppo_batch",
    "actor.train",
    "critic.train",
)
DEVICES, DEVICES_PER_NODE = 8, 4


def random_plan(seed: int) -> str:
    """A valid plan over two nodes of four devices: every call on some part of a node or on both, with some strategy;
    under every third seed actor and critic are trained in one fused pipeline."""
    draw = random.Random(seed)
    calls, fuse = {call: _random_placement(call, draw) for call in CALLS}, []
    offload = [role for role in ("actor", "critic", "reference") if draw.random() < 0.2]
    if seed % 3 == 0:
        count = draw.choice((2, 4, 8))
        where = {"devices": f"0-{count - 1}", "pipeline": 2, "micro_batches": draw.choice((1, 2))}
        calls["actor.train"] = {**where, "data": max(1, count // 4), "tensor": min(2, count // 2)}
        calls["critic.train"] = {**where, "data": count // 2}
        fuse = ["actor.train", "critic.train"]
    return json.dumps({"default": {"data": 1}, "calls": calls, "fuse": fuse, "offload": offload})


def _random_placement(call: str, draw: random.Random) -> dict[str, Any]:
    count = draw.choice((1, 2, 4, 8))
    first = draw.randrange(0, DEVICES, count)
    rows = ROWS // 2 if call.endswith(".train") else ROWS
    tensor = draw.choice([n for n in (1, 2) if count % n == 0 and call != "ppo_batch"] or [1])
    pipeline = draw.choice([n for n in (1, 2, 2) if (count // tensor) % n == 0]) if call != "ppo_batch" else 1
    shards = count // tensor // pipeline
    data = draw.choice([n for n in (1, 2, 4, 8) if shards % n == 0])
    placement: dict[str, Any] = {
        "data": data,
        "fsdp": shards // data,
        "tensor": tensor,
        "devices": f"{first}-{first + count - 1}",
    }
    if pipeline > 1:
        placement["pipeline"] = pipeline
        if call.endswith(".train"):
            placement["schedule"] = draw.choice(("1f1b", "gpipe"))
        elif call.endswith(".generate"):
            rows //= pipeline  # it cuts each micro-batch into as many again
    if call != "ppo_batch":
        placement["micro_batches"] = draw.choice([n for n in (1, 1, 2, 4) if rows % (n * shards) == 0])
    if call.endswith(".train"):
        placement["remat"] = draw.choice(("none", "dots", "layer"))
    if call.endswith((".train", ".values", ".logprobs")):
        placement["balance"] = draw.random() < 0.3
    return placement


def run_plans(folder: Path, plans: Sequence[str]) -> None:
    """One run after another, in this process, or in all processes of a cluster."""
    channel = None
    for i, plan in enumerate(plans):
        (folder / str(i)).mkdir(exist_ok=True, parents=True)
        output = f"{{folder: {folder / str(i)}, samples_every: 1, num_samples: {ROWS}, tensorboard: false}}"
        config_file = folder / str(i) / "run.yaml"
        if channel is None or channel.is_first:
            written = config_file.with_suffix(f".{os.getpid()}")  # the other processes never read half a file
            written.write_text(f'{RUN}output: {output}\nplan: {plan}\ncompilation_cache: ""\n')
            written.replace(config_file)
        if channel is None:
            channel = start(load_run(config_file))
        else:
            channel.share(lambda: None)  # the file is there
        execute(prepare(load_run(config_file), Console(quiet=True), channel), Console(quiet=True))
    assert channel is not None
    channel.close()


def results(folder: Path, i: int) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Metrics of every step and all sampled completions, under a plan by its position."""
    run = folder / str(i) / "latest"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return read_metrics(run / "metrics.jsonl"), samples


if __name__ == "__main__":
    run_plans(Path(sys.argv[1]), sys.argv[2:])
