"""The built-in reward functions: answers that a program can check.

Each factory takes options and returns a function `f(prompts, completions, *, finished, **columns) -> list[float]`. The
other columns of the rows arrive as keyword lists, `finished` says which completions ended by a stop token.
"""

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

RewardFunction = Callable[..., Sequence[float]]
"""`f(prompts, completions, **columns) -> list[float]`, one number for each completion."""


def exact_answer(partial_credit: float = 0.0, answer_column: str = "answer", separator: str = ">") -> RewardFunction:
    """Is what follows the last separator the answer?

    1                              equal
    partial_credit * right / max(len(given), len(answer))    else, `right` characters agreeing place by place
    0                              not finished, or no separator
    """
    _require(0 <= partial_credit <= 1, "exact_answer", "partial_credit", "must lie in [0, 1]", partial_credit)
    _require(separator != "", "exact_answer", "separator", "must not be empty", separator)

    def reward(
        prompts: list[str], completions: list[str], *, finished: list[bool], **columns: list[Any]
    ) -> list[float]:
        def score(completion: str, answer: str, done: bool) -> float:
            if not done or separator not in completion:
                return 0.0
            given = completion.rpartition(separator)[2].strip()
            if given == answer:
                return 1.0
            right = sum(ours == theirs for ours, theirs in zip(given, answer, strict=False))
            return partial_credit * right / max(len(given), len(answer))

        answers = _column("exact_answer", columns, answer_column)
        return [
            score(completion, str(answer).strip(), done)
            for completion, answer, done in zip(completions, answers, finished, strict=True)
        ]

    return reward


def final_number(answer_column: str = "answer", marker: str = "####", partial_credit: float = 0.0) -> RewardFunction:
    """Is the number after the last marker the one of the answer, as in GSM8K?

    Commas, dollar signs and a trailing period do not count, and 72 equals 72.0. A wrong number earns `partial_credit`,
    a completion without marker and number nothing. The answer column may also hold the bare number.
    """
    _require(0 <= partial_credit <= 1, "final_number", "partial_credit", "must lie in [0, 1]", partial_credit)
    _require(marker != "", "final_number", "marker", "must not be empty", marker)

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        scores = []
        for index, (completion, answer) in enumerate(
            zip(completions, _column("final_number", columns, answer_column), strict=True)
        ):
            expected = _number(str(answer).rpartition(marker)[2])
            if expected is None:
                raise ValueError(
                    f"final_number: column {answer_column!r} must hold a number after {marker!r}. Got {answer!r} at "
                    f"index {index}. Correct the row, or set answer_column or marker."
                )
            given = _number(completion.rpartition(marker)[2]) if marker in completion else None
            scores.append(0.0 if given is None else 1.0 if given == expected else partial_credit)
        return scores

    return reward


def exact_match(answer_column: str = "answer") -> RewardFunction:
    """1 where the whole completion is the answer, white space around it aside, else 0."""

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        answers = _column("exact_match", columns, answer_column)
        return [
            float(completion.strip() == str(answer).strip())
            for completion, answer in zip(completions, answers, strict=True)
        ]

    return reward


def regex_format(pattern: str) -> RewardFunction:
    """1 where the pattern matches the whole completion (`.` matches line ends too), else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"Reward 'regex_format': pattern must be a regular expression. Got {pattern!r}: {error}."
        ) from error

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        return [float(compiled.fullmatch(completion) is not None) for completion in completions]

    return reward


def length_penalty(target: int, scale: float) -> RewardFunction:
    """`-scale` for each character of a completion beyond `target`."""
    _require(target >= 0, "length_penalty", "target", "must not be negative", target)
    _require(scale >= 0 and math.isfinite(scale), "length_penalty", "scale", "must be finite and not negative", scale)

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        return [-scale * max(0, len(completion) - target) for completion in completions]

    return reward


VERIFIERS: dict[str, Callable[..., RewardFunction]] = {
    "exact_answer": exact_answer,
    "final_number": final_number,
    "exact_match": exact_match,
    "regex_format": regex_format,
    "length_penalty": length_penalty,
}


def _require(holds: bool, name: str, option: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"Reward {name!r}: {option} {rule}. Got {value!r}.")


def _column(name: str, columns: dict[str, list[Any]], column: str) -> list[Any]:
    """A column that every row of a batch must have."""
    values = columns.get(column)
    if values is None or any(value is None for value in values):
        raise ValueError(
            f"{name}: needs a column {column!r} in every row. Got columns {', '.join(columns) or 'none'}. "
            "Set answer_column."
        )
    return values


def _number(text: str) -> Decimal | None:
    """The number that `text` starts with, to the next white space; None if that is not a number."""
    words = text.split(maxsplit=1)
    word = words[0].replace(",", "").replace("$", "").removesuffix(".") if words else ""
    return Decimal(word) if re.fullmatch(r"[+-]?([0-9]+(\.[0-9]+)?|\.[0-9]+)", word) else None
