"""Charts: what they draw, where curves are thinned out, and which ticks axes have."""

import math
import re

import pytest

from jaxrlhf.pages.curves import MOST_POINTS, curves_svg, nice_ticks, thinned


def paths(chart: str) -> list[str]:
    return re.findall(r'<path d="([^"]*)"[^>]*class="curve"', chart)


def test_each_curve_is_drawn_once_with_gaps_where_values_are_not_finite():
    chart = curves_svg({"one": [(i, float(i)) for i in range(20)], "two": [(0, 1.0), (1, math.nan), (2, 3.0)]})
    first, second = paths(chart)
    assert first.count("M") == 1 and first.count("L") == 19
    assert second.count("M") == 2 and "L" not in second, "two single points"
    assert ">one<" in chart and ">two<" in chart


def test_a_higher_value_lies_higher_and_the_ends_touch_the_axes():
    (path,) = paths(curves_svg({"a": [(0, 0.0), (5, 1.0), (10, 0.5)]}, width=400, height=200))
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    assert y1 < y2 < y0 and x0 == 52 and x2 == 388 and x1 == pytest.approx(220)


def test_a_logarithmic_chart_says_what_it_leaves_out():
    chart = curves_svg({"a": [(0, 1.0), (1, -1.0), (2, 100.0), (3, 10.0)]}, log=True)
    (path,) = paths(chart)
    first, second, third = [float(point.split()[1]) for point in path[1:].split("L")]
    assert third == pytest.approx((first + second) / 2, abs=0.1), "10 is half-way from 1 to 100"
    assert "1 values that are not positive left out" in chart


def test_long_curves_keep_their_spikes_and_say_that_they_are_thinned_out():
    points = [(i, 0.0 if i != 4321 else 9.0) for i in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS and (4321, 9.0) in kept and kept[-1] == points[-1]
    assert kept == sorted(kept)
    assert f"thinned out to {MOST_POINTS} points" in curves_svg({"a": points})
    assert "thinned" not in curves_svg({"a": points[:MOST_POINTS]})


@pytest.mark.parametrize("points", [[], [(0, math.nan)], [(1, 2.0)], [(1, 0.0), (2, 0.0)], [(1, 1e-300), (2, 1e300)]])
def test_any_values_can_be_drawn(points):
    chart = curves_svg({"a": points})
    assert "nan" not in chart and "inf" not in chart
    assert ("no values" in chart) == (not any(math.isfinite(y) for _, y in points))


def test_names_are_escaped():
    assert "<b>" not in curves_svg({"<b>": [(0, 1.0)], "x": [(0, 1.0)]}, title="<b>")


@pytest.mark.parametrize("low, high, count", [(0, 1, 5), (-3.7, 12.1, 4), (1e-7, 3e-7, 4), (0, 123456, 6), (5, 6, 3)])
def test_ticks_are_round_and_within(low, high, count):
    ticks = nice_ticks(low, high, count)
    assert 2 <= len(ticks) <= 2 * count + 1
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)
