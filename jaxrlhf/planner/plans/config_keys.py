"""The keys of a config that set the numbers of rows of a graph, for error messages."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class RowCountKeys:
    """A part of a run, and the keys of its config that set its rows."""

    part: str = ""
    """`the evaluation`."""
    rows: str = "batch_size"
    """The key that sets the number of rows of the part."""
    counts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """A number of rows -> the key that sets it, if that is another one."""
    settings: Any = None
    """The config's `settings`. None if the part has settings of its own."""

    def where(self, call: str) -> str:
        """A call of the plan, and the part of the run that it is in."""
        return f"plan.calls.{call}" + (f", in {self.part}" if self.part else "")

    def key(self, num_rows: int) -> str:
        """The key that sets this number of rows."""
        return self.counts.get(num_rows, self.rows)

    def mini_batches(self, update: Any) -> str:
        """The key that sets the mini-batches of the settings `update`. Empty if not known."""
        paths = paths_of(self.settings, lambda value: value is update)
        return f"{paths[0]}.mini_batches" if len(paths) == 1 else ""


BATCH_SIZE = RowCountKeys()
"""The default."""


def paths_of(settings: Any, is_wanted: Callable[[Any], bool], path: str = "settings") -> list[str]:
    """The paths of the wanted values in nested settings."""
    if is_wanted(settings):
        return [path]
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        return []
    fields = dataclasses.fields(settings)
    return [p for f in fields for p in paths_of(getattr(settings, f.name), is_wanted, f"{path}.{f.name}")]


def count_keys(settings: Any, counts: set[int]) -> dict[int, str]:
    """Number of rows -> the `batch_size` under `settings` with this value, if it is the only one."""
    found = {count: paths_of(settings, lambda x, count=count: type(x) is int and x == count) for count in counts}
    named = {count: [p for p in paths if p.endswith(".batch_size")] for count, paths in found.items()}
    return {count: paths[0] for count, paths in named.items() if len(paths) == 1}
