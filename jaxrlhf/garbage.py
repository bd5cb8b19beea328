"""How often Python looks for garbage."""

import gc

DEFAULT = (700, 10, 10)
"""Python's own thresholds."""
RARELY = (50_000, 20, 50)


def collect_rarely() -> None:
    """Makes Python look for garbage more rarely, unless somebody has set the thresholds before.

    Tracing makes objects by the million, few of them garbage. At Python's own thresholds, looking for it takes a fifth
    of a processor's time while programs are made.
    """
    if gc.get_threshold() == DEFAULT:
        gc.set_threshold(*RARELY)
