"""Calls over stages in float64, to 1e-10, in one process and in two."""

import pytest

from tests.subprocesses import run_processes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 2])
def test_calls_over_stages_give_what_one_device_gives_in_float64(count):
    """Training, inference and two fused calls; in two processes with a stage in each, and with every stage in both."""
    run_processes("tests.runtime.run_pipelines", count, seconds=500)
