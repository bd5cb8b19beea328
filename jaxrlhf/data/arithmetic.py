"""The built-in task: sums, differences and products of whole numbers, worked digit by digit, generated on the fly.

A row is `{"prompt": "47+85=", "completion": "12 13>132", "answer": "132", "rejected": "12 10>102"}`. The steps before
`>` go from the lowest digit up, two characters each: what is carried, then the digit that stays (7+5=12, then
4+8+1=13). A subtraction borrows in the place of carrying ("52-37=" gives "15 01>15": 12-7=5 with 1 borrowed, then
5-3-1=1); a product has one digit on the right ("47*8=" gives "56 37>376"). The rejected completion has one wrong digit
in its steps, and so a wrong answer.
"""

import dataclasses
import math
import random
import zlib

from jaxrlhf.require import require, require_at_least_one

OPERATIONS = ("+", "-", "*")


@dataclasses.dataclass(frozen=True)
class ArithmeticConfig:
    """Settings of the arithmetic task.

    >>> rows, held_out = arithmetic_rows(ArithmeticConfig(digits=1))
    >>> len(rows) + len(held_out)
    81
    """

    digits: int = 2
    """Digits of the operands. The right operand of a product has one, from 2 to 9."""
    operations: tuple[str, ...] = ("+",)
    """Some of +, - and *. A difference is never negative."""
    held_out: int = 8
    """One row in this many is held out, chosen by the checksum of its prompt."""
    max_rows: int = 20000
    """The most problems of an operation. If there are more, a fixed random choice of them is used."""

    def __post_init__(self) -> None:
        where, given = "data.arithmetic", self.operations
        require(1 <= self.digits <= 9, f"{where}.digits", "must lie between 1 and 9", self.digits)
        known = set(given) <= set(OPERATIONS) and len(set(given)) == len(given) > 0
        require(known, f"{where}.operations", "must be some of '+', '-', '*', each once", given)
        rule = "must be at least 2, so that rows are left for training"
        require(self.held_out >= 2, f"{where}.held_out", rule, self.held_out)
        require_at_least_one(self.max_rows, f"{where}.max_rows")


def arithmetic_rows(config: ArithmeticConfig) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training rows and held-out rows, which are disjoint and always the same.

    The held-out rows are shuffled, so that the first ones are a fair sample.
    """
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for operation in config.operations:
        count = _num_problems(operation, config.digits)
        for index in sorted(random.Random(0).sample(range(count), min(count, config.max_rows))):
            row = _row(operation, config.digits, index)
            (train if zlib.crc32(row["prompt"].encode()) % config.held_out else held_out).append(row)
    random.Random(0).shuffle(held_out)
    return train, held_out


def _num_problems(operation: str, digits: int) -> int:
    num_operands = 9 * 10 ** (digits - 1)
    return {"+": num_operands**2, "-": num_operands * (num_operands + 1) // 2, "*": num_operands * 8}[operation]


def _row(operation: str, digits: int, index: int) -> dict[str, str]:
    """Problem number `index` of an operation, with its steps and answer."""
    lowest = 10 ** (digits - 1)
    if operation == "+":
        left, right = index // (9 * lowest), index % (9 * lowest)
    elif operation == "-":  # pairs with right <= left, counted along the rows of a triangle
        left = (math.isqrt(8 * index + 1) - 1) // 2
        right = index - left * (left + 1) // 2
    else:
        left, right = index // 8, index % 8
    left, right = left + lowest, right + (2 if operation == "*" else lowest)
    answer = {"+": left + right, "-": left - right, "*": left * right}[operation]
    prompt, steps = f"{left}{operation}{right}=", _steps(operation, left, right, digits)
    return {
        "prompt": prompt,
        "completion": f"{' '.join(steps)}>{answer}",
        "answer": str(answer),
        "rejected": _wrong(prompt, steps),
    }


def _wrong(prompt: str, steps: list[str]) -> str:
    """The steps with a wrong digit in one of them, chosen by the checksum of the prompt, and the resulting answer."""
    place, off = divmod(zlib.crc32(prompt.encode()) // 8 % (9 * len(steps)), 9)
    carry, digit = steps[place]
    steps = [*steps[:place], f"{carry}{(int(digit) + 1 + off) % 10}", *steps[place + 1 :]]
    return f"{' '.join(steps)}>{int(steps[-1][0] + ''.join(step[1] for step in reversed(steps)))}"


def _steps(operation: str, left: int, right: int, digits: int) -> list[str]:
    """One step for each digit of `left`, lowest first: the carry or borrow, then the digit."""
    carry, steps = 0, []
    for place in range(digits):
        a, b = left // 10**place % 10, right // 10**place % 10
        if operation == "+":
            carry, digit = divmod(a + b + carry, 10)
        elif operation == "-":
            borrow, digit = divmod(a - b - carry, 10)
            carry = -borrow
        else:
            carry, digit = divmod(a * right + carry, 10)
        steps.append(f"{carry}{digit}")
    return steps
