"""Renders conversations in another process, within limits of time and memory."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from jaxrlhf.data import chat_rendering
from jaxrlhf.data.chat_rendering import EXTRA_CHARACTERS, LONGER, MEMORY_BYTES

SECONDS = 2.0
"""CPU time for one conversation, and for compiling a template. Templates in use take less than a millisecond."""
FIRST_SECONDS, SECONDS_EACH = 10.0, 0.02
"""CPU time for all conversations of a table: a constant, and a part for each conversation."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template, and its variables beside the messages."""

    where: str
    """The file that it was found in, for error messages."""
    text: str
    special_tokens: Mapping[str, str]
    """Texts of special tokens by name: bos_token, eos_token ..."""
    date: str
    """The date that `strftime_now` gives, such as '2024-07-26'."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Conversation to render, up to where the assistant's next message begins."""

    source: str
    """The row of a file that it was read from, for error messages."""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    """The functions that the assistant may call."""


def render_chats(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[str]:
    """The texts of conversations. Raises ValueError if the template is not valid Jinja, refuses a conversation, or
    exceeds the limits of time or memory."""
    seconds = FIRST_SECONDS + SECONDS_EACH * len(conversations)
    tokens, limits = dict(template.special_tokens), [SECONDS, seconds]
    first = {"template": template.text, "special_tokens": tokens, "date": template.date, "seconds": limits}
    requests = [first, *({"messages": c.messages, "tools": c.tools} for c in conversations)]
    # Without site packages and environment, whose packages may import anything. Jinja's folders are passed.
    folders = dict.fromkeys(os.path.dirname(module.__path__[0]) for module in (jinja2, markupsafe))
    start = f"import sys, runpy; sys.path += {list(folders)!r}; runpy.run_path(sys.argv[1], run_name='__main__')"
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start, chat_rendering.__file__],
        input=b"".join(json.dumps(request, default=str).encode() + b"\n" for request in requests),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run, not for it
    )
    replies = [json.loads(line) for line in process.stdout.split(b"\n")[:-1]]
    texts = []
    for conversation, reply in zip([None, *conversations], [*replies, None], strict=False):
        source = template.where if conversation is None else conversation.source
        if reply is None or "limit" in reply:
            raise ValueError(_over_limit(template, source, reply, process.returncode, seconds, len(conversations)))
        if "refused" in reply:
            if conversation is None:
                line = f", line {reply['line']}" if reply["line"] else ""
                raise ValueError(f"{source}{line}: must be a Jinja template. Got {reply['refused'].rstrip('.')}.")
            roles = ", ".join(str(message["role"]) for message in conversation.messages)
            raise ValueError(
                f"{source}: the chat template of {template.where} must take every conversation. Got "
                f"{reply['refused']} for messages of {roles}."
            )
        texts.append(reply.get("text"))
    return texts[1:]


def _over_limit(
    template: ChatTemplate, source: str, reply: Mapping[str, Any] | None, status: int, seconds: float, count: int
) -> str:
    """The error message for a template that exceeded a limit, or whose process has ended with a status."""
    if reply is None and status != -signal.SIGPROF:
        rule, got = "must not end the process that renders it", f"its end with status {status}"
    elif reply is None:
        rule = f"must take at most {SECONDS:g} s of CPU time for a conversation, and {seconds:g} s for these {count}"
        got = "more"
    elif reply["limit"] == "memory":
        rule, got = f"must make do with {MEMORY_BYTES >> 20} MiB of memory", "more"
    else:
        rule = f"must add at most {EXTRA_CHARACTERS} characters to {LONGER} times those of a conversation"
        got = "a longer text"
    where = f"{source}: the chat template of {template.where}" if source != template.where else f"{source}: it"
    return f"{where} {rule}. Got {got}. Set data.chat_template to another one."
