"""Writes what the policy said: prompts, completions and their scores, one JSON line each."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxrlhf.observe.json_lines import JsonLinesWriter, split_non_finite


class SamplesWriter:
    """Appends lines of step, split, prompt, completion, scores and finish; `read_json_lines` reads them.

    Texts are kept whole. A score that is not finite is written as null, and its name is listed under "non_finite".
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesWriter(path)

    def write(
        self, *, step: int, split: str, prompt: str, completion: str, scores: Mapping[str, float], finish: str
    ) -> None:
        """Writes one sample.

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
        if non_finite:
            record["non_finite"] = non_finite
        self._lines.write(record)

    def sync(self) -> None:
        """Returns when every line is on the disk. To be called before a checkpoint that counts on them."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
