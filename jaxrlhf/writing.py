"""Writing to disks that may be full or gone: one error, which names the path; and files that are whole or not there."""

import contextlib
import os
import re
import threading
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path`, under which to write what takes its place in one move when the block has ended. No
    reader and no kill ever finds half of it.

    Raises:
        UnwritableError: It cannot be written. The file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with writing(path):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by a text; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def _what(error: Exception) -> str:
    """What the system said, of which libraries write much."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := re.search(r"\bos[ _]error\D{1,8}(\d+)", str(error), re.IGNORECASE)):
        number = int(told[1])
    if number is not None:
        return f"'{os.strerror(number)}'"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200].rstrip('.')}"
