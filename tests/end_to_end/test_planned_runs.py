"""Plans that offload and balance: the same results, and what they did is there to see."""

import json
from pathlib import Path

import pytest

from jaxrlhf.observe.metrics import read_metrics

PLAN = (
    "plan={default: {data: 8, balance: true}, offload: [%s], calls: {actor.train: {fsdp: 2, tensor: 2}, "
    "reference.logprobs: {data: 4, devices: 4-7}}}"
)


def events(folder: Path) -> set[str]:
    return {event["name"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]}


def test_offloaded_roles_give_the_same_bit_for_bit(train, undisturbed, results):
    status, _, error = train("--set", PLAN % "actor, critic, reference")
    assert status == 0, error
    kept, rested = undisturbed(PLAN % ""), Path("runs/latest")
    assert len(results(rested)) == 3 and results(rested) == results(kept)
    assert json.loads((rested / "plan.json").read_text())["step"]["offload"] == ["actor", "critic", "reference"]
    for role in ("actor", "critic", "reference"):
        assert {f"{role}.offload", f"{role}.reload"} <= events(rested)
    assert not any(name.endswith((".offload", ".reload")) for name in events(kept))


STAGES = (
    "plan={default: {pipeline: 2, data: 2}, fuse: [actor.train, critic.train], calls: {actor.train: {pipeline: 2, "
    "tensor: 2, micro_batches: 2}, critic.train: {pipeline: 2, data: 2, micro_batches: 2}}}"
)


def test_a_run_over_stages_gives_the_same_and_goes_on_without_them(train, results):
    """Generation, inference, two fused train calls, evaluation, checkpoints; at last the warm start by itself."""
    same = ("--set", "roles.actor.model.num_layers=2", "--set", "settings.critic_update.mini_batches=2")
    # a reward that an untrained model earns some of: without any, the advantages are rounding
    digits = "roles.reward={function: 'jaxrlhf.testing:share_of_digits'}"
    same = (*same, "--set", "warm_start=null", "--set", digits)
    for name, plan in (("plain", "plan={default: {data: 2}}"), ("stages", STAGES)):
        steps = "steps=2" if name == "stages" else "steps=3"
        status, _, error = train(*same, "--set", f"name={name}", "--set", plan, "--set", steps)
        assert status == 0, error
    plain, stages = (next(Path("runs").glob(f"*{name}*")) for name in ("plain", "stages"))
    assert "actor.train + critic.train" in events(stages) and "critic.train" not in events(stages)
    assert json.loads((stages / "plan.json").read_text())["step"]["fuse"] == ["actor.train", "critic.train"]
    more = ("--set", "name=stages", "--set", "plan={default: {data: 4}}", "--set", "steps=3")
    status, _, error = train(*same, *more, "--set", f"resume={stages}")
    assert status == 0, error
    expected, got = results(plain), results(stages)
    assert [record["step"] for record in got] == [1, 2, 3]
    for record, want in zip(got, expected, strict=True):
        for key in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "kl/mean"):
            assert record[key] == pytest.approx(want[key], rel=1e-3, abs=1e-5), (record["step"], key)


def test_the_warm_start_runs_over_stages_too(train):
    losses = {}
    for name, plan in (("plain", "plan={default: {data: 2}}"), ("stages", STAGES)):
        model = ("--set", "roles.actor.model.num_layers=2", "--set", "settings.critic_update.mini_batches=2")
        status, _, error = train(*model, "--set", f"name={name}", "--set", plan, "--set", "steps=0")
        assert status == 0, error
        records = read_metrics(next(Path("runs").glob(f"*{name}*")) / "metrics.jsonl")
        losses[name] = [record["warm_start/actor/loss"] for record in records if "warm_start/step" in record]
    assert len(losses["plain"]) == 2 and losses["stages"] == pytest.approx(losses["plain"], rel=1e-4)


def test_balance_is_a_metric(undisturbed):
    record = next(r for r in read_metrics(undisturbed(PLAN % "") / "metrics.jsonl") if "actor/pg_loss" in r)
    assert 0 <= record["perf/padding_waste"] < 1
    assert record["perf/token_imbalance/reference.logprobs"] >= 1  # not balanced by this plan
    assert "perf/token_imbalance_undealt/reference.logprobs" not in record
    for call in ("critic.values", "critic.train"):
        assert 1 <= record[f"perf/token_imbalance/{call}"] <= record[f"perf/token_imbalance_undealt/{call}"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.offload=[referee]", "plan.offload: must be roles of the run. Got 'referee'."),
        ("plan.fuse=actor.train", "plan.fuse: expected a list. Got 'actor.train'."),
        ("plan.fuse=[actor.train, ppo_batch]", "plan.fuse: must be two train calls. Got ['actor.train', 'ppo_batch'],"),
        ("plan.calls.critic.train.devices='0,2,4,6'", "critic.train.devices: must be a consecutive part of one node"),
        (
            "plan.critic.train.data=2",
            "plan: placements of calls stand under plan.calls. Got 'critic.train' beside it. Write plan.calls.critic",
        ),
        (
            "plan={critic.train: data two}",
            "plan.calls.critic.train: must be degrees of parallelism on devices. Got",
        ),
        ("plan={defualt: {data: 2}}", "Write plan.calls.defualt. Did you mean 'default'?"),
    ],
)
def test_plans_that_are_refused(train, override, message):
    status, _, error = train("--dry-run", "--set", override)
    assert status != 0 and message in " ".join(error.split())
