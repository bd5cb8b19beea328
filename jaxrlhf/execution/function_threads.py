"""Threads for Python functions that run beside the devices, and that a run can abandon."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from jaxrlhf.brief import brief

T = TypeVar("T")
NAME = "function-role"
_AT_A_TIME = 4
_CLOSING_SECONDS = 5.0
"""The longest that closing waits for functions that still run."""


class FunctionAbandonedError(RuntimeError):
    """A Python function did not return in time after the run was asked to stop."""


class FunctionThreads:
    """Runs Python functions, a few at a time, each in a daemon thread, which Python cannot end but can abandon."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(_AT_A_TIME)
        self._started: dict[concurrent.futures.Future[object], tuple[str, float, threading.Thread]] = {}

    def submit(self, name: str, work: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Starts `work`, which must not raise. Returns a future of its result."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            with self._room:
                result = work()
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has been abandoned
                future.set_result(result)
            self._started.pop(future, None)  # pyright: ignore[reportArgumentType, reportCallIssue]

        thread = threading.Thread(target=run, name=NAME, daemon=True)
        self._started[future] = (name, time.monotonic(), thread)  # pyright: ignore[reportArgumentType]
        thread.start()
        return future

    def abandon(self, seconds: float) -> None:
        """Abandons functions that have run for `seconds`: the results of their futures are `(False, error)`."""
        for future, (name, started, _) in list(self._started.items()):
            waited = time.monotonic() - started
            if waited >= seconds and not future.done():
                error = FunctionAbandonedError(
                    f"{brief(name)} had not returned after {waited:.0f} seconds, and was not waited for."
                )
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it has just returned
                    future.set_result((False, error))

    def close(self) -> None:
        """Waits for a while for functions that still run."""
        until = time.monotonic() + _CLOSING_SECONDS
        for future, (_, _, thread) in list(self._started.items()):
            if not future.done():  # futures of abandoned functions are done
                thread.join(max(0.0, until - time.monotonic()))


def any_left_behind() -> bool:
    """Returns whether an abandoned Python function of this process still runs."""
    return any(thread.daemon and thread.name in (NAME, "reward") for thread in threading.enumerate())
