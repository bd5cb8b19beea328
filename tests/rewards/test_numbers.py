"""Numbers as people and models write them, and what is none."""

from fractions import Fraction

import pytest

from jaxrlhf.rewards.numbers import boxed_number, last_number, starting_number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        (" -3 apples", -3),
        ("+3", 3),
        ("\u22123", -3),
        ("$1,072.50.", Fraction(2145, 2)),
        ("-$5", -5),
        ("$-5", -5),
        ("$ 5", 5),
        (r"\$5", 5),
        ("**42**", 42),
        (".5", Fraction(1, 2)),
        ("72.", 72),
        ("72kg", 72),
        ("3/4", Fraction(3, 4)),
        ("-3/4.", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("50%", 50),
        (r"50\%", 50),
        ("(42)", 42),
        ("1,234,567", 1234567),
        ("12,34", None),
        ("1.2.3", None),
        ("1e5", None),
        ("3/0", None),
        ("x3", None),
        ("is 3", None),
        ("", None),
        ("9" * 5000, None),
        ("\u0663", None),
    ],
)
def test_starting_number(text, expected):
    assert starting_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 + 37 = 42", 42),
        ("x=-42", -42),
        ("10-3", 3),
        ("between 1,000 and 2,000 dollars", 2000),
        ("He has 3/4 of it", Fraction(3, 4)),
        ("In GSM8K it is 5.", 5),
        ("7 of A4", 7),
        ("none", None),
        ("1" * 100_000, None),
        ("1," * 50_000, 1),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{42}", 42),
        (r"\boxed{ \$1{,}000 }", 1000),
        (r"\boxed{\$1,000}", 1000),
        (r"\boxed{1} then \boxed{\text{about }2}.", 2),
        (r"\boxed{}", None),
        (r"\boxed{x}", None),
        (r"\boxed{4", None),
        ("42", None),
    ],
)
def test_boxed_number(text, expected):
    assert boxed_number(text) == expected
