"""Writing files: one error, which names the path, for full or failed disks; and atomic replacement."""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path


class UnwritableError(RuntimeError):
    """A file or folder that cannot be written."""


@contextlib.contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Raises an `OSError` inside of the block, or one of `also`, as an `UnwritableError` that names a path."""
    try:
        yield
    except (OSError, *also) as error:
        raise UnwritableError(
            f"{path}: must be writable. Got {_what(error)}. Make room, or mend the file system."
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which replaces it in one move at the end of the block. Readers find the
    old file or the new one, also after a kill. After an UnwritableError the old one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with writing(path):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def partial_folder(path: Path) -> Path:
    """The name beside `path` under which a folder is written until all of it is there."""
    return path.with_name(f".{path.name}.partial")


def begin_folder(path: Path) -> None:
    """Makes the empty folder `partial_folder(path)`. What a killed writer left there is removed."""
    with writing(path):
        shutil.rmtree(partial_folder(path), ignore_errors=True)
        partial_folder(path).mkdir(parents=True)


def finish_folder(path: Path) -> None:
    """Gives a written folder its name in one move. Where there is an older one of that name, a kill at this
    moment leaves none."""
    with writing(path):
        if path.exists():
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
            os.replace(partial_folder(path), path)
            shutil.rmtree(old)
        else:
            os.replace(partial_folder(path), path)


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file by a text; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def _what(error: Exception) -> str:
    """The system's error message, without the long text that libraries add."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := re.search(r"\bos[ _]error\D{1,8}(\d+)", str(error), re.IGNORECASE)):
        number = int(told[1])
    if number is not None:
        return f"'{os.strerror(number)}'"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200].rstrip('.')}"
