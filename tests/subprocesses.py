"""What tests need that start processes."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
_draw = random.Random(os.getpid())


def free_port() -> int:
    """A port that nobody listens on.

    Below those that the kernel hands out to outgoing connections: one of these could be taken before the coordinator
    has started.
    """
    while True:
        port = _draw.randrange(20_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("localhost", port))
            except OSError:
                continue
        return port


def flags_of_one_processor() -> str:
    """XLA's flags as conftest.py sets them, but for the number of devices: compiling takes no longer than it must."""
    return " ".join(f for f in os.environ["XLA_FLAGS"].split() if "force_host_platform_device_count" not in f)


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that runs the package on virtual devices, with the tests' compilation cache."""
    cache = {
        name.upper(): str(getattr(jax.config, name))
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags_of_one_processor()}
    return {**os.environ, **cache, **own, **more}


def run_processes(module: str, count: int, *, seconds: float = 200, **variables: str) -> None:
    """Runs a module of the tests as so many processes on virtual devices of this processor, with the coordinator's
    address, their count and their index as arguments, or, as one, without. Each is to end without an error: only its
    exit status says so, since what connects processes writes into the middle of other lines.

    Args:
        variables: Of their environment, in place of the tests' own.
    """
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *([address, str(count), str(i)] if count > 1 else [])],
            cwd=ROOT, env=environment(**variables), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            with process:  # closes its pipe and waits: the test that ends here is the one that fails
                pass
    assert not any(process.returncode for process in processes), "\n".join(outputs)
