"""Schedules of pipelines as fragments."""

import itertools
import re

from jaxrlhf.pages.schedule_html import schedule_html
from jaxrlhf.schedules.instructions import Pipe
from jaxrlhf.schedules.schedule import interleaved_1f1b
from jaxrlhf.schedules.schedule_bounds import serial_schedule


def boxes(html):
    """(x, y, width) of every box."""
    numbers = r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"'
    return [tuple(map(float, found)) for found in re.findall(numbers, html)]


def test_a_box_for_each_instruction_whose_width_is_its_latency():
    html = schedule_html(interleaved_1f1b(2, 1, 3), title="a < b")
    drawn = boxes(html)
    assert len(drawn) == 2 * 2 * 3 and len({y for _, y, _ in drawn}) == 2
    widths = {round(width) for _, _, width in drawn}
    assert len(widths) == 2 and abs(max(widths) - 2 * min(widths)) <= 1  # backwards take two forwards
    assert "ends at 12; workers wait 25.0% of the time until then; at most 2 of activations" in html
    assert "a &lt; b" in html


def test_no_two_boxes_of_a_worker_overlap():
    pipes = (Pipe((0, 1), 3, model=0), Pipe((1, 0), 3, forward=2, backward=3, model=1))
    html = schedule_html(serial_schedule(pipes), names=("actor", "critic"))
    rows = {}
    for x, y, width in boxes(html):
        rows.setdefault(y, []).append((x, x + width))
    for row in rows.values():
        row.sort()
        assert all(end <= start + 0.02 for (_, end), (start, _) in itertools.pairwise(row))
    assert all(f"{name}, {kind}" in html for name in ("actor", "critic") for kind in ("forward", "backward"))


def test_two_schedules_are_drawn_to_one_scale():
    short, long = (interleaved_1f1b(2, 1, count) for count in (2, 8))
    alone, beside = boxes(schedule_html(short)), boxes(schedule_html(short, end=27))
    assert beside[0][2] < alone[0][2]
    assert beside[0][2] == boxes(schedule_html(long))[0][2]
