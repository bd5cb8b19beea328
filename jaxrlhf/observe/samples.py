"""What the policy said: prompts, completions and their scores, one JSON line each."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.observe.json_lines import split_non_finite


def sample_record(
    *, step: int, split: str, prompt: str, completion: str, scores: Mapping[str, float], finish: str
) -> dict[str, Any]:
    """A line of the samples file. Texts are kept whole.

    A score that is not finite becomes null, and its name is listed under "non_finite".

    Args:
        split: Which prompts it comes from, such as 'train' or 'test'.
        scores: What each scorer gave, by its name.
        finish: Why the completion ended, such as 'stop' or 'length'.
    """
    values, non_finite = split_non_finite(scores)
    record: dict[str, Any] = {
        "step": step,
        "split": split,
        "prompt": prompt,
        "completion": completion,
        "scores": values,
        "finish": finish,
    }
    return {**record, "non_finite": non_finite} if non_finite else record
