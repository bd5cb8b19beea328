"""The devices that placement strategies give to roles."""

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.config.plan_config import PlanConfig
from jaxrlhf.config.reading import ConfigError, build, to_tree
from jaxrlhf.planner.placement.role_groups import devices_of_calls
from jaxrlhf.planner.plans.plan import PlanError
from tests.planner.described_step import ppo

STEP = ppo(rows=64)
ALL = (range(8),)
FIRST, SECOND = (range(4),), (range(4, 8),)


def strategy(data: object) -> PlacementStrategy:
    made = PlacementStrategy.from_data(data)
    assert made is not None
    return made


def devices(data: object, cluster: str = "1x8:a100-80g") -> dict[str, tuple[range, ...]]:
    return devices_of_calls(strategy(data), STEP.workload, read_cluster(cluster))


def test_interleaving_has_reference_and_reward_on_halves_of_their_own():
    """The paper's [1, 1, 0.5, 0.5]."""
    found = devices("interleaving")
    assert found["reference.logprobs"] == FIRST and found["reward.scores"] == SECOND
    assert {found[name] for name in ("actor.generate", "actor.train", "critic.values", "critic.train")} == {ALL}
    assert found == devices({"actor": 1, "critic": 1, "reference": 0.5, "reward": 0.5})
    assert found == devices({"reference": 0.5, "reward": 0.5})


def test_interleaving_2_parts_what_is_trained_too():
    """Actor and critic are trained side by side, and no half has both roles that are never trained."""
    found = devices("interleaving-2")
    assert {found["actor.generate"], found["actor.train"]} == {FIRST}
    assert {found["critic.values"], found["critic.train"]} == {SECOND}
    assert found["reference.logprobs"] != found["reward.scores"]


@pytest.mark.parametrize("data", ["disaggregated", {"train": 0.5}, {"infer": "4-7"}, {"train": "0-3", "infer": "4-7"}])
def test_training_and_inference_apart(data):
    found = devices(data)
    assert {found["actor.train"], found["critic.train"]} == {FIRST}
    assert {found[call.name] for call in STEP.workload.calls if not call.trains} == {SECOND}


def test_roles_have_devices_of_their_own_among_those_of_inference():
    found = devices({"train": 0.5, "reference": 0.25, "reward": 0.25, "critic": 0.25}, "2x8:a100-80g")
    assert found["actor.train"] == (range(8),) and found["actor.generate"] == (range(8, 16),)
    assert {found[name] for name in ("reference.logprobs", "critic.values", "reward.scores")} == {
        (range(8, 12),), (range(12, 16),),
    }, "none waits for another"  # fmt: skip


def test_what_is_no_mesh_is_several():
    """Largest first; whole nodes stay together."""
    found = devices({"train": 0.25})
    assert found["actor.train"] == (range(2),) and found["actor.generate"] == (range(4, 8), range(2, 4))
    found = devices({"train": "0-11", "infer": "12-31"}, "4x8:a100-80g")
    assert found["actor.train"] == (range(8), range(8, 12))
    assert found["reward.scores"] == (range(16, 32), range(12, 16))


def test_a_fraction_is_rounded_down_to_a_mesh():
    assert devices({"reward": 0.7})["reward.scores"] == FIRST
    assert len(devices({"reward": 0.7}, "4x8:a100-80g")["reward.scores"][0]) == 16


def test_it_is_written_as_it_was_read():
    for data in ("interleaving", {"train": 0.5, "parts": 4, "replicas": 2}, {"actor": "0-3,6", "critic": 1.0}):
        assert strategy(strategy(data).to_data()) == strategy(data)
    named = strategy({"name": "disaggregated", "parts": 4})
    assert named.parts == 4 and strategy(named.to_data()) == named
    assert to_tree(strategy("interleaving")) != "interleaving" and strategy("interleaving").to_data() == "interleaving"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"reward": 0.05}, "plan.placement.reward: must be at least one of 8 devices. Got 0.05 of them. Use 0.125"),
        (
            {"rewrd": 0.5},
            "plan.placement.rewrd: must be a role with calls of a model in the step.*Did you mean 'reward'",
        ),
        ({"train": "0-4", "infer": "4-7"}, "train and infer must have devices of their own. Got 4 in both. Change one"),
        ({"train": 1}, "must leave devices to infer. Got none. Lower the other fraction"),
        ({"reward": "6-9"}, "plan.placement.reward: must be among the 8 devices, 0 to 7. Got 8-9. Leave them out"),
    ],
)
def test_what_does_not_fit_is_refused(data, message):
    with pytest.raises(PlanError, match=message):
        devices(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("interleave", "x: placement: must be one of interleaving, .* Got 'interleave'. Did you mean 'interleaving'"),
        ({"actor": 0}, r"x: placement.actor: must be a fraction of the devices in \(0, 1\], or their positions"),
        ({"actor": 3}, "x: placement.actor: must be a fraction.* Got 3. Write 0.5 or '0-7'."),
        ({"actor": "a-b"}, "x: placement.actor: must be positions of devices, such as '0-3'"),
        ({"train": 0.5, "parts": 1.5}, "x: placement.parts: must be a whole number. Got 1.5"),
        ({"train": 0.5, "replicas": -1}, "replicas: must be at least 1, or 0 to have it chosen. Got -1"),
        ({}, "placement: must be a name or a mapping"),
        ({"parts": 2}, "placement: must say where roles are"),
    ],
)
def test_what_is_not_a_strategy_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        build(PlanConfig, {"auto": True, "placement": data}, where="x")
