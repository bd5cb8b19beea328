"""The rows of a step: a pure function of the seed and the step, so that resuming needs no state.

Row k of the endless stream is `permutation(k // n)[k % n]` over the n training rows: every row comes once in each
epoch, and a batch may span two epochs.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import RowKind
from jaxrlhf.require import require

_STREAMS: dict[RowKind, tuple[int, ...]] = {"prompts": (), "demonstrations": (0x5F7,), "preferences": (0xDB0,)}
"""Kind of rows -> numbers that are folded into the seed, so that each kind sees the rows in an order of its own."""


@dataclasses.dataclass(frozen=True)
class PromptLoader:
    """Batches of a table's rows by step number.

    The type of a batch follows from the kind of its rows: `Prompts`, `Sequences` for demonstrations, `Preferences`.
    """

    table: PromptTable
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "PromptLoader", "batch_size must be at least 1", self.batch_size)
        require(self.seed >= 0, "PromptLoader", "seed must not be negative", self.seed)

    def batch(self, step: int, kind: RowKind = "prompts", *, max_new_tokens: int = 0) -> Any:
        """The training rows of a step; for demonstrations and preferences, of those with completions of at most
        `max_new_tokens`. Ids of prompts are running numbers over the whole run, modulo 2**32."""
        rows = self.row_numbers(step, kind, max_new_tokens=max_new_tokens)
        return self._rows(kind, rows, self._positions(step), max_new_tokens)

    def row_numbers(self, step: int, kind: RowKind = "prompts", *, max_new_tokens: int = 0) -> np.ndarray:
        """The numbers of the training rows of a step."""
        usable = self.table.usable(kind, max_new_tokens)
        return usable[_stream(self._positions(step), len(usable), self.seed, _STREAMS[kind])]

    def _positions(self, step: int) -> np.ndarray:
        return step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)

    def eval_batches(self, num: int, kind: RowKind = "prompts", *, max_new_tokens: int = 0) -> list[Any]:
        """The first `num` held-out rows that can be used as `kind`, always in the same order, in batches.

        Raises ValueError if there are fewer, or if the batch size does not divide `num`.
        """
        rows = self.table.usable(kind, max_new_tokens, held_out=True)
        rule, remedy = f"must ask for at most the {len(rows)} held-out rows", "Ask for fewer, or hold out more"
        remedy = f"{remedy} (data.eval_rows, data.eval_path)."
        require(0 <= num <= len(rows), "Evaluation", rule, num, remedy)
        rule = f"the number of rows must be a multiple of the batch size {self.batch_size}"
        remedy = f"Ask for {num - num % self.batch_size or self.batch_size}."
        require(num % self.batch_size == 0, "Evaluation", rule, num, remedy)
        places = np.arange(num).reshape(-1, self.batch_size)
        return [self._rows(kind, rows[place], place, max_new_tokens) for place in places]

    def _rows(self, kind: RowKind, rows: np.ndarray, positions: np.ndarray, max_new_tokens: int) -> Any:
        if kind == "prompts":
            return self.table.batch(rows, (positions % 2**32).astype(np.uint32))
        load = self.table.demonstrations if kind == "demonstrations" else self.table.preferences
        return load(rows, max_new_tokens=max_new_tokens)


def _stream(positions: np.ndarray, num_rows: int, seed: int, stream: tuple[int, ...]) -> np.ndarray:
    """The rows, out of `num_rows`, at some positions of a stream."""
    epochs, places = positions // num_rows, positions % num_rows
    rows = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = _permutation(num_rows, (seed, int(epoch), *stream))[places[here]]
    return rows


@functools.lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: tuple[int, ...]) -> np.ndarray:
    """The order of an epoch; read-only, since it is shared."""
    order = np.random.default_rng(seed).permutation(num_rows)
    order.flags.writeable = False
    return order
