"""Thresholds of garbage collection: raised, unless somebody else has set them."""

import gc

import pytest

from jaxrlhf import garbage


@pytest.mark.parametrize(("before", "after"), [((700, 10, 10), garbage.RARELY), ((123, 4, 5), (123, 4, 5))])
def test_thresholds_are_raised_from_the_defaults_alone(before, after):
    now = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        garbage.collect_rarely()
        assert gc.get_threshold() == after
    finally:
        gc.set_threshold(*now)
