"""Rows to prompts and completions: a column, a filled template, or a rendered conversation."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.data.chat import (
    Message,
    check_tool_messages,
    check_tools,
    check_tools_are_known,
    find_template,
    split_completion,
)
from jaxrlhf.data.chat_process import ChatTemplate, Conversation, render_chats
from jaxrlhf.data.config import DataConfig, template_fields
from jaxrlhf.data.control_tokens import MarkedText, control_pattern, mark_text, mark_tokens
from jaxrlhf.data.files import Row
from jaxrlhf.data.pairs import MalformedPair, read_margin, read_messages, read_pair
from jaxrlhf.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """The prompt and completions of a row."""

    row: Row
    prompt: str
    """The text of the prompt; empty if `messages` become the prompt."""
    messages: Sequence[Message]
    """A conversation up to the assistant's reply; empty if the prompt is text."""
    completion: str | None
    """The response to learn from; of two, the preferred one."""
    rejected: str | None = None
    """The other response of a pair."""
    margin: float = 0.0
    """The margin by which the first response was preferred."""
    tools: list[Any] | None = None
    """The functions that the assistant of a chat may call."""
    first_reply: int = 0
    """The place in `messages` from which on the assistant's messages belong to the completion."""


def read_example(row: Row, config: DataConfig) -> Example:
    """The prompt and completions of a row, checked. `config` is settled (`jaxrlhf.data.columns`).

    Raises:
        MalformedPair: The row does not hold two different replies to one prompt.
        ValueError: Anything else is wrong.
    """
    if config.text_column:
        row.require_column(config.text_column, "Set data.text_column, or to '' where rows have prompts.")
        text = row.text(config.text_column, row.columns[config.text_column])
        return Example(row, prompt="", messages=[], completion=text)
    start, chosen, rejected = read_pair(row, config)
    prompt, messages, answer = _read_prompt(row, config, start)
    first_reply = 0
    completion = row.columns.get(config.completion_column)
    if completion is not None and answer is not None:
        raise ValueError(
            f"{row.source}: a completion is given once. Got an assistant's last message and the column "
            f"{config.completion_column!r}. Remove one, or set data.completion_column to ''."
        )
    if isinstance(completion, list) and config.chat != "none":
        first_reply = len(messages)
        messages, completion = _continued(messages, row, config)
    elif completion is not None:
        completion = row.text(config.completion_column, completion, may_be_empty=True)
    completion = completion if answer is None else answer
    if chosen is not None and completion is not None:
        raise ValueError(
            f"{row.source}: a completion is given once. Got one beside the column {config.chosen_column!r}. Remove "
            "it, or set data.completion_column or data.chosen_column to ''."
        )
    completion = completion if chosen is None else chosen
    if completion is not None and completion == rejected:
        raise MalformedPair(row, "a rejected completion must differ from the chosen one", f"{brief(completion)} twice")
    tools = row.columns.get(config.tools_column) if config.chat != "none" else None
    tools = check_tools(tools, column=config.tools_column, source=row.source)
    if config.system_prompt and messages[0]["role"] != "system":
        messages, first_reply = [{"role": "system", "content": config.system_prompt}, *messages], first_reply + 1
    margin = read_margin(row, config)
    return Example(row, prompt, messages, completion, rejected, margin, tools, first_reply)


def _read_prompt(row: Row, config: DataConfig, start: str | list[Message]) -> tuple[str, Sequence[Message], str | None]:
    """The prompt of a row, as text or as messages, and the assistant's answer, if that is in the prompt column.

    `start` is what the dialogues of a pair begin with, if it has some.
    """
    if isinstance(start, str) and start:
        return start, [], None
    before = list(start) if isinstance(start, list) else []
    if before and before[0]["role"] != "assistant":
        return "", before, None
    is_list = isinstance(row.columns.get(config.prompt_column), list)
    if config.chat == "messages" or (config.chat == "user" and is_list and not config.template):
        messages, answer = _read_dialogue(row, config)
        return "", [*messages, *before], answer
    prompt = _prompt(row, config)
    return prompt, [{"role": "user", "content": prompt}, *before] if config.chat == "user" else [], None


def _continued(messages: Sequence[Message], row: Row, config: DataConfig) -> tuple[Sequence[Message], str]:
    """The messages of a prompt with those of the completion column, up to the assistant's last one, and that."""
    where = f"{row.source}: {config.completion_column}"
    reply = read_messages(row, config.completion_column)
    before, completion = split_completion([*messages, *reply], where=where)
    if completion is None:
        raise ValueError(
            f"{where} must end with the assistant's message. Got the {reply[-1]['role']}'s. Mend the row, or set "
            "data.completion_column to ''."
        )
    return before, completion


def _read_dialogue(row: Row, config: DataConfig) -> tuple[Sequence[Message], str | None]:
    """The messages in the prompt column up to the assistant's answer, and that answer, if it is there."""
    column = config.prompt_column
    row.require_column(column, "Set data.prompt_column.")
    messages, answer = split_completion(read_messages(row, column), where=f"{row.source}: {column}")
    if not messages:
        raise ValueError(
            f"{row.source}: {column} must hold a message before the assistant's. Got only that. Remove the row."
        )
    return messages, answer


def prompt_texts(examples: Sequence[Example], config: DataConfig, tokenizer: Tokenizer) -> list[MarkedText]:
    """The text of the prompt of every row; for chats, the rendered messages.

    Control tokens in the rows are marked, unless the config allows them; those of templates are not.
    """
    tokens = tokens_as_text(config, tokenizer)
    if config.text_column:
        return [MarkedText("", "") for _ in examples]
    if config.chat != "none":
        return _chat_texts(examples, config, tokenizer)
    if not config.template:
        return [mark_text(example.prompt, tokens) for example in examples]
    texts = []
    for example in examples:
        columns, mark = mark_tokens(example.row.columns, tokens, avoid=config.template)
        filled = _prompt(dataclasses.replace(example.row, columns=columns), config) if mark else example.prompt
        texts.append(MarkedText(filled, mark))
    return texts


def tokens_as_text(config: DataConfig, tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern of the control tokens that are encoded as text in rows."""
    return control_pattern(() if config.control_tokens == "allow" else tokenizer.control_tokens)


def _chat_texts(examples: Sequence[Example], config: DataConfig, tokenizer: Tokenizer) -> list[MarkedText]:
    """`prompt_texts` for chats."""
    template, tokens = configured_template(config, tokenizer), tokens_as_text(config, tokenizer)
    for example in examples:
        check_tools_are_known(template, example.messages, example.tools, source=example.row.source)
    marked = [marked_conversation(example, template, tokens) for example in examples]
    texts = render_marked(template, marked)
    check_tool_messages(template, [conversation for conversation, _ in marked])
    for example, text in zip(examples, texts, strict=True):
        example.row.text("the rendered chat", text.marked)
    return texts


def configured_template(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a config, or of its tokenizer."""
    where, text = find_template(config.chat_template, tokenizer.chat_templates, tokenizer=tokenizer.name)
    return ChatTemplate(where, text, tokenizer.special_tokens, config.chat_date)


def marked_conversation(
    example: Example, template: ChatTemplate, tokens: re.Pattern[str] | None
) -> tuple[Conversation, str]:
    """The messages of an example with the control tokens in them marked, and the mark."""
    given, mark = mark_tokens([example.messages, example.tools], tokens, avoid=template.text)
    return Conversation(example.row.source, *given), mark


def render_marked(template: ChatTemplate, marked: Sequence[tuple[Conversation, str]]) -> list[MarkedText]:
    """The texts of conversations with marks."""
    rendered = render_chats(template, [conversation for conversation, _ in marked])
    texts = []
    for text, (_, mark) in zip(rendered, marked, strict=True):
        if mark:
            text = text.replace(json.dumps(mark)[1:-1], mark)  # as tojson(ensure_ascii=true) writes it
        texts.append(MarkedText(text, mark))
    return texts


def _prompt(row: Row, config: DataConfig) -> str:
    """The text of the prompt of a row without messages."""
    remedy = "" if config.template else "Set data.prompt_column or data.template."
    for name in template_fields(config.template) if config.template else [config.prompt_column]:
        row.require_column(name, remedy)
    if not config.template:
        return row.text(config.prompt_column, row.columns[config.prompt_column])
    try:
        text = config.template.format_map(row.columns)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{row.source}: the template must fit every row. Got {brief(config.template)}: {error}."
        ) from error
    return row.text("the filled template", text)


def learnable_texts(examples: Sequence[Example]) -> Iterator[str]:
    """Texts to train a tokenizer on: the prompt or messages, the completion, and all text columns of each row."""
    for example in examples:
        messages = [message.get("content", "") for message in example.messages]
        columns = [value for value in example.row.columns.values() if isinstance(value, str)]
        texts = dict.fromkeys([example.prompt, *messages, *columns, example.completion or ""])
        yield from (text.encode(errors="replace").decode() for text in texts)
