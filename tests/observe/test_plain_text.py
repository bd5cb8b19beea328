import math

import pytest

from jaxrlhf.observe.plain_text import duration, sparkline


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([0, 1, 2, 3, 4, 5, 6, 7], 60, "▁▂▃▄▅▆▇█"),
        ([-5.0, 5.0], 60, "▁█"),
        ([2.0, 2.0, 2.0], 60, "▄▄▄"),
        ([0.0, math.nan, 7.0, math.inf], 60, "▁ █ "),
        ([math.nan], 60, " "),
        # Groups of two, three and three.
        ([0, 0, 3, 4, 5, 8, 8, 8], 3, "▁▅█"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.4, "0s"), (59.6, "1m00s"), (2996, "49m56s"), (3600, "1h00m"), (90061, "25h01m")]
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
