"""Worked problems against hand computation and against plain arithmetic, and the split."""

import re
import zlib

import pytest

from jaxrlhf.data.arithmetic import ArithmeticConfig, arithmetic_rows


def by_prompt(**options):
    train, held_out = arithmetic_rows(ArithmeticConfig(**options))
    return {row["prompt"]: row for row in train + held_out}


def test_two_digit_sums_by_hand():
    rows = by_prompt()
    problem = {"prompt": "47+85=", "completion": "12 13>132", "answer": "132", "rejected": "12 10>102"}
    assert rows["47+85="] == problem
    assert rows["10+10="]["completion"] == "00 02>20"
    assert rows["99+99="]["completion"] == "18 19>198"


def test_all_pairs_once():
    train, held_out = arithmetic_rows(ArithmeticConfig())
    assert len(train) + len(held_out) == 8100
    assert {row["prompt"] for row in train + held_out} == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}
    assert [row["prompt"] for row in train[:3]] == [
        prompt for b in range(10, 99) if zlib.crc32((prompt := f"10+{b}=").encode()) % 8
    ][:3]


@pytest.mark.parametrize("operation", ["+", "-", "*"])
def test_what_is_rejected_has_one_wrong_digit_and_the_answer_that_it_leads_to(operation):
    places = set()
    for row in by_prompt(operations=(operation,), digits=3, max_rows=500).values():
        (right, _), (wrong, answer) = row["completion"].split(">"), row["rejected"].split(">")
        (place,) = [i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b]
        places.add(place)
        steps = wrong.split(" ")
        assert int(answer) == int(steps[2][0] + steps[2][1] + steps[1][1] + steps[0][1]) != int(row["answer"])
    assert places == {1, 4, 7}  # the digits that stay


def test_held_out_is_one_in_eight_by_checksum_and_shuffled():
    train, held_out = arithmetic_rows(ArithmeticConfig())
    assert all(zlib.crc32(row["prompt"].encode()) % 8 == 0 for row in held_out)
    assert all(zlib.crc32(row["prompt"].encode()) % 8 for row in train)
    assert 900 < len(held_out) < 1125
    first = [int(row["prompt"][:2]) for row in held_out[:50]]
    assert min(first) < 30 and max(first) > 80
    assert arithmetic_rows(ArithmeticConfig()) == (train, held_out)


def test_differences_and_products_by_hand():
    rows = by_prompt(operations=("-", "*"))
    assert rows["52-37="]["completion"] == "15 01>15"
    assert rows["30-30="]["completion"] == "00 00>0"
    assert rows["47*8="]["completion"] == "56 37>376"
    assert rows["99*9="]["completion"] == "81 89>891"
    assert len(rows) == 90 * 91 // 2 + 90 * 8


@pytest.mark.parametrize(("digits", "operations"), [(1, ("+", "-", "*")), (3, ("+", "-", "*")), (9, ("+", "-"))])
def test_answers_are_right_and_steps_spell_them(digits, operations):
    rows = by_prompt(digits=digits, operations=operations, max_rows=300)
    for prompt, row in rows.items():
        assert int(row["answer"]) == eval(prompt[:-1]) >= 0
        steps, _, answer = row["completion"].partition(">")
        assert answer == row["answer"]
        steps = steps.split(" ")
        assert len(steps) == digits and all(len(step) == 2 for step in steps)
        assert int(steps[-1][0] + "".join(step[1] for step in reversed(steps))) == int(answer)


def test_more_digits_are_sampled_without_replacement():
    first = by_prompt(digits=3)
    assert len(first) == 20000
    assert all(re.fullmatch(r"[1-9]\d\d\+[1-9]\d\d=", prompt) for prompt in first)
    assert list(first) == list(by_prompt(digits=3))
    assert len(by_prompt(digits=4, max_rows=50)) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 0}, "data.arithmetic.digits: must lie between 1 and 9. Got 0."),
        ({"operations": ("+", "/")}, "operations: must be some of '+', '-', '*', each once. Got ('+', '/')."),
        ({"operations": ()}, "data.arithmetic.operations: must be some of"),
        ({"operations": ("+", "+")}, "data.arithmetic.operations: must be some of"),
        ({"held_out": 1}, "data.arithmetic.held_out: must be at least 2, so that rows are left for training. Got 1."),
        ({"max_rows": 0}, "data.arithmetic.max_rows: must be at least 1. Got 0."),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ArithmeticConfig(**options)
