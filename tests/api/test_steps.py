"""`jaxrlhf.Run`: steps by hand, their results beside those of the command line, and how a run ends."""

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxrlhf as rl
from jaxrlhf.config.reading import merge, to_tree
from jaxrlhf.config.schema import build_run
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics, without_times
from jaxrlhf.rewards.functions import RewardError
from jaxrlhf.run.checked_run import InputError
from jaxrlhf.testing import SMALL_MODEL, small_run
from jaxrlhf.train import execute, prepare

STEPS = 4
interrupts: list[int] = []
"""Calls of the reward, counted down, until it presses Ctrl-C."""


def share_of_vowels(completions: list[str]) -> list[float]:
    if interrupts:
        interrupts[0] -= 1
        if interrupts[0] == 0:
            interrupts.clear()
            os.kill(os.getpid(), signal.SIGINT)
    return [sum(c in "aeiou" for c in text) / 6 for text in completions]


def fails_later(completions: list[str]) -> list[float]:
    fails_later.calls += 1  # pyright: ignore[reportFunctionMemberAccess]
    if fails_later.calls == 3:  # pyright: ignore[reportFunctionMemberAccess]
        raise RuntimeError("no more")
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    return merge(to_tree(small_run("rloo", steps=STEPS, num_layers=1, learning_rate=1e-2)), {
        "roles": {"reward": {"function": f"{__name__}:share_of_vowels"}},
        "evaluation": {"every": 2, "num_prompts": 8},
        "output": {"samples_every": 1, "checkpoint_every": 3, "export": ["actor"], "tensorboard": False},
    })  # fmt: skip


def files_of(folder: Path) -> dict[str, Any]:
    """What a run wrote, without what a clock decides."""
    return {
        "metrics": [without_times(record) for record in read_metrics(folder / "metrics.jsonl")],
        "samples": (folder / "samples.jsonl").read_text(),
        "weights": (folder / "actor" / "model.safetensors").read_bytes(),
        "checkpoints": sorted(path.name for path in (folder / "checkpoints" / "steps").iterdir()),
        "outcome": json.loads((folder / "outcome.json").read_text()),
        "plan": (folder / "plan.json").read_text(),
    }


@pytest.fixture(scope="module")
def by_command(tree, tmp_path_factory) -> dict[str, Any]:
    """The files of the run on the command line."""
    output = {"output": {"folder": str(tmp_path_factory.mktemp("command"))}}
    checked = prepare(build_run(merge(tree, output), where="test"), Console(quiet=True))
    return files_of(execute(checked, Console(quiet=True)).folder.path)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        assert one[name] == other[name], name


def test_steps_by_hand_give_the_files_of_the_command_line(tree, by_command, tmp_path):
    """Bit for bit, whatever the run is asked between its steps."""
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)})
    assert run.done == 0 and run.records == [] and run.samples == [] and not list(tmp_path.iterdir())
    first = run.generate(["1+1="])
    steps = [run.step()]
    assert run.done == 1 and set(steps[0]) >= {"critic/score/mean", "timing_s/step"}
    assert run.evaluate()["eval/reward"] >= 0
    assert run.save().is_dir() and run.save().name == "1"
    steps += list(run)
    assert run.done == STEPS and run.generate(["1+1="]) != first
    assert "eval/reward" in steps[1] and "eval/reward" not in steps[2]
    recorded = [record for record in run.records if "critic/score/mean" in record]
    for step, record in zip(steps, recorded, strict=True):
        assert {name: record[name] for name in step if not name.startswith("eval/") and name != "timing_s/testing"} == {
            name: value for name, value in step.items() if not name.startswith("eval/") and name != "timing_s/testing"
        }
    assert [sample["step"] for sample in run.samples if sample["split"] == "train"][::8] == [1, 2, 3, 4]
    with pytest.raises(rl.RunEndedError, match=r"step: a run has as many steps as .* Got all 4 .*resume\(.*, steps=8"):
        run.step()
    same(files_of(run.folder), by_command)


def test_train_gives_the_files_of_the_command_line(tree, by_command, tmp_path):
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)}).train(1)
    assert run.done == 1 and len(run.rewards) == 1, "the metrics of the last step are read"
    assert run.train().done == STEPS and run.train() is run
    with pytest.raises(rl.RunEndedError, match="Got all 4 of them done"):
        run.train(1)
    same(files_of(run.folder), by_command)


def test_a_run_goes_on_where_it_was_saved(tree, by_command, tmp_path):
    with rl.Run(tree, quiet=True, output={"folder": str(tmp_path)}) as run:
        run.train(2)
        run.save()
    again = rl.resume(run.folder, quiet=True)
    assert again.done == 2 and again.folder == run.folder and len(again.rewards) == 2
    again.train()
    same(files_of(run.folder), by_command)
    branch = rl.resume(run.folder / "checkpoints" / "steps" / "3", quiet=True)
    branch.train()
    assert branch.folder != run.folder and branch.rewards == again.rewards


def test_ctrl_c_lets_the_step_end_and_the_run_goes_on(tree, by_command, tmp_path, capsys):
    run = rl.Run(tree, output={"folder": str(tmp_path)})
    interrupts.append(4)  # in the evaluation after the second step
    with pytest.raises(rl.RunStopped, match="Saved after 2 of 4 steps"):
        for _ in run:
            pass
    assert "Ctrl-C: the run stops after this step, and saves" in capsys.readouterr().out
    assert run.done == 2 and (run.folder / "checkpoints" / "steps" / "2").is_dir()
    interrupts.append(1)
    with pytest.raises(rl.RunStopped, match="Saved after 3 of 4 steps"):
        run.train()
    assert run.generate(["1+1="]) and run.train().done == STEPS
    same({**files_of(run.folder), "checkpoints": None}, {**by_command, "checkpoints": None})


def test_before_its_first_step_is_done_a_run_has_nothing_to_save(tree, tmp_path, capsys):
    run = rl.Run(tree, output={"folder": str(tmp_path)})
    interrupts.append(2)  # after the first evaluation
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert "Ctrl-C: nothing is to be saved, so the run ends now." in capsys.readouterr().out
    with pytest.raises(rl.RunEndedError, match=r"step: the run must be open. Got a run that is ended by KeyboardInt"):
        run.step()
    assert repr(run).endswith("ended by KeyboardInterrupt>")


def test_after_an_error_a_run_says_how_to_go_on(tree, tmp_path):
    fails_later.calls = 0  # pyright: ignore[reportFunctionMemberAccess]
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)}, reward=fails_later, evaluation=None)
    with pytest.raises(RewardError, match=r"no more"):
        run.train()
    assert len(run.rewards) == 2 and (run.folder / "reward_error.txt").exists()
    with pytest.raises(rl.RunEndedError, match=r"ended by RewardError. Go on with rl.resume\('.*'\)"):
        run.step()
    again = rl.resume(run.folder, quiet=True, reward=share_of_vowels)
    assert again.done == 2 and "critic/score/mean" in again.step()


def test_two_runs_of_different_sizes_take_turns(tree, by_command, tmp_path):
    output = {"folder": str(tmp_path)}
    small = rl.Run(tree, quiet=True, output=output)
    sizes = {**SMALL_MODEL, "num_layers": 2, "hidden_size": 2 * SMALL_MODEL["hidden_size"]}
    large = rl.Run(tree, quiet=True, output=output, name="large", roles={"actor": {"model": sizes}})
    for _ in zip(small, large, strict=True):
        pass
    counts = [sum(x.size for x in jax.tree.leaves(run.weights())) for run in (small, large)]
    assert counts[0] * 2 < counts[1] and large.generate(["1+1="])
    same(files_of(small.folder), by_command)
    assert [record["step"] for record in large.records] == [record["step"] for record in small.records]


def test_export_and_weights_at_any_step(tree, tmp_path):
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path), "export": []})
    run.step()
    written = run.export(tmp_path / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in written.iterdir()}
    before = np.asarray(run.weights()["lm_head"])
    other = rl.Run(tree, quiet=True, model=written, evaluation=None, output={"folder": str(tmp_path)}, name="other")
    other.save()
    np.testing.assert_array_equal(np.asarray(other.weights()["lm_head"]), before)
    for call in (run.export, lambda path, role: run.weights(role)):
        with pytest.raises(ValueError, match=r"role must have weights. Got 'reward'. Known: actor, reference"):
            call(tmp_path / "x", role="reward")


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_a_number_of_steps_is_checked(tree, tmp_path, steps):
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)})
    with pytest.raises(ValueError, match=rf"train: steps must be at least 1. Got {steps}. Leave it out"):
        run.train(steps)


def test_questions_that_a_config_does_not_allow(tree, tmp_path):
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)}, evaluation=None)
    with pytest.raises(ValueError, match=r"evaluate: needs the section `evaluation` of the config. Got none"):
        run.evaluate()
    with pytest.raises(InputError, match=r"resume: must be the folder of a run, or a checkpoint in one. Got '.*nowh"):
        rl.resume(tmp_path / "nowhere")


def test_a_run_that_is_dropped_frees_its_weights(tree, tmp_path):
    gc.collect()
    before = len(jax.live_arrays())
    run = rl.Run(tree, quiet=True, output={"folder": str(tmp_path)}, evaluation=None)
    run.step()
    assert len(jax.live_arrays()) > before
    del run
    gc.collect()
    assert len(jax.live_arrays()) <= before + 2
