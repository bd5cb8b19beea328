"""Rules for names of roles, datasets, runs, metrics and files in configs, data and model folders.

A name becomes a folder, a file, a key of a config or a tag of a tracker. No name may lead out of its folder, or contain
the separators `.`, `/` and `#` of joined names.
"""

import re

from jaxrlhf.brief import brief

MAX_BYTES = 200
"""A file name can have 255, and a date or a suffix may be added."""
_WORD = re.compile(r"\w[\w-]*")


def check_name(name: str, where: str) -> None:
    """Raises ValueError unless a role or dataset may have this name, a part of keys, calls, metrics and paths."""
    if not _WORD.fullmatch(name) or len(name.encode()) > MAX_BYTES:
        usable = re.sub(r"[^\w-]+", "_", name).strip("_-")[:40] or "actor"
        raise ValueError(
            f"{where}: a name must be of letters, digits, _ and -, at most {MAX_BYTES} bytes. Got {brief(name)}. Write "
            f"{usable}, say."
        )


def check_file_name(name: str, where: str, *, example: str) -> None:
    """Raises ValueError unless a file or folder of this name is inside of its folder, on every system."""
    plain = _is_part(name) and not name.startswith((".", "-")) and not set(name) & set(':*?"<>|')
    if not plain or len(name.encode()) > MAX_BYTES:
        raise ValueError(
            f"{where}: must be a plain file name, such as {example!r}. Got {brief(name)}. Leave out slashes, control "
            f"characters and a leading dot or dash; keep to {MAX_BYTES} bytes."
        )


def check_metric_name(name: str) -> None:
    """Raises ValueError unless a metric may have this name, with parts between slashes."""
    if not all(_is_part(part) for part in name.split("/")) or len(name.encode()) > MAX_BYTES:
        raise ValueError(
            f"Metric {brief(name)}: a name must be group/name, of characters that can be printed, without empty parts, "
            f". and .., and of at most {MAX_BYTES} bytes. Rename it."
        )


def _is_part(name: str) -> bool:
    """Returns whether a text is one part of a path that does not lead to another folder."""
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & set("/\\")
