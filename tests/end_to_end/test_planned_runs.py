"""Plans that offload and balance: the same results, and what they did is there to see."""

import json
from pathlib import Path

import pytest

from jaxrlhf.config.reading import dump_yaml
from jaxrlhf.config.schema import load_run
from jaxrlhf.runtime.metrics import read_metrics

PLAN = (
    "plan={default: {data: 8, balance: true}, actor.train: {fsdp: 2, tensor: 2}, "
    "reference.logprobs: {data: 4, devices: 4-7}, offload: [%s]}"
)


def events(folder: Path) -> set[str]:
    return {event["name"] for event in json.loads((folder / "timeline.json").read_text())["traceEvents"]}


def test_offloaded_roles_give_the_same_bit_for_bit(train, results):
    for name, offload in (("kept", ""), ("rested", "actor, critic, reference")):
        status, _, error = train("--set", f"name={name}", "--set", PLAN % offload)
        assert status == 0, error
    kept, rested = (next(Path("runs").glob(f"*{name}*")) for name in ("kept", "rested"))
    assert len(results(rested)) == 3 and results(rested) == results(kept)
    assert json.loads((rested / "plan.json").read_text())["step"]["offload"] == ["actor", "critic", "reference"]
    for role in ("actor", "critic", "reference"):
        assert {f"{role}.offload", f"{role}.reload"} <= events(rested)
    assert not any(name.endswith((".offload", ".reload")) for name in events(kept))


def test_balance_is_a_metric(train):
    status, _, error = train("--set", PLAN % "", "--set", "steps=1")
    assert status == 0, error
    (record,) = [record for record in read_metrics(Path("runs/latest/metrics.jsonl")) if "actor/pg_loss" in record]
    assert 0 <= record["perf/padding_waste"] < 1
    assert record["perf/token_imbalance/reference.logprobs"] >= 1  # not balanced by this plan
    assert "perf/token_imbalance_undealt/reference.logprobs" not in record
    for call in ("critic.values", "critic.train"):
        assert 1 <= record[f"perf/token_imbalance/{call}"] <= record[f"perf/token_imbalance_undealt/{call}"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.offload=[referee]", "plan.offload: must be roles of the run. Got 'referee'."),
        (
            "plan.offload=[reward]",
            "plan.offload: 'reward' has no weights of its own to offload. Roles that have: actor,",
        ),
        ("plan.offload={data: 2}", "plan.offload: must be a list of roles. Got"),
        ("plan.default=[two]", "plan.default: must be a placement, {data: 2, ...}. Got ["),
        ("plan.critic.train.protocol=3D", "plan.critic.train.protocol: must be auto or one of ONE_TO_ALL,"),
        ("plan.critic.train.pipeline=2", "plan.critic.train.pipeline: only 1 so far. Got 2."),
        ("plan.critic.train.devices='0,2,4,6'", "plan.critic.train.devices: must be a consecutive part of one node"),
    ],
)
def test_plans_that_are_refused(train, override, message):
    status, _, error = train("--dry-run", "--set", override)
    assert status != 0 and message in " ".join(error.split())


def test_a_config_with_offload_is_written_as_it_is_read(tmp_path):
    run = load_run("ppo_arithmetic", ["plan.offload=[reference]"])
    (tmp_path / "again.yaml").write_text(dump_yaml(run))
    again = load_run(tmp_path / "again.yaml")
    assert again == run and again.offload == ("reference",) and "offload" not in again.placements
