"""Estimates from several responses to a prompt, against all subsets, and votes counted by hand."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from jaxrlhf.rewards.repeated_samples import answer_vote, expected_best, majority_score


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_expected_best_is_the_mean_over_all_subsets(k):
    scores_GN = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    subsets = [list(subset) for subset in itertools.combinations(range(5), k)]
    expected = np.mean([scores_GN[:, subset].max(axis=1) for subset in subsets])
    assert expected_best(scores_GN.ravel(), k, num_samples=5) == pytest.approx(expected, rel=1e-6)


def test_pass_at_k_of_many_samples():
    passes_B = np.zeros(400)
    passes_B[:10] = 1.0  # 10 of 200 for one prompt, none for the other
    missed = np.prod([(190 - i) / (200 - i) for i in range(100)])
    assert expected_best(passes_B, 100, num_samples=200) == pytest.approx((1 - missed) / 2, rel=1e-9)
    assert expected_best(passes_B, 1, num_samples=200) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("scores", "votes", "expected"),
    [
        ([1, 0, 1, 0], [5, 6, 5, 7], 1.0),
        ([1, 0, 0, 1], [5, 6, 6, 5], 1.0),
        ([0, 1, 1, 0], [6, 5, 5, 6], 0.0),
        ([1, 0, 0, 0], [5, None, None, None], 1.0),
        ([1, 0, 0, 0], [None] * 4, 0.25),
        ([1.0, 0.5, 0, 0], [5, 5, 6, None], 0.75),
    ],
)
def test_majority_score(scores, votes, expected):
    assert majority_score(np.array(scores, np.float32), votes, num_samples=4) == expected
    twice = np.array([*scores, *[1.0] * 4], np.float32)
    assert majority_score(twice, [*votes, *[1] * 4], num_samples=4) == (expected + 1) / 2


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        (r"\boxed{1} \boxed{1,000}", "any", 1000),
        (r"\boxed{\frac{1}{2}}", "boxed", Fraction(1, 2)),
        (r"\boxed{ x + 1 }", "any", "x+1"),
        (r"\boxed{x+1}", "last", 1),
        ("3 or 4", "any", 4),
        ("3 or 4", "boxed", None),
        ("#### 3 or 4", "marker", 3),
        (r"\boxed{a} #### b", "any", None),
        ("none", "any", None),
    ],
)
def test_answer_vote(text, where, expected):
    assert answer_vote(text, where) == expected
