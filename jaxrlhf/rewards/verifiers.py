"""Built-in rewards for answers that a program can check by their text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.require import require
from jaxrlhf.rewards.numbers import FINDERS, any_number

RewardFunction = Callable[..., Sequence[float]]
"""`f(prompts, completions, **columns) -> list[float]`, one number for each completion."""


def exact_answer(partial_credit: float = 0.0, answer_column: str = "answer", separator: str = ">") -> RewardFunction:
    """Compares the text after the last separator with the answer.

    1                              equal
    partial_credit * right / max(len(given), len(answer))    else, `right` characters agreeing place by place
    0                              not finished, or no separator
    """
    require(0 <= partial_credit <= 1, "Reward 'exact_answer'", "partial_credit must lie in [0, 1]", partial_credit)
    require(separator != "", "Reward 'exact_answer'", "separator must not be empty", separator)

    def reward(
        prompts: list[str], completions: list[str], *, finished: list[bool], **columns: list[Any]
    ) -> list[float]:
        def score(given: str | None, answer: str) -> float:
            if given is None or given == answer:
                return float(given == answer)
            right = sum(ours == theirs for ours, theirs in zip(given, answer, strict=False))
            return partial_credit * right / max(len(given), len(answer))

        answers = _answers("exact_answer", columns, answer_column)
        claims = zip(_claims(completions, finished, separator), answers, strict=True)
        return [score(given, answer) for given, answer in claims]

    return reward


def wrong_answer(answer_column: str = "answer", separator: str = ">") -> RewardFunction:
    """A cost of 1 for a completion that claims a wrong answer.

    1    the text after the last separator is not the answer, in a completion that finished
    0    it is; or no answer is given: not finished, or no separator
    """
    require(separator != "", "Reward 'wrong_answer'", "separator must not be empty", separator)

    def cost(prompts: list[str], completions: list[str], *, finished: list[bool], **columns: list[Any]) -> list[float]:
        answers = _answers("wrong_answer", columns, answer_column)
        claims = zip(_claims(completions, finished, separator), answers, strict=True)
        return [float(given is not None and given != answer) for given, answer in claims]

    return cost


def final_number(
    answer_column: str = "answer", marker: str = "####", partial_credit: float = 0.0, where: str = "marker"
) -> RewardFunction:
    """Compares the number in a completion with that of the answer column, as in GSM8K.

    `where` is the place of the number: after the last `marker`; in the last `\\boxed{}` (`boxed`); the `last` number;
    or `any`, the first of these three that the completion has. 1,072, $1072 and 1072.0 are equal, and so are 3/4 and
    0.75; a percent sign does not count. A wrong number earns `partial_credit`, a completion without a number 0. The
    answer column may hold the bare number, or a text that is read as with `any`.
    """
    require(0 <= partial_credit <= 1, "Reward 'final_number'", "partial_credit must lie in [0, 1]", partial_credit)
    require(marker != "", "Reward 'final_number'", "marker must not be empty", marker)
    require_choice("final_number", "where", where, FINDERS)

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        scores = []
        for index, (completion, answer) in enumerate(
            zip(completions, column("final_number", columns, answer_column), strict=True)
        ):
            expected = any_number(str(answer), marker)
            if expected is None:
                raise ValueError(
                    f"final_number: column {brief(answer_column)} must hold a number, bare or after {brief(marker)}. "
                    f"Got {brief(answer)} at index {index}. Correct the row, or set answer_column or marker."
                )
            given = FINDERS[where](completion, marker)
            scores.append(0.0 if given is None else 1.0 if given == expected else partial_credit)
        return scores

    return reward


def exact_match(answer_column: str = "answer") -> RewardFunction:
    """1 if the whole completion, without surrounding white space, is the answer, else 0."""

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        answers = _answers("exact_match", columns, answer_column)
        return [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]

    return reward


def require_choice(name: str, option: str, value: object, known: Collection[str]) -> None:
    """Checks that an option of a reward has one of the known values."""
    rule = f"{option} must be one of {', '.join(known)}"
    require(value in known, f"Reward {name!r}", rule, value, did_you_mean(str(value), known).strip())


def _claims(completions: list[str], finished: list[bool], separator: str) -> list[str | None]:
    """The text after the last separator of each completion; None if it did not finish, or has no separator."""
    return [
        text.rpartition(separator)[2].strip() if done and separator in text else None
        for text, done in zip(completions, finished, strict=True)
    ]


def _answers(name: str, columns: Mapping[str, list[Any]], key: str) -> list[str]:
    """The answers as text, without surrounding white space."""
    return [str(answer).strip() for answer in column(name, columns, key)]


def column(name: str, columns: Mapping[str, list[Any]], key: str, option: str = "answer_column") -> list[Any]:
    """A column that every row must have, whose name is an option of a reward."""
    values = columns.get(key)
    if values is None or any(value is None for value in values):
        raise ValueError(
            f"{name}: needs a column {brief(key)} in every row. Got columns {', '.join(columns) or 'none'}. "
            f"Set {option}."
        )
    return values
