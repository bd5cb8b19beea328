"""Preferences in rows: two completions of one prompt, or two dialogues that differ in their last reply."""

import math

from jaxrlhf.brief import brief
from jaxrlhf.data.chat import Message, check_messages, split_completion
from jaxrlhf.data.config import DataConfig
from jaxrlhf.data.files import Row


class MalformedPair(ValueError):
    """A row does not hold two different replies to one prompt."""

    def __init__(self, row: Row, rule: str, got: str) -> None:
        super().__init__(f"{row.source}: {rule}. Got {got}. Mend the row, or set data.malformed to 'drop'.")


def read_pair(row: Row, config: DataConfig) -> tuple[str | list[Message], str | None, str | None]:
    """The common start of both dialogues of a row, empty if the columns hold only replies, and the chosen and the
    rejected reply, None if there is none.

    Raises:
        MalformedPair: A dialogue has no reply, or the dialogues differ before it.
        ValueError: A column holds something else.
    """
    if config.reply_marker:
        row.require_column(config.chosen_column, "Set data.chosen_column, or data.reply_marker to ''.")
    columns = [name for name in (config.chosen_column, config.rejected_column) if row.columns.get(name) is not None]
    prompts, replies = zip(*(_split(row, name, config) for name in columns), strict=True) if columns else ([""], [])
    if prompts[0] != prompts[-1]:
        raise MalformedPair(row, f"{' and '.join(columns)} must be the same up to their last replies", "two prompts")
    reply_of = dict(zip(columns, replies, strict=True))
    return prompts[0], reply_of.get(config.chosen_column), reply_of.get(config.rejected_column)


def read_messages(row: Row, column: str) -> list[Message]:
    """The list of messages in a column, its texts checked."""
    messages = check_messages(row.columns[column], column=column, source=row.source)
    for index, message in enumerate(messages):
        row.text(f"{column}[{index}]", message.get("content", ""), may_be_empty=True)
    return messages


def _split(row: Row, column: str, config: DataConfig) -> tuple[str | list[Message], str]:
    """The prompt in a column of the pair, empty if the column holds only a reply, and the reply."""
    value = row.columns[column]
    if config.chat != "none" and isinstance(value, list):
        messages, reply = split_completion(read_messages(row, column), where=f"{row.source}: {column}")
        if reply is None:
            raise MalformedPair(row, f"{column} must end with the assistant's message", f"the {messages[-1]['role']}'s")
        return list(messages), reply
    text = row.text(column, value, may_be_empty=not config.reply_marker)
    if not config.reply_marker:
        return [] if config.chat != "none" else "", text
    before, marker, reply = text.rpartition(config.reply_marker)
    if not marker:
        raise MalformedPair(row, f"{column} must have a reply, after {config.reply_marker!r}", brief(text))
    return before + marker, reply


def read_margin(row: Row, config: DataConfig) -> float:
    """By how much the chosen reply of a row was preferred."""
    value = row.columns.get(config.margin_column) if config.margin_column else None
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{row.source}: {config.margin_column} must be a finite number. Got {brief(value)}.")
    return float(value)
