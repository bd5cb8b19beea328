"""The built-in rewards against scores counted by hand, and every error of theirs."""

import re

import pytest

from jaxrlhf.rewards.built_in import VERIFIERS
from jaxrlhf.rewards.verifiers import (
    exact_answer,
    exact_match,
    final_number,
    wrong_answer,
)


def score(reward, completion, answer, *, finished=True):
    return reward(["p"], [completion], finished=[finished], answer=[answer])[0]


@pytest.mark.parametrize(
    ("completion", "answer", "finished", "expected"),
    [
        ("12 13>132", "132", True, 1.0),
        ("12 13>132", 132, True, 1.0),
        ("12>9>132 ", "132", True, 1.0),
        ("12 13>132", "132", False, 0.0),
        ("132", "132", True, 0.0),
        (">152", "132", True, 0.5 * 2 / 3),
        (">1", "132", True, 0.5 * 1 / 3),
        (">1327", "132", True, 0.5 * 3 / 4),
        (">32", "132", True, 0.0),
        (">", "132", True, 0.0),
    ],
)
def test_exact_answer(completion, answer, finished, expected):
    assert score(exact_answer(partial_credit=0.5), completion, answer, finished=finished) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "finished", "expected"),
    [
        ("12 13>132", True, 0.0),
        ("12 13>132 ", True, 0.0),
        ("12 13>152", True, 1.0),
        ("12 13>152", False, 0.0),
        ("12 13", True, 0.0),
        (">", True, 1.0),
    ],
)
def test_wrong_answer(completion, finished, expected):
    assert score(wrong_answer(), completion, 132, finished=finished) == expected


def test_wrong_answer_options():
    cost = wrong_answer(answer_column="truth", separator="=>")
    assert cost(["p"] * 2, ["a=>5", "a>5"], finished=[True, True], truth=["6", "6"], answer=["5", "5"]) == [1.0, 0.0]


def test_exact_answer_options():
    assert score(exact_answer(), ">152", "132") == 0.0
    reward = exact_answer(answer_column="truth", separator="=>")
    assert reward(["p"] * 2, ["a=>5", "a>5"], finished=[True, True], truth=["5", "5"], answer=["6", "6"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so #### 72", "48/2=24\n#### 72", 1.0),
        ("#### 5\n#### 72", "#### 72", 1.0),
        ("#### $1,072.", "#### 1072", 1.0),
        ("#### 72.0", "#### 72", 1.0),
        ("####72 apples", "72", 1.0),
        ("#### -3", -3, 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 3", "#### -3", 0.25),
        ("#### 7", "#### 72", 0.25),
        ("#### 72 #### nothing", "#### 72", 0.0),
        ("####", "#### 72", 0.0),
        ("the answer is 72", "#### 72", 0.0),
    ],
)
def test_final_number(completion, answer, expected):
    assert score(final_number(partial_credit=0.25), completion, answer) == expected


@pytest.mark.parametrize(
    ("where", "completion", "expected"),
    [
        ("boxed", r"so \boxed{7} or \boxed{72}", 1.0),
        ("boxed", r"$\boxed{\frac{144}{2}}$ #### 5", 1.0),
        ("boxed", r"\boxed{72\text{ apples}}", 1.0),
        ("boxed", r"\boxed{72", 0.0),
        ("boxed", "72", 0.0),
        ("last", "Of 100 there are 72 left.", 1.0),
        ("last", "72 of 100", 0.25),
        ("last", "no idea", 0.0),
        ("any", r"72 #### 71 \boxed{72}", 0.25),
        ("any", r"71 \boxed{72} 73", 1.0),
        ("any", "It is 72!", 1.0),
        ("any", "#### none of 72", 0.0),
    ],
)
def test_where_the_final_number_is_read(where, completion, expected):
    assert score(final_number(partial_credit=0.25, where=where), completion, "#### 72") == expected


@pytest.mark.parametrize("answer", ["72", 72, 72.0, "a\n#### 72", r"\boxed{72}", "It is 72."])
def test_forms_of_the_answer_column(answer):
    assert score(final_number(), "#### 72", answer) == 1.0


def test_exact_match():
    scores = exact_match("truth")(["p"] * 3, [" yes\n", "yess", "7"], finished=[True] * 3, truth=["yes", "yes", 7])
    assert scores == [1, 0, 1]


def test_every_verifier_is_listed():
    assert all(factory.__name__ == name for name, factory in VERIFIERS.items()) and len(set(VERIFIERS)) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: exact_answer(partial_credit=1.5),
            "Reward 'exact_answer': partial_credit must lie in [0, 1]. Got 1.5.",
        ),
        (lambda: exact_answer(separator=""), "Reward 'exact_answer': separator must not be empty. Got ''."),
        (lambda: wrong_answer(separator=""), "Reward 'wrong_answer': separator must not be empty. Got ''."),
        (lambda: final_number(partial_credit=-1), "Reward 'final_number': partial_credit must lie in [0, 1]. Got -1."),
        (lambda: final_number(marker=""), "Reward 'final_number': marker must not be empty. Got ''."),
        (
            lambda: final_number(where="box"),
            "Reward 'final_number': where must be one of marker, boxed, last, any. Got 'box'. Did you mean 'boxed'?",
        ),
    ],
)
def test_option_errors(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_data_errors():
    with pytest.raises(ValueError, match=r"exact_match: needs a column 'truth' .* Got columns finished, a\. Set"):
        exact_match("truth")(["p"], ["c"], finished=[True], a=[1])
    with pytest.raises(ValueError, match=r"exact_answer: needs a column 'answer' in every row"):
        score(exact_answer(), "c", None)
    with pytest.raises(ValueError, match=r"final_number: column 'answer' must hold a number, .* Got 'many' at index 0"):
        score(final_number(), "#### 1", "many")
