"""Charts of metrics."""

import math

import pandas as pd

import jaxrlhf as rl


def test_curves_are_of_numbers_or_of_columns_without_what_is_missing():
    column = pd.Series([1.0, math.nan, 3.0], index=[0, 5, 10])
    shown = rl.curves({"list": [2.0, 4.0], "column": column}, title="two & two")
    assert shown.points == {"list": [(1.0, 2.0), (2.0, 4.0)], "column": [(0.0, 1.0), (10.0, 3.0)]}
    assert repr(shown) == "<curves: list 2 to 4, column 1 to 3>"
    html = shown._repr_html_()
    assert html.count('class="curve"') == 2 and "two &amp; two" in html


def test_curves_without_values_say_so():
    assert repr(rl.curves({"none": [math.nan]})) == "<curves: no values>"
