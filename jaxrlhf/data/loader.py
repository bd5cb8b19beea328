"""Which rows a step trains on: a pure function of the seed and the step, so that resuming needs no state.

Row k of the endless stream is `permutation(k // n)[k % n]` over the n training rows: every row comes once in each
epoch, and a batch may reach over the border of two.
"""

import dataclasses
import functools

import numpy as np

from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Preferences, Prompts, Sequences

PROMPT_STREAM, DEMONSTRATION_STREAM, PREFERENCE_STREAM = (), (0x5F7,), (0xDB0,)
"""What is folded into the seed, so that the warm start and the rollouts see the rows in different orders."""


@dataclasses.dataclass(frozen=True)
class PromptLoader:
    """Batches of a table's rows by step number."""

    table: PromptTable
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"PromptLoader: batch_size must be at least 1. Got {self.batch_size}.")
        if self.seed < 0:
            raise ValueError(f"PromptLoader: seed must not be negative. Got {self.seed}.")

    def batch(self, step: int) -> Prompts:
        """The prompts of a step. Their ids are running numbers over the whole run, modulo 2**32."""
        positions = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
        rows = _stream(positions, self.table.num_train, self.seed, PROMPT_STREAM)
        return self.table.batch(rows, (positions % 2**32).astype(np.uint32))

    def eval_batches(self, num: int) -> list[Prompts]:
        """The first `num` held-out rows, always in the same order, in batches of `batch_size`.

        Raises:
            ValueError: There are not so many, or the batch size does not divide `num`.
        """
        ids = np.arange(num, dtype=np.uint32)
        batches = self._held_out(self.table.numbers(held_out=True), num)
        return [
            self.table.batch(rows, ids[i * self.batch_size : (i + 1) * self.batch_size])
            for i, rows in enumerate(batches)
        ]

    def eval_demonstrations(self, num: int, max_new_tokens: int) -> list[Sequences]:
        """The same with completions, among the held-out rows that have one which fits. Raises as `eval_batches`."""
        batches = self._held_out(self.table.demonstrable(max_new_tokens, held_out=True), num)
        return [self.table.demonstrations(rows, max_new_tokens=max_new_tokens) for rows in batches]

    def eval_preferences(self, num: int, max_new_tokens: int) -> list[Preferences]:
        """The same with pairs of completions, among the held-out rows that have them."""
        batches = self._held_out(self.table.preferable(max_new_tokens, held_out=True), num)
        return [self.table.preferences(rows, max_new_tokens=max_new_tokens) for rows in batches]

    def _held_out(self, rows: np.ndarray, num: int) -> list[np.ndarray]:
        """The first `num` of these rows in batches."""
        if not 0 <= num <= len(rows):
            raise ValueError(
                f"Evaluation: must ask for at most the {len(rows)} held-out rows. Got {num}. Ask for fewer, "
                "or hold out more (data.eval_rows, data.eval_path)."
            )
        if num % self.batch_size:
            raise ValueError(
                f"Evaluation: the number of rows must be a multiple of the batch size {self.batch_size}. Got {num}. "
                f"Ask for {num - num % self.batch_size or self.batch_size}."
            )
        return [rows[start : start + self.batch_size] for start in range(0, num, self.batch_size)]

    def demonstrations(self, step: int, batch_size: int, max_new_tokens: int) -> Sequences:
        """The worked examples of a step of supervised training, in an order of their own, among those that fit."""
        rows = self._of_step(step, batch_size, self.table.demonstrable(max_new_tokens), DEMONSTRATION_STREAM)
        return self.table.demonstrations(rows, max_new_tokens=max_new_tokens)

    def preferences(self, step: int, batch_size: int, max_new_tokens: int) -> Preferences:
        """The pairs of a step, in an order of their own, among those that fit."""
        rows = self._of_step(step, batch_size, self.table.preferable(max_new_tokens), PREFERENCE_STREAM)
        return self.table.preferences(rows, max_new_tokens=max_new_tokens)

    def epoch(self, step: int) -> float:
        """How many times the training rows were seen before this step."""
        return step * self.batch_size / self.table.num_train

    def _of_step(self, step: int, batch_size: int, rows: np.ndarray, stream: tuple[int, ...]) -> np.ndarray:
        """Those of these rows that a step sees."""
        positions = step * batch_size + np.arange(batch_size, dtype=np.int64)
        return rows[_stream(positions, len(rows), self.seed, stream)]


def _stream(positions: np.ndarray, num_rows: int, seed: int, stream: tuple[int, ...]) -> np.ndarray:
    """Which of `num_rows` rows stand at these positions of a stream."""
    epochs, places = positions // num_rows, positions % num_rows
    rows = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = _permutation(num_rows, (seed, int(epoch), *stream))[places[here]]
    return rows


@functools.lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: tuple[int, ...]) -> np.ndarray:
    """The order of an epoch, read-only because it is shared."""
    order = np.random.default_rng(seed).permutation(num_rows)
    order.flags.writeable = False
    return order
