"""Calls over stages in float64, to 1e-10, in one process and in two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subprocesses import flags_of_one_processor, free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_over_stages_give_what_one_device_gives_in_float64(count):
    """Training, inference and two fused calls; in two processes with a stage in each, and with every stage in both."""
    command = [sys.executable, "-m", "tests.runtime.run_pipelines"]
    address = f"localhost:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags_of_one_processor()}
    processes = [
        subprocess.Popen(
            [*command, *([address, str(count), str(i)] if count > 1 else [])],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(output.rstrip().endswith("done") for output in outputs), "\n".join(outputs)
