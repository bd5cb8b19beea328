"""Demonstrations with several replies of the assistant: their tokens, and which of these are learned.

A chat template writes the conversation up to each reply, as it would where the reply is generated. What follows that
text in the conversation up to the next reply is the reply, its end of text, and then what the model only reads.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxrlhf.data.chat import Message
from jaxrlhf.data.chat_process import Conversation
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.control_tokens import MarkedText
from jaxrlhf.data.examples import Example, configured_template, marked_conversation, render_marked, tokens_as_text
from jaxrlhf.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A conversation from its first reply that is learned to its last."""

    prompt: np.ndarray
    """The tokens before that first reply."""
    response: np.ndarray
    """The tokens from there on, with what stands between replies."""
    learned: np.ndarray
    """True at the tokens of replies and at their ends of text."""


def earlier_replies(example: Example) -> list[int]:
    """The places of the assistant's messages before its last one that are to be learned too, if there are some.

    Those before anything was said to it are not.
    """
    if example.completion is None:
        return []
    roles = [message["role"] for message in example.messages]
    asked = next((place for place, role in enumerate(roles) if role not in ("assistant", "system")), len(roles))
    first = max(asked, example.first_reply)
    return [place for place, role in enumerate(roles) if role == "assistant" and place >= first]


def read_dialogues(
    examples: Mapping[int, Example],
    prompts: Mapping[int, MarkedText],
    completions: Mapping[int, np.ndarray],
    config: DataConfig,
    tokenizer: Tokenizer,
) -> dict[int, Dialogue]:
    """The dialogues of examples that have earlier replies to learn from, by number.

    Args:
        prompts: The text of each up to its last reply.
        completions: The tokens of that reply, with its end of text.

    Raises:
        ValueError: The chat template does not leave a reply as it was when more messages follow.
    """
    template, tokens = configured_template(config, tokenizer), tokens_as_text(config, tokenizer)
    marked = {number: marked_conversation(example, template, tokens) for number, example in examples.items()}
    asked: list[tuple[Conversation, str]] = []
    for number, example in examples.items():
        conversation, mark = marked[number]
        for place in earlier_replies(example):
            ends = (place, place + 1) if example.messages[place].get("tool_calls") else (place,)
            asked += [(dataclasses.replace(conversation, messages=conversation.messages[:end]), mark) for end in ends]
    rendered = iter(render_marked(template, asked))
    end = tokenizer.special_tokens["eos_token"]
    found = {}
    for number, example in examples.items():
        (conversation, mark), places = marked[number], earlier_replies(example)
        replies = []
        for place in places:
            called = bool(example.messages[place].get("tool_calls"))
            replies.append((place, next(rendered).marked, next(rendered).marked if called else None))
        texts = [before for _, before, _ in replies] + [prompts[number].marked]
        ids, learned = [], []
        for (place, before, with_calls), after in zip(replies, texts[1:], strict=True):
            cut = _cut(before, after, conversation.messages[place], with_calls, end)
            if cut is None:
                raise ValueError(
                    f"{example.row.source}: the chat template of {template.where} must leave the assistant's "
                    f"message {place} as its reply when more messages follow. Got another text for it. Set "
                    "data.assistant_turns to 'last', or data.chat_template to another one."
                )
            reply, ended, between = cut
            for text, is_reply in ((reply, True), (between, False)):
                new = tokenizer.encode(text, mark=mark) + ([tokenizer.end_id] if is_reply and ended else [])
                ids += new
                learned += [is_reply] * len(new)
        last = completions[number]
        found[number] = Dialogue(
            prompt=np.asarray(tokenizer.encode(texts[0], mark=mark), np.int32),
            response=np.concatenate([np.asarray(ids, np.int32), last]),
            learned=np.concatenate([np.asarray(learned, bool), np.ones(len(last), bool)]),
        )
    return found


def _cut(before: str, after: str, message: Message, with_calls: str | None, end: str) -> tuple[str, bool, str] | None:
    """A reply, whether the text `end` ends it, and what follows it in `after`; None if it cannot be found there.

    `before` is the conversation up to the reply and `after` the one up to the next. `with_calls` is the one with the
    reply, if that calls tools, whose text only the template knows.
    """
    if not after.startswith(before):
        return None
    rest = after[len(before) :]
    if with_calls is not None:
        reply, ended, _ = with_calls[len(before) :].partition(end)
        whole = before + reply + end
        return (reply, True, after[len(whole) :]) if ended and after.startswith(whole) else None
    text = message["content"].strip()
    skipped, _, following = rest.partition(text) if text else ("", "", rest)
    if end in skipped or not rest.startswith(skipped + text):
        return None
    spaces = following[: len(following) - len(following.lstrip())]
    if following.startswith(spaces + end):
        return skipped + text + spaces, True, following[len(spaces + end) :]
    return skipped + text, False, following
