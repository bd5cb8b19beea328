"""`jaxrlhf.forecast`: what the planning command finds, as an object."""

import json
import subprocess
import sys
from typing import Any

import pytest

import jaxrlhf as rl
from jaxrlhf.plan import main
from jaxrlhf.planner.plans.saved_plan import read_plan

FAST: dict[str, Any] = {"cluster": "1x4:a100-80g", "method": "colocate", "costs": "analytic", "quiet": True}


@pytest.fixture(scope="module")
def forecast() -> rl.Forecast:
    return rl.forecast("ppo_arithmetic", batch_size=256, **FAST)


def test_a_forecast_is_that_of_the_command(forecast, capsys):
    options = ["--config", "ppo_arithmetic", "--batch-size", "256", "--cluster", "1x4:a100-80g", "--json"]
    assert main([*options, "--strategy", "colocate", "--costs", "analytic"]) == 0
    printed, own = json.loads(capsys.readouterr().out), forecast.to_json()
    for data in (printed, own):
        del data["search"]["planning_seconds"]
    assert own == printed


def test_what_a_forecast_says(forecast):
    assert forecast.seconds > 0 and forecast.tokens_per_second > 0 and forecast.method == "colocate"
    assert forecast.cluster == "1x4:a100-80g" and forecast.config.batch_size == 256
    names = ["actor.generate", "reference.logprobs", "critic.values", "actor.train", "critic.train"]
    assert sorted(forecast.call_seconds) == sorted(names) == sorted(forecast.call_bytes)
    assert forecast.call_bytes["actor.train"] > 0 and set(forecast.plan) >= {*names, "ppo_batch"}
    assert [row["call"] for row in forecast.calls] == list(forecast.call_seconds) and forecast.memory
    assert any("assumed" in note for note in forecast.notes) and forecast.search[0] == repr(forecast).splitlines()[0]
    assert "<svg" in forecast._repr_html_()


def test_its_plan_is_one_that_a_config_can_name(forecast, tmp_path):
    path = forecast.save(tmp_path / "plan.json")
    assert read_plan(path).plan.placements == forecast.plan
    assert rl.read_config("ppo_arithmetic", plan=path).plan.file == str(path)


def test_other_sizes_than_those_of_the_data(forecast):
    longer = rl.forecast("ppo_arithmetic", prompt_tokens=64, response_tokens=128, lengths=(40, 100), **FAST)
    assert longer.seconds > forecast.seconds and longer.config.settings.sampling.max_new_tokens == 128


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cluster": "moon"}, r"cluster: must be groups of nodes. Got 'moon'"),
        ({"method": "guess"}, r"Got 'guess'"),
        ({"calibration": "x.json"}, r"calibration: goes with costs='measured'. Got costs='analytic'. Leave one out"),
        ({"batch_size": 7, "plan": "interleaving"}, r"."),
        ({"prompt_tokens": 0}, r"prompt-tokens: must be at least 1. Got 0"),
    ],
)
def test_mistakes_are_input_errors(keys, message):
    with pytest.raises(rl.InputError, match=message):
        rl.forecast("ppo_arithmetic", **{**FAST, **keys})


def test_a_plan_is_saved_to_json_alone(forecast, tmp_path):
    with pytest.raises(rl.InputError, match=r"save: a plan is a file whose name ends in .json. Got '.*plan.yaml'"):
        forecast.save(tmp_path / "plan.yaml")


def test_a_forecast_leaves_the_devices_of_the_process_open():
    code = (
        "import jaxrlhf as rl; from jaxrlhf.sharding import mesh\n"
        "rl.forecast('grpo_arithmetic', cluster='1x2:a100-80g', method='colocate', costs='analytic', quiet=True)\n"
        "with mesh.devices_left_open(): gone = mesh.build_mesh((0,), rl.Strategy())\n"
        "assert not mesh.is_running(); mesh.use_virtual_cpu_devices(3); print(mesh.num_devices(), mesh.is_running())\n"
        "assert mesh.build_mesh((0,), rl.Strategy()) is not gone"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "True"]
