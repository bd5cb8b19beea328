"""The lengths of responses in forecasts: from a config, or from a run."""

import json

import pytest

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.config.schema import load_run
from jaxrlhf.configured.size_overrides import with_lengths
from jaxrlhf.experience import Sampling
from jaxrlhf.run.recorded_lengths import response_lengths
from jaxrlhf.run.step_draft import draft_step


def recorded(tmp_path, *pairs):
    lines = [
        {"step": i, "perf/response_length/mean": m, "perf/response_length/p99": p} for i, (m, p) in enumerate(pairs)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 0}, *lines]))
    return str(tmp_path)


def read(lengths, most) -> ResponseLengths:
    found = response_lengths(lengths, Sampling(max_new_tokens=most))
    assert found is not None
    return found


def test_lengths_of_a_config():
    config = load_run("ppo_arithmetic", ["plan.lengths={mean: 5, p99: 9}"])
    assert config.plan.lengths == ResponseLengths(mean=5.0, p99=9)
    lengths = {call.name: call.lengths for call in draft_step(config).workload_to_plan().calls}
    assert lengths.pop("actor.generate") == config.plan.lengths and set(lengths.values()) == {None}
    assert read(config.plan.lengths, 10) == config.plan.lengths
    assert with_lengths(config, "7.5,10").plan.lengths == ResponseLengths(mean=7.5, p99=10)
    assert with_lengths(config, "runs/a").plan.lengths == ResponseLengths(run="runs/a")
    assert load_run("ppo_arithmetic", ["plan.lengths=runs/a"]).plan.lengths == ResponseLengths(run="runs/a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{mean: 5}", r"plan\.lengths\.p99: must be at least the mean, 5 tokens\. Got 0\. Raise p99, or lower mean\."),
        ("{p99: 5}", r"plan\.lengths\.mean: must be at least 1 token\. Got 0\.0\."),
        (
            "{run: a, p99: 5}",
            r"plan\.lengths\.run: gives mean and p99 by itself\. Got 'p99'\. Remove one or the other\.",
        ),
    ],
)
def test_lengths_that_say_too_little_or_too_much_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        load_run("ppo_arithmetic", [f"plan.lengths={text}"])


def test_lengths_beyond_the_limit_are_refused():
    with pytest.raises(
        ConfigError, match=r"plan\.lengths\.p99: must be at most max_new_tokens=10, which cuts.* Got 12"
    ):
        read(ResponseLengths(mean=5, p99=12), 10)
    with pytest.raises(ConfigError, match=r"--lengths: p99: must be at least the mean, 9 tokens\. Got 5\."):
        with_lengths(load_run("ppo_arithmetic", []), "9,5")


def test_lengths_of_a_run_are_those_of_its_last_steps(tmp_path):
    folder = recorded(tmp_path, *[(1.0, 1)] * 5, *[(4.0, 20), (6.0, 21)] * 5)
    assert read(ResponseLengths(run=folder), 64) == ResponseLengths(mean=5.0, p99=21)
    assert read(ResponseLengths(run=folder), 16) == ResponseLengths(mean=5.0, p99=16)
    extreme = recorded(tmp_path, (2.0, 256))  # nearly all short, and some cut off: heavier than any lognormal lengths
    nearest = read(ResponseLengths(run=extreme), 256)
    assert nearest.p99 == 256 and 11 < nearest.mean < 12


def test_a_folder_without_lengths_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.lengths\.run: must be the folder of a run\. Got .* No such file"):
        read(ResponseLengths(run=str(tmp_path / "none")), 64)
    with pytest.raises(ConfigError, match=r"plan\.lengths\.run: must be a run with at least one step that drew resp"):
        read(ResponseLengths(run=recorded(tmp_path)), 64)
