"""`jaxrlhf.train`: a run from Python, with rows and a reward of one's own, and what it gives back."""

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import jaxrlhf
from jaxrlhf import Run
from jaxrlhf.config.reading import to_tree
from jaxrlhf.observe.console import Console
from jaxrlhf.testing import small_run
from jaxrlhf.train import InputError, prepare, read

ROWS = [{"prompt": f"{i}+{i}=", "label": i} for i in range(10, 42)]
seen: list[Any] = []


def share_of_vowels(completions: list[str], label: list[int]) -> list[float]:
    seen.extend(label)
    return [sum(c in "aeiou" for c in text) / 6 for text in completions]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    tree = to_tree(small_run("rloo", steps=2))
    del tree["data"]
    return tree


@pytest.fixture(scope="module")
def run(config, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    output = {"folder": str(folder), "timeline": False, "tensorboard": False}
    return jaxrlhf.train(
        config, data={"path": ROWS, "eval_rows": 8}, reward=share_of_vowels, quiet=True, output=output, steps=3
    )


def test_a_run_gives_its_folder_its_metrics_as_rows_and_its_rewards(run):
    assert (run.folder / "config.yaml").is_file()
    assert [row["step"] for row in run.records] == [1, 2, 3], "keys given beside the config are laid over it"
    assert run.rewards == [row["critic/score/mean"] for row in run.records]
    assert list(run.metrics.index) == [1, 2, 3] and list(run.metrics["critic/score/mean"]) == run.rewards
    assert (
        set(seen) <= {row["label"] for row in ROWS} and len(seen) == 3 * 16 * run.config.settings.sampling.num_samples
    )
    assert run.config.roles["reward"].function == f"{__name__}:share_of_vowels"


def test_without_pandas_there_are_the_records(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"metrics: needs the package pandas. Got none .* pip install 'jaxrlhf\[note"):
        _ = run.metrics
    assert run.records


def test_the_folder_can_be_gone_on_with_from_the_command_line(run):
    settings = read(str(run.folder / "config.yaml"), ["steps=4", f"resume={run.folder}"])
    resume = prepare(settings, Console(quiet=True)).resume
    assert resume is not None and resume.position is not None and resume.position.done == 3


def test_it_generates_with_the_last_weights(run):
    prompts = ["12+12=", "7+7=", "31+31="]
    greedy = run.generate(prompts)
    assert len(greedy) == 3 and run.generate(prompts[1:]) == greedy[1:], "a response depends on its prompt alone"
    drawn = run.generate(prompts, temperature=1.0, num_samples=2, seed=1)
    assert len(drawn) == 6 and drawn == run.generate(prompts, temperature=1.0, num_samples=2, seed=1)
    assert drawn != run.generate(prompts, temperature=1.0, num_samples=2, seed=2)
    assert run.generate([]) == []
    # not the first weights: those of the reference, which never change
    logits = [run.weights(name)["lm_head"] for name in ("actor", "reference")]
    assert not np.array_equal(np.asarray(logits[0]), np.asarray(logits[1]))
    assert run.generate(prompts, role="reference", temperature=1.0, seed=1) != run.generate(
        prompts, temperature=1.0, seed=1
    )


def test_it_generates_with_other_settings_of_sampling(run):
    """Stop strings and masks of tokens, as lists. Up to where a stop string is complete, the response is the same."""
    letters = list(b"ab ")
    longer = run.generate(["12+12="], allowed_tokens=letters, min_new_tokens=6)[0]
    assert len(longer) == 6 and set(longer.encode()) <= set(letters)
    stopped = run.generate(["12+12="], allowed_tokens=letters, stop_strings=[longer[1:3]])[0]
    assert stopped == longer[: longer.index(longer[1:3]) + 2]
    assert set(run.generate(["12+12="], allowed_tokens=letters, logit_bias={98: 100.0})[0]) == {"b"}


def test_a_run_has_its_folder_for_itself_until_it_is_closed(run):
    """Or until nobody refers to it any more; then its threads end too."""
    before = set(threading.enumerate())
    other = jaxrlhf.resume(run.folder, quiet=True, steps=4)
    assert other.generate(["1+1="]) and (started := set(threading.enumerate()) - before)
    with pytest.raises(InputError, match="one process at a time can run a run"):
        jaxrlhf.resume(run.folder, quiet=True, steps=4)
    del other
    gc.collect()
    assert not started & set(threading.enumerate())
    with jaxrlhf.resume(run.folder, quiet=True) as again:
        assert again.done == 3 and again.generate(["1+1="]) == run.generate(["1+1="])
    with pytest.raises(jaxrlhf.RunEndedError, match=r"generate: the run must be open. Got a run that is closed"):
        again.generate(["1+1="])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": "7+7="}, r"generate: prompts must be a list. Got '7\+7='. Write \['7\+7='\]"),
        ({"prompts": ["a"], "role": "reward"}, r"role must have a language model. Got 'reward'. .*: actor, reference"),
        ({"prompts": ["a"], "temprature": 1.0}, r"sampling has max_new_tokens, .*. Got 'temprature'"),
        ({"prompts": ["a"], "temperature": -1.0}, r"sampling.temperature"),
        ({"prompts": ["a"], "banned_tokens": [500]}, r"sampling.banned_tokens: must be tokens of the .* Got 500"),
        ({"prompts": ["a"], "stop_strings": "ab"}, r"sampling.stop_strings: must be a list. Got 'ab'"),
        ({"prompts": [""]}, r"prompts\[0\]: .* must not be empty"),
        ({"prompts": [{"text": "a"}]}, r"prompts\[0\]: must have the column 'prompt'. Got text"),
        ({"prompts": ["a" * 2100]}, r"must fit into max_position_embeddings=2048 of 'actor'. Got 2112 \+ 6 tokens"),
    ],
)
def test_what_it_cannot_generate_is_refused(run, arguments, message):
    with pytest.raises(ValueError, match=message):
        run.generate(**arguments)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stepz": 3}, r"config: unknown key 'stepz'.*Did you mean 'steps'"),
        ({"data": [{"prompt": object()}]}, r"data.path: rows must be plain data, as in JSON. Got .*not JSON"),
        (
            {"data": ROWS[:4], "evaluation": {"num_prompts": 4}},
            r"data.eval_rows: must leave rows for training out of the 4 of .* Got 4",
        ),
        (
            {"reward": lambda completions, colour: []},
            r"roles.reward: Reward 'reward': its arguments must be columns of the data or options. Got 'colour'",
        ),
    ],
)
def test_bad_input_is_refused_as_on_the_command_line(config, tmp_path, more, message):
    keys: dict[str, Any] = {"data": {"path": ROWS, "eval_rows": 8}, "output": {"folder": str(tmp_path)}, **more}
    with pytest.raises(InputError, match=message):
        jaxrlhf.train(config, **keys)


def test_of_rows_in_a_list_none_are_held_out_without_an_evaluation(config, tmp_path):
    with pytest.raises(InputError, match=r"its arguments must be columns"):  # after the rows were found to suffice
        jaxrlhf.train(config, data=ROWS[:4], reward=lambda completions, colour: [], output={"folder": str(tmp_path)})


def test_a_shipped_config_takes_rows_in_place_of_its_task(tmp_path):
    more: dict[str, Any] = {"devices": "cpu:8", "output": {"folder": str(tmp_path)}}
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(InputError, match=r"needs a column 'answer' in every row"):
        jaxrlhf.train("grpo_arithmetic", data={"path": rows, "eval_rows": 8}, **more)


def test_the_package_is_light_and_stays_callable_after_an_import_of_the_command():
    """Importing a submodule gives the package's name to it, and JAX is configured before it is imported."""
    code = (
        "import sys, jaxrlhf; assert 'jax' not in sys.modules; import jaxrlhf.train\n"
        "try: jaxrlhf.train({'name': 'x'})\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("config: steps: required")


def test_settings_of_another_algorithm_are_left_out_as_on_the_command_line(tmp_path):
    with pytest.raises(InputError, match=r"ppo_arithmetic.yaml with other keys: steps: must be at least 0"):
        jaxrlhf.train("ppo_arithmetic", algorithm="rloo", steps=-1, output={"folder": str(tmp_path)})
