"""Runs of several processes: one is killed, one fails, and the run goes on in another number of them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.subprocesses import ROOT, environment, free_port

APART = (
    *("--set", "plan.default={data: 4, devices: 0-3}"),
    *("--set", "plan.calls.reference.logprobs={data: 2, devices: 4-5}"),
)
"""With the plan of ppo_arithmetic, whose critic has the second four devices: each process has calls of its own."""
SHORT = ("--set", "warm_start=null", "--set", "evaluation=null")
FAILING = """
import os, sys
from jaxrlhf.execution import executor
from jaxrlhf.train import main

dispatch = executor.Executor._call_device

def fail(self, call, plan, values, step):
    if call.kind == "infer" and os.environ["JAX_PROCESS_ID"] == "1":
        raise FloatingPointError("made up")
    return dispatch(self, call, plan, values, step)

executor.Executor._call_device = fail
sys.exit(main(sys.argv[1:]))
"""


class Started:
    """Two processes of one run, with what they print in files."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        port = free_port()
        self.logs = [folder / f"{index}.log" for index in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            own = environment(
                JAX_COORDINATOR_ADDRESS=f"localhost:{port}", JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index)
            )
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=subprocess.STDOUT)
                )

    def wait_for(self, happens, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not happens():
            assert time.monotonic() < until, self.said()
            assert any(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.05)

    def ends(self, seconds: float) -> list[int]:
        try:
            return [process.wait(timeout=seconds) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None
        finally:
            for process in self.processes:
                process.kill()

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)


def steps_done(folder: Path) -> int:
    files = list(folder.glob("runs/*/metrics.jsonl"))
    return max((file.read_text().count('"actor/pg_loss"') for file in files), default=0)


@pytest.mark.timeout(600)
def test_a_killed_process_ends_the_other_and_the_run_goes_on_in_one_process(train, results, tmp_path):
    # of the rewards of the task, a model this small earns none: advantages would be rounding, whitened
    workers = "workers: 4, sample_timeout_seconds: 100, timeout_score: 0"
    digits = ROOT / "tests" / "invariance" / "digits.py"
    reward = f"roles.reward={{function: '{digits}:share_of_digits', {workers}}}"
    several = ("--set", "steps=6", "--set", "evaluation.every=0", "--set", reward)
    assert train(*several)[0] == 0
    undisturbed = results()
    run = Started(
        tmp_path,
        [sys.executable, "-m", "jaxrlhf.train", "--config", "tiny.yaml", "--set", "name=apart", *several, *APART],
    )
    (tmp_path / "runs").rename(tmp_path / "before")
    run.wait_for(lambda: steps_done(tmp_path) >= 3)
    run.processes[1].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    assert run.ends(60) == [1, -signal.SIGKILL]
    assert time.monotonic() - killed_at < 60
    assert "process 1 of 2 is gone" in run.logs[0].read_text() and "--resume auto" in run.logs[0].read_text()

    # another plan, in one process: that of the config
    folder = (tmp_path / "runs" / "latest").resolve()
    status, out, _ = train("--config", "tiny.yaml", "--resume", str(folder), *several, config="")
    assert status == 0 and "Going on from" in out
    assert [record["reward/reward/timeouts"] for record in undisturbed if "actor/pg_loss" in record] == [0] * 6
    for got, want in zip(results(folder), undisturbed, strict=True):
        assert got.keys() == want.keys()
        for name in want.keys() - {"rollout/logprob_gap_max"}:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {want['step']}")


@pytest.mark.timeout(600)
def test_an_error_in_one_process_ends_all_with_its_traceback(train, tmp_path):
    run = Started(
        tmp_path,
        [sys.executable, "-c", FAILING, "--config", "tiny.yaml", *SHORT, *APART],
    )
    assert run.ends(240) == [1, 1]
    first, second = (log.read_text() for log in run.logs)
    assert "process 1 of 2 failed, so process 0 ends too" in first
    assert "FloatingPointError: made up" in first and "FloatingPointError: made up" in second
