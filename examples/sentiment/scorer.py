"""Rewards of the example: how positive a text is by VADER, and how varied its words are.

The scorer is the package `vaderSentiment`, which `fetch` unpacks beside the data. A config names both by their file:

    reward: {function: "examples/sentiment/scorer.py:sentiment"}
"""

import functools
import importlib.util
from pathlib import Path
from typing import Any

FOLDER = "runs/sentiment/vader"


def sentiment(completions: list[str], folder: str = FOLDER) -> list[float]:
    """From -1, extremely negative, to 1, extremely positive: VADER's compound score."""
    analyzer = _analyzer(folder)
    return [float(analyzer.polarity_scores(text)["compound"]) for text in completions]


def variety(completions: list[str]) -> list[float]:
    """The fraction of a text's words that it has not had before: low for a policy that repeats what is rewarded."""
    words = [text.lower().split() for text in completions]
    return [len(set(each)) / len(each) if each else 0.0 for each in words]


def ended(completions: list[str], finished: list[bool]) -> list[float]:
    """1 for a text that the policy itself ended, 0 for one that the limit of its length cut off."""
    return [float(each) for each in finished]


@functools.cache
def _analyzer(folder: str) -> Any:
    path = Path(folder) / "vaderSentiment" / "vaderSentiment.py"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: the sentiment scorer must be there. Got no such file. Run: python -m examples.sentiment.fetch"
        )
    spec = importlib.util.spec_from_file_location("vaderSentiment", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SentimentIntensityAnalyzer()
