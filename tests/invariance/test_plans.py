"""The plan never changes the result of a whole run, as a user starts it: the same tokens and, to rtol 1e-5 and atol
1e-6, the same losses, KL, rewards and gradient norms under any devices, degrees and micro-batches, in one process and
in several."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.invariance.plan_runs import DEVICES_PER_NODE, ONE_DEVICE, ROWS, STEPS, random_plans, results, run_plans
from tests.subprocesses import ROOT, environment

ALL_PLANS = random_plans(10) if os.environ.get("ALL_PLANS") else {}
"""Run with ALL_PLANS=1 in the environment, in one process and in two: tests/invariance/test_algorithms.py has random
plans that cost less."""
IN_PARTS = (  # two instances of generation, one in each process, whose last rows go on in one of them
    "{default: {data: 2}, calls: {actor.generate: [{devices: 0-3, data: 4, parts: 2, tail: {devices: 0-1, data: 2, "
    "rows: 0.25, migrate: MIGRATE}}, {devices: 4-7, data: 2, tensor: 2, rows: 0.5, parts: 2, slots: 6}], "
    "reference.logprobs: [{devices: 4-7, data: 4, parts: 4}, {devices: 0-1, data: 2, rows: 0.25}], "
    "critic.values: {devices: 4-5, pipeline: 2, parts: 3}, reward.scores: {parts: 5}}}"
)
ONE_UPDATE = "".join(
    f" --set settings.{setting}"
    for setting in ("whiten_advantages=false", "actor_update.mini_batches=1", "critic_update.mini_batches=1")
)
TRAINED_IN_PARTS = (  # the critic in one process, the actor in both
    IN_PARTS.replace("MIGRATE", "cache").removesuffix("}}")
    + ", critic.train: {devices: 4-7, fsdp: 4, parts: 4}, actor.train: {data: 4, fsdp: 2, parts: 2}}}"
    + ONE_UPDATE
)
PLANS = {
    "devices the other way round, in micro-batches and slots": "{longest_first: true, default: {data: 4, "
    "tensor: 2, devices: '7,6,5,4,3,2,1,0', micro_batches: 2}, calls: {actor.generate: {data: 2, tensor: 2, slots: 5}, "
    "actor.train: {fsdp: 8, micro_batches: 2}, critic.train: {data: 4, micro_batches: 4}}}",
    "in parts and shares, with a tail": IN_PARTS.replace("MIGRATE", "cache"),
    **ALL_PLANS,
}
PLACED = (  # by the planner, from a short description
    "{placement: {train: 0.5, actor: 0.25, critic: 0.25, reference: 0.25, parts: 2}}" + ONE_UPDATE,
    "{placement: {train: '4-7', infer: '0-2', parts: 2}}" + ONE_UPDATE,
)
STALE = " --set staleness=1"
"""Generation with the weights of the step before."""
"""Training in parts behind generation and inference; generation on two groups of devices."""
APART_AND_ACROSS = (  # a critic that trains over stages in one process
    "{default: {data: 4, devices: 0-3}, calls: {actor.generate: {data: 8, micro_batches: 3}, actor.train: {fsdp: 4, "
    "tensor: 2}, critic.values: {data: 2, tensor: 2, devices: 4-7}, critic.train: {pipeline: 2, tensor: 2, "
    "micro_batches: 2, schedule: gpipe, devices: 4-7}, reference.logprobs: {data: 3, devices: 4-6}}}"
)
STAGES_ACROSS = (  # two roles on devices 6-7, of which one process has none, under other names of the same layout
    "{default: {data: 2, devices: 4-5}, fuse: [actor.train, critic.train], calls: {actor.generate: {pipeline: 2, data: "
    "4, slots: 2}, reference.logprobs: {pipeline: 2, tensor: 2, micro_batches: 2, devices: 4-7}, critic.values: {fsdp: "
    "2, devices: 6-7}, actor.train: {pipeline: 2, data: 2, tensor: 2, micro_batches: 2}, critic.train: {pipeline: 2, "
    "data: 4, micro_batches: 2}}}"
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return on_one_device(tmp_path_factory.mktemp("one"))


def on_one_device(folder, settings=""):
    run_plans(folder, [ONE_DEVICE + settings])
    return results(folder, 0)


def test_training_in_parts_does_not_change_the_result(tmp_path):
    run_plans(tmp_path, [TRAINED_IN_PARTS, *PLACED])
    expected = on_one_device(tmp_path / "one update", ONE_UPDATE)
    for i in range(1 + len(PLACED)):
        assert_the_same(results(tmp_path, i), expected)


def assert_the_same(got, expected):
    metrics, samples = got
    expected_metrics, expected_samples = expected
    assert [s["completion"] for s in samples] == [s["completion"] for s in expected_samples]
    for is_now, want in zip(metrics, expected_metrics, strict=True):
        compared = [
            n for n in want if not n.startswith(("time", "timing_", "perf/")) and n != "rollout/logprob_gap_max"
        ]
        assert "actor/grad_norm" in compared and "critic/vf_loss" in compared and "kl/mean" in compared
        for name in compared:
            np.testing.assert_allclose(
                is_now[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {want['step']}"
            )


def test_run_is_worth_comparing(expected):
    metrics, samples = expected
    assert len(metrics) == STEPS and len(samples) == STEPS * ROWS
    assert metrics[0]["kl/mean"] == pytest.approx(0.0, abs=1e-4)
    assert abs(metrics[-1]["kl/mean"]) > 1e-3, "the actor's weights moved"
    assert metrics[-1]["kl/coef"] != metrics[0]["kl/coef"]
    assert metrics[-1]["critic/vpred_mean"] != metrics[0]["critic/vpred_mean"]
    assert 0.0 < metrics[0]["response_length/clip_ratio"] < 0.9, "responses of different lengths"
    assert metrics[0]["critic/score/std"] > 0
    assert all(m["rollout/logprob_gap_max"] < 1e-4 for m in metrics)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_plan_does_not_change_the_result(plan, expected, tmp_path):
    run_plans(tmp_path, [plan])
    assert_the_same(results(tmp_path, 0), expected)


@pytest.mark.timeout(1500)
def test_two_processes_do_not_change_the_result(expected, tmp_path):
    """An actor that lives in both, a critic in one of them and a batch that is made in the other, with rows that do not
    divide and stages in one process; then stages in both, and slots."""
    parts = [IN_PARTS.replace("MIGRATE", migrate) for migrate in ("cache", "prefill")]
    plans = [APART_AND_ACROSS, STAGES_ACROSS, *parts, *ALL_PLANS.values(), TRAINED_IN_PARTS, *PLACED]
    plans += [PLACED[0] + STALE]
    command = [sys.executable, str(ROOT / "scripts" / "launch_local"), "--processes", str(8 // DEVICES_PER_NODE), "--"]
    command += [sys.executable, str(ROOT / "tests" / "invariance" / "plan_runs.py"), str(tmp_path), *plans]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    in_one_update = {more: on_one_device(tmp_path / f"one update{more}", ONE_UPDATE + more) for more in ("", STALE)}
    for i, plan in enumerate(plans):
        wanted = in_one_update[STALE if STALE in plan else ""] if ONE_UPDATE in plan else expected
        assert_the_same(results(tmp_path, i), wanted)
