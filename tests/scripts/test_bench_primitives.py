"""The bench runs everywhere, and says null where it does not know."""

import json

import jax
import pytest

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.params import abstract_params
from scripts import bench_primitives
from tests.subprocesses import environment


def test_the_suite_for_gpus_runs_with_tiny_models(capsys, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bench_primitives, "GPU_SUITE", bench_primitives.GPU_SUITE[:1])  # compiling takes long
    assert bench_primitives.main(["--gpu-suite", "--tiny"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["options"]["batch"] for result in results] == [2]
    for result in results:
        calls = result["calls"]
        assert list(calls) == [
            "actor.generate",
            "reference.logprobs",
            "critic.values",
            "reward.scores",
            "ppo_batch",
            "actor.train",
            "critic.train",
        ]
        assert sum(call["fraction"] for call in calls.values()) == pytest.approx(1)
        assert all(call["wall_s"] > 0 for call in [*calls.values(), result["iteration"], result["prefill"]])
        assert set(result["compile_s"]) == {*calls, "prefill"}
        assert set(result["memory"]["compiler_forecast_bytes"]) <= {*calls, "prefill"}
        assert result["memory"]["peak_rss_bytes"] > 1e8
        bounds = result["bounds"]
        unknown = {"bandwidth_bytes_per_s", "peak_flops_per_s", "forward_utilisation", "train_utilisation"}
        assert {name for name, value in bounds.items() if value is None} == unknown | {
            "decode_tokens_per_s_bound",
            "decode_fraction_of_bound",
        }


def test_a_setting_that_fails_is_named(capsys, monkeypatch):
    monkeypatch.setattr(bench_primitives, "GPU_SUITE", [{"size": "0.5b", "batch": 32, "micro_batches": "many"}])
    assert bench_primitives.main(["--gpu-suite"]) == 1
    (failed,) = json.loads(capsys.readouterr().out)
    assert failed == {"failed": ["--size", "0.5b", "--batch", "32", "--micro-batches", "many", "--rounds", "5"]}


def test_bounds_of_a_named_device():
    options = bench_primitives.parse(["--size", "0.5b", "--batch", "128"])
    lm = bench_primitives.language_model(options)
    calls = {name: {"wall_s": 2.0} for name in ("actor.generate", "reference.logprobs", "actor.train")}
    bounds = bench_primitives.bounds(options, lm, "NVIDIA H100 80GB HBM3", calls, {"wall_s": 1.0})
    assert bounds["decode_tokens_per_s"] == 128 * 511
    weights = 494_032_768  # of Qwen 2.5 0.5B
    biases = 24 * (14 + 2 + 2) * 64  # which the bench leaves out
    cache = 24 * 2 * 2 * 64 * 128 * (512 + 256)
    assert bounds["decode_bytes_per_step"] == 2 * (weights - biases + cache)
    expected_rate = 128 * 3.35e12 / bounds["decode_bytes_per_step"]
    assert bounds["decode_tokens_per_s_bound"] == pytest.approx(expected_rate)
    train_flops = bounds["train_flops"]
    assert train_flops is not None
    assert bounds["train_utilisation"] == pytest.approx(train_flops / 2.0 / 989e12)
    assert train_flops == pytest.approx(6 * weights * 128 * 1023, rel=0.25)
    own = bench_primitives.parse(["--size", "small", "--bandwidth", "1e10", "--peak-flops", "1e11"])
    bounds = bench_primitives.bounds(own, bench_primitives.language_model(own), "cpu", calls, {"wall_s": 1.0})
    assert bounds["decode_fraction_of_bound"] is not None and bounds["forward_utilisation"] is not None


def test_devices_must_divide(capsys):
    with pytest.raises(SystemExit):
        bench_primitives.parse(["--devices", "4", "--fsdp", "3"])
    assert "--devices: must be a multiple of --fsdp x --tensor = 3. Got 4." in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_a_decoding_step(tied, dtype, size):
    D, K, h = 6, 2, 2
    config = ModelConfig(
        vocab_size=11, hidden_size=D, intermediate_size=7, num_layers=3, num_heads=4, num_kv_heads=K, head_dim=h,
        tie_embeddings=tied, dtype=dtype,
    )  # fmt: skip
    leaves = {jax.tree_util.keystr(p): x.size for p, x in jax.tree_util.tree_leaves_with_path(abstract_params(config))}
    weights = sum(leaves.values()) - (0 if tied else leaves["['embedding']"] - 4 * D)
    cache = 3 * 2 * 4 * 10 * K * h
    assert bench_primitives.decode_step_bytes(config, rows=4, tokens=10) == size * (weights + cache)
