"""Values as short plain text: numbers, durations, curves, and texts without control characters."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
"""The characters of a sparkline."""


def cell(value: Any) -> str:
    """A value of plain data as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, digits=4)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={cell(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(cell(item) for item in value)
    return str(value)


def number(value: float, *, digits: int) -> str:
    """A number rounded to some significant digits, without an exponent up to 1e9."""
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds.

    >>> duration(2996)
    '49m56s'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def printable(text: str) -> str:
    """A text with line breaks and control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of block characters, from the least value to the greatest.

    More values than `width` are averaged in groups; groups without finite values leave a gap.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    """
    columns = min(width, len(values))
    ends = [len(values) * i // columns for i in range(columns + 1)] if columns else []
    groups = [[x for x in values[a:b] if math.isfinite(x)] for a, b in itertools.pairwise(ends)]
    means = [sum(group) / len(group) if group else None for group in groups]
    least, greatest = (end((mean for mean in means if mean is not None), default=0.0) for end in (min, max))
    scale = (len(BLOCKS) - 1) / (greatest - least) if greatest > least else 0.0
    middle = 0 if scale else 3
    return "".join(" " if mean is None else BLOCKS[middle + round(scale * (mean - least))] for mean in means)
