"""Which columns of the rows are the prompt, the completions and the answer.

A config names them, or leaves that to their names: those of this library, and those that TRL, OpenRLHF and verl use. A
name may lead into nested columns, as in verl's `reward_model.ground_truth`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.data.config import AUTO, DataConfig
from jaxrlhf.data.files import Row

KNOWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prompt": (("prompt", "messages", "conversations"), ("input", "question", "instruction", "problem", "query")),
    "chosen": (("chosen",), ()),
    "rejected": (("rejected",), ()),
    "completion": (("completion",), ("output", "response")),
    "answer": (("answer",), ("solution", "ground_truth", "reward_model.ground_truth", "label")),
    "text": (("text",), ()),
}
"""Meaning of a column -> its names here, then its names in other libraries."""


def settle_columns(config: DataConfig, rows: Sequence[Row]) -> tuple[DataConfig, str]:
    """The config with every `auto` of columns and chats settled, and a line that says what is read as what.

    Raises ValueError if several columns could be meant, or if the settings do not fit what the columns hold.
    """
    columns = _Columns(rows)
    found: dict[str, str] = {}
    for what in KNOWN:
        given = getattr(config, f"{what}_column")
        found[what] = given if given != AUTO else _recognized(what, columns, config, found)
    if found["text"]:
        found |= dict.fromkeys(("prompt", "chosen", "rejected", "completion"), "")
    chat = _chat(config, columns, found) if config.chat == AUTO else config.chat
    if chat == "none" and config.chat == AUTO:
        _check_plain(config)
    if config.answer_column not in (AUTO, "") and not columns.has(config.answer_column):
        known = ", ".join(columns.names)
        raise ValueError(
            f"data.answer_column: must name a column of the rows. Got {brief(config.answer_column)}. Known: "
            f"{known}.{did_you_mean(config.answer_column, columns.names)}"
        )
    settled = dataclasses.replace(config, chat=chat, **{f"{what}_column": name for what, name in found.items()})
    return settled, _described(settled, columns)


def with_columns(row: Row, config: DataConfig) -> Row:
    """The row with the nested columns that a settled config names, and with its answer as the column `answer`."""
    more = {}
    for what in KNOWN:
        name = getattr(config, f"{what}_column")
        value = value_at(row.columns, name)
        if value is not None and name not in row.columns:
            more[name] = value
        if what == "answer" and name not in ("", "answer"):
            more["answer"] = value
    return dataclasses.replace(row, columns={**row.columns, **more}) if more else row


def value_at(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key in nested ones, `reward_model.ground_truth`; None if there is none.

    >>> value_at({"reward_model": {"style": "rule", "ground_truth": "4"}}, "reward_model.ground_truth")
    '4'
    """
    if name in columns:
        return columns[name]
    first, dot, rest = name.partition(".")
    inner = columns.get(first)
    return value_at(inner, rest) if dot and isinstance(inner, Mapping) else None


class _Columns:
    """The values of the rows by column."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.names = list(dict.fromkeys(name for row in rows for name in row.columns))

    def has(self, name: str) -> bool:
        """Some row has a value there."""
        return self.some(name, lambda value: True)

    def some(self, name: str, fits: Callable[[Any], bool]) -> bool:
        """Some row has a value there that fits."""
        if not name or (name not in self.names and name.partition(".")[0] not in self.names):
            return False
        values = (value_at(row.columns, name) for row in self._rows)
        return any(value is not None and fits(value) for value in values)


def _recognized(what: str, columns: _Columns, config: DataConfig, found: Mapping[str, str]) -> str:
    """The column that is meant. Where there is none, it is called what it is called here, but for the answer."""
    if what == "prompt" and (config.template or config.reply_marker):
        return what
    if what == "text":
        others = ("prompt", "chosen", "rejected", "completion")
        has_other = config.template or config.reply_marker or config.chat not in (AUTO, "none")
        has_other = has_other or any(getattr(config, f"{other}_column") not in (AUTO, "") for other in others)
        has_other = has_other or any(columns.has(found[other]) for other in others)
        return "" if has_other or not columns.some("text", lambda value: isinstance(value, str)) else what
    ours, theirs = KNOWN[what]
    named = {getattr(config, f"{other}_column") for other in KNOWN} - {AUTO, ""}
    taken = named.union(found.values()) if what != "answer" else set()
    candidates = [name for name in ours if name not in taken and columns.has(name)]
    fits: Callable[[Any], bool] = _is_answer if what == "answer" else _is_text_or_messages
    # a response beside a chosen one says nothing of its own
    if not candidates and not (what == "completion" and columns.has(found["chosen"])):
        candidates = [name for name in theirs if name not in taken and columns.some(name, fits)]
    if len(candidates) > 1:
        key = f"data.{what}_column"
        or_else = {"prompt": ", or fill data.template from several", "answer": ", or to '' if no reward needs it"}
        raise ValueError(
            f"{key}: the rows must have one column for the {what}. Got {' and '.join(candidates)}, each of which may "
            f"be it. Set {key} to {candidates[0]}, say{or_else.get(what, '')}."
        )
    if candidates:
        return candidates[0]
    return "" if what == "answer" or (what in taken and what != "prompt") else what


def _is_text_or_messages(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _chat(config: DataConfig, columns: _Columns, found: Mapping[str, str]) -> str:
    """How the prompts of rows are to be read."""

    def lists(what: str) -> bool:
        return columns.some(found[what], lambda value: isinstance(value, list))

    if config.reply_marker:
        return "none"
    if not config.template and lists("prompt"):
        return "messages"
    if lists("chosen") or lists("rejected") or lists("completion"):
        return "user" if config.template or columns.has(found["prompt"]) else "messages"
    return "none"


def _check_plain(config: DataConfig) -> None:
    """Checks that no setting of chats is given where the prompts of all rows are text."""
    for field, rule in (
        ("chat_template", "only chats have one"),
        ("system_prompt", "only chats have one"),
        ("assistant_turns", "only chats have several"),
    ):
        if getattr(config, field) not in ("", "last"):
            raise ValueError(
                f"data.{field}: {rule}. Got {brief(getattr(config, field))}, and prompts that are text. "
                "Set data.chat to 'user' to make users' messages of them, or leave it out."
            )


def _described(config: DataConfig, columns: _Columns) -> str:
    """The columns and their meanings, in one line."""
    parts = []
    for what in KNOWN:
        name = getattr(config, f"{what}_column")
        if what == "prompt" and config.template:
            parts.append("prompt by the template")
        elif columns.has(name):
            form = "lists of messages" if columns.some(name, lambda value: isinstance(value, list)) else "text"
            shown = "texts" if what == "text" else what
            parts.append(f"{shown} from {name!r}" + ("" if what in ("answer", "text") else f" ({form})"))
    chat = {"none": "", "user": ", as users' messages", "messages": ", as chats"}[config.chat]
    return f"{', '.join(parts)}{chat}"
