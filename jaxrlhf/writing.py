"""Writing to disks that may be full or gone: one error, which names the path."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


class UnwritableError(RuntimeError):
    """A file or folder that cannot be written."""


@contextlib.contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Raises what goes wrong inside as an `UnwritableError` that names a path.

    Args:
        also: Errors, beside `OSError`, by which a library tells that it cannot write.
    """
    try:
        yield
    except (OSError, *also) as error:
        raise UnwritableError(
            f"{path}: must be writable. Got {_what(error)}. Make room, or mend the file system."
        ) from error


def _what(error: Exception) -> str:
    """What the system said, of which libraries write much."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := re.search(r"\bos[ _]error\D{1,8}(\d+)", str(error), re.IGNORECASE)):
        number = int(told[1])
    if number is not None:
        return f"'{os.strerror(number)}'"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200].rstrip('.')}"
