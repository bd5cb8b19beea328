"""The distribution of response lengths that a forecast assumes: lognormal, cut off at the most new tokens.

cdf = length_cdf(ResponseLengths(mean=33, p99=150), 256)        # P(length <= k) for k = 1, 2, ..., 256
cdf**512                                                        # the same of the longest of 512 responses
"""

import functools
import math
import statistics

import numpy as np

from jaxrlhf.config.plan_config import ResponseLengths

_NORMAL = statistics.NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


@functools.lru_cache(maxsize=64)
def length_cdf(lengths: ResponseLengths | None, most: int) -> np.ndarray:
    """The probability that a response has at most k tokens, for k from 1 to `most`.

        length = min(round(exp(mu + sigma z)), most), at least 1, with z from the standard normal distribution

    sigma is the one in [0, 2.33] for which the mean of these lengths and their 99th percentile are those given: in this
    range the mean falls as sigma grows, and beyond it the percentile says little of the tail. Where the percentile is
    `most`, 1 % of all responses are cut off. Without lengths, all responses have `most` tokens.

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
    return np.array([*map(_NORMAL.cdf, scores), 1.0])
