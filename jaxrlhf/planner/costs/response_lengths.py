"""The distribution of response lengths that a forecast assumes: lognormal, cut off at the most new tokens.

cdf = length_cdf(ResponseLengths(mean=33, p99=150), 256)        # P(length <= k) for k = 1, 2, ..., 256
expected_longest(cdf, 512)                                      # tokens of the longest of 512 responses
"""

import functools
import math

import numpy as np

from jaxrlhf.config.plan_config import ResponseLengths

_Z99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""


@functools.lru_cache(maxsize=64)
def length_cdf(lengths: ResponseLengths | None, most: int) -> np.ndarray:
    """The probability that a response has at most k tokens, for k from 1 to `most`.

        length = min(round(exp(mu + sigma z)), most), at least 1, with z from the standard normal distribution

    sigma is the one in [0, 2.33] for which the mean of these lengths and their 99th percentile are those given: in this
    range the mean falls as sigma grows, and beyond it the percentile says little of the tail. Where the percentile is
    `most`, 1 % of all responses are cut off.

    Args:
        lengths: None means that all responses have `most` tokens.

    Raises:
        ValueError: No such lengths have that mean and that percentile.
    """
    lengths = lengths or ResponseLengths(mean=most, p99=most)
    mean, p99 = lengths.mean, lengths.p99
    for name in ("mean", "p99"):
        if (value := getattr(lengths, name)) > most:
            raise ValueError(
                f"{name}: must be at most max_new_tokens={most}, which cuts responses off. Got {value:g}. Lower it, or "
                "raise max_new_tokens."
            )
    if mean == p99:
        return (np.arange(1, most + 1) >= p99).astype(float)
    low, high, least = 1e-6, _Z99, least_mean(p99, most)
    if mean < least:
        raise ValueError(
            f"mean: must be at least {math.ceil(10 * least) / 10:g} where 99 % of the responses have at most {p99} "
            f"tokens and none more than {most}, since lengths are taken to be lognormal. Got {mean:g}. Raise it, or "
            "lower p99."
        )
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(_lognormal(p99, middle, most)) > mean else (low, middle)
    return _lognormal(p99, high, most)


def expected_longest(cdf: np.ndarray, count: int) -> float:
    """The expected maximum of the lengths of `count` responses."""
    return _mean(cdf**count)


def least_mean(p99: int, most: int) -> float:
    """The least mean that goes with a 99th percentile."""
    return _mean(_lognormal(p99, _Z99, most))


def median_length(cdf: np.ndarray) -> int:
    """The fewest tokens that half of all responses have at most."""
    return int(np.searchsorted(cdf, 0.5)) + 1


def _mean(cdf: np.ndarray) -> float:
    """The mean of lengths: the sum over k of the probability to have more than k tokens."""
    return 1.0 + float((1.0 - cdf[:-1]).sum())


def _lognormal(p99: int, sigma: float, most: int) -> np.ndarray:
    """The probabilities of `length_cdf`, from the percentile and sigma."""
    scores = (np.log(np.arange(1, most) + 0.5) - math.log(p99)) / sigma + _Z99
    return np.append(np.interp(scores, *_normal_cdf()), 1.0)


@functools.cache
def _normal_cdf() -> tuple[np.ndarray, np.ndarray]:
    """Points of the standard normal distribution, between which it is within 3e-8 of a straight line."""
    points = np.linspace(-9.0, 9.0, 18001)
    return points, np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in points])
