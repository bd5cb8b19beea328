"""Reports on a long generation from its parts: how many responses have ended, and tokens per second."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrlhf.observe.plain_text import number


class PartReports:
    """Reports on one call with `num_sequences` responses in all processes, whose parts end one after another."""

    def __init__(self, call: str, num_sequences: int, say: Callable[[str], None]) -> None:
        self._call, self._num_sequences, self._say = call, num_sequences, say
        self._before, self._at = np.zeros(4, np.int64), time.perf_counter()

    def after(self, part: str, arrays: list[Any]) -> str:
        """Takes note that a part has ended. Returns what was done in it.

        Args:
            arrays: [D, 4]: finished responses, tokens, rounds and groups so far, of every row shard or of all together
                (`programs.generation_in_parts.Progress`). Of several processes each knows its own row shards.
        """
        (progress,) = arrays
        own = {str(shard.index): np.asarray(shard.data) for shard in progress.addressable_shards}
        each = np.concatenate(list(own.values())).astype(np.int64)
        now, total, sequences = time.perf_counter(), each.sum(axis=0), self._num_sequences * len(each) // len(progress)
        (finished, tokens, _, _), (_, new_tokens, rounds, groups) = total, total - self._before
        seconds, self._before, self._at = now - self._at, total, now
        if not new_tokens:
            return f"{part}, all had ended" if finished else part
        rate = number(new_tokens / max(seconds, 1e-9), digits=3)
        self._say(f"{self._call}: {finished:,} of {sequences:,} responses, {tokens:,} tokens, {rate} tokens/s")
        in_slots = f", {groups:,} groups in {rounds:,} rounds" if rounds else ""
        return f"{part}, {new_tokens:,} tokens{in_slots}"
