"""Conversations to text, by the Jinja templates that tokenizers bring; rendered as transformers renders them."""

import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxrlhf.brief import brief
from jaxrlhf.suggest import did_you_mean

Message = Mapping[str, Any]
"""At least a `role` and a `content`, both text."""

DEFAULT = "default"
"""The name of the template that a tokenizer's only one has, and of the one taken where none is named."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and what it is given beside the messages."""

    where: str
    """Where it was found, for error messages."""
    compiled: jinja2.Template
    special_tokens: Mapping[str, str]
    """Such as bos_token and eos_token."""

    def render(self, messages: Sequence[Message], *, source: str) -> str:
        """The text of a conversation, up to where the assistant's next message begins.

        Raises:
            ValueError: The template refuses these messages; `source` is where they were read.
        """
        try:
            return self.compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program and may fail in any way
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{source}: the chat template of {self.where} must take every conversation. Got {error} for messages "
                f"of {roles}."
            ) from error


def compile_template(text: str, *, where: str, special_tokens: Mapping[str, str], date: str) -> ChatTemplate:
    """A template ready to render.

    Args:
        date: What `strftime_now` takes for today, as in '2024-07-26'.

    Raises:
        ValueError: It is no Jinja.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(date)
    try:
        compiled = environment.from_string(text)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ValueError(f"{where}{line}: must be a Jinja template. Got {error}.") from error
    return ChatTemplate(where, compiled, special_tokens)


def find_template(wanted: str, known: Mapping[str, str], *, tokenizer: str) -> tuple[str, str]:
    """Where a template is, and its text.

    Args:
        wanted: Jinja text, a file, the name of one of the tokenizer's templates, or '' for its default.
        known: The tokenizer's templates by name.
        tokenizer: Its name, for error messages.

    Raises:
        ValueError: There is none.
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
            return wanted, Path(wanted).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"data.chat_template: must be readable text. Got {brief(wanted)}: {error}.") from error
    if "{" in wanted:
        return "data.chat_template", wanted
    raise ValueError(
        f"data.chat_template: must be Jinja text, an existing file or one of the tokenizer's templates "
        f"({', '.join(known) or 'it has none'}). Got {brief(wanted)}.{did_you_mean(wanted, known)}"
    )


def check_messages(value: Any, *, column: str, source: str) -> list[Message]:
    """A conversation, if that is what `value` is. Keys without a value, as parquet fills them in, are left out.

    Raises:
        ValueError: It is something else.
    """
    where = f"{source}: {column}"
    if not isinstance(value, list):
        raise ValueError(
            f"{where} must be a list of messages, {{role, content}}. Got {_shown(value)}. Set data.chat to 'user' "
            "where it is the text of a user's message."
        )
    if not value:
        raise ValueError(f"{where} must hold at least one message. Got []. Remove the row or fill it in.")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{where}[{index}] must be a message, {{role, content}}. Got {_shown(message)}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = (
                    _shown(message[key]) if message.get(key) is not None else f"only {', '.join(message) or 'nothing'}"
                )
                raise ValueError(f"{where}[{index}] must have a {key} of text. Got {got}.")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def split_completion(messages: Sequence[Message]) -> tuple[Sequence[Message], str | None]:
    """The messages to answer, and the answer: the last message where it is the assistant's."""
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark what the assistant says. It changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As it is, where Jinja's own filter would escape what HTML takes for tags."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(date: str) -> Callable[[str], str]:
    today = datetime.datetime.fromisoformat(date)
    return lambda form: today.strftime(form)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
