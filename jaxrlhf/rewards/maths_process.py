"""What the process of `maths_answer` runs: math-verify, within limits. It imports nothing of the package.

A time limit takes signals, and thus a main thread; and arithmetic on huge numbers heeds no signal, so that only the end
of its process ends it.
"""

import json
import logging
import resource
import signal
import sys
from types import FrameType
from typing import NoReturn

import math_verify

MEMORY_BYTES = 4 * 2**30


class TookTooLong(BaseException):
    """Passes through the `except Exception` of libraries."""


def is_right(answer: str, given: str) -> bool:
    """True if what a completion gives as its answer equals that of the row, as mathematics."""
    # In a box, LaTeX is read without dollars; outside of it, plain expressions such as sqrt(2).
    right = [each for text in (rf"\boxed{{{answer}}}", answer) for each in _parse(text)]
    return math_verify.verify(right, _parse(given), timeout_seconds=None)


def _parse(text: str) -> list:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def serve() -> None:
    """Replies to requests, one JSON object a line, until there are no more."""
    signal.signal(signal.SIGALRM, _stop)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            right = is_right(request["answer"], request["given"])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (TookTooLong, MemoryError, RecursionError):
            right = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"right": right}), flush=True)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise TookTooLong


if __name__ == "__main__":
    logging.disable()  # what could not be read, and that there is no time limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve()
