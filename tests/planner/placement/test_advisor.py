"""The guideline's rules, and what a simulation says of them."""

import functools

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.placement_strategy import PlacementStrategy
from jaxrlhf.models.config import PRESETS, ModelConfig
from jaxrlhf.planner.make_plan import plan_workload
from jaxrlhf.planner.placement.advisor import WITHIN, Advice, advise
from jaxrlhf.planner.placement.guideline import guideline
from tests.planner.described_step import ppo

SEVEN = ppo(ModelConfig(**PRESETS["7b"]), rows=256, prompt=256, response=256, mini_batches=1, whiten=False)
SEVENTY = ppo(ModelConfig(**PRESETS["70b"]), rows=256, prompt=256, response=256, mini_batches=1, whiten=False)


@functools.cache
def advice(cluster: str) -> Advice:
    planned = plan_workload(SEVEN.workload, read_cluster(cluster), seconds=3.0, compare=False)
    return advise(planned, SEVEN.graph, SEVEN.roles)


def test_up_to_two_nodes_the_guideline_interleaves_what_fits_a_node():
    found = guideline(SEVEN.workload, read_cluster("2x8:a100-80g"))
    assert found.strategies[0] == PlacementStrategy("interleaving")
    assert "reference (1" in str(found.rules[0]) and "fit into a node" in str(found.rules[0])
    small = guideline(SEVENTY.workload, read_cluster("2x1:a100-80g"))
    assert small.strategies[0] is None and "none that is not trained fits into a node" in str(small.rules[0])


def test_on_more_nodes_it_parts_training_from_inference():
    found = guideline(SEVEN.workload, read_cluster("8x8:a100-80g"))
    first = found.strategies[0]
    assert first is not None and first.is_disaggregated and first.extents["infer"] == tuple(range(32, 64))
    assert {rule.about for rule in found.rules} == {"Strategy", "Ratio", "Replicas", "Batch"}
    assert "3 to 4 of 8 nodes" in str(found.rules[1])
    assert any(each is not None and each.replicas == 4 for each in found.strategies)


def test_where_memory_is_short_it_keeps_all_roles_together():
    found = guideline(SEVENTY.workload, read_cluster("3x8:a100-80g"))
    assert found.strategies[0] is None and "no room for shadow models" in str(found.rules[0])


def test_a_step_that_only_trains_has_nothing_to_part():
    calls = tuple(call for call in SEVEN.workload.calls if call.trains)
    found = guideline(
        type(SEVEN.workload)(tuple(type(c)(**{**vars(c), "needs": ()}) for c in calls)), read_cluster("4x8:h100")
    )
    assert found.strategies == (None,) and "train calls alone" in str(found.rules[0])


@pytest.mark.parametrize("cluster", ["1x8:h100", "3x8:h100"])
def test_what_it_recommends_is_as_fast_as_the_search_or_it_says_why_not(cluster):
    found = advice(cluster)
    by_name = {row["placement"]: row for row in found.rows}
    searched = by_name["search"]["seconds"]
    recommended = by_name[found.recommended]["seconds"]
    assert recommended <= (1 + WITHIN) * searched
    text = " ".join(found.lines)
    if found.recommended == "search":
        assert found.saved is None and "takes" in text and "longer" in text
    else:
        assert found.saved is not None and found.saved.step_seconds == recommended
        assert f"agree within 10%: {found.recommended} takes" in text and "For it, " in text
    assert {"colocate", "interleaving", "interleaving-2", "disaggregated"} <= set(by_name)
    assert any(row["guideline"] == "yes" for row in found.rows)


def test_it_says_what_would_change_the_time():
    text = " ".join(advice("1x8:h100").lines)
    assert "Bottleneck: " in text and "One more node (2x8:h100): " in text and "Responses half as long: " in text
    assert "Memory: " in text and ("Twice the batch: " in text or "no room for a larger batch" in text)
    shorter = next(line for line in advice("1x8:h100").lines if line.startswith("Responses half"))
    assert "times as fast" in shorter
