"""Running means of the lengths of responses by prompt, by which slots admit those of the longest responses first."""

import numpy as np
from jaxtyping import Float, Int

from jaxrlhf.execution.step_result import StepResult


class LengthMeans:
    """The mean length of the responses to each of the `num_rows` prompts of a table so far."""

    def __init__(self, num_rows: int) -> None:
        self._tokens, self._responses = np.zeros(num_rows), np.zeros(num_rows)

    def add(self, row_B: Int[np.ndarray, " B"], lengths_B: Int[np.ndarray, " B"]) -> None:
        """Takes note of responses: the row of each one's prompt, and its tokens."""
        np.add.at(self._tokens, row_B, lengths_B)
        np.add.at(self._responses, row_B, 1)

    def add_step(self, result: StepResult) -> None:
        """Takes note of the responses of a step to prompts with expected lengths. Waits for them."""
        calls = [call for call in result.graph.calls if call.kind == "generate"]
        drawn = [call.outputs for call in calls if call.args[0].expected_tokens is not None]
        for row_B, response_BR in result.read([(each.row, each.response) for each in drawn]):
            self.add(row_B, response_BR.sum(axis=1))

    def expected(self, row_B: Int[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """The tokens that the response to each prompt is expected to have: the mean of those to it so far; of those to
        all prompts where it has none; 0 before the first step."""
        everywhere = self._tokens.sum() / max(1.0, self._responses.sum())
        seen_B = self._responses[row_B]
        own_B = self._tokens[row_B] / np.maximum(seen_B, 1.0)
        return np.where(seen_B > 0, own_B, everywhere).astype(np.float32)
