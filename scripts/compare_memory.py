"""The memory that the planner counts beside what XLA reports for a described GPU. No GPU is needed.

    python scripts/compare_memory.py                           # the 7B model cut to 4 layers, on an A100
    python scripts/compare_memory.py --model 13b --layers 6 --kind h100

Each row is a program that runs, compiled for the GPU. `held` is what it is given: weights, and master weights with the
optimizer's moments; `working` is what is there only while it runs. Bytes are those of one device, in GB.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.size_overrides import with_synthetic_prompts
from jaxrlhf.models.config import PRESETS
from jaxrlhf.planner.compiled.described_devices import described_devices, has_gpu_compiler
from jaxrlhf.planner.costs.memory import call_memory
from jaxrlhf.programs.ahead_of_time import call_program
from jaxrlhf.run.step_draft import draft_step
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import mesh_over
from jaxrlhf.sharding.strategy import Strategy

PROGRAMS = [
    ("actor.generate", 16, Strategy()),
    ("actor.generate", 16, Strategy(tensor=8)),
    ("actor.generate", 64, Strategy(tensor=2)),
    ("reference.logprobs", 4, Strategy()),
    ("reference.logprobs", 16, Strategy(tensor=4)),
    ("actor.train", 2, Strategy(remat="layer")),
    ("actor.train", 8, Strategy(tensor=8, remat="layer")),
    ("actor.train", 4, Strategy(tensor=4)),
    ("actor.train", 8, Strategy(tensor=8, micro_batches=2, remat="layer")),
    ("actor.train", 4, Strategy(fsdp=2, tensor=4, remat="layer")),
    ("critic.train", 4, Strategy(tensor=2)),
]
"""Call, rows of a micro-batch on each row shard, strategy."""


def compare(preset: str, layers: int, kind_name: str, columns: int) -> list[dict[str, Any]]:
    """Ours and XLA's bytes of every program of PPO with four models of one size."""
    model = f"{{preset: {preset}, num_layers: {layers}, scan_layers: false}}"
    overrides = [f"roles.{role}.model={model}" for role in ("actor", "critic")]
    overrides += [f"settings.{role}_update.mini_batches=1" for role in ("actor", "critic")]
    overrides += [f"settings.sampling.max_new_tokens={columns}"]
    config, tables = with_synthetic_prompts(load_run("ppo_70b_128gpus", overrides), columns)
    workload = draft_step(config, tables=tables).workload()
    kind, results = kinds()[kind_name], []
    for name, rows, strategy in PROGRAMS:
        devices = described_devices(kind, strategy.num_devices)
        layout = Layout(mesh_over(devices.devices, strategy), strategy)
        call = workload.call(name)
        call = dataclasses.replace(call, rows=rows * strategy.num_row_shards * strategy.micro_batches)
        program = call_program(call.require_described(), layout, num_layers=layers, rows=call.rows)
        compiled = program.lower().compile(compiler_options=dict(devices.options)).memory_analysis()
        ours = call_memory(call, strategy, is_trained=name == "actor.generate")
        results.append(
            {
                "program": name, "rows": rows, "strategy": f"{strategy}, {strategy.micro_batches} x, {strategy.remat}",
                "held": (ours.resting + ours.copy) / 1e9, "held, XLA": compiled.argument_size_in_bytes / 1e9,
                "working": ours.working / 1e9, "working, XLA": compiled.temp_size_in_bytes / 1e9,
            }
        )  # fmt: skip
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", choices=sorted(PRESETS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--columns", type=int, default=1024, help="tokens of a prompt, and of a response")
    parser.add_argument("--kind", default="a100-80g", help="of GPU, as in cluster/hardware.yaml")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not has_gpu_compiler():
        print("compare_memory.py: needs the compiler of GPUs: pip install 'jaxrlhf[planner]'", file=sys.stderr)
        return 1
    results = compare(options.model, options.layers, options.kind, options.columns)
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    for r in results:
        cells = [f"{x:.2f}" if isinstance(x, float) else str(x) for x in r.values()]
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
