"""Bars of values by name."""

from jaxrlhf.pages.bars import bars_svg


def test_a_bar_for_each_value_as_long_as_it_is_large():
    svg = bars_svg({"one plan": {"gen": 4.0, "train": 2.0}, "another": {"gen": 1.0}}, title="Seconds", unit="s")
    widths = [float(each.split('width="')[1].split('"')[0]) for each in svg.split("<rect")[1:] if 'width="' in each]
    bars = sorted(widths)[-3:]
    assert len(widths) >= 3 and svg.count("<svg") == 1
    assert abs(bars[2] / bars[0] - 4) < 0.2 and abs(bars[1] / bars[0] - 2) < 0.1
    assert "gen" in svg and "train" in svg and "Seconds" in svg and "4" in svg


def test_names_are_escaped():
    assert "<b>" not in bars_svg({"": {"<b>": 1.0}})
