"""Which rows a step trains on: a pure function of the seed and the step, so that resuming needs no state.

Row k of the endless stream is `permutation(k // n)[k % n]` over the n training rows: every row comes once in each
epoch, and a batch may reach over the border of two.
"""

import dataclasses
import functools

import numpy as np

from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.experience import Prompts, Sequences

PROMPT_STREAM, DEMONSTRATION_STREAM = (), (0x5F7,)
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
        if not 0 <= num <= self.table.num_eval:
            raise ValueError(
                f"Evaluation: must ask for at most the {self.table.num_eval} held-out rows. Got {num}. Ask for fewer, "
                "or hold out more (data.eval_rows, data.eval_path)."
            )
        if num % self.batch_size:
            raise ValueError(
                f"Evaluation: the number of rows must be a multiple of the batch size {self.batch_size}. Got {num}. "
                f"Ask for {num - num % self.batch_size or self.batch_size}."
            )
        ids = np.arange(num, dtype=np.uint32)
        return [
            self.table.batch(
                self.table.num_train + ids[start : start + self.batch_size].astype(np.int64),
                ids[start : start + self.batch_size],
            )
            for start in range(0, num, self.batch_size)
        ]

    def demonstrations(self, step: int, batch_size: int, max_new_tokens: int) -> Sequences:
        """The worked examples of a step of the warm start, in an order of their own, among those that fit."""
        fitting = self.table.demonstrable(max_new_tokens)
        positions = step * batch_size + np.arange(batch_size, dtype=np.int64)
        rows = fitting[_stream(positions, len(fitting), self.seed, DEMONSTRATION_STREAM)]
        return self.table.demonstrations(rows, max_new_tokens=max_new_tokens)

    def epoch(self, step: int) -> float:
        """How many times the training rows were seen before this step."""
        return step * self.batch_size / self.table.num_train


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
