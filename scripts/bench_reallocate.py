"""Times reallocation between layouts, beside `jax.device_put`.

    python scripts/bench_reallocate.py                    # eight virtual devices of this processor
    python scripts/bench_reallocate.py --way programs     # the same by the programs that accelerators would run
    python scripts/bench_reallocate.py --processes 2      # two processes with four devices each
    python scripts/bench_reallocate.py --json

Weights of transformer layers, about 200 MB in float32, go from one layout to another. The two ways alternate, each from
sources made anew, since `device_put` leaves copies on those that it has seen. Prints a table: the least seconds of a
round, their median, the first round's with compiling; bytes between devices by the transfer plan; and the peak of the
(first) process' memory beyond sources and results. A dash is what `device_put` cannot do.
"""

import argparse
import contextlib
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxrlhf.models.architecture import Weight
from jaxrlhf.reshard import reallocate as reallocation
from jaxrlhf.reshard.reallocate import reallocate
from jaxrlhf.reshard.traffic import traffic_of
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import num_devices, use_virtual_cpu_devices
from jaxrlhf.sharding.strategy import Strategy

DEVICES = 8
ALL, LOWER, UPPER = tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7)
PAIRS: dict[str, tuple[tuple[tuple[int, ...], Strategy], tuple[tuple[int, ...], Strategy]]] = {
    "fsdp 8 -> data 4 x tensor 2": ((ALL, Strategy(fsdp=8)), (ALL, Strategy(data=4, tensor=2))),
    "data 4 x tensor 2 -> fsdp 8": ((ALL, Strategy(data=4, tensor=2)), (ALL, Strategy(fsdp=8))),
    "fsdp 8 -> tensor 8": ((ALL, Strategy(fsdp=8)), (ALL, Strategy(tensor=8))),
    "tensor 8 -> data 2 x tensor 4": ((ALL, Strategy(tensor=8)), (ALL, Strategy(data=2, tensor=4))),
    "fsdp 8 -> data 8": ((ALL, Strategy(fsdp=8)), (ALL, Strategy(data=8))),
    "data 8 -> fsdp 8": ((ALL, Strategy(data=8)), (ALL, Strategy(fsdp=8))),
    "fsdp 8, other order": ((ALL, Strategy(fsdp=8)), (ALL[::-1], Strategy(fsdp=8))),
    "tensor 8 -> data 2 x tensor 4, other order": (
        (ALL, Strategy(tensor=8)), ((0, 4, 1, 5, 2, 6, 3, 7), Strategy(data=2, tensor=4))
    ),
    "subset: fsdp 8 -> tensor 4": ((ALL, Strategy(fsdp=8)), (UPPER, Strategy(tensor=4))),
    "superset: tensor 4 -> fsdp 8": ((LOWER, Strategy(tensor=4)), (ALL, Strategy(fsdp=8))),
    "superset: fsdp 4 -> data 4 x tensor 2": ((LOWER, Strategy(fsdp=4)), (ALL, Strategy(data=4, tensor=2))),
    "overlap: fsdp 4 -> tensor 4": ((LOWER, Strategy(fsdp=4)), ((2, 3, 4, 5), Strategy(tensor=4))),
    "disjoint: fsdp 4 -> fsdp 4": ((LOWER, Strategy(fsdp=4)), (UPPER, Strategy(fsdp=4))),
    "disjoint: fsdp 4 -> data 2 x tensor 2": ((LOWER, Strategy(fsdp=4)), (UPPER, Strategy(data=2, tensor=2))),
}  # fmt: skip

WEIGHTS = {
    "query": Weight((1024, 1024), ("embed", "heads")),
    "output": Weight((1024, 1024), ("heads", "embed")),
    "up": Weight((1024, 2816), ("embed", "mlp")),
    "down": Weight((2816, 1024), ("mlp", "embed")),
    "norm": Weight((1024,), ("norm",)),
}
"""Weights of a layer. 31 MB in float32."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.processes > 1 and options.index is None:
        return run_processes(options, list(sys.argv[1:] if arguments is None else arguments))
    use_virtual_cpu_devices(DEVICES // options.processes)
    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, options.processes, options.index)
    if num_devices() != DEVICES:
        raise SystemExit(f"devices: the pairs need {DEVICES}. Got {num_devices()}.")
    if options.way == "programs":
        reallocation.host_memory_is_theirs = lambda devices: False
    rows = [measure(name, options) for name in PAIRS if options.pair in name]
    if jax.process_index() == 0:
        print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="of 31 MB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pair", default="", help="only the pairs whose name contains this")
    parser.add_argument("--way", choices=("fastest", "programs"), default="fastest")
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_processes(options: argparse.Namespace, words: list[str]) -> int:
    """This script once for each process; what the first prints is printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *words, "--coordinator", address, "--index"]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=None if i == 0 else subprocess.DEVNULL, env=os.environ)
        for i in range(options.processes)
    ]
    return max(abs(process.wait()) for process in processes)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One pair of layouts."""
    source, target = (
        [
            {key: Layout.over(devices, strategy).weight(weight) for key, weight in WEIGHTS.items()}
            for _ in range(options.layers)
        ]
        for devices, strategy in PAIRS[name]
    )

    rng = np.random.default_rng(0)
    host = [
        {key: rng.random(weight.shape, np.float32) for key, weight in WEIGHTS.items()} for _ in range(options.layers)
    ]
    placed = reallocate(host, source)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    def sources() -> Any:
        """New arrays on the source's devices. A process that has none of these holds no part, and runs nothing."""
        return jax.block_until_ready(copy(placed)) if source[0]["query"].addressable_devices else placed

    ways: dict[str, Callable[[Any], Any]] = {"reallocate": lambda tree: reallocate(tree, target)}
    if options.processes == 1 or source[0]["query"].device_set == target[0]["query"].device_set:
        ways["device_put"] = lambda tree: jax.device_put(tree, target)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    extra: dict[str, int] = {}
    tree = placed
    for i in range(options.rounds + 2):
        for way, move in ways.items():
            moved = None
            tree = sources()
            if i == options.rounds + 1:  # the last is for memory, and slower for it
                before = reset_peak_memory()
                moved = jax.block_until_ready(move(tree))
                extra[way] = max(0, peak_memory() - before - held_bytes(moved))
                continue
            wait_for_all(options)
            started = time.perf_counter()
            moved = jax.block_until_ready(move(tree))
            wait_for_all(options)
            seconds[way].append(time.perf_counter() - started)
    counted = traffic_of(tree, target)
    return {
        "pair": name,
        "bytes": sum(array.nbytes for array in jax.tree.leaves(tree)),
        "moved_bytes": counted.moved_bytes,
        "between_processes_bytes": counted.between_nodes_bytes,
        "ways": {
            way: {
                "first_s": times[0], "least_s": min(times[1:]), "median_s": statistics.median(times[1:]),
                "extra_bytes": extra[way],
            }
            for way, times in seconds.items()
        },
    }  # fmt: skip


def wait_for_all(options: argparse.Namespace) -> None:
    """A process that gets nothing is done at once, but the move is not."""
    if options.processes > 1:
        multihost_utils.sync_global_devices("bench")


def held_bytes(tree: Any) -> int:
    """Memory of the results in this process; devices of a processor may share it."""
    shards = [shard.data for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def reset_peak_memory() -> int:
    """Forgets this process' peak and gives its memory now, in bytes. Linux only; elsewhere extra memory reads 0."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # or what was freed before hides what is taken now
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak_memory() -> int:
    return memory("VmHWM")


def memory(field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table in Markdown, as in docs/performance.md."""
    lines = [
        "| Layouts | Between devices | reallocate: least, median, first | device_put | Extra memory, each |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ours, theirs = row["ways"]["reallocate"], row["ways"].get("device_put")
        cells = [row["pair"], f"{row['moved_bytes'] / 1e6:.0f} MB", *(milliseconds(way) for way in (ours, theirs))]
        cells.append(", ".join(f"{way['extra_bytes'] / 1e6:.0f} MB" if way else "-" for way in (ours, theirs)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def milliseconds(way: dict[str, float] | None) -> str:
    return ", ".join(f"{way[name] * 1e3:.0f}" for name in ("least_s", "median_s", "first_s")) + " ms" if way else "-"


if __name__ == "__main__":
    sys.exit(main())
