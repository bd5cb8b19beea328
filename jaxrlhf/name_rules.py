"""Names of roles, datasets, runs, metrics and files that configs, data and model folders bring: what they may be.

A name becomes a folder, a file, a key of a config or a tag of a tracker. None leads out of the folder that it is put
in, and none is taken apart where names are joined by `.`, `/` or `#`.
"""

import re

from jaxrlhf.brief import brief

MAX_BYTES = 200
"""A file name has 255, and there may be a date or a suffix after it."""
_WORD = re.compile(r"\w[\w-]*")


def check_name(name: str, where: str) -> None:
    """A role or a dataset can have this name: it stands in keys, in the names of calls and metrics, and is a folder's.

    Raises:
        ValueError: It cannot.
    """
    if not _WORD.fullmatch(name) or len(name.encode()) > MAX_BYTES:
        usable = re.sub(r"[^\w-]+", "_", name).strip("_-")[:40] or "actor"
        raise ValueError(
            f"{where}: a name must be of letters, digits, _ and -, at most {MAX_BYTES} bytes. Got {brief(name)}. Write "
            f"{usable}, say."
        )


def check_file_name(name: str, where: str, *, example: str) -> None:
    """A file or folder of this name lies in the folder that it is put in, or looked for.

    Raises:
        ValueError: It would not, or not on every system.
    """
    plain = _is_part(name) and not name.startswith((".", "-")) and not set(name) & set(':*?"<>|')
    if not plain or len(name.encode()) > MAX_BYTES:
        raise ValueError(
            f"{where}: must be a plain file name, such as {example!r}. Got {brief(name)}. Leave out slashes, control "
            f"characters and a leading dot or dash; keep to {MAX_BYTES} bytes."
        )


def check_metric_name(name: str) -> None:
    """A metric can have this name, in parts between slashes.

    Raises:
        ValueError: It cannot.
    """
    if not all(_is_part(part) for part in name.split("/")) or len(name.encode()) > MAX_BYTES:
        raise ValueError(
            f"Metric {brief(name)}: a name must be group/name, of characters that can be printed, without empty parts, "
            f". and .., and of at most {MAX_BYTES} bytes. Rename it."
        )


def _is_part(name: str) -> bool:
    """Whether a text is one part of a path, and no way to another folder."""
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\")
