"""How the settings of an algorithm refuse a value: one message form for all of them."""

import math


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


def require_passes(mini_batches: int, epochs: int, where: str) -> None:
    """What an update asks of the number of its mini-batches and epochs."""
    require(mini_batches >= 1, f"{where}.mini_batches", "must be at least 1", mini_batches)
    require(epochs >= 1, f"{where}.epochs", "must be at least 1", epochs)
