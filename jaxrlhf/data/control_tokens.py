"""Marks control tokens, such as <|im_end|>, in the text of rows, so that they are encoded as text.

A mark is a character that the text does not have otherwise, inserted after the first character of each control token.
It survives string formatting and chat templates. Control tokens that a template writes are not marked.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_MARKS = range(0x20000, 0x2A6E0)
"""Rare Chinese characters: printable, without case, and not white space."""


@dataclasses.dataclass(frozen=True)
class MarkedText:
    """A text with marked control tokens."""

    marked: str
    mark: str = ""
    """The mark; empty if no control token is marked."""

    @property
    def plain(self) -> str:
        """The text without marks."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked


def control_pattern(tokens: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest control token at each place, as a group; None without control tokens.

    Control tokens of a single character are left out: they are ordinary text.
    """
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def mark_tokens(value: Any, tokens: re.Pattern[str] | None, *, avoid: str = "") -> tuple[Any, str]:
    """Text, or lists and mappings of texts, with every control token marked, and the mark, which the text `avoid` does
    not contain; unchanged, and '', if there are none."""
    if tokens is None or not any(tokens.search(text) for text in _texts(value)):
        return value, ""
    used = set(avoid).union(*_texts(value))
    mark = next(char for char in map(chr, _MARKS) if char not in used)
    return _marked(value, tokens, mark), mark


def mark_text(text: str, tokens: re.Pattern[str] | None) -> MarkedText:
    """A text with every control token in it marked."""
    return MarkedText(*mark_tokens(text, tokens))


def _marked(value: Any, tokens: re.Pattern[str], mark: str) -> Any:
    if isinstance(value, str):
        return tokens.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
    if isinstance(value, Mapping):
        return {_marked(key, tokens, mark): _marked(item, tokens, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, tokens, mark) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
