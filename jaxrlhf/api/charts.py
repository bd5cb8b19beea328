"""Charts of metrics, of one run or of several, which show themselves in a notebook."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrlhf.observe.plain_text import number
from jaxrlhf.pages.bars import bars_svg
from jaxrlhf.pages.curves import curves_svg
from jaxrlhf.pages.markup import fragment


class CurvesDisplay:
    """Curves by name. In a notebook, a chart; elsewhere, the first and the last value of each.

    >>> rl.curves({"reward": [0.1, 0.5, 0.9]}).points["reward"][0]
    (1.0, 0.1)
    """

    def __init__(self, points: Mapping[str, list[tuple[float, float]]], settings: Mapping[str, Any]) -> None:
        self.points = points
        """Name -> (x, y) of a curve."""
        self._settings = settings

    def __repr__(self) -> str:
        ends = {name: (known[0][1], known[-1][1]) for name, known in self.points.items() if known}
        shown = [f"{name} {number(a, digits=4)} to {number(b, digits=4)}" for name, (a, b) in ends.items()]
        return f"<curves: {', '.join(shown) or 'no values'}>"

    def _repr_html_(self) -> str:
        return fragment("curves", curves_svg(self.points, **self._settings))


def curves(
    series: Mapping[str, Iterable[float]], *, title: str = "", x_label: str = "step", log: bool = False,
    width: int = 560, height: int = 260,
) -> CurvesDisplay:  # fmt: skip
    """A chart of curves by name, for a notebook.

    Args:
        series: Name -> its values: a column of `run.metrics`, with the index as x and without what is missing, or
            numbers, of which the first is that of step 1.
        log: A logarithmic scale; values that are not positive are left out, and the chart says so.
        width: In pixels.
        height: In pixels.

    Example:
        >>> rl.curves({"reward": run.rewards, "twice": [2 * x for x in run.rewards]}, title="two curves")
        <curves: reward ... to ..., twice ... to ...>
    """
    settings = {"title": title, "x_label": x_label, "log": log, "width": width, "height": height}
    return CurvesDisplay({name: _points(values) for name, values in series.items()}, settings)


def _points(values: Any) -> list[tuple[float, float]]:
    """(x, y) of a curve, without those that are NaN."""
    pairs = values.items() if hasattr(values, "items") else zip(itertools.count(1), values, strict=False)
    return [(float(x), float(y)) for x, y in pairs if y == y]


class BarsDisplay:
    """Values by name, of one series or of several. In a notebook, bars; elsewhere, a line.

    >>> rl.bars({"actor.train": 2.5, "critic.train": 1.0}, unit="s").series[""]["critic.train"]
    1.0
    """

    def __init__(self, series: Mapping[str, Mapping[str, float]], settings: Mapping[str, Any]) -> None:
        self.series = series
        """Series -> name -> value."""
        self._settings = settings

    def __repr__(self) -> str:
        shown = [
            f"{of}{': ' if of else ''}{', '.join(f'{name} {number(x, digits=3)}' for name, x in values.items())}"
            for of, values in self.series.items()
        ]
        return f"<bars: {'; '.join(shown)}>"

    def _repr_html_(self) -> str:
        return fragment("bars", bars_svg(self.series, **self._settings))


def bars(
    values: Mapping[str, float] | Mapping[str, Mapping[str, float]], *, title: str = "", unit: str = "",
    width: int = 560,
) -> BarsDisplay:  # fmt: skip
    """A bar for each value, for a notebook.

    Args:
        values: Name -> value; or series -> name -> value, which puts the bars of a name side by side.
        width: In pixels.

    Example:
        >>> rl.bars({"before": {"sums": 0.25}, "after": {"sums": 0.75}}, title="exact match")
        <bars: before: sums 0.25; after: sums 0.75>
    """
    several = {name: x for name, x in values.items() if isinstance(x, Mapping)}
    series = several or {"": {name: float(x) for name, x in values.items() if not isinstance(x, Mapping)}}
    return BarsDisplay(series, {"title": title, "unit": unit, "width": width})
