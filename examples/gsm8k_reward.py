"""A reward function of one's own: is the final number of a GSM8K solution right?

A config names it by file and function wherever a reward's name goes, and the rows' columns arrive by their names:

    examples/gsm8k_reward.py:gsm8k_reward

with data such as

    data:
      path: gsm8k/train.jsonl
      eval_path: gsm8k/test.jsonl
      template: "{question}\\nAnswer: "

The function gets the prompts and completions of a batch and, as lists in the same order, all columns that it names or
takes by `**columns`. It returns one finite number for each completion. Arguments with defaults, such as
`format_credit`, can be set as options of the reward in the config.
"""

import re
from typing import Any

FINAL_NUMBER = re.compile(r"####\s*\$?\s*(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)")


def final_number(text: str) -> float | None:
    """The number after the last `####`, None if there is none."""
    numbers = FINAL_NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("$", "")) if numbers else None


def gsm8k_reward(
    prompts: list[str], completions: list[str], answer: list[str], format_credit: float = 0.1, **columns: Any
) -> list[float]:
    """1 for the right number, `format_credit` for any other well-formed `#### N`, else 0."""
    rewards = []
    for completion, solution in zip(completions, answer, strict=True):
        number = final_number(completion)
        if number is None:
            rewards.append(0.0)
        else:
            rewards.append(1.0 if number == final_number(solution) else format_credit)
    return rewards
