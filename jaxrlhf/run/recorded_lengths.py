"""The lengths of responses that a config wants forecasts to assume: as it says, or as a run recorded them."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.config.plan_config import ResponseLengths
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.configured.sampling import samplings_of
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.planner.costs.response_lengths import least_mean, length_cdf
from jaxrlhf.require import errors_as
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.step_metrics import RESPONSE_LENGTH

LAST_STEPS = 10
"""The steps of a run that count: the last ones."""
_WHERE = "plan.lengths"


def response_lengths(lengths: ResponseLengths | None, settings: Any) -> ResponseLengths | None:
    """The lengths of responses in forecasts with their mean and 99th percentile, read from a run if they name one.
    Raises ConfigError if it recorded none, or nothing that settings let draw can have such lengths.
    """
    limits = [sampling.max_new_tokens for sampling in samplings_of(settings)]
    if lengths is None or not limits:
        return None
    if lengths.run:
        lengths = lengths_like(*_recorded(lengths.run), limits)  # recorded under other limits, perhaps
    for most in limits:
        with errors_as(ConfigError, f"{_WHERE}."):
            length_cdf(lengths, most)
    return lengths


def lengths_like(mean: float, p99: float, limits: Sequence[int]) -> ResponseLengths:
    """The lengths nearest to recorded ones that forecasts can assume, where responses have at most so many tokens."""
    tail = max(1, min(math.ceil(p99), *limits))
    least = max(least_mean(tail, most) for most in limits)
    return ResponseLengths(mean=min(max(mean, least), tail), p99=tail)


def _recorded(folder: str) -> tuple[float, float]:
    """Mean and 99th percentile of the lengths in a run, each a mean over its last steps."""
    path = RunFolder(Path(folder)).metrics
    try:
        records = read_metrics(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{_WHERE}.run: must be the folder of a run. Got {folder!r}; {path}: {reason}.") from error
    steps = [each for each in records if f"{RESPONSE_LENGTH}mean" in each][-LAST_STEPS:]
    if not steps:
        raise ConfigError(
            f"{_WHERE}.run: must be a run with at least one step that drew responses. Got {folder!r}, whose metrics "
            f"have no {RESPONSE_LENGTH}mean. Name another, or give mean and p99."
        )
    mean, p99 = (statistics.mean(each[f"{RESPONSE_LENGTH}{name}"] for each in steps) for name in ("mean", "p99"))
    return mean, p99
