"""Renders conversations in another process, within limits of time and memory."""

import atexit
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from jaxrlhf.data import chat_rendering
from jaxrlhf.data.chat_rendering import EXTRA_CHARACTERS, LONGER, MEMORY_BYTES

SECONDS = 2.0
"""CPU time for one conversation, and for compiling a template. Templates in use take less than a millisecond."""
FIRST_SECONDS, SECONDS_EACH = 10.0, 0.02
"""CPU time for all conversations of a table: a constant, and a part for each conversation."""
_BATCH = 256
"""The number of conversations that are sent at a time."""
_IDLE_SECONDS = 5.0
"""The time after which an unused process is ended."""


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
    """The texts of conversations.

    Raises:
        ValueError: The template is not valid Jinja, refuses a conversation, or exceeds the limits of time or memory.
    """
    seconds = FIRST_SECONDS + SECONDS_EACH * len(conversations)
    with _borrowed() as process:
        reply = process.compile(template, seconds)
        if reply is None or "limit" in reply:
            raise ValueError(_over_limit(template, template.where, reply, process, seconds, len(conversations)))
        if "refused" in reply:
            line = f", line {reply['line']}" if reply["line"] else ""
            raise ValueError(f"{template.where}{line}: must be a Jinja template. Got {reply['refused'].rstrip('.')}.")
        texts = []
        for start in range(0, len(conversations), _BATCH):
            batch = conversations[start : start + _BATCH]
            process.send({"count": len(batch)}, *({"messages": c.messages, "tools": c.tools} for c in batch))
            for conversation in batch:
                reply = process.reply()
                if reply is None or "limit" in reply:
                    raise ValueError(
                        _over_limit(template, conversation.source, reply, process, seconds, len(conversations))
                    )
                if "refused" in reply:
                    roles = ", ".join(str(message["role"]) for message in conversation.messages)
                    raise ValueError(
                        f"{conversation.source}: the chat template of {template.where} must take every conversation. "
                        f"Got {reply['refused']} for messages of {roles}."
                    )
                texts.append(reply["text"])
        return texts


def _over_limit(
    template: ChatTemplate,
    source: str,
    reply: Mapping[str, Any] | None,
    process: "_Process",
    seconds: float,
    count: int,
) -> str:
    """The error message for a template that exceeded a limit, or whose process has ended."""
    if reply is None and (status := process.status()) != -signal.SIGPROF:
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


class _Process:
    """A rendering process."""

    def __init__(self) -> None:
        self.num_requests = 0
        # Without site packages and environment, whose packages may import anything. Jinja's folders are passed.
        folders = dict.fromkeys(os.path.dirname(module.__path__[0]) for module in (jinja2, markupsafe))
        start = f"import sys, runpy; sys.path += {list(folders)!r}; runpy.run_path(sys.argv[1], run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, chat_rendering.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, not for it
        )

    def compile(self, template: ChatTemplate, seconds: float) -> dict[str, Any] | None:
        """Compiles a template. Rendering all conversations with it may take `seconds`. Returns the reply."""
        tokens, limits = dict(template.special_tokens), [SECONDS, seconds]
        self.send({"template": template.text, "special_tokens": tokens, "date": template.date, "seconds": limits})
        return self.reply()

    def send(self, *lines: Any) -> None:
        """Sends requests. A process that has ended does not reply to them."""
        assert self._process.stdin is not None
        self.num_requests += 1
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"".join(json.dumps(line, default=str).encode() + b"\n" for line in lines))
            self._process.stdin.flush()

    def reply(self) -> dict[str, Any] | None:
        """The next reply; None if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def is_there(self) -> bool:
        """Returns whether the process is still alive."""
        return self._process.poll() is None

    def status(self) -> int:
        """The exit status of a process that gave no reply: below zero, the signal that ended it."""
        return self._process.wait()

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # of what was not sent
                pipe.close() if pipe is not None else None


_lock = threading.RLock()
_idle: dict[int, _Process] = {}
"""This process -> its idle rendering process: starting one takes as long as rendering hundreds of conversations."""


@contextlib.contextmanager
def _borrowed() -> Iterator[_Process]:
    """A process for one table. Unless an error occurs, it is kept for a while for the next table."""
    with _lock:
        process = _idle.pop(os.getpid(), None)
        if process is not None and not process.is_there():
            process.end()
            process = None
        process = process or _Process()
        try:
            yield process
        except BaseException:  # it may be in the middle of something
            process.end()
            raise
        _idle[os.getpid()] = process
        timer = threading.Timer(_IDLE_SECONDS, _end_if_unused, [process, process.num_requests])
        timer.daemon = True
        timer.start()


def _end_if_unused(process: _Process, num_requests: int) -> None:
    """Ends a process that has had no request since."""
    with _lock:
        if _idle.get(os.getpid()) is process and process.num_requests == num_requests:
            _end_idle()


@atexit.register
def _end_idle() -> None:
    with _lock:
        process = _idle.pop(os.getpid(), None)
        if process is not None:
            process.end()
