"""Times rollouts whose responses differ in length: all rows at once, in waves of S rows, and in S slots.

    python -m scripts.bench_rollouts                                             # a processor, some minutes
    python -m scripts.bench_rollouts --size 1.5b --slots 32 128 256 --rows 1024  # a GPU

Lengths are lognormal, the 99.9th percentile ten times the median: every token stops with the same probability, and
of more prompts than are timed, those are taken whose responses come nearest to the lengths that are drawn. "Longest
first" knows all lengths beforehand, as no run does. Rounds alternate between the ways. Prints one JSON object: seconds
on the wall and of processors, the decoding steps that each way needs at least, and ratios; on GPUs, also tokens per
second against the bound by which a step reads all weights and the keys and values of its tokens.
"""

import argparse
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.experience import Prompts, Rollout, Sampling
from jaxrlhf.generation.generate import generate
from jaxrlhf.generation.rollout_settings import Slots
from jaxrlhf.models.params import Params, init_params
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy
from scripts.bench_primitives import (
    BANDWIDTH,
    SIZES,
    Clocks,
    decode_step_bytes,
    known,
    language_model,
    random_prompts,
    summary,
)

POOL = 8
"""Prompts, as a multiple of those that are timed, among which these are found."""


def main(arguments: Sequence[str] | None = None) -> int:
    print(json.dumps(measure(parse(arguments)), indent=2))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256, help="the most")
    parser.add_argument("--mean", type=float, default=33.0, help="of the new tokens; from the most on, all have it")
    parser.add_argument("--slots", type=int, nargs="+", default=[128])
    parser.add_argument("--steps", type=int, default=8, help="decoding steps between two admissions")
    parser.add_argument("--prefill-rows", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1, help="of each prompt; lengths are geometric if several")
    parser.add_argument("--shared-prompts", type=int, default=0, help="of slots, as one more way; for several samples")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-whole", action="store_true", help="leave out all rows at once")
    options = parser.parse_args(arguments)
    defaults = {"tied": False, "dtype": "float32", "scan_layers": False, **SIZES[options.size], **vars(options)}
    return argparse.Namespace(**{**defaults, "batch": options.rows // options.samples})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one setting."""
    config, layout = language_model(options), Layout.over((0,), Strategy())
    noise, temperature = jnp.zeros(3, jnp.uint32), jnp.float32(1.0)
    targets, n = drawn_lengths(options), options.samples
    mean = options.mean * (1 if targets is None else 2)
    stop_ids = () if options.mean >= options.new_tokens else tuple(range(max(1, round(config.vocab_size / mean))))
    sampling = Sampling(max_new_tokens=options.new_tokens, stop_ids=stop_ids, min_new_tokens=0, num_samples=n)
    params = jax.device_put(init_params(config, jax.random.key(0)))
    params["lm_head" if not config.tie_embeddings else "embedding"] *= 0.1  # every token is nearly as likely

    def whole() -> list[Rollout]:
        return [at_once(params, prompts)]

    def in_waves(size: int) -> list[Rollout]:
        size //= n
        parts = [jax.tree.map(lambda x, i=i: x[i : i + size], prompts) for i in range(0, options.batch, size)]
        return [at_once(params, part) for part in parts]

    def in_slots(slots: Slots, given: Params, some: Prompts) -> Rollout:
        return generate(given, some, noise, temperature, sampling, config, layout, slots)

    at_once = jax.jit(lambda given, some: generate(given, some, noise, temperature, sampling, config, layout))
    prompts = random_prompts(options)
    if targets is not None:
        pool = random_prompts(argparse.Namespace(**{**vars(options), "batch": POOL * options.rows}))
        parts = [jax.tree.map(lambda x, i=i: x[i::POOL], pool) for i in range(POOL)]
        lengths = np.stack([np.asarray(at_once(params, part).lengths) for part in parts], axis=1).ravel()
        prompts = jax.tree.map(lambda x: x[nearest(targets, lengths)], pool)
    ways: dict[str, Callable[[], list[Rollout]]] = {} if options.without_whole else {"at once": whole}
    for size in options.slots:
        slots = Slots(size, prefill_rows=options.prefill_rows, steps=options.steps)
        sharing = dataclasses.replace(slots, shared_prompts=options.shared_prompts)
        run, run_sharing = jax.jit(functools.partial(in_slots, slots)), jax.jit(functools.partial(in_slots, sharing))
        ways[f"waves of {size}"] = lambda size=size: in_waves(size)
        ways[f"{size} slots"] = lambda run=run: [run(params, prompts)]
        if options.shared_prompts:
            ways[f"{size} slots, shared prompts"] = lambda run=run_sharing: [run(params, prompts)]
        ways[f"{size} slots, longest first"] = lambda run=run, known=f"waves of {size}": [
            run(params, prompts.replace(expected_tokens=rollouts[known].reshape(-1, n).mean(axis=1, dtype=np.float32)))
        ]
    clocks: dict[str, list[Clocks]] = {name: [] for name in ways}
    rollouts: dict[str, np.ndarray] = {}
    for i in range(options.rounds + 1):  # the first compiles
        for name, run in ways.items():
            started = Clocks.now()
            done = jax.block_until_ready(run())
            clocks[name] += [Clocks.now() - started] if i else []
            rollouts[name] = np.concatenate([np.asarray(each.lengths) for each in done])
    (lengths,) = {each.tobytes(): each for each in rollouts.values()}.values()  # every way gives the same
    return {
        "options": vars(options),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokens": int(lengths.sum()),
        "median_length": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "ways": {name: of_way(name, each, lengths, config, options) for name, each in clocks.items()},
        "ratios": {
            f"{name} / {slots}": statistics.median(
                one.cpu / other.cpu for one, other in zip(clocks[name], clocks[slots], strict=True)
            )
            for size in options.slots
            for slots in (f"{size} slots", f"{size} slots, shared prompts", f"{size} slots, longest first")
            for name in ("at once", f"waves of {size}")
            if name in clocks and slots in clocks
        },
    }


def drawn_lengths(options: argparse.Namespace) -> np.ndarray | None:
    """Lognormal lengths of this mean, before those above the limit are cut to it. None if the limit is not above it, or
    prompts have several samples."""
    if options.mean >= options.new_tokens or options.samples > 1:
        return None
    sigma = lognormal_sigma()
    lengths = np.random.default_rng(1).lognormal(math.log(options.mean) - sigma**2 / 2, sigma, options.rows)
    return np.clip(np.round(lengths), 1, options.new_tokens).astype(int)


def lognormal_sigma() -> float:
    """Of the logarithm, where the 99.9th percentile is ten times the median."""
    return math.log(10) / statistics.NormalDist().inv_cdf(0.999)


def nearest(targets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each target, from the highest on, the place of the length that is nearest to it and not yet taken."""
    left, places = lengths.astype(float), np.zeros(len(targets), int)
    for i in np.argsort(-targets, kind="stable"):
        places[i] = np.abs(left - targets[i]).argmin()
        left[places[i]] = np.inf
    return places


def of_way(
    name: str, clocks: list[Clocks], lengths: np.ndarray, config: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds and steps of one way."""
    found: dict[str, Any] = {**summary(clocks), "fewest_steps": fewest_steps(name, lengths)}
    found["tokens_per_second"] = int(lengths.sum()) / found["wall_s"]
    bandwidth = known(BANDWIDTH, jax.devices()[0].device_kind)
    if bandwidth and "slots" in name:
        rows = int(name.split()[0])
        read = decode_step_bytes(config, rows=rows, tokens=options.prompt + float(lengths.mean()) / 2)
        found["fraction_of_bandwidth_bound"] = found["fewest_steps"] * read / bandwidth / found["wall_s"]
    return found


def fewest_steps(name: str, lengths: np.ndarray) -> int:
    """Decoding steps: of all at once the longest response, of waves that of each, of slots the end of the last one if
    every response begins as soon as another has ended."""
    if name == "at once":
        return int(lengths.max())
    size = next(int(word) for word in name.split() if word.isdigit())
    if name.startswith("waves"):
        return int(sum(lengths[i : i + size].max() for i in range(0, len(lengths), size)))
    ends = np.zeros(size, int)
    for length in -np.sort(-lengths) if name.endswith("first") else lengths:
        ends[ends.argmin()] += length
    return int(ends.max())


if __name__ == "__main__":
    raise SystemExit(main())
