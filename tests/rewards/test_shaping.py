"""Rewards for form and length against scores counted by hand, and every error of theirs."""

import re

import pytest

from jaxrlhf.rewards.shaping import length_penalty, regex_format, soft_overlong, tag_format


def test_regex_format():
    reward = regex_format(r"<a>.*</a>\d*")
    assert reward(["p"] * 3, ["<a>x\ny</a>12", "<a>x</a>12 ", " <a></a>"], finished=[True] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, -2]),
        ({"both_sides": True}, [-0.5, 0, -2]),
        ({"unit": "words"}, [0, 0, -0.5]),
        ({"unit": "words", "both_sides": True}, [-1, -1, -0.5]),
        ({"unit": "tokens"}, [-1, -3.5, 0]),
    ],
)
def test_length_penalty(options, expected):
    reward = length_penalty(3, 0.5, **options)
    assert reward(["p"] * 3, ["ab", "abc", "a b c\nd"], num_tokens=[5, 10, 1]) == expected


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>\n", {}, 1.0),
        ("<think></think><answer></answer>", {}, 1.0),
        ("so <think>a</think><answer>7</answer>", {}, 0.5),
        ("<think>a</think> so <answer>7</answer>", {}, 0.5),
        ("<think>a</think><answer>7</answer>.", {}, 0.5),
        ("<think>a</think><answer>7</answer>.", {"text_after": True}, 1.0),
        ("<think>a</think> so <answer>7</answer>.", {"text_after": True}, 0.5),
        ("<answer>7</answer><think>a</think>", {}, 0.5),
        ("<think>a<answer>7</answer></think>", {}, 0.5),
        ("<think>a</think><think>b</think><answer>7</answer>", {}, 0.25),
        ("<think>a</think><answer>7", {}, 0.375),
        ("7", {}, 0.0),
        ("a</think><answer>7</answer>", {"opened": True}, 1.0),
        ("<think>a</think><answer>7</answer>", {"opened": True}, 0.375),
        ("<think>a</think> It is 7.", {"tags": "think", "text_after": True}, 1.0),
        ("<think>a</think> It is 7.", {"tags": "think"}, 0.5),
        ("<a>x</a><b-1>y</b-1><c>z</c>", {"tags": "a b-1 c"}, 1.0),
    ],
)
def test_tag_format(completion, options, expected):
    assert tag_format(partial_credit=0.5, **options)(["p"], [completion]) == [expected]


def test_soft_overlong():
    reward = soft_overlong(max_tokens=10, buffer_tokens=4, penalty=2.0)
    assert reward(["p"] * 6, [""] * 6, num_tokens=[1, 6, 7, 8, 10, 15]) == [0, 0, -0.5, -1, -2, -2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regex_format("("), "Reward 'regex_format': pattern must be a regular expression. Got '(': "),
        (lambda: length_penalty(-1, 1), "Reward 'length_penalty': target must not be negative. Got -1."),
        (lambda: length_penalty(1, float("inf")), "Reward 'length_penalty': scale must be finite and not"),
        (
            lambda: length_penalty(1, 1, unit="token"),
            "Reward 'length_penalty': unit must be one of characters, words, tokens. Got 'token'. Did you mean "
            "'tokens'?",
        ),
        (
            lambda: tag_format(""),
            "Reward 'tag_format': tags must be different names of letters, digits, _ and -. Got ''.",
        ),
        (lambda: tag_format("a a"), "Reward 'tag_format': tags must be different names"),
        (lambda: tag_format("<think>"), "Reward 'tag_format': tags must be different names"),
        (lambda: tag_format(partial_credit=2), "Reward 'tag_format': partial_credit must lie in [0, 1]. Got 2."),
        (lambda: soft_overlong(0, 1), "Reward 'soft_overlong': max_tokens must be at least 1. Got 0."),
        (lambda: soft_overlong(8, 9), "Reward 'soft_overlong': buffer_tokens must lie in [1, 8]. Got 9."),
        (lambda: soft_overlong(8, 4, -1), "Reward 'soft_overlong': penalty must be finite and not negative. Got -1."),
    ],
)
def test_option_errors(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
