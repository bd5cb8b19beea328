"""The command that measures a machine for a run."""

import dataclasses
import subprocess
import sys

import pytest

from jaxrlhf import calibrate
from jaxrlhf.calibration import timing
from jaxrlhf.calibration.measure_calls import Degrees
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.planner.costs.calibration import Point, read_calibration, this_machine
from tests.planner.costs.test_calibration import RATES
from tests.subprocesses import ROOT

CONFIG = """
name: small
algorithm: sft
steps: 1
batch_size: 2
devices: cpu:8
data: {path: rows.jsonl, eval_rows: 0}
roles:
  actor:
    model: {vocab_size: 264, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 4, num_kv_heads: 2}
    optimizer: {learning_rate: 1.0e-3}
plan: {default: {data: 2}}
compilation_cache: ""
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "measure_machine", lambda **_: RATES)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2", "answer": "2"}\n' * 8)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return path


def test_a_run_is_measured_and_more_is_added(config, capsys):
    command = ["--config", str(config), "--out", "measured.json", "--patience", "0"]
    assert calibrate.main([*command, "--degrees", "data=1"]) == 0
    shown = capsys.readouterr().out
    assert "measured.json" in shown and "gradient" in shown and "Meanwhile other processes had " in shown
    path = config.with_name("measured.json")
    first = read_calibration(path, machine=this_machine())
    assert {(c.case.phase, c.case.data) for c in first.curves} == {
        (phase, data) for phase in ("gradient", "update") for data in (1, 2)
    }
    assert first.rates == dataclasses.replace(RATES, host_seconds=first.rates.host_seconds)
    assert 0 < first.rates.host_seconds < 1
    assert 0 <= first.load.others <= 1
    assert calibrate.main([*command, "--minutes", "1e-9"]) == 1
    shown = capsys.readouterr()
    assert "no time is left for" in shown.out and "no pass was measured in 1e-09 minutes" in shown.err
    assert read_calibration(path, machine=this_machine()) == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes: must be positive. Got 0.0."),
        (["--minutes", "nan"], "--minutes: must be positive. Got nan."),
        (["--patience", "-1"], "--patience: must not be negative. Got -1.0."),
    ],
)
def test_times_that_are_refused(config, capsys, arguments, message):
    assert calibrate.main(["--config", str(config), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_file_of_another_machine_is_not_added_to(config, capsys):
    config.with_name("measured.json").write_text("{}")
    assert calibrate.main(["--config", str(config), "--out", "measured.json"]) == 1
    assert "measured.json: version: must be 3. Got None. Measure this machine" in capsys.readouterr().err


def test_the_command_starts_by_itself():
    """In a process that has imported nothing else of the package."""
    command = [sys.executable, "-m", "jaxrlhf.calibrate", "--config", "no_such_config"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("Error: Unknown config 'no_such_config'")


def test_two_measurements_count_by_what_they_had_of_the_processors():
    quiet, noisy = Point(8, 1.0, 0.2, spread=0.01, others=0.0), Point(8, 4.0, 0.8, spread=0.02, others=0.5)
    both = calibrate.mean(quiet, noisy)
    assert (both.rows, both.layer, both.rest) == pytest.approx((8, 2.0, 0.4), rel=1e-5)
    assert both.spread == pytest.approx(0.75, rel=1e-5)
    assert calibrate.mean(quiet, quiet) == quiet


def test_degrees_are_numbers_of_devices():
    assert calibrate.parse_degrees([], all_devices=8) == Degrees(data=(1, 8))
    assert calibrate.parse_degrees([], all_devices=1) == Degrees()
    assert calibrate.parse_degrees(["tensor=1,2", "data=4", "remat=none,layer"], all_devices=8) == Degrees(
        data=(4,), tensor=(1, 2), remat=("none", "layer")
    )
    cases = {
        "pipeline=2": "must be of data, fsdp, tensor, remat. Got 'pipeline=2'. Write --degrees",
        "tensor": "must be of data, fsdp, tensor, remat. Got 'tensor'",
        "tensor=16": "tensor: must be numbers from 1 to 8, the devices that there are.* Got '16'",
        "tensor=two": "Got 'two'",
        "tensor=": "Got ''",
        "remat=all": "remat: must be of none, dots, layer. Got 'all'",
    }
    for text, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            calibrate.parse_degrees([text], all_devices=8)
