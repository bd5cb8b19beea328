"""Processes that reply to requests, one JSON object a line."""

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jaxrlhf.brief import cut


class ProcessEnded(RuntimeError):
    """A process ended instead of replying."""


class LineProcesses:
    """Python processes that reply to requests: as many as there are threads that ask at a time.

    They end with this object, and with the run.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """
        Args:
            arguments: Those of the interpreter: options, a file, and what that gets.
        """
        self._arguments, self._environment = arguments, environment
        self._idle: queue.SimpleQueue[_LineProcess] = queue.SimpleQueue()

    def ask(self, request: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any] | None:
        """The reply to a request; None if it takes longer than `seconds`, after which its process is ended.

        Raises ProcessEnded, with the last line of its errors, if the process ends.
        """
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _LineProcess(self._arguments, self._environment)
        try:
            reply = process.ask(request, seconds)
        except BaseException:
            process.close()
            raise
        if reply is None:
            process.close()
        else:
            self._idle.put(process)
        return reply


class _LineProcess:
    """One such process, for one thread at a time."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run, not for it
        )
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        """Ends the process."""

    def ask(self, request: Mapping[str, Any], seconds: float | None) -> dict[str, Any] | None:
        given, printed = self._process.stdin, self._process.stdout
        assert given is not None and printed is not None
        until = None if seconds is None else time.monotonic() + seconds
        replies = select.poll()
        replies.register(printed, select.POLLIN)
        received = b""
        try:
            given.write(json.dumps(request).encode() + b"\n")
            given.flush()
            while not received.endswith(b"\n"):
                if not replies.poll(None if until is None else max(0.0, 1000 * (until - time.monotonic()))):
                    return None
                more = os.read(printed.fileno(), 2**16)
                if not more:
                    raise BrokenPipeError
                received += more
        except BrokenPipeError:
            status = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            said = f" and {cut(lines[-1])}" if lines else ""
            raise ProcessEnded(f"a process that ended with status {status}{said}") from None
        return json.loads(received)


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    process.kill()
    process.communicate()
    errors.close()
