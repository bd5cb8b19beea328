"""The run whose results no plan may change, random plans for it, and running it under many of them in one go.

As a script, in one process or in several that `scripts/launch_local` starts:

    python tests/invariance/plan_runs.py FOLDER PLAN [PLAN ...]

where a plan is YAML, after which settings of its run may stand: `{default: {data: 2}} --set settings.discount=0.9`.
Each plan's run is in a folder of its own, by the plan's position.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxrlhf.config.schema import build_run, load_run
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.planner.plans.plan import SCHEDULES
from jaxrlhf.run.assembly import assemble
from jaxrlhf.testing import random_plan
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
data: {{task: arithmetic, arithmetic: {{max_rows: 46}}}}  # some come again
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
DEVICES, DEVICES_PER_NODE = 8, 4


def random_plans(count: int) -> dict[str, str]:
    """Valid plans over two nodes of four devices."""
    phase = assemble(build_run(yaml.safe_load(RUN), where="RUN"), DEVICES, DEVICES_PER_NODE).train
    plans = {f"random plan {seed}": random_plan(phase, seed=seed).to_json() for seed in range(count)}
    return {name: json.dumps({key: x for key, x in plan.items() if key != SCHEDULES}) for name, plan in plans.items()}


def run_plans(folder: Path, plans: Sequence[str]) -> None:
    """One run after another, in this process, or in all processes of a cluster."""
    channel = None
    for i, text in enumerate(plans):
        plan, *changed = text.split(" --set ")
        (folder / str(i)).mkdir(exist_ok=True, parents=True)
        output = f"{{folder: {folder / str(i)}, samples_every: 1, num_samples: {ROWS}, tensorboard: false}}"
        config_file = folder / str(i) / "run.yaml"
        if channel is None or channel.is_first:
            written = config_file.with_suffix(f".{os.getpid()}")  # the other processes never read half a file
            written.write_text(f'{RUN}output: {output}\nplan: {plan}\ncompilation_cache: ""\n')
            written.replace(config_file)
        if channel is None:
            channel = start(load_run(config_file, changed))
        else:
            channel.share(lambda: None)  # the file is there
        execute(prepare(load_run(config_file, changed), Console(quiet=True), channel), Console(quiet=True))
    assert channel is not None
    channel.close()


def results(folder: Path, i: int) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Metrics of every step and all sampled completions, under a plan by its position."""
    run = folder / str(i) / "latest"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return read_metrics(run / "metrics.jsonl"), samples


if __name__ == "__main__":
    run_plans(Path(sys.argv[1]), sys.argv[2:])
