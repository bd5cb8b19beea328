"""Conversations in rows, checked, and the chat templates that render them.

Templates are rendered in another process (`chat_process`). `examples` turns a row into a prompt and completions,
`prompts` tokenizes them.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.data.chat_process import ChatTemplate, Conversation, render_chats

Message = Mapping[str, Any]
"""At least a `role` and a `content`, both text; the content may be missing beside `tool_calls`."""

DEFAULT = "default"
"""The name of a tokenizer's only template, and of the template that is used if none is named."""


def find_template(wanted: str, known: Mapping[str, str], *, tokenizer: str) -> tuple[str, str]:
    """The origin of a template, for error messages, and its text.

    `wanted` is Jinja text, a file, the name of one of the tokenizer's templates, or '' for its default. Raises
    ValueError if there is none.
    """
    if wanted in known:
        return f"{tokenizer} ({wanted})", known[wanted]
    if not wanted and DEFAULT in known:
        return tokenizer, known[DEFAULT]
    if not wanted:
        has = f"only {', '.join(known)}" if known else "none"
        raise ValueError(
            f"data.chat_template: a chat needs a template. Got '', and the tokenizer {tokenizer} has {has}. Set "
            "data.chat_template to Jinja text or a file, or tokenizer.path to a tokenizer that brings one in its "
            "tokenizer_config.json or chat_template.jinja."
        )
    if os.path.isfile(wanted):
        try:
            return wanted, Path(wanted).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data.chat_template: must be readable text. Got {brief(wanted)}: {error}.") from error
    if "{" in wanted:
        return "data.chat_template", wanted
    raise ValueError(
        f"data.chat_template: must be Jinja text, an existing file or one of the tokenizer's templates "
        f"({', '.join(known) or 'it has none'}). Got {brief(wanted)}.{did_you_mean(wanted, known)}"
    )


def check_messages(value: Any, *, column: str, source: str) -> list[Message]:
    """The messages of a conversation, checked. A content that is a list of text parts is joined.

    Keys without a value, as parquet fills them in, are left out; templates get all others. `from` and `value`, as in
    ShareGPT, become role and content.
    """
    where = f"{source}: {column}"
    if not isinstance(value, list):
        raise ValueError(
            f"{where} must be a list of messages, {{role, content}}. Got {brief(value)}. Set data.chat to 'user' "
            "where it is the text of a user's message."
        )
    if not value:
        raise ValueError(f"{where} must hold at least one message. Got []. Remove the row or fill it in.")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{where}[{index}] must be a message, {{role, content}}. Got {brief(message)}.")
        message = _with_role({key: item for key, item in message.items() if item is not None})
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], f"{where}[{index}].content")
        for key in ("role", "content"):
            only_calls = key == "content" and key not in message and message.get("tool_calls")
            if not isinstance(message.get(key), str) and not only_calls:
                got = brief(message[key]) if key in message else f"only {', '.join(message) or 'nothing'}"
                raise ValueError(f"{where}[{index}] must have a {key} of text. Got {got}.")
        messages.append(message)
    return messages


def check_tools(value: Any, *, column: str, source: str) -> list[Any] | None:
    """The functions that an assistant may call, from a list of JSON objects or its JSON text; None for no functions."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value or "null")
        except (ValueError, RecursionError):
            tools = value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(
            f"{source}: {column} must be a list of JSON objects, each of which describes a function. Got "
            f"{brief(value)}. Set data.tools_column to '' where it is something else."
        )
    return tools or None


def check_tools_are_known(template: ChatTemplate, messages: Sequence[Message], tools: Any, *, source: str) -> None:
    """Checks that a template reads the tools and tool calls of a conversation, if it has any."""
    calls = next((index for index, message in enumerate(messages) if message.get("tool_calls")), None)
    for word, got in (("tool_calls", calls), ("tools", tools)):
        if got is not None and not re.search(rf"\b{word}\b", template.text):
            what = "tools" if word == "tools" else f"tool_calls in message {got}"
            raise ValueError(
                f"{source}: the chat template of {template.where} must read {word}. Got {what}, which it would leave "
                "out. Set data.chat_template to one that knows tools, or take them out of the row."
            )


def check_tool_messages(template: ChatTemplate, conversations: Sequence[Conversation]) -> None:
    """Checks, with the first conversation that has a tool's answer, that a template writes such answers."""
    answer = "\U00020000"  # no template writes this character by itself
    for conversation in conversations:
        tools = [index for index, message in enumerate(conversation.messages) if message["role"] == "tool"]
        if not tools:
            continue
        messages = [
            {**message, "content": answer} if message["role"] == "tool" else message
            for message in conversation.messages
        ]
        if answer not in render_chats(template, [dataclasses.replace(conversation, messages=messages)])[0]:
            raise ValueError(
                f"{conversation.source}: the chat template of {template.where} must write out messages of the role "
                f"tool. Got one as message {tools[0]}, which it leaves out. Set data.chat_template to one that knows "
                "tools, or take them out of the row."
            )
        return


def split_completion(messages: Sequence[Message], *, where: str) -> tuple[Sequence[Message], str | None]:
    """The messages to answer, and the answer: the last message if it is the assistant's, else None.

    Raises ValueError if the answer calls tools, for which there is no text to learn from.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, None
    if last.get("tool_calls"):
        raise ValueError(
            f"{where}: an assistant's last message, which is the completion, must be text alone. Got tool_calls. Write "
            "them into its content as the model is to write them, or end the row with the message before."
        )
    return messages[:-1], last["content"]


SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Speakers of ShareGPT's conversations -> roles. Other names are roles already."""


def _with_role(message: dict[str, Any]) -> dict[str, Any]:
    """A message with a role and a content, if it has ShareGPT's `from` and `value`."""
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker, value = message["from"], message["value"]
    role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    return {"role": role, "content": value, **others}


def _joined(parts: list[Any], where: str) -> str:
    """The text of a content that is a list of parts."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(text, str):
            got = f"a part of type {brief(kind)}" if kind != "text" else brief(part)
            raise ValueError(
                f"{where}[{index}] must be text, {{type: text, text: ...}}. Got {got}. The models here read text "
                "alone: remove the part, or the row."
            )
        texts.append(text)
    return "".join(texts)
