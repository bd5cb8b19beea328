"""The bench of loading and exporting runs, and neither holds the weights twice."""

import json
import sys

import pytest

from jaxrlhf.models.architecture import num_parameters
from scripts.bench_load import main, model_of


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("held", ["float32", "bfloat16"])
def test_loading_and_exporting_take_little_beside_the_weights(held, capfd, tmp_path):
    sizes = ["--gigabytes", "0.3", "--stored", held, "--held", held, "--scratch", str(tmp_path)]
    assert main([*sizes, "--stacked"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["gigabytes_on_devices"] == pytest.approx(0.3, rel=0.2)
    for part in ("load", "export"):
        # chunks of 32 MiB and pages of programs weigh more at this size than at that of a real model
        assert 0.9 < found[part]["ratio_beyond_process"] < 1.6, found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gigabytes", [0.001, 0.5, 2, 16])
def test_models_are_as_large_as_asked_for(gigabytes):
    assert 4 * num_parameters(model_of(gigabytes, 4)) == pytest.approx(gigabytes * 1e9, rel=0.25)
