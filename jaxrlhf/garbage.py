"""Thresholds of Python's garbage collection."""

import gc

DEFAULTS = ((700, 10, 10), (2000, 10, 10))
"""Python's own thresholds, up to 3.12 and in 3.13."""
RARELY = (50_000, 20, 50)


def collect_rarely() -> None:
    """Lets Python collect garbage more rarely, unless the thresholds have been changed before.

    Tracing makes objects by the million, few of them garbage. At Python's own thresholds, collections take a seventh of
    the CPU time of tests that trace and compile many programs.
    """
    if gc.get_threshold() in DEFAULTS:
        gc.set_threshold(*RARELY)
