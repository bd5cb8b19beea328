"""Checks of a config's values, with one form of error message for all."""

import math
from collections.abc import Callable
from typing import Any


def require(holds: bool, where: str, rule: str, got: object, remedy: str = "") -> None:
    """Raises ValueError, `where: rule. Got value. Remedy.`, unless `holds`."""
    if not holds:
        raise ValueError(f"{where}: {rule}. Got {got!r}.{' ' + remedy if remedy else ''}")


def require_positive(value: float, where: str) -> None:
    require(math.isfinite(value) and value > 0, where, "must be finite and positive", value)


def require_not_negative(value: float, where: str) -> None:
    require(math.isfinite(value) and value >= 0, where, "must be finite and not negative", value)


def require_fraction(value: float, where: str) -> None:
    require(0 <= value <= 1, where, "must lie in [0, 1]", value)


def require_positive_fraction(value: float, where: str) -> None:
    require(0 < value <= 1, where, "must lie in (0, 1]", value)


def require_at_least_one(value: float, where: str) -> None:
    require(value >= 1, where, "must be at least 1", value)


def require_fields(config: Any, check: Callable[[float, str], None], *names: str) -> None:
    """Checks some fields of a config, each under its own name."""
    for name in names:
        check(getattr(config, name), name)


def require_passes(mini_batches: int, epochs: int, where: str) -> None:
    """Checks the numbers of mini-batches and epochs of an update."""
    require_at_least_one(mini_batches, f"{where}.mini_batches")
    require_at_least_one(epochs, f"{where}.epochs")
