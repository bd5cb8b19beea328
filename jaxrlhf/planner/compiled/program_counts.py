"""Counts of a compiled program's work on one of its devices, by part of the program.

    counts = ProgramCounts(parts={"prefill": Counts(...)}, loops=(Loop("while.3", "decode", None, ...),))
    counts.total(rounds=255).flops

Operations are those of matrix products: a multiplication and an addition are two. Bytes are those that kernels read
from memory and write to it; a fusion is one kernel, whose intermediate results are not in memory.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrlhf.planner.compiled.hlo import DeviceGroups

_PER_DEVICE_OF_GROUP = {
    # bytes that a device sends in a ring of n, per byte of its operand
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1.0 if n > 1 else 0.0,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation."""

    kind: str
    """'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute' ..."""
    dtype: str
    """Element type, as in HLO: 'bf16'."""
    bytes: float
    """Bytes of each device's operand."""
    groups: DeviceGroups
    """Devices by their positions in the mesh; of `collective-permute`, pairs of a source and a target."""

    @property
    def group_size(self) -> int:
        """Devices of a group."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends, if groups are rings."""
        if self.kind == "collective-permute":
            return self.bytes if any(source != target for source, target in self.groups) else 0.0
        return self.bytes * _PER_DEVICE_OF_GROUP[self.kind](self.group_size)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of work, which can be added and multiplied."""

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    """Kernels that are started, those of collectives included."""
    collectives: Mapping[Collective, float] = dataclasses.field(default_factory=dict)
    """Collective -> how many times it runs."""

    def __add__(self, other: "Counts") -> "Counts":
        collectives = dict(self.collectives)
        for collective, count in other.collectives.items():
            collectives[collective] = collectives.get(collective, 0.0) + count
        flops, bytes_, kernels = self.flops + other.flops, self.bytes + other.bytes, self.kernels + other.kernels
        return Counts(flops, bytes_, kernels, collectives)

    def __mul__(self, times: float) -> "Counts":
        collectives = {collective: count * times for collective, count in self.collectives.items() if count * times}
        return Counts(self.flops * times, self.bytes * times, self.kernels * times, collectives)

    def wire_bytes(self) -> float:
        """Bytes that each device sends in collectives."""
        return sum(count * collective.wire_bytes for collective, count in self.collectives.items())


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """Counts of a program, or of a round of one of its loops."""

    parts: Mapping[str, Counts]
    """Label -> counts outside loops."""
    loops: tuple["Loop", ...] = ()
    """In the order in which they run."""
    unknown: tuple[str, ...] = ()
    """Calls of libraries whose operations are not known and not counted, each once."""

    def total(self, *, rounds: float | None = None) -> Counts:
        """Counts of the whole program, loops times their rounds.

        Args:
            rounds: The number for loops that end when a condition says so.

        Raises:
            ValueError: There are such loops, and `rounds` is None.
        """
        return sum(self.by_label(rounds=rounds).values(), Counts())

    def by_label(self, *, rounds: float | None = None) -> dict[str, Counts]:
        """Label -> counts, loops times their rounds, as in `total`."""
        sums = dict(self.parts)
        for loop in self.loops:
            times = loop.times(rounds)
            for label, counts in loop.round.by_label(rounds=rounds).items():
                sums[label] = sums.get(label, Counts()) + counts * times
        return sums

    def map(self, change: Callable[[Counts], Counts]) -> "ProgramCounts":
        """The same with all counts changed."""
        loops = tuple(dataclasses.replace(loop, round=loop.round.map(change)) for loop in self.loops)
        return ProgramCounts({label: change(counts) for label, counts in self.parts.items()}, loops, self.unknown)

    def to_tree(self) -> dict[str, Any]:
        """Converts to plain data."""
        return {
            "parts": {label: _counts_tree(counts) for label, counts in self.parts.items()},
            "loops": [{**vars(loop), "round": loop.round.to_tree()} for loop in self.loops],
            "unknown": list(self.unknown),
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "ProgramCounts":
        """The inverse of `to_tree`, also of a tree that went through JSON."""
        return cls(
            {label: _counts_of(counts) for label, counts in tree["parts"].items()},
            tuple(Loop(**{**loop, "round": cls.from_tree(loop["round"])}) for loop in tree["loops"]),
            tuple(tree["unknown"]),
        )


@dataclasses.dataclass(frozen=True)
class Loop:
    name: str
    """Name of its instruction."""
    label: str
    trips: int | None
    """Number of rounds. None means until a condition no longer holds."""
    round: ProgramCounts
    """One round, its condition included."""

    def times(self, rounds: float | None) -> float:
        if self.trips is not None:
            return self.trips
        if rounds is None:
            raise ValueError(
                f"rounds: must be given for loops that end when a condition says so. Got None for {self.name!r} in "
                f"{self.label!r}. Give the number of its rounds."
            )
        return rounds


def _counts_tree(counts: Counts) -> dict[str, Any]:
    return {**vars(counts), "collectives": [[vars(c), count] for c, count in counts.collectives.items()]}


def _counts_of(tree: dict[str, Any]) -> Counts:
    collectives = {
        Collective(**{**fields, "groups": tuple(map(tuple, fields["groups"]))}): count
        for fields, count in tree["collectives"]
    }
    return Counts(**{**tree, "collectives": collectives})
