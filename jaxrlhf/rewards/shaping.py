"""Built-in rewards for the form and the length of completions, to be added to those for their answers."""

import math
import re
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.require import require
from jaxrlhf.rewards.verifiers import RewardFunction, require_choice


def regex_format(pattern: str) -> RewardFunction:
    """1 if the pattern matches the whole completion (`.` matches line ends too), else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"Reward 'regex_format': pattern must be a regular expression. Got {brief(pattern)}: {error}."
        ) from error

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        return [float(compiled.fullmatch(completion) is not None) for completion in completions]

    return reward


def length_penalty(target: int, scale: float, unit: str = "characters", both_sides: bool = False) -> RewardFunction:
    """`-scale` for each unit of a completion beyond `target`, and, with `both_sides`, for each missing one.

    A unit is one of `characters`, `words` (separated by white space) and `tokens` (including the stop token).
    """
    require(target >= 0, "Reward 'length_penalty'", "target must not be negative", target)
    require(
        scale >= 0 and math.isfinite(scale), "Reward 'length_penalty'", "scale must be finite and not negative", scale
    )
    require_choice("length_penalty", "unit", unit, ("characters", "words", "tokens"))

    def reward(
        prompts: list[str], completions: list[str], *, num_tokens: list[int], **columns: list[Any]
    ) -> list[float]:
        measured = {
            "characters": map(len, completions),
            "words": (len(completion.split()) for completion in completions),
            "tokens": num_tokens,
        }[unit]
        return [-scale * (abs(length - target) if both_sides else max(0, length - target)) for length in measured]

    return reward


def tag_format(
    tags: str = "think answer", opened: bool = False, text_after: bool = False, partial_credit: float = 0.0
) -> RewardFunction:
    """1 where a completion is `<think>...</think> <answer>...</answer>`, with white space only outside.

    `tags` are the names, in order. Each tag is there exactly once. `opened`: the prompt ends with the first tag, so
    that completions begin within. `text_after`: anything may follow the last tag, as with `tags: think`. Else the
    score is `partial_credit` times the fraction of tags that are there exactly once.
    """
    name, names = "Reward 'tag_format'", tags.split()
    rule = "tags must be different names of letters, digits, _ and -"
    named = all(re.fullmatch(r"[\w-]+", tag, re.ASCII) for tag in names)
    require(bool(names) and named and len(set(names)) == len(names), name, rule, tags)
    require(0 <= partial_credit <= 1, name, "partial_credit must lie in [0, 1]", partial_credit)
    marks = [mark for tag in names for mark in (f"<{tag}>", f"</{tag}>")]
    first = marks[0]

    def score(completion: str) -> float:
        text = first + completion if opened else completion
        once = sum(text.count(mark) == 1 for mark in marks)
        places = [text.find(mark) for mark in marks]
        if once < len(marks) or places != sorted(places):
            return partial_credit * once / len(marks)
        outside = [text[: places[0]]]  # before the first tag, and after each that closes
        for close, mark, opening in zip(places[1::2], marks[1::2], [*places[2::2], len(text)], strict=True):
            outside.append(text[close + len(mark) : opening])
        clean = not "".join(outside[:-1] if text_after else outside).strip()
        return 1.0 if clean else partial_credit

    def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
        return [score(completion) for completion in completions]

    return reward


def soft_overlong(max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> RewardFunction:
    """The soft overlong punishment of DAPO.

        0                                                                   up to max_tokens - buffer_tokens
        -penalty * (tokens - max_tokens + buffer_tokens) / buffer_tokens    up to max_tokens
        -penalty                                                            beyond

    Tokens include the stop token.

    Reference:
        Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    name = "Reward 'soft_overlong'"
    require(max_tokens >= 1, name, "max_tokens must be at least 1", max_tokens)
    require(1 <= buffer_tokens <= max_tokens, name, f"buffer_tokens must lie in [1, {max_tokens}]", buffer_tokens)
    require(penalty >= 0 and math.isfinite(penalty), name, "penalty must be finite and not negative", penalty)

    def reward(
        prompts: list[str], completions: list[str], *, num_tokens: list[int], **columns: list[Any]
    ) -> list[float]:
        over = [max(0, tokens - max_tokens + buffer_tokens) for tokens in num_tokens]
        return [-penalty * min(1.0, each / buffer_tokens) for each in over]

    return reward
