"""The colors of roles and their calls, the same in every picture and page."""

import itertools
from collections.abc import Iterable, Mapping

_HUES = {
    "actor": ("#3182bd", "#6baed6", "#9ecae1", "#c6dbef"),
    "critic": ("#e6550d", "#fd8d3c", "#fdae6b", "#fdd0a2"),
    "reference": ("#31a354", "#74c476", "#a1d99b", "#c7e9c0"),
    "reward": ("#756bb1", "#9e9ac8", "#bcbddc", "#dadaeb"),
}
"""The roles of PPO have hues of their own, so that pictures of different runs can be compared. Each has four shades,
dark to light: those of matplotlib's tab20c and tab20b."""
_MORE_HUES = (
    ("#843c39", "#ad494a", "#d6616b", "#e7969c"),
    ("#393b79", "#5254a3", "#6b6ecf", "#9c9ede"),
    ("#637939", "#8ca252", "#b5cf6b", "#cedb9c"),
    ("#7b4173", "#a55194", "#ce6dbd", "#de9ed6"),
)
_COMPUTE = ("#8c6d31", "#bd9e39", "#e7ba52", "#e7cb94")
"""The hue of calls that belong to no role."""
GREY, PALE, FAINT = "#9a9a9a", "#dddddd", "#f5f5f5"
"""Borders, what moves weights and data, and waits."""


def role_colors(roles: Iterable[str]) -> dict[str, str]:
    """Role -> its color, the darkest of its hue. '' stands for calls that belong to no role."""
    return {role: shades[0] for role, shades in _shades(roles).items()}


def call_colors(kinds: Mapping[str, str]) -> dict[str, str]:
    """Call -> color, in alphabetical order: a hue for each role, a shade for each of its calls.

    `kinds` is call -> kind, with names as in 'actor.generate', without the ordinal.
    """
    role_of = {name: "" if kinds[name] == "compute" else name.partition(".")[0] for name in sorted(kinds)}
    shades = {role: itertools.cycle(hue) for role, hue in _shades(role_of.values()).items()}
    return {name: next(shades[role]) for name, role in role_of.items()}


def _shades(roles: Iterable[str]) -> dict[str, tuple[str, ...]]:
    more = itertools.cycle(_MORE_HUES)
    others = [role for role in sorted(set(roles)) if role and role not in _HUES]
    return {"": _COMPUTE, **_HUES} | {role: next(more) for role in others}
