"""Numbers in text, as the answers to problems: after a marker, in a box, or simply the last one.

    1,072.50   -3   .5   $12   3/4   \\frac{3}{4}   50%

They are exact fractions, so 0.75 and 3/4 are equal. Currency and percent signs and units do not count: 50% is 50.
"""

import re
from collections.abc import Callable
from fractions import Fraction

_WHOLE = r"[0-9]{1,400}"  # bounded, since a model may repeat a digit many times
_PLAIN = rf"(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+|{_WHOLE})(?:\.{_WHOLE})?|\.{_WHOLE}"
_FRACTION = rf"\\[dt]?frac\s*\{{(?P<above>{_WHOLE})\}}\s*\{{(?P<below>{_WHOLE})\}}"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[+-])?\$?(?<![A-Za-z_0-9])"
    rf"(?:{_FRACTION}|(?P<plain>{_PLAIN})(?:/(?P<over>{_WHOLE}))?)"
    r"(?![0-9]|[.,/][0-9]|[eE][+-]?[0-9])"
)
_BESIDE_A_NUMBER = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[!,;:() \[\]]|[*]")


def starting_number(text: str) -> Fraction | None:
    """The number at the start of `text`."""
    match = _NUMBER.match(_plain_signs(text).lstrip(" \t\r\n("))
    return _value(match) if match else None


def last_number(text: str) -> Fraction | None:
    """The last number anywhere in `text`."""
    numbers = [value for match in _NUMBER.finditer(_plain_signs(text)) if (value := _value(match)) is not None]
    return numbers[-1] if numbers else None


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed{}."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest if box else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:end]
    return None


def boxed_number(text: str) -> Fraction | None:
    r"""The number in the last \boxed{}."""
    content = last_box(text)
    return None if content is None else starting_number(content)


def marked_number(text: str, marker: str) -> Fraction | None:
    """The number right after the last `marker`."""
    _, found, rest = text.rpartition(marker)
    return starting_number(rest) if found else None


def any_number(text: str, marker: str) -> Fraction | None:
    """The number after the last marker, or else in the last box, or else the last one."""
    if marker in text:
        return marked_number(text, marker)
    return boxed_number(text) if "\\boxed{" in text else last_number(text)


FINDERS: dict[str, Callable[[str, str], Fraction | None]] = {
    "marker": marked_number,
    "boxed": lambda text, marker: boxed_number(text),
    "last": lambda text, marker: last_number(text),
    "any": any_number,
}
"""Place of an answer -> function of the text and the marker that finds it."""


def _plain_signs(text: str) -> str:
    """The text without typesetting around numbers."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$").replace("$-", "-$").replace("$ ", "$")
    return _BESIDE_A_NUMBER.sub("", text)


def _value(match: re.Match[str]) -> Fraction | None:
    parts = match.groupdict()
    above = Fraction((parts["plain"] or parts["above"]).replace(",", ""))
    below = Fraction(parts["over"] or parts["below"] or 1)
    sign = -1 if parts["sign"] == "-" else 1
    return sign * above / below if below else None
