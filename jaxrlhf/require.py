"""Checks of a config's values, with one form of error message for all."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxrlhf.brief import brief


def require(holds: bool, where: str, rule: str, got: object, remedy: str = "") -> None:
    """Raises ValueError, `where: rule. Got value. Remedy.`, unless `holds`."""
    if not holds:
        raise ValueError(f"{where}: {rule}. Got {brief(got)}.{' ' + remedy if remedy else ''}")


@contextlib.contextmanager
def errors_as(kind: type[Exception], before: str = "", caught: type[Exception] = ValueError) -> Iterator[None]:
    """Raises errors inside of the block as errors of another kind, with a text before the message."""
    try:
        yield
    except caught as error:
        raise kind(f"{before}{error}") from error


def _rule(rule: str, holds: Callable[[float], bool]) -> Callable[[float, str], None]:
    """A check of a value, given with its place for the error message."""
    return lambda value, where: require(holds(value), where, rule, value)


require_positive = _rule("must be finite and positive", lambda x: math.isfinite(x) and x > 0)
require_not_negative = _rule("must be finite and not negative", lambda x: math.isfinite(x) and x >= 0)
require_fraction = _rule("must lie in [0, 1]", lambda x: 0 <= x <= 1)
require_positive_fraction = _rule("must lie in (0, 1]", lambda x: 0 < x <= 1)
require_fraction_below_one = _rule("must lie in [0, 1)", lambda x: 0 <= x < 1)
require_at_least_zero = _rule("must be at least 0", lambda x: x >= 0)
require_at_least_one = _rule("must be at least 1", lambda x: x >= 1)


def require_fields(config: Any, check: Callable[[float, str], None], *names: str) -> None:
    """Checks some fields of a config, each under its own name."""
    for name in names:
        check(getattr(config, name), name)


def require_passes(mini_batches: int, epochs: int, where: str) -> None:
    """Checks the numbers of mini-batches and epochs of an update."""
    require_at_least_one(mini_batches, f"{where}.mini_batches")
    require_at_least_one(epochs, f"{where}.epochs")
