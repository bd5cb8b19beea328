"""The "Did you mean" at the end of an error message."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence, with a leading space, that suggests the known word nearest to `word`; empty if none is near.

    >>> did_you_mean("acter", ["actor", "critic"])
    " Did you mean 'actor'?"
    >>> did_you_mean("zebra", ["actor", "critic"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
