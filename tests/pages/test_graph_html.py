"""The picture of a graph: an edge for each dependency that says something, and no box on another."""

import itertools
import re

import pytest

from jaxrlhf.pages.graph_html import graph_edges, graph_html, next_iteration
from jaxrlhf.pages.graph_layout import layered
from tests.made_up_step import actor_critic, trace_step
from tests.pages.made_up_runs import CALLS, graph, planned_step


def test_edges_are_what_calls_need_of_one_another():
    edges = graph_edges(graph().to_rows())
    assert edges["actor.generate", "reference.logprobs"] == "data"
    assert edges["ppo_batch", "critic.train"] == "data"
    needed = {(name, call.name) for call in graph().calls for name in graph().dependencies(call)}
    assert set(edges) <= needed
    assert ("critic.values", "critic.train") in needed - set(edges), "another way leads there"
    assert next_iteration(graph().to_rows()) == [("actor.train", "actor.generate"), ("critic.train", "critic.values")]


def test_in_a_graph_of_two_iterations_new_weights_are_edges():
    two = trace_step(actor_critic, iterations=2).to_rows()
    edges = graph_edges(two)
    assert edges["actor.train", "1:actor.generate"] == "weights"
    assert next_iteration(two) == [("1:actor.train", "actor.generate"), ("1:critic.train", "critic.values")]


def test_a_plan_adds_placements_and_says_which_weights_move():
    step, _, plan = planned_step()
    bare, placed = graph_html(step.graph), graph_html(step.graph, plan)
    assert all(f'data-call="{name}"' in bare for name in CALLS)
    assert "reallocated" not in bare
    assert f"{plan.placements['actor.train'].strategy}"[:10] in placed
    moves = plan.placements["critic.values"].devices != plan.placements["critic.train"].devices
    assert ("critic.train to critic.values of the next iteration: new weights, reallocated" in placed) == moves


def test_a_long_graph_is_scrolled_rather_than_drawn_too_small():
    assert len(re.findall(r"min-width:", graph_html(graph()))) == 1, "that of bars"
    long = graph_html(trace_step(actor_critic, iterations=3))
    width, least = re.findall(r'viewBox="0 0 ([\d.]+) ', long)[0], re.findall(r"min-width:(\d+)px", long)[-1]
    assert float(least) == pytest.approx(0.65 * float(width), abs=1) and float(least) > 900


SIZES = dict.fromkeys("abcdefg", (100.0, 40.0))


@pytest.mark.parametrize(
    "edges",
    [
        [],
        [("a", "b"), ("b", "c"), ("a", "c")],
        [("a", "b"), ("a", "c"), ("a", "d"), ("b", "e"), ("c", "e"), ("d", "e"), ("a", "g"), ("e", "f")],
        [(x, y) for x, y in itertools.combinations("abcdefg", 2)],
    ],
)
def test_boxes_lie_apart_and_no_edge_runs_through_one(edges):
    layout = layered(SIZES, edges)
    boxes = list(layout.boxes.values())
    for one, other in itertools.combinations(boxes, 2):
        beside = one.x + one.width <= other.x or other.x + other.width <= one.x
        assert beside or one.y + one.height <= other.y or other.y + other.height <= one.y
    for (left, right), points in layout.routes.items():
        assert layout.boxes[left].x < layout.boxes[right].x
        for (x1, y1), (x2, y2) in zip(points[1:-1:2], points[2:-1:2], strict=True):  # through a layer
            assert y1 == y2 and x1 < x2
            assert not any(box.y < y1 < box.y + box.height and box.x < x2 and x1 < box.x + box.width for box in boxes)
    assert all(box.y >= 0 and box.y + box.height <= layout.height + 1e-9 for box in boxes)
