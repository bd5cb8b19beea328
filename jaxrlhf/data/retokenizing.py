"""Rollouts in the tokens of another tokenizer, for a reward model of another family than the actor.

A response is decoded to text and encoded by the reward model's tokenizer, after the prompt as that model reads it: by
its own chat template where the rows are chats and it has one, else as text. The score is read at the last token.

Letters: B sequences, R response columns, T columns of the other tokenizer.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np

from jaxrlhf.data.control_tokens import mark_text
from jaxrlhf.data.examples import prompt_texts, tokens_as_text
from jaxrlhf.data.prompts import PromptTable
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.experience import STOP, Rollout, Sequences
from jaxrlhf.require import require


@dataclasses.dataclass(frozen=True)
class OwnTokenizerConfig:
    """How a scorer with its own tokenizer reads sequences.

    >>> OwnTokenizerConfig(max_tokens=1024).overlong
    'cut'
    """

    max_tokens: int = 0
    """Columns of its sequences, prompt and response. 0: the longest prompt in its tokens and twice `max_new_tokens`."""
    overlong: Literal["cut", "error"] = "cut"
    """The treatment of longer sequences. `cut`: their first tokens are left out, and the sequence is counted."""
    chat_template: str = ""
    """Jinja text, a file of it, or the name of one of its tokenizer's templates. Empty: its tokenizer's default."""

    def __post_init__(self) -> None:
        require(0 <= self.max_tokens < 2**31, "max_tokens", "must be positive, or 0", self.max_tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Retokenizer:
    """Rollouts to the sequences that a scorer with its own tokenizer reads."""

    role: str
    tokenizer: Tokenizer
    table: PromptTable
    config: OwnTokenizerConfig

    @property
    def renders_chats(self) -> bool:
        """True if prompts are rendered by a template of its own."""
        is_chat = self.table.config.chat != "none"
        return is_chat and bool(self.config.chat_template or "default" in self.tokenizer.chat_templates)

    @functools.cached_property
    def prompts(self) -> list[np.ndarray]:
        """The tokens of every row's prompt. Raises ValueError if the template refuses a conversation."""
        data = dataclasses.replace(self.table.config, chat_template=self.config.chat_template)
        if self.renders_chats or data.chat == "none":
            texts = prompt_texts(self.table.examples, data, self.tokenizer)
        else:
            control = tokens_as_text(data, self.tokenizer)
            texts = [mark_text(prompt, control) for prompt in self.table.prompts]
        return [np.asarray(self.tokenizer.encode(text.marked, mark=text.mark), np.int32) for text in texts]

    def columns(self, max_new_tokens: int) -> int:
        """Columns of the sequences for responses of at most `max_new_tokens` of the actor's tokens."""
        return self.config.max_tokens or max(map(len, self.prompts)) + 2 * max_new_tokens

    def __call__(self, rollout: Rollout) -> tuple[Sequences, int]:
        """The sequences of a rollout of NumPy arrays, padded on the left, with one response column, the last; and how
        many of them were cut. Raises ValueError if a sequence is too long and must not be cut."""
        R = rollout.response.shape[1]
        T, num_cut = self.columns(R), 0
        tokens_BT = np.full((len(rollout.tokens), T), self.tokenizer.pad_id, np.int32)
        mask_BT = np.zeros(tokens_BT.shape, bool)
        responses = zip(np.asarray(rollout.tokens)[:, -R:], np.asarray(rollout.response), strict=True)
        finished = np.asarray(rollout.finish) == STOP
        for index, (tokens_R, response_R) in enumerate(responses):
            row = int(rollout.row[index])
            response = self._response(tokens_R[response_R].tolist(), finished=bool(finished[index]))
            ids = [*self.prompts[row].tolist(), *response]
            if len(ids) > T:
                num_cut += 1
                if self.config.overlong == "error":
                    raise ValueError(
                        f"roles.{self.role}.own_tokenizer.max_tokens: must hold prompt and response in the role's own "
                        f"tokens. Got {T}, and {len(ids)} for a response to {self.table.sources[row]}. Raise it, or "
                        f"set roles.{self.role}.own_tokenizer.overlong to 'cut'."
                    )
                ids = ids[-T:]
            tokens_BT[index, T - len(ids) :] = ids
            mask_BT[index, T - len(ids) :] = True
        arrays: dict[str, Any] = {"tokens": tokens_BT, "mask": mask_BT, "response": mask_BT[:, -1:]}
        return Sequences(**arrays), num_cut

    def _response(self, ids: list[int], *, finished: bool) -> list[int]:
        """The tokens of a response, with an end of text if it is `finished`."""
        actors = self.table.tokenizer
        if finished and ids and actors.is_control(ids[-1]):  # the token that ended it, which may be none of its text
            ids = ids[:-1]
        text = mark_text(actors.decode(ids), tokens_as_text(self.table.config, self.tokenizer))
        encoded = self.tokenizer.encode(text.marked, mark=text.mark)
        return [*encoded, self.tokenizer.end_id] if finished else encoded
