"""Threads in which Python functions run beside the devices, and which nobody has to wait for."""

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
"""The longest that closing waits for what still runs."""


class FunctionAbandonedError(RuntimeError):
    """A Python function did not return, and the run that was to stop did not wait for it."""


class FunctionThreads:
    """Runs Python functions, a few at a time, each in a daemon thread: Python cannot end a thread, but it can leave it
    behind."""

    def __init__(self) -> None:
        self._room = threading.Semaphore(_AT_A_TIME)
        self._started: dict[concurrent.futures.Future[object], tuple[str, float, threading.Thread]] = {}

    def submit(self, name: str, work: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Starts `work`, which does not raise, and gives what it returns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            with self._room:
                result = work()
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was abandoned meanwhile
                future.set_result(result)
            self._started.pop(future, None)  # pyright: ignore[reportArgumentType, reportCallIssue]

        thread = threading.Thread(target=run, name=NAME, daemon=True)
        self._started[future] = (name, time.monotonic(), thread)  # pyright: ignore[reportArgumentType]
        thread.start()
        return future

    def abandon(self, seconds: float, outcome: Callable[[Exception], object]) -> None:
        """Leaves functions to themselves that have run for so long.

        Args:
            outcome: What their futures give, from an error that names the function.
        """
        for future, (name, started, _) in list(self._started.items()):
            waited = time.monotonic() - started
            if waited >= seconds and not future.done():
                error = FunctionAbandonedError(
                    f"{brief(name)} had not returned after {waited:.0f} seconds, and was not waited for."
                )
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it returned just now
                    future.set_result(outcome(error))

    def close(self) -> None:
        """Waits a little for what still runs."""
        until = time.monotonic() + _CLOSING_SECONDS
        for future, (_, _, thread) in list(self._started.items()):
            if not future.done():  # nobody waits for what was abandoned
                thread.join(max(0.0, until - time.monotonic()))


def any_left_behind() -> bool:
    """True where a Python function of this process still runs that nobody waits for."""
    return any(thread.daemon and thread.name in (NAME, "reward") for thread in threading.enumerate())
