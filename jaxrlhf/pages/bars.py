"""Bar charts: a group of bars for each thing that is compared, one bar for each of the series, with its value."""

import math
from collections.abc import Mapping

from jaxrlhf.observe.plain_text import number
from jaxrlhf.pages.curves import RUN_COLORS
from jaxrlhf.pages.markup import element, escaped, label, shortened, svg

_BAR, _GAP, _CHARACTER = 13, 8, 6.6


def bars_svg(
    series: Mapping[str, Mapping[str, float]], *, title: str = "", unit: str = "", width: int = 560
) -> str:
    """A chart of values, series -> name -> value, as inline SVG: names from top to bottom, bars from the left.

    Names are in the order in which they first occur. A name that a series lacks has no bar there, and neither has a
    value that is not finite. Values must not be negative.
    """
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    finite = [value for values in series.values() for value in values.values() if math.isfinite(value)]
    if any(value < 0 for value in finite):
        raise ValueError(f"bars: values must not be negative. Got {min(finite)}. Draw curves of them.")
    most = max(finite, default=0.0) or 1.0
    left = 14 + _CHARACTER * min(26, max((len(name) for name in names), default=0))
    scale = (width - left - 12 - _CHARACTER * (7 + len(unit))) / most
    drawn = [label(0, 15, title, font_weight=600, font_size=12)] if title else []
    y = 24.0 if title else 4.0
    if len(series) > 1:
        drawn, y = drawn + _legend(list(series), left, y + 8), y + 22
    top = y
    for name in names:
        has = [(order, values[name]) for order, values in enumerate(series.values()) if name in values]
        middle = y + _BAR * len(has) / 2
        drawn.append(label(left - 8, middle + 4, shortened(name, 26), text_anchor="end"))
        for order, value in has:
            color = RUN_COLORS[order % len(RUN_COLORS)]
            drawn.append(_bar(name, list(series)[order], value, left, y, scale, color, unit))
            y += _BAR
        y += _GAP
    ends = dict(y1=top - 3, y2=y - _GAP + 3)
    drawn.append(element("line", x1=left, x2=left, **ends, stroke="currentColor", stroke_opacity=0.5))
    return svg(width, y, *drawn, name=title or "bars", class_="chart")


def _bar(name: str, of: str, value: float, left: float, y: float, scale: float, color: str, unit: str) -> str:
    """A bar with its value behind it, or a dash for a value that is not finite."""
    if not math.isfinite(value):
        return label(left + 4, y + _BAR - 3, "-", fill_opacity=0.75)
    text = f"{number(value, digits=3)} {unit}".rstrip()
    told = element("title", escaped(f"{name}{f', {of}' if of else ''}: {text}"))
    bar = element("rect", told, x=left, y=y + 1, width=max(scale * value, 0.5), height=_BAR - 2, fill=color)
    return bar + label(left + scale * value + 5, y + _BAR - 3, text, fill_opacity=0.75, font_size=10)


def _legend(names: list[str], x: float, y: float) -> list[str]:
    """The names of series in a line, each with its color."""
    drawn = []
    for i, name in enumerate(names):
        drawn.append(element("rect", x=x, y=y - 8, width=10, height=10, fill=RUN_COLORS[i % len(RUN_COLORS)]))
        drawn.append(label(x + 15, y + 1, name))
        x += 30 + _CHARACTER * len(name)
    return drawn
