"""Renders chat templates, as transformers does, in a process of its own with limits of time and memory.

A template comes with somebody else's model and is a program: it can loop for ever, or build a text of any size. So no
template is compiled or rendered in the process that trains. `jaxrlhf.data.chat_process` runs this file as a script. It
imports only Jinja, so that it starts in a tenth of a second.

Requests and replies are lines of JSON, the first of them about the template, the others about conversations:

    {"template": ..., "special_tokens": ..., "date": ..., "seconds": [one, all]}  ->  {}
    {"messages": ..., "tools": ...}                                               ->  {"text": ...}

Instead, a reply may be {"refused": why} or {"limit": of what}. There is no reply if the CPU time is exceeded: SIGPROF
ends the process.
"""

import datetime
import json
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 512 * 2**20
"""Address space of the process. Python and Jinja take 25 MB of it."""
EXTRA_CHARACTERS, LONGER = 100_000, 10
"""A rendered conversation has at most `EXTRA_CHARACTERS` more than `LONGER` times the characters of its JSON."""
_LONGEST_ERROR = 300


def compile_template(text: str, date: str) -> jinja2.Template:
    """A template ready to render. `date` is the one that `strftime_now` formats, such as '2024-07-26'."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _clock(date)
    return environment.from_string(text)


def render(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    tools: Sequence[Any] | None = None,
) -> str:
    """The text of a conversation, up to where the assistant's next message begins."""
    return template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=True, **special_tokens)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which some templates put around the assistant's text. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(date: str) -> Callable[[str], str]:
    today = datetime.datetime.fromisoformat(date)
    return lambda form: today.strftime(form)


# The process


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Replies to requests until the end of the input."""
    first = json.loads(requests.readline())
    seconds, left = first["seconds"]
    reply, template = _compiled(first["template"], first["date"], seconds)
    _send(replies, reply)
    for conversation in requests if template is not None else ():
        before = time.process_time()
        _send(replies, _rendered(template, conversation, first["special_tokens"], min(seconds, left)))
        left -= time.process_time() - before
        if left <= 0:  # the timer counts whole ticks of the clock, and a conversation may take less
            signal.raise_signal(signal.SIGPROF)


def _compiled(text: str, date: str, seconds: float) -> tuple[dict[str, Any], Any]:
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # compiling folds constants, which can take long
        return {}, compile_template(text, date)
    except MemoryError:
        return {"limit": "memory"}, None
    except Exception as error:
        return {"refused": _shown(error), "line": getattr(error, "lineno", None)}, None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _rendered(template: Any, conversation: bytes, special_tokens: Mapping[str, str], seconds: float) -> dict[str, Any]:
    try:
        asked = json.loads(conversation)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        text = render(template, asked["messages"], special_tokens, asked["tools"])
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # templates may fail in any way
        return {"refused": _shown(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(text) > EXTRA_CHARACTERS + LONGER * len(conversation):
        return {"limit": "characters"}
    return {"text": text}


def _shown(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def _send(replies: BinaryIO, reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _limit_memory() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
