"""Calls over stages in two processes, in float64 to 1e-10."""

import pytest

from tests.subprocesses import run_processes


@pytest.mark.timeout(600)
def test_calls_over_stages_give_what_one_device_gives_in_float64():
    """Training, inference and two fused calls; with a stage in each process, and with every stage in both."""
    run_processes("tests.programs.run_pipelines", 2, seconds=500)
