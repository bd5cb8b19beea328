"""The manifest of a checkpoint: sizes and checksums of its files, which tell whether it is whole.

Orbax checks metadata and the index of arrays, but not the bytes of arrays, so that training would use a flipped bit or
a truncated file. CRC-32 finds damage; it does not protect against attackers.
"""

import concurrent.futures
import json
import os
import zlib
from pathlib import Path

MANIFEST = "manifest.json"
TEMPORARY = "orbax-checkpoint-tmp"
"""The name of a checkpoint that is being written begins with its number, a dot and this."""
_STAMPED = "_CHECKPOINT_METADATA"
"""Orbax writes the time of the commit into this file after the manifest is written."""
_CHUNK_BYTES = 1 << 22
_MAX_READERS = 8


def write_manifest(folder: Path) -> None:
    """Writes the manifest of all files in a folder, and returns when it is on the disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in (MANIFEST, _STAMPED))
    checksums = _checksums(paths)
    files = {str(path.relative_to(folder)): entry for path, entry in zip(paths, checksums, strict=True)}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"crc32": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def find_damage(folder: Path) -> str | None:
    """The first damage of a checkpoint; None if it is whole, or was written without a manifest. Reads all files."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["crc32"]
        wanted = {folder / name: (int(size), int(checksum)) for name, (size, checksum) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is garbled"
    try:
        json.loads((folder / _STAMPED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{_STAMPED} is missing"
    except ValueError:
        return f"{_STAMPED} is garbled"
    for path, (size, _) in wanted.items():
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes instead of {size}"
    try:
        checksums = _checksums(list(wanted))
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    for (path, before), now in zip(wanted.items(), checksums, strict=True):
        if before != now:
            return f"{path.relative_to(folder)} is garbled: its checksum differs"
    return None


def _checksums(paths: list[Path]) -> list[tuple[int, int]]:
    """(size, CRC-32) of files. zlib releases the GIL, so several files are read at a time."""
    with concurrent.futures.ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum
