"""Line charts: curves over steps, several runs in one chart, with axes, ticks and a legend."""

import math
from collections.abc import Callable, Mapping, Sequence

from jaxrlhf.observe.plain_text import number
from jaxrlhf.pages.markup import element, escaped, label, shortened, svg

RUN_COLORS = ("#2b7de9", "#e8710a", "#1e9e5a", "#a142f4", "#d93025", "#12a4af", "#8d6e63", "#e52592")
"""The colors of runs, in their order."""
MOST_POINTS = 400
"""The most points of a curve."""
Points = Sequence[tuple[float, float]]
"""(x, y); y may be NaN, which leaves a gap."""
_LEFT, _RIGHT, _BOTTOM = 52, 12, 30


def curves_svg(
    series: Mapping[str, Points],
    *,
    title: str = "",
    x_label: str = "step",
    log: bool = False,
    width: int = 420,
    height: int = 220,
    colors: Mapping[str, str] | None = None,
) -> str:
    """A chart of curves by name, as inline SVG.

    Curves with more than 400 points are thinned out, and the chart says so. With `log`, values that are not positive
    are left out, and the chart says how many.
    """
    colors = colors or {name: RUN_COLORS[i % len(RUN_COLORS)] for i, name in enumerate(series)}
    drawable = {name: [p for p in points if not log or math.isnan(p[1]) or p[1] > 0] for name, points in series.items()}
    dropped = sum(len(points) - len(drawable[name]) for name, points in series.items())
    finite = [(x, y) for points in drawable.values() for x, y in points if math.isfinite(x) and math.isfinite(y)]
    top = (22 if title else 6) + (16 if len(series) > 1 else 0)
    drawn = [label(_LEFT, 15, shortened(title, int(width / 7.6)), font_weight=600, font_size=12)] if title else []
    drawn += _legend(colors, list(series), 30 if title else 12, width) if len(series) > 1 else []
    if not finite:
        drawn.append(label(width / 2, height / 2, "no values", text_anchor="middle", fill_opacity=0.6))
        return svg(width, height, *drawn, name=title or "curves", class_="chart")
    x_low, x_high = _range([x for x, _ in finite])
    values = [math.log10(y) if log else y for _, y in finite]
    y_low, y_high = _range(values, margin=0.04)
    inner_width, inner_height = width - _LEFT - _RIGHT, height - top - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        upward = ((math.log10(y) if log else y) - y_low) / (y_high - y_low)
        return _LEFT + inner_width * (x - x_low) / (x_high - x_low), top + inner_height * (1 - upward)

    ticks = _log_ticks(y_low, y_high) if log else nice_ticks(y_low, y_high, max(2, round(inner_height / 34)))
    for tick, text in ticks:
        y = top + inner_height * (1 - (tick - y_low) / (y_high - y_low))
        drawn.append(_rule(_LEFT, y, width - _RIGHT, y, stroke_opacity=0.13))
        drawn.append(label(_LEFT - 5, y + 3.5, text, text_anchor="end", fill_opacity=0.75, font_size=10))
    for tick, text in nice_ticks(x_low, x_high, max(2, round(inner_width / 80)), whole=True):
        x = _LEFT + inner_width * (tick - x_low) / (x_high - x_low)
        drawn.append(_rule(x, height - _BOTTOM, x, height - _BOTTOM + 4, stroke_opacity=0.5))
        drawn.append(label(x, height - _BOTTOM + 15, text, text_anchor="middle", fill_opacity=0.75, font_size=10))
    drawn.append(_rule(_LEFT, height - _BOTTOM, width - _RIGHT, height - _BOTTOM, stroke_opacity=0.5))
    notes = [x_label]
    notes += [f"{dropped} values that are not positive left out"] if dropped else []
    notes += [f"thinned out to {MOST_POINTS} points"] if any(len(x) > MOST_POINTS for x in drawable.values()) else []
    drawn.append(
        label(width - _RIGHT, height - 3, "; ".join(notes), text_anchor="end", fill_opacity=0.65, font_size=9.5)
    )
    drawn += [_curve(name, thinned(points), place, colors[name]) for name, points in drawable.items()]
    return svg(width, height, *drawn, name=title or "curves", class_="chart")


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many of some points: of each of equally long pieces the least and the greatest value, in order, so
    that no spike is lost. The last point stays.

    >>> thinned([(0, 1.0), (1, 5.0), (2, 2.0), (3, 0.0), (4, 3.0), (5, 4.0)], most=4)
    [(0, 1.0), (1, 5.0), (3, 0.0), (5, 4.0)]
    """
    if len(points) <= most:
        return list(points)
    pieces, kept = most // 2, []
    for i in range(pieces):
        piece = range(len(points) * i // pieces, len(points) * (i + 1) // pieces)
        finite = [j for j in piece if math.isfinite(points[j][1])] or [piece[0]]
        ends = {min(finite, key=lambda j: points[j][1]), max(finite, key=lambda j: points[j][1])}
        kept += sorted(ends if i < pieces - 1 else {min(ends), len(points) - 1})
    return [points[j] for j in kept]


def nice_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """About `count` round numbers in a range, with their texts.

    >>> nice_ticks(0.0, 1.0, 4)
    [(0.0, '0'), (0.2, '0.2'), (0.4, '0.4'), (0.6, '0.6'), (0.8, '0.8'), (1.0, '1')]
    >>> [text for _, text in nice_ticks(0, 3, 8, whole=True)]
    ['0', '1', '2', '3']
    """
    if not high > low:
        return [(low, number(low, digits=3))]
    raw = (high - low) / max(1, count)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.8)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [round(i * step, decimals + 3) for i in range(first, last + 1)]
    return [(tick, _tick_text(tick, decimals)) for tick in ticks]


def _tick_text(value: float, decimals: int) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if decimals else f"{value:.0f}"


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks at powers of ten, or at 1, 2 and 5 times these where there are few; in logarithms."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1,) if high - low > 2 else (1, 2, 5)
    every = max(1, round(len(powers) / 6))
    found = [10.0**power * factor for power in powers[::every] for factor in factors]
    return [(math.log10(x), f"{x:.3g}") for x in found if low <= math.log10(x) <= high]


def _range(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """The least and the greatest value, apart, with a margin around them."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    return low - margin * (high - low), high + margin * (high - low)


def _curve(name: str, points: Points, place: Callable[[float, float], tuple[float, float]], color: str) -> str:
    """A curve with gaps where values are not finite; single points are dots."""
    pieces: list[list[str]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            px, py = place(x, y)
            pieces[-1].append(f"{px:.1f} {py:.1f}")
        elif pieces[-1]:
            pieces.append([])
    path = "".join(f"M{piece[0]}h0.01" if len(piece) == 1 else "M" + "L".join(piece) for piece in pieces if piece)
    finite = [y for _, y in points if math.isfinite(y)]
    few = len(finite) <= 12
    last = f", last {number(finite[-1], digits=4)}" if finite else ""
    line = element(
        "path", d=path, fill="none", stroke=color, stroke_width=1.6, stroke_linejoin="round", stroke_linecap="round",
        class_="curve", data_name=name,
    )  # fmt: skip
    dots = []
    if few:
        for x, y in points:
            if math.isfinite(y):
                px, py = place(x, y)
                told = element("title", escaped(f"{name}: {number(y, digits=4)} at {x:g}"))
                dots.append(element("circle", told, cx=px, cy=py, r=2.4, fill=color))
    return element("g", element("title", escaped(f"{name}{last}")), line, *dots)


def _legend(colors: Mapping[str, str], names: Sequence[str], y: float, width: float) -> list[str]:
    """Names of curves in a line, as many as there is room for."""
    drawn, x = [], float(_LEFT)
    for i, name in enumerate(names):
        text = shortened(name, 26)
        needed = 18 + 6.2 * len(text)
        if x + needed > width - 40 and i < len(names) - 1:
            drawn.append(label(x, y + 3, f"+{len(names) - i}", fill_opacity=0.7, font_size=10))
            break
        drawn.append(element("line", x1=x, x2=x + 11, y1=y, y2=y, stroke=colors[name], stroke_width=2.5))
        drawn.append(label(x + 15, y + 3.5, text, font_size=10))
        x += needed + 8
    return drawn


def _rule(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", **attributes)
