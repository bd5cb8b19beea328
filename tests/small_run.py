"""A small valid run that touches every section of a config, for tests that break it."""

import json
from pathlib import Path

CONFIG = """
name: small
steps: 2
batch_size: 8
devices: cpu:8
data: {path: rows.jsonl, eval_rows: 4}
roles:
  actor:
    model: {vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2}
    optimizer: &optimizer {learning_rate: 1.0e-3}
  critic: {init: actor, head: scalar, optimizer: *optimizer}
  reference: {init: actor}
  exact: {function: exact_answer, options: {partial_credit: 0.5}}
  short: {function: length_penalty, options: {target: 3, scale: 0.1, unit: tokens}}
  reward: {weighted_sum: {exact: 1.0, short: 0.5}}
settings: {sampling: {max_new_tokens: 6}, actor_update: {mini_batches: 2}, critic_update: {mini_batches: 2}}
plan:
  default: {data: 4}
  calls: {actor.train: {fsdp: 2, tensor: 2}, critic.train: {fsdp: 2, devices: 4-5, remat: layer}}
warm_start: {steps: 2, batch_size: 8, optimizer: {learning_rate: 1.0e-3}}
evaluation: {num_prompts: 4, scorers: [reward], sampling: {max_new_tokens: 4}}
compilation_cache: ""
"""
ROWS = [{"prompt": f"{i}+{i}=", "completion": f">{2 * i}", "answer": str(2 * i)} for i in range(12)]


def write_run(folder: Path) -> None:
    """`run.yaml` and `rows.jsonl`."""
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
