"""Checks on an NVIDIA GPU what the tests check on a processor, and trains the quickstart there.

    python scripts/check_gpu.py               # on a machine with a GPU and jax[cuda12] or jax[cuda13]
    python scripts/check_gpu.py --allow-cpu   # the same on a processor, where attention is XLA's in both cases
    python scripts/check_gpu.py --benchmarks  # then everything that is to be timed on a GPU, half an hour

For a small Llama in float32 and bfloat16: cuDNN's attention against XLA's, values and gradients, on ragged rows; the
gap between the log-probabilities that sampling records and those of the training forward; seconds of each. In slots:
the bits of a rollout over the order of its prompts and the number of steps between two admissions, and seconds of a
step for each; what one step between them takes more is the cost of a round. Then `ppo_arithmetic` on all devices:
data-parallel; with generation in parts whose last responses move to one device; with a critic that is trained in parts;
and, where there are several, in two stages with actor and critic fused.
Exit status 1 if a figure is out of bounds.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import Prompts, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models import heads
from jaxrlhf.models.attention import attention_implementation
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import init_params
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

MODEL = ModelConfig(
    vocab_size=2048, hidden_size=512, intermediate_size=1376, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64
)
SAMPLING = Sampling(max_new_tokens=64, stop_ids=(5, 6, 7, 8))
# bfloat16 keeps 8 bits: logits of size 1 to 10 differ in the second decimal between two orders of summation
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.3}
LARGEST_GRADIENT_ERROR = {"float32": 1e-3, "bfloat16": 0.05}

BENCHMARKS = (
    ("bench_decode_attention",),
    ("bench_decode_attention", "--heads", "32", "32", "128", "--slots", "32", "--columns", "512", "2048"),
    *(
        ("bench_rollouts", "--size", size, "--slots", *slots, "--rows", "1024", "--without-whole", "--rounds", "2")
        for size, slots in (("0.5b", ("32", "128", "256")), ("1.5b", ("32", "128", "256")), ("7b", ("32", "128")))
    ),
    ("bench_primitives", "--gpu-suite"),
)
"""Scripts and their arguments, run with --benchmarks from the root of the repository."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow-cpu", action="store_true", help="run without a GPU too")
    parser.add_argument("--benchmarks", action="store_true", help="also run the benchmarks for GPUs")
    options = parser.parse_args()
    if mesh.platform() != "gpu" and not options.allow_cpu:
        print(f"No GPU: JAX sees {mesh.num_devices()} devices of kind {mesh.device_kind()}. Install jaxrlhf[cuda13].")
        return 1
    print(f"{mesh.num_devices()} x {mesh.device_kind()}, jax {jax.__version__}")
    failures = [name for dtype in ("float32", "bfloat16") for name in (*check_model(dtype), *check_slots(dtype))]
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", "ppo_arithmetic", "--set", "devices=auto"]
    every = f"data: {mesh.num_devices()}"
    plans = {"data-parallel": f"{{default: {{{every}}}}}"}
    in_parts = (
        f"{{default: {{{every}}}, calls: {{actor.generate: {{{every}, slots: 64, parts: 2, tail: {{devices: 0, rows: "
        f"0.25}}}}, reference.logprobs: {{{every}, parts: 3}}, reward.scores: {{parts: 3}}}}}}"
    )
    plans["in slots and parts, with a tail"] = in_parts
    plans["with a critic that is trained in parts"] = (
        in_parts.removesuffix("}}") + f", critic.values: {{{every}, parts: 3}}, critic.train: {{{every}, parts: 2}}}}}}"
    )
    if mesh.num_devices() % 2 == 0:
        halves = f"pipeline: 2, data: {mesh.num_devices() // 2}, micro_batches: 4"
        plans["over stages"] = f"{{default: {{{halves}}}, fuse: [actor.train, critic.train]}}"
    for name, plan in plans.items():
        changed = [f"plan={plan}"]
        if "critic.train: " in plan:
            changed += ["settings.whiten_advantages=false", "settings.critic_update.mini_batches=1"]
        if subprocess.run([*command, *(x for each in changed for x in ("--set", each))], check=False).returncode:
            failures.append(f"ppo_arithmetic, {name}")
    for module, *arguments in BENCHMARKS if options.benchmarks else ():
        print(f"\n{module} {' '.join(arguments)}", flush=True)
        if subprocess.run([sys.executable, "-m", f"scripts.{module}", *arguments], check=False).returncode:
            failures.append(module)
    print(f"Failed: {', '.join(failures)}" if failures else "All within bounds")
    return 1 if failures else 0


def check_model(dtype: Any) -> list[str]:
    """Names of the checks that failed in one precision."""
    layout = Layout.over((0,), Strategy())
    config = dataclasses.replace(MODEL, dtype=dtype)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(0))
    prompts = ragged_prompts(rows=32, columns=64)
    sample = jax.jit(
        lambda p: generate(p, prompts, jnp.arange(3, dtype=jnp.uint32), jnp.float32(1), SAMPLING, config, layout)
    )
    rollout, generate_seconds = timed(sample, params)

    def loss_and_gradient(attention: Any) -> Callable[[Any], Any]:
        chosen = dataclasses.replace(config, attention=attention)

        def loss(p: Any) -> tuple[jax.Array, jax.Array]:
            logprobs = heads.policy_outputs(p, rollout, chosen, layout).logprobs
            return -logprobs.sum() / rollout.response.sum(), logprobs

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    ((_, logprobs), gradient), train_seconds = timed(loss_and_gradient("auto"), params)
    ((_, _), expected), xla_seconds = timed(loss_and_gradient("xla"), params)
    gap = float(jnp.abs(logprobs - rollout.logprobs).max())
    error = relative_error(gradient, expected)
    print(
        json.dumps(
            {
                "dtype": dtype,
                "attention": attention_implementation(config, layout),
                "logprob_gap_max": gap,
                "gradient_error_against_xla": error,
                "generate_seconds": generate_seconds,
                "forward_backward_seconds": train_seconds,
                "forward_backward_seconds_xla": xla_seconds,
            }
        )
    )
    failed = {"log-probability gap": gap > LARGEST_GAP[dtype], "gradient": error > LARGEST_GRADIENT_ERROR[dtype]}
    return [f"{name} in {dtype}" for name, is_out in failed.items() if is_out or not np.isfinite(gap + error)]


def check_slots(dtype: Any) -> list[str]:
    """Names of the schedules of a rollout in slots that gave other bits than the first."""
    layout, config = Layout.over((0,), Strategy()), dataclasses.replace(MODEL, dtype=dtype)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(0))
    prompts = ragged_prompts(rows=64, columns=64)
    order = np.random.default_rng(1).permutation(len(prompts.id))
    noise, temperature = jnp.arange(3, dtype=jnp.uint32), jnp.float32(1)
    bits: dict[str, list[bytes]] = {}
    seconds_a_step: dict[str, float] = {}
    for name, steps, rows in (
        ("in order", 8, None),
        ("shuffled", 8, order),
        ("1 step", 1, None),
        ("32 steps", 32, order),
    ):
        slots = Slots(16, prefill_rows=4, steps=steps)
        given = prompts if rows is None else jax.tree.map(lambda x, rows=rows: x[rows], prompts)
        run = jax.jit(
            lambda p, given, slots=slots: generate(p, given, noise, temperature, SAMPLING, config, layout, slots)
        )
        rollout, seconds = timed(lambda p, run=run, given=given: run(p, given), params)
        by_id = np.argsort(np.asarray(rollout.id))
        compared = (rollout.tokens, rollout.logprobs, rollout.sampled_logprobs, rollout.finish)
        bits[name] = [np.ascontiguousarray(np.asarray(each)[by_id]).tobytes() for each in compared]
        fewest = int(np.asarray(rollout.lengths).sum()) / slots.slots
        seconds_a_step[name] = seconds / fewest
    print(json.dumps({"dtype": dtype, "seconds_over_fewest_steps": seconds_a_step}))
    return [f"bits in slots, {name}, in {dtype}" for name, each in bits.items() if each != bits["in order"]]


def ragged_prompts(*, rows: int, columns: int) -> Prompts:
    """Random prompts of one token to `columns`."""
    rng = np.random.default_rng(0)
    mask = np.arange(columns)[None, :] >= columns - rng.integers(1, columns + 1, rows)[:, None]
    return Prompts(
        tokens=jnp.asarray(np.where(mask, rng.integers(10, MODEL.vocab_size, mask.shape), 0), jnp.int32),
        mask=jnp.asarray(mask),
        row=jnp.arange(rows),
        id=jnp.arange(rows, dtype=jnp.uint32),
    )


def timed(function: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    """The result, and the median seconds of five calls after the one that compiles."""
    result = jax.block_until_ready(function(argument))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(function(argument))
        seconds.append(time.perf_counter() - started)
    return result, float(np.median(seconds))


def relative_error(got: Any, expected: Any) -> float:
    """|got - expected| / |expected| over all leaves."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    difference = sum(float(jnp.square(x - y).sum()) for x, y in pairs)
    return (difference / sum(float(jnp.square(y).sum()) for _, y in pairs)) ** 0.5


if __name__ == "__main__":
    sys.exit(main())
