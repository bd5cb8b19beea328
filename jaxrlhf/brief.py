"""Parts of error messages: values, shortened if they are long, and the known word nearest to a wrong one."""

import difflib
import reprlib
from collections.abc import Iterable
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence, with a leading space, that suggests the known word nearest to `word`; empty if none is near.

    >>> did_you_mean("acter", ["actor", "critic"])
    " Did you mean 'actor'?"
    >>> did_you_mean("zebra", ["actor", "critic"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
