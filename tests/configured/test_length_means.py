"""Running means of lengths by prompt: what is expected of prompts, and what a step's prompts say of it."""

import numpy as np

from jaxrlhf.configured.length_means import LengthMeans


def test_means_are_those_of_a_prompt_or_of_all():
    means = LengthMeans(6)
    np.testing.assert_array_equal(means.expected(np.array([0, 5])), [0, 0])
    means.add(np.array([1, 1, 3]), np.array([4, 8, 30]))
    means.add(np.array([3]), np.array([10]))
    np.testing.assert_array_equal(means.expected(np.array([3, 0, 1, 1])), [20, 13, 6, 6])
