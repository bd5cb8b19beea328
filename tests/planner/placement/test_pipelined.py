"""Plans of placement strategies: parts between groups of devices, replicas, and shares by speed."""

import dataclasses

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.fusion.parts_forecast import PartsForecast, PlanInParts
from jaxrlhf.planner.make_plan import Planned, plan_workload
from jaxrlhf.planner.placement.pipelined import pipelined
from jaxrlhf.planner.plans.check_plan import check
from jaxrlhf.planner.plans.plan import NoRoomError, PlanError
from tests.planner.described_step import DescribedStep, ppo

MODEL = ModelConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_layers=24, num_heads=16, num_kv_heads=16,
    max_position_embeddings=2048, dtype="bfloat16",
)  # fmt: skip
STEP = ppo(MODEL, rows=512, prompt=256, response=256, mini_batches=1, whiten=False)
LENGTHS = ResponseLengths(mean=100, p99=250)
TWO_NODES = read_cluster("2x8:a100-80g")


def strategy(data: object) -> PlacementStrategy:
    made = PlacementStrategy.from_data(data)
    assert made is not None
    return made


def planned(data: object, cluster: Cluster = TWO_NODES, step: DescribedStep = STEP) -> tuple[Planned, PlanInParts]:
    made = plan_workload(
        dataclasses.replace(
            step.workload,
            calls=tuple(
                dataclasses.replace(c, lengths=LENGTHS) if c.kind == "generate" else c for c in step.workload.calls
            ),
        ),
        cluster, method="placement", placement=strategy(data),
    )  # fmt: skip
    assert made.costs is not None
    plan = made.plan_for(step.graph)
    found = pipelined(step.graph, step.roles, plan, made.groups, made.costs, LENGTHS, strategy(data))
    if found.plan is not None:
        check(found.plan, step.graph, step.models, cluster.num_devices, cluster.devices_per_node)
    return made, found


def test_generation_inference_and_training_are_pipelined_between_their_groups():
    made, found = planned({"train": 0.5, "critic": 0.25, "reference": 0.25, "reward": 0.25, "actor": 0.25})
    assert {made.placements()[name].devices for name in ("actor.train", "critic.train")} == {tuple(range(8))}
    assert {x.devices for name, x in made.placements().items() if "train" not in name} == {
        (8, 9, 10, 11), (12, 13, 14, 15)
    }  # fmt: skip
    assert found.plan is not None and found.seconds_in_parts < 0.9 * found.seconds
    assert found.seconds == pytest.approx(made.seconds)
    generation, training = (found.plan.placements[name] for name in ("actor.generate", "actor.train"))
    assert generation.parts > 1 and training.parts == generation.parts
    assert {row["training in parts"] for row in found.rows} == {"yes", "no"}
    assert set(found.calls) == {call.name for call in STEP.workload.calls}


def test_it_says_why_training_waits():
    whitened = ppo(MODEL, rows=512, prompt=256, response=256, mini_batches=1)
    _, found = planned({"train": 0.5}, step=whitened)
    assert "Training waits for the whole batch" in found.summary() and "whiten_advantages" in found.summary()


def test_parts_and_replicas_are_kept_where_they_are_given():
    _, found = planned({"train": "0-7", "infer": "8-15", "parts": 2, "replicas": 2})
    assert found.plan is not None
    generation = found.plan.placements["actor.generate"]
    assert generation.parts == 2 and [share.rows for share in generation.shares] == [0.5]
    assert generation.devices == tuple(range(8, 12)) and generation.shares[0].devices == tuple(range(12, 16))
    assert found.plan.placements["reference.logprobs"].parts == 4


def test_whole_calls_stay_where_parts_gain_nothing():
    """All roles are everywhere, so that nothing runs beside anything."""
    _, found = planned({"actor": 1})
    assert found.plan is None and "Whole calls are as fast" in found.summary()


def test_several_groups_share_the_rows_of_a_call():
    _, found = planned({"train": 0.25}, read_cluster("1x8:a100-80g"))
    assert found.plan is not None
    for name in ("actor.generate", "critic.values", "reward.scores"):
        placement = found.plan.placements[name]
        assert placement.devices == (4, 5, 6, 7) and placement.shares[0].devices == (2, 3)
        assert 0.3 < placement.shares[0].rows < 0.4, "of half as many devices"


def test_unlike_devices_have_rows_by_their_speed():
    """An A100 is slower than an H100: both groups end at nearly the same time."""
    cluster = read_cluster("1x8:h100+1x8:a100-40g")
    made, found = planned({"train": "0-3", "infer": "4-15"}, cluster)
    assert found.plan is not None and made.costs is not None
    forecast = PartsForecast(STEP.graph, STEP.roles, made.costs, LENGTHS)
    for name in ("critic.values", "reference.logprobs"):
        placement = found.plan.placements[name]
        assert placement.shares and placement.devices == tuple(range(8, 16))
        per_share: dict[str, float] = {}
        parts = [each for of, _, each in forecast.parts(found.plan) if of == name]
        total = placement.parts + sum(share.parts for share in placement.shares)
        assert len(parts) == total
        per_share = {
            "first": sum(each.seconds for each in parts[: placement.parts]),
            "second": sum(each.seconds for each in parts[placement.parts :]),
        }
        assert min(per_share.values()) > 0.9 * max(per_share.values()), per_share


def test_a_role_that_fits_nowhere_says_by_how_much():
    small = read_cluster("1x8:a100-40g").with_kinds(
        lambda kind: dataclasses.replace(kind, memory=dataclasses.replace(kind.memory, bytes=8 * 10**9))
    )
    with pytest.raises(NoRoomError, match=r"GB too much.* Or give its role more devices"):
        planned({"train": "0"}, small)


def test_what_cannot_be_cut_so_is_refused():
    odd = ppo(MODEL, rows=3, prompt=256, response=256, mini_batches=1)
    with pytest.raises(
        PlanError,
        match=r"plan.placement: no plan has such parts, replicas or groups of devices. .* 4 replicas cannot be made",
    ):
        planned({"train": 0.5, "replicas": 4}, TWO_NODES, odd)
