"""A run that ends before its time comes back exactly, and refuses what it cannot go on with."""

import functools
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrlhf.checkpoint.store import checkpoint_numbers
from jaxrlhf.config.schema import load_run
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.metrics import read_metrics, without_times
from jaxrlhf.run import interruption
from jaxrlhf.run.checkpoints import Checkpoints
from jaxrlhf.run.evaluation import Evaluator
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.trainer import Trainer
from jaxrlhf.train import InputError, execute, prepare

DIGITS = Path(__file__).parents[1] / "invariance" / "digits.py"
CHECK_RECOVERY = Path(__file__).parents[2] / "scripts" / "check_recovery.py"


ONE_DEVICE = "plan={default: {data: 1}}"
"""Quicker to trace and to compile."""
NO_WARM_START = ("--set", "warm_start=null")


@pytest.fixture
def train(train):
    return functools.partial(train, "--set", ONE_DEVICE)


@pytest.fixture
def whole(undisturbed) -> Path:
    """The folder of a run of four steps."""
    return undisturbed(ONE_DEVICE, "steps=4")


def copied(run: Path) -> Path:
    """A copy of a run in the folder of this test."""
    return Path(shutil.copytree(run, Path("runs") / run.name)).resolve()


def records(folder: str | Path) -> list[dict]:
    return [without_times(record) for record in read_metrics(Path(folder) / "metrics.jsonl")]


def saved(folder: str | Path = "runs/latest") -> list[int]:
    return checkpoint_numbers(Path(folder) / "checkpoints" / "steps")


def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    spec = importlib.util.spec_from_file_location("check_recovery", CHECK_RECOVERY)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    report = script.sweep(
        tmp_path, kills=1, terminations=1, seed=1, cache=jax.config.values["jax_compilation_cache_dir"], steps=8
    )
    assert sum(report["signals"].values()) == 2 and report["differences"] == []


def test_a_run_goes_on_in_its_folder_from_its_newest_checkpoint(train, whole, results):
    assert train("--set", "steps=2")[0] == 0
    half = Path("runs/latest").resolve()
    status, out, _ = train("--set", "steps=4", "--resume", "runs/latest")
    assert status == 0 and "after 2 steps" in out and "Note: steps: 2 in the run, 4 now" in out
    assert Path("runs/latest").resolve() == half
    # but for the evaluation after the last step of the first part, which the whole run did too
    assert records(half) == records(whole)
    assert results()[2]["kl/coef"] != results()[0]["kl/coef"], "the adaptive coefficient came along"
    assert json.loads((half / "outcome.json").read_text()) == json.loads((whole / "outcome.json").read_text())
    assert (half / "config.1.yaml").exists(), "the config of the first part is kept"

    # once more: there is nothing left to do
    status, out, _ = train("--set", "steps=4", "--resume", "auto")
    assert status == 0 and Path("runs/latest").resolve() == half, "the run of this config that was started last"
    assert records(half) == records(whole)


def test_older_weights_that_generation_still_reads_come_back(train, undisturbed, results):
    stale = ("--set", "staleness=2")
    whole = undisturbed(ONE_DEVICE, "steps=4", "staleness=2")
    assert train("--set", "steps=2", *stale)[0] == 0
    half = Path("runs/latest").resolve()
    assert train("--set", "steps=4", *stale, "--resume", "auto")[0] == 0
    assert records(half) == records(whole)
    assert [record["staleness/steps"] for record in results()] == [0, 1, 2, 2]

    # another staleness: the first step generates with the oldest weights that there are
    assert train("--set", "steps=5", "--set", "staleness=3", "--resume", str(half))[0] == 0
    assert results()[-1]["staleness/steps"] == 2
    assert train("--set", "steps=6", "--set", "staleness=0", "--resume", str(half))[0] == 0
    assert not any("staleness" in name for name in results()[-1])


def test_what_a_run_cannot_go_on_with_is_said_before_anything_changes(train, whole):
    run = copied(whole)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    Path("other.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "answer": "1"}) for i in range(600)))
    for override, message in {
        "steps=1": "has done 4 steps, so steps must be at least that. Got 1",
        "seed=5": "must go on with the seed of",
        "batch_size=32": "must go on with the batch_size of",
        "roles.actor.model.hidden_size=64": "differ, first roles/",
        "data={path: other.jsonl, max_prompt_tokens: 8}": "must go on with the data and tokenizer of",
    }.items():
        status, _, err = train("--set", "warm_start=null", "--set", "steps=4", "--set", override, "--resume", str(run))
        assert status == 1 and message in err, err
    for path, message in {
        "nowhere": "must be never, auto, the folder of a run or a checkpoint in one. Got '",
        f"{run}/checkpoints/steps/7": "must be a complete checkpoint. Got",
    }.items():
        status, _, err = train("--resume", path)
        assert status == 1 and message in err, err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"} == {
        path: time for path, time in before.items() if path.name != ".lock"
    }


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_run_goes_on_as_if_nothing_had_happened(train, whole):
    assert train("--set", "steps=3", "--set", "output.checkpoint_every=1")[0] == 0
    run = Path("runs/latest").resolve()
    newest = run / "checkpoints" / "steps" / "3"
    file = max((newest / "arrays").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, err = train("--set", "steps=4", "--resume", str(newest))
    assert status == 1 and f"{newest} must be whole. Got damage: arrays/" in err and "Name another one" in err
    status, out, _ = train("--set", "steps=4", "--resume", "auto")
    assert status == 0 and f"Note: {newest} is damaged: arrays/" in out and "goes on from 2 steps" in out
    assert "after 2 steps" in out and records(run) == records(whole)
    assert (newest.parent / "3.damaged" / file.relative_to(newest)).read_bytes() == content, "nothing of it is lost"

    for number in saved(run):
        (run / "checkpoints" / "steps" / str(number) / "_CHECKPOINT_METADATA").write_text("")
    status, _, err = train("--set", "steps=5", "--resume", "auto")
    assert status == 1 and "must have a whole checkpoint. Got damaged ones: " in err
    assert "_CHECKPOINT_METADATA is garbled" in err and "start a new run with resume=never" in err


def test_a_full_disk_is_one_line_that_names_the_file_and_what_was_kept(train, whole, monkeypatch, caplog):
    """The limit on the size of files stands in for the disk: everything that writes meets it."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(owner: type, name: str, when: int) -> None:
        method = getattr(owner, name)

        def full(self, step, *arguments, **keywords):
            if step == when:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
            return method(self, step, *arguments, **keywords)

        patch.setattr(owner, name, full)

    for owner, name, when, unwritten, kept in (
        (Checkpoints, "save_steps", 2, "checkpoints/steps/2", "steps/0, after 0 steps"),
        (Trainer, "_report", 2, "metrics.jsonl", "steps/2, after 2 steps"),
    ):
        with monkeypatch.context() as patch:
            fill(owner, name, when)
            try:
                status, out, err = train("--set", "steps=4", "--set", "name=full", "--resume", "auto")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert status == 1 and err.startswith("Error: ") and err.count("\n") == 1, err
        assert f"/{unwritten}: must be writable. Got 'File too large'. Make room" in err
        assert f"/checkpoints/{kept}. Start again with --resume auto to go on from there." in err
        assert out.count("TensorBoard failed, and training goes on without it") <= 1
        assert not caplog.records, "no tracebacks of threads"
    assert train("--set", "steps=4", "--set", "name=full", "--resume", "auto")[0] == 0
    assert records("runs/latest") == records(whole)


def test_a_second_start_beside_a_live_run_is_told_who_runs_it(train, whole):
    run = copied(whole)
    (run / "checkpoints" / "steps" / "4" / "meta" / "metadata").unlink()  # as where it is just being removed
    with RunFolder(run).locked():
        for resume in ("auto", str(run)):
            status, _, err = train("--set", "steps=5", "--resume", resume)
            assert status == 1 and "one process at a time can run a run" in err
            assert f"running it: process {os.getpid()} on {platform.node()}. Wait" in err


def test_a_checkpoint_is_a_branching_point_for_a_new_run(train, whole):
    status, _, err = train("--resume", f"{whole}/checkpoints/steps/2", "--set", "steps=4", config="")
    assert (status, err) == (0, "")
    branch = Path("runs/latest").resolve()
    assert branch != whole
    assert [r for r in records(branch) if "actor/pg_loss" in r] == [r for r in records(whole) if "actor/pg_loss" in r]
    assert saved(branch)[-1] == 4


def test_on_another_layout_a_run_goes_on_to_rounding(train, results):
    # of the rewards of the task, a model this small earns none: advantages would be rounding, whitened; and the first
    # updates of AdamW go as far for gradients that are mostly rounding: at small rates, what comes of that stays small
    rates = ("--set", "roles.actor.optimizer.learning_rate=1e-4", "--set", "roles.critic.optimizer.learning_rate=1e-4")
    reward = ("--set", f"roles.reward={{function: '{DIGITS}:share_of_digits'}}", *rates)
    reward = (*reward, *NO_WARM_START)
    assert train("--set", "steps=4", *reward)[0] == 0
    whole, half = results(), Path("runs/latest/checkpoints/steps/2").resolve()
    calls = "{actor.train: {fsdp: 4}, critic.train: {fsdp: 2, devices: '6-7'}}"
    plan = f"plan={{default: {{data: 2, tensor: 2}}, calls: {calls}}}"
    assert train("--set", "steps=4", "--resume", str(half), "--set", plan, *reward)[0] == 0
    for got, want in zip(results()[2:], whole[2:], strict=True):
        for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "kl/mean", "actor/grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name


def test_a_run_that_is_asked_to_stop_saves_and_leaves(train, whole, results, monkeypatch):
    report = Trainer._report

    def report_and_ask(self, step, *rest):
        report(self, step, *rest)
        if step == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_report", report_and_ask)
        status, out, err = train("--set", "steps=4", "--set", "output.checkpoint_every=0", "--set", "name=asked")
    assert (status, err) == (128 + signal.SIGTERM, "")
    assert "of 4 steps. Start it again with --resume auto to go on." in out
    assert saved()[-1] < 4 and len(results()) == saved()[-1]
    status, out, _ = train(
        "--set", "steps=4", "--set", "output.checkpoint_every=0", "--set", "name=asked", "--resume", "auto"
    )
    assert status == 0 and results() == results(whole)


def test_a_stop_in_the_warm_start_is_saved_too(train, whole, monkeypatch):
    import jaxrlhf.run.warm_start as module

    flatten = module.flatten

    def flatten_and_ask(tree):
        os.kill(os.getpid(), signal.SIGTERM)
        return flatten(tree)

    with monkeypatch.context() as patch:
        patch.setattr(module, "flatten", flatten_and_ask)
        status, out, _ = train("--set", "name=asked", "--set", "steps=4")
    assert status == 143 and "Saved after 2 of 4 updates of the warm start." in out
    status, out, _ = train("--set", "name=asked", "--set", "steps=4", "--resume", "auto")
    assert status == 0 and "after 2 updates of the warm start" in out
    assert records("runs/latest") == records(whole)
    assert not Path("runs/latest/checkpoints/warm_start").exists()


def test_a_failing_reward_loses_no_step_that_was_done(train, results):
    Path("fails.py").write_text(
        "import pathlib\n"
        "def reward(completions):\n"
        "    calls = pathlib.Path('calls')\n"
        "    n = int(calls.read_text()) + 1 if calls.exists() else 1\n"
        "    calls.write_text(str(n))\n"
        "    if n == 3:\n"
        "        raise ConnectionError('the verifier is down')\n"
        "    return [len(c) / 10 for c in completions]\n"
    )
    rewards = ("--set", "roles.reward={function: 'fails.py:reward'}", "--set", "output.checkpoint_every=0",
               *NO_WARM_START)  # fmt: skip
    status, out, err = train(*rewards, "--set", "steps=4", "--set", "evaluation=null")
    message = " ".join(err.split())
    assert status == 1 and "Reward 'reward': must not raise. Got ConnectionError: the verifier is down, at " in message
    kept = Path("runs", "latest", "reward_error.txt").resolve()
    assert "fails.py:7" in message and f"The whole traceback is in runs/{kept.parent.name}/reward_error.txt" in message
    assert "Traceback" not in err and kept.read_text().startswith("Traceback (most recent call last)")
    assert "Saved after 2 steps, before the one that failed." in out and saved()[-1] == 2
    assert train(*rewards, "--set", "steps=4", "--set", "evaluation=null", "--resume", "auto")[0] == 0
    assert [record["step"] for record in results()] == [1, 2, 3, 4]


def test_ctrl_c_abandons_a_reward_that_hangs_and_loses_no_step_that_was_done(train, results, monkeypatch):
    monkeypatch.setattr(interruption, "PATIENCE_SECONDS", 0.1)
    Path("hangs.py").write_text(
        "import os, pathlib, signal, time\n"
        "def reward(completions):\n"
        "    calls = pathlib.Path('calls')\n"
        "    n = int(calls.read_text()) + 1 if calls.exists() else 1\n"
        "    calls.write_text(str(n))\n"
        "    if n == 3:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(600)\n"
        "    return [len(c) / 10 for c in completions]\n"
    )
    settings = ("--set", "roles.reward={function: 'hangs.py:reward'}", "--set", "output.checkpoint_every=0",
                "--set", "steps=4", "--set", "evaluation=null", *NO_WARM_START)  # fmt: skip
    status, out, err = train(*settings)
    assert (status, err) == (130, "") and "Ctrl-C: the run stops after this step, and saves." in out
    assert "'reward.scores' had not returned after 0 seconds, and was not waited for. Saved after 2 steps." in out
    assert saved()[-1] == 2
    assert train(*settings, "--resume", "auto")[0] == 0
    assert [record["step"] for record in results()] == [1, 2, 3, 4]


def test_a_failing_evaluation_loses_no_step_and_is_made_up_for(train):
    settings = ("--set", "output.checkpoint_every=0", "--set", "output.keep_best=false", *NO_WARM_START,
                "--set", "evaluation.batch_size=8", "--set", "evaluation.scorers=[judge]")  # fmt: skip
    scorer = "def scores(completions):\n{fails}    return [len(c) for c in completions]\n"
    Path("judge.py").write_text(scorer.format(fails=""))
    judge = ("--set", "roles.judge={function: 'judge.py:scores'}")
    assert train(*settings, *judge)[0] == 0
    whole = Path("runs/latest").resolve()

    # the second batch of the second evaluation
    fails = "    global n\n    n = globals().get('n', 0) + 1\n    assert n != 4, 'the judge is down'\n"
    Path("judge.py").write_text(scorer.format(fails=fails))
    status, out, err = train(*settings, *judge, "--set", "name=judged")
    assert status == 1 and "the judge is down" in err
    assert "Saved after 2 steps, before the evaluation that failed." in out
    Path("judge.py").write_text(scorer.format(fails=""))
    assert train(*settings, *judge, "--set", "name=judged", "--resume", "auto")[0] == 0
    assert records("runs/latest") == records(whole)
    assert Path("runs/latest/samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_a_run_that_another_process_went_on_with_is_left_alone(train, whole):
    run = copied(whole)
    prepared = prepare(load_run("tiny.yaml", ["steps=5", f"resume={run}", ONE_DEVICE]), Console(quiet=True))
    assert train("--set", "steps=5", "--resume", str(run))[0] == 0
    with pytest.raises(InputError, match=r"must stand where it did when it was looked at, 4 steps. Got 5 steps"):
        execute(prepared, Console(quiet=True))


def test_the_best_checkpoint_is_kept_beside_the_newest(train, monkeypatch):
    values = iter([0.5, 0.2, 0.7, 0.1, 0.3, 0.4])
    run = Evaluator.run

    def scored(self, *args):
        metrics = run(self, *args)
        metrics["eval/exact_match"] = next(values)
        return metrics

    monkeypatch.setattr(Evaluator, "run", scored)
    status, out, _ = train(
        "--set", "steps=5", "--set", "evaluation.every=1", "--set", "output.checkpoint_every=1",
        "--set", "output.keep_checkpoints=1", *NO_WARM_START,
    )  # fmt: skip
    assert status == 0 and saved() == [2, 5]
    assert json.loads(Path("runs/latest/outcome.json").read_text())["best"] == {"step": 2, "value": 0.7}
    assert "best after 2 steps: 0.700" in out


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_last_good_checkpoint(train):
    status, _, err = train(
        "--set", "roles.critic.optimizer.learning_rate=1.0e+30", "--set", "roles.critic.optimizer.max_grad_norm=0"
    )
    assert status == 1
    assert "losses and gradient norms must be finite. Got critic/" in err and "Step " in err
    newest = f"runs/{Path('runs/latest').resolve().name}/checkpoints/steps/{saved()[-1]}"
    assert f"The last good checkpoint is {newest}; if the same" in err
    broken = read_metrics(Path("runs/latest/metrics.jsonl"))[-1]
    assert not np.isfinite(broken["critic/grad_norm"]), "the step that went wrong is on record"
    assert saved()[-1] < broken["step"]
