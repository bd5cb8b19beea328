"""Rows to prompts and completions: a column, a filled template, or a rendered conversation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.data.chat import Message, check_messages, compile_template, find_template, split_completion
from jaxrlhf.data.config import DataConfig, template_fields
from jaxrlhf.data.files import Row
from jaxrlhf.data.tokenizer import Tokenizer
from jaxrlhf.suggest import did_you_mean


@dataclasses.dataclass(frozen=True)
class Example:
    """What a run takes from a row."""

    row: Row
    prompt: str
    """Text, as it is. Empty where `messages` become the prompt."""
    messages: Sequence[Message]
    """A conversation up to where the assistant is to speak. Empty where the prompt is text."""
    completion: str | None


def read_example(row: Row, config: DataConfig) -> Example:
    """A row's prompt and completion, checked."""
    completion = row.columns.get(config.completion_column)
    if completion is not None:
        completion = _text(row, config.completion_column, completion, may_be_empty=True)
    if config.chat != "messages":
        prompt = _prompt(row, config)
        messages = _with_system([{"role": "user", "content": prompt}], config) if config.chat == "user" else []
        return Example(row, prompt, messages, completion)
    column = config.prompt_column
    _require_column(row, column, "Set data.prompt_column.")
    messages = check_messages(row.columns[column], column=column, source=row.source)
    for index, message in enumerate(messages):
        _text(row, f"{column}[{index}]", message["content"], may_be_empty=True)
    messages, answer = split_completion(messages)
    if not messages:
        raise ValueError(
            f"{row.source}: {column} must hold a message before the assistant's. Got only that. Remove the row."
        )
    if answer is not None and completion is not None:
        raise ValueError(
            f"{row.source}: a completion is given once. Got an assistant's last message and the column "
            f"{config.completion_column!r}. Remove one, or set data.completion_column to ''."
        )
    return Example(row, "", _with_system(messages, config), completion if answer is None else answer)


def _with_system(messages: Sequence[Message], config: DataConfig) -> Sequence[Message]:
    if not config.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def prompt_texts(examples: Sequence[Example], config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The text of every row's prompt: of a chat, what its template makes of the messages."""
    if config.chat == "none":
        return [example.prompt for example in examples]
    where, text = find_template(config.chat_template, tokenizer.chat_templates, tokenizer=tokenizer.name)
    template = compile_template(text, where=where, special_tokens=tokenizer.special_tokens, date=config.chat_date)
    texts = (template.render(example.messages, source=example.row.source) for example in examples)
    return [_text(example.row, "the rendered chat", text) for example, text in zip(examples, texts, strict=True)]


def _prompt(row: Row, config: DataConfig) -> str:
    """The text of a row's prompt, where it is text."""
    remedy = "" if config.template else "Set data.prompt_column or data.template."
    for name in template_fields(config.template) if config.template else [config.prompt_column]:
        _require_column(row, name, remedy)
    if not config.template:
        return _text(row, config.prompt_column, row.columns[config.prompt_column])
    try:
        text = config.template.format_map(row.columns)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{row.source}: the template must fit every row. Got {brief(config.template)}: {error}."
        ) from error
    return _text(row, "the filled template", text)


def _require_column(row: Row, name: str, remedy: str) -> None:
    if row.columns.get(name) is None:
        has = ", ".join(row.columns) or "nothing"
        near = did_you_mean(name, (key for key in row.columns if key != name))
        raise ValueError(f"{row.source}: must have the column {brief(name)}. Got {has}.{near} {remedy}".rstrip())


def _text(row: Row, column: str, value: Any, *, may_be_empty: bool = False) -> str:
    """`value`, if it is text that can be tokenized."""
    if not isinstance(value, str):
        remedy = "Set data.chat to 'messages'." if isinstance(value, list) else "Write it in quotes."
        raise ValueError(f"{row.source}: {column} must be a string. Got {repr(value)[:60]}. {remedy}")
    if not value and not may_be_empty:
        raise ValueError(f"{row.source}: {column} must not be empty. Got ''. Remove the row or fill it in.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{row.source}: {column} must be valid Unicode. Got {value[:60]!r}: {error}.") from error
    return value


def learnable_texts(examples: Sequence[Example]) -> Iterator[str]:
    """What a tokenizer learns from: of each row the prompt or its messages, the completion, and all columns of text."""
    for example in examples:
        messages = [message["content"] for message in example.messages]
        columns = [value for value in example.row.columns.values() if isinstance(value, str)]
        texts = dict.fromkeys([example.prompt, *messages, *columns, example.completion or ""])
        yield from (text.encode(errors="replace").decode() for text in texts)
