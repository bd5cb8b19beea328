"""Scores of several responses to one prompt: the best of k, pass@k, and majority votes.

Letters: G prompts, N responses to each, consecutive in B = G N.
"""

import collections
import math
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrlhf.rewards.numbers import FINDERS, last_box

MARKER = "####"


def expected_best(scores_B: np.ndarray, k: int, *, num_samples: int) -> float:
    """Mean over prompts of the expected best score of k responses, of N that were sampled.

        sum_i  C(i - 1, k - 1) / C(N, k) * s_(i),   s_(1) <= ... <= s_(N)

    This is the mean of the best over all subsets of k, thus unbiased. For scores of 0 and 1 it is pass@k,
    1 - C(N - c, k) / C(N, k) for c right ones.

    Reference:
        Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    weights_N = [math.comb(i, k - 1) / math.comb(num_samples, k) for i in range(num_samples)]
    sorted_GN = np.sort(scores_B.astype(np.float64).reshape(-1, num_samples), axis=1)
    return float((sorted_GN @ np.asarray(weights_N)).mean())


def majority_score(scores_B: np.ndarray, votes: Sequence[Hashable], *, num_samples: int) -> float:
    """Mean over prompts of the score of the answer that most responses give; of equals, the first.

    Responses with one answer may have different scores, whose mean counts. Responses without an answer (None) have no
    vote; where none has one, their mean score counts.
    """
    means = []
    for start in range(0, len(scores_B), num_samples):
        scores_N, votes_N = scores_B[start : start + num_samples], votes[start : start + num_samples]
        counts = collections.Counter(vote for vote in votes_N if vote is not None)
        winner = max(counts, key=counts.__getitem__) if counts else None
        means.append(np.mean([score for score, vote in zip(scores_N, votes_N, strict=True) if vote == winner]))
    return float(np.mean(means))


def answer_vote(text: str, where: str) -> Hashable:
    """The answer of a response as votes compare it, read as `final_number` does: a number, or else, of a box, its
    content without white space. None without an answer."""
    number = FINDERS[where](text, MARKER)
    content = last_box(text) if where in ("boxed", "any") and (where == "boxed" or MARKER not in text) else None
    if content is not None and number is None:
        return "".join(content.split())
    return number
