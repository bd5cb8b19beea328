"""Warnings of JAX's compilation cache, which come for every program, shown once for each kind."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_COMPLAINT = re.compile(r"Error (reading|writing) persistent compilation cache entry for '[^']*': (.*)", re.DOTALL)


@contextlib.contextmanager
def complaints_said_once(say: Callable[[str], None]) -> Iterator[None]:
    """Shows only the first warning about reading from the cache and the first about writing to it, by `say`."""
    show, said = warnings.showwarning, set[str]()

    def show_or_say(message: Warning | str, *rest: Any, **keywords: Any) -> None:
        complaint = _COMPLAINT.match(str(message))
        if complaint is None:
            show(message, *rest, **keywords)
        elif complaint[1] not in said:
            said.add(complaint[1])
            say(
                f"Note: {complaint[1]} the compilation cache failed, and programs are compiled anew ({complaint[2]}). "
                "This is said once. Make room in compilation_cache, or remove the folder."
            )

    warnings.showwarning = show_or_say
    try:
        yield
    finally:
        warnings.showwarning = show
