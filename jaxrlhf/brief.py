"""Values in error messages, shortened if they are long."""

import reprlib
from typing import Any

_ABBREVIATED = reprlib.Repr()
_ABBREVIATED.maxlong = 100
_ABBREVIATED.maxstring = _ABBREVIATED.maxother = 200  # a path stays whole


def brief(value: Any) -> str:
    """The `repr` of a value, without its middle if it is long.

    >>> brief("actor")
    "'actor'"
    >>> len(brief("actor" * 1000))
    200
    """
    return _ABBREVIATED.repr(value)


def cut(text: str) -> str:
    """The start of a text, for error messages of libraries that contain their input."""
    return text if len(text) <= 300 else f"{text[:300]}..."
