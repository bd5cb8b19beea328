"""Values as error messages show them: whole if short, and never a screenful."""

import reprlib
from typing import Any

_ABBREVIATED = reprlib.Repr()
_ABBREVIATED.maxlong = 100
_ABBREVIATED.maxstring = _ABBREVIATED.maxother = 200  # a path stays whole


def brief(value: Any) -> str:
    """A value as Python writes it, long ones without their middle.

    >>> brief("actor")
    "'actor'"
    >>> len(brief("actor" * 1000))
    200
    """
    return _ABBREVIATED.repr(value)


def cut(text: str) -> str:
    """The start of a text, for messages of others that repeat what they got."""
    return text if len(text) <= 300 else f"{text[:300]}..."
