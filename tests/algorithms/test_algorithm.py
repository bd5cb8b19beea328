import re
from types import SimpleNamespace

import pytest

from jaxrlhf.algorithms import ALGORITHMS
from jaxrlhf.algorithms.algorithm import Rows, demonstrations, preferences, prompts


def test_rows_follow_from_the_settings():
    config = SimpleNamespace(max_new_tokens=7)
    assert prompts(config) == Rows("prompts")
    assert demonstrations(config) == Rows("demonstrations", 7)
    assert preferences(config) == Rows("preferences", 7)
    kinds = {name: algorithm.data(algorithm.config()) for name, algorithm in ALGORITHMS.items()}
    assert kinds["ppo"] == Rows("prompts") and kinds["sft"] == Rows("demonstrations", 128)
    assert kinds["dpo"] == kinds["reward_model"] == Rows("preferences", 128)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "pairs"}, "Rows.kind: must be one of prompts, demonstrations, preferences. Got 'pairs'."),
        ({"max_new_tokens": 3}, "Rows.max_new_tokens: prompts have no completion. Got 3."),
        ({"kind": "preferences"}, "Rows.max_new_tokens: must be at least 1. Got 0."),
        ({"count": -1}, "Rows.count: must not be negative. Got -1."),
        ({"dataset": "x"}, "Rows.dataset: prompts come from the run's `data`, as rewards read its columns. Got 'x'."),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Rows(**fields)
