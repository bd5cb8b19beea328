"""A `Sampling` with all that changes logits or ends responses, to be given to every kind of loop."""

from typing import Any

from jaxrlhf.data.stop_strings import stop_table
from jaxrlhf.experience import ResolvedSampling


def steered(vocab_size: int, **changes: Any) -> ResolvedSampling:
    """With penalties, bias, banned tokens, `min_p` and stop strings. A token has one of six letters."""
    settings: dict[str, Any] = {
        "min_new_tokens": 1, "min_p": 0.01, "top_p": 0.97, "stop_ids": (0, 7), "banned_tokens": (1, 2, 3),
        "logit_bias": {5: 2.5, vocab_size - 1: -3.0}, "stop_strings": ("ab", "cde", "ff"),
        "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
    } | changes  # fmt: skip
    table = stop_table(settings["stop_strings"], [b"abcdef"[i % 6 : i % 6 + 1] for i in range(vocab_size)])
    return ResolvedSampling(**settings, stop_table=table)
