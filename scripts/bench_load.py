"""Measures the host memory of loading a checkpoint onto devices and of exporting it again.

    python -m scripts.bench_load                                    # 2 GB in float32, 8 virtual CPU devices
    python -m scripts.bench_load --gigabytes 4 --stored bfloat16 --held bfloat16 --stacked

Makes a folder with random weights of Llama's shapes, loads it in a fresh process onto virtual CPU devices, whose memory
is the host's, and writes it from there to another folder. Prints one JSON object with the peak of the process (Linux:
VmHWM, which is reset before each part) while it loads and while it exports, each also as a ratio to the bytes of the
arrays; in all, and without what the process had before. Interpreter, JAX and eight devices are 0.3 to 0.5 GB of it.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.models.architecture import num_parameters
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.config_json import read_config
from jaxrlhf.models.huggingface import load_params, save_params
from jaxrlhf.models.params import abstract_params
from jaxrlhf.models.weight_files import Dtype
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.mesh import skip_cuda_check_without_gpu, use_virtual_cpu_devices
from jaxrlhf.sharding.strategy import Strategy

STRATEGY = Strategy(fsdp=4, tensor=2)
ITEMSIZE = {"float32": 4, "bfloat16": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        print(json.dumps(measure(options)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / "model"
        config = model_of(options.gigabytes, ITEMSIZE[options.stored])
        write_random(config, folder, options.stored)
        passed = [*("--child", str(folder)), *("--stored", options.stored), *("--held", options.held)]
        done = subprocess.run(
            [sys.executable, "-m", "scripts.bench_load", *passed, *(["--stacked"] if options.stacked else [])],
            stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
    print(json.dumps({"model": dataclasses.asdict(config), **json.loads(done.stdout)}, indent=2))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the weight files")
    parser.add_argument("--stored", choices=ITEMSIZE, default="float32", help="precision of the weight files")
    parser.add_argument("--held", choices=ITEMSIZE, default="float32", help="precision on the devices")
    parser.add_argument("--stacked", action="store_true", help="layers stacked, as scan_layers has them")
    parser.add_argument("--scratch", type=Path, help="where the folders are made; default: that of temporary files")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def model_of(gigabytes: float, itemsize: int) -> ModelConfig:
    """A model of Llama's proportions with so many bytes, to a layer."""
    wanted = gigabytes * 1e9 / itemsize
    hidden = max(64, 256 * round((wanted / 12 / 24) ** 0.5 / 256))
    config = ModelConfig(
        vocab_size=32_000 if wanted > 1e8 else 512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_layers=1,
        num_heads=hidden // 64,
        num_kv_heads=max(1, hidden // 256),
        dtype="float32",
    )
    of_layer = num_parameters(dataclasses.replace(config, num_layers=2)) - num_parameters(config)
    rest = num_parameters(config) - of_layer
    return dataclasses.replace(config, num_layers=max(1, round((wanted - rest) / of_layer)))


def write_random(config: ModelConfig, folder: Path, dtype: Dtype) -> None:
    """A folder of random weights: views that repeat one row, without memory of their own."""
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: np.broadcast_to(rng.normal(0, 0.02, x.shape[-1]).astype(np.float32), x.shape), abstract_params(config)
    )
    save_params(weights, config, folder, dtype=dtype, shard_bytes=5 * 10**8)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Loads and exports in this process."""
    skip_cuda_check_without_gpu()
    use_virtual_cpu_devices(STRATEGY.num_devices)
    config, dtype = read_config(options.child), jnp.dtype(options.held)
    layout = Layout.over(tuple(range(STRATEGY.num_devices)), STRATEGY)
    jnp.zeros(()).block_until_ready()
    parts: dict[str, Any] = {}
    held: list[Any] = []
    num_bytes = num_parameters(config) * dtype.itemsize

    def load() -> None:
        held.append(load_params(options.child, config, layout, stacked=options.stacked, dtype=dtype))

    def export() -> None:
        save_params(held[0], config, options.child.with_name("exported"), dtype=options.stored)

    before = _status("VmRSS")
    for name, part in {"load": load, "export": export}.items():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        began = time.perf_counter()
        part()
        seconds, peak = time.perf_counter() - began, _status("VmHWM")
        parts[name] = {
            "seconds": round(seconds, 1),
            "peak_gigabytes": round(peak / 1e9, 3),
            "ratio": round(peak / num_bytes, 3),
            "ratio_beyond_process": round((peak - before) / num_bytes, 3),
        }
    return {"gigabytes_on_devices": num_bytes / 1e9, "gigabytes_before": before / 1e9, **parts}


def _status(field: str) -> int:
    """Bytes of the process by /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, field
    return 1024 * int(found[1])


if __name__ == "__main__":
    sys.exit(main())
