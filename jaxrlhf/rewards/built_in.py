"""The built-in rewards by name."""

from collections.abc import Callable

from jaxrlhf.rewards.code_tests import code_tests
from jaxrlhf.rewards.maths_answer import maths_answer
from jaxrlhf.rewards.shaping import length_penalty, regex_format, soft_overlong, tag_format
from jaxrlhf.rewards.verifiers import (
    RewardFunction,
    exact_answer,
    exact_match,
    final_number,
    wrong_answer,
)

VERIFIERS: dict[str, Callable[..., RewardFunction]] = {
    "exact_answer": exact_answer,
    "wrong_answer": wrong_answer,
    "final_number": final_number,
    "exact_match": exact_match,
    "maths_answer": maths_answer,
    "code_tests": code_tests,
    "regex_format": regex_format,
    "tag_format": tag_format,
    "length_penalty": length_penalty,
    "soft_overlong": soft_overlong,
}
"""Name -> factory, which takes options and returns a function `f(prompts, completions, *, finished, **columns) ->
list[float]`. The other columns of the rows are keyword lists; `finished` is True for completions that ended by a stop
token, and `num_tokens` is their length."""
