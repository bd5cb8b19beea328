"""Counts of a compiled program's work on one of its devices, by part of the program.

    counts = ProgramCounts(parts={"prefill": Counts(...)}, loops=(Loop("while.3", "decode", None, ...),))
    counts.total(rounds=255).flops  # of loops that end when a condition says so

Operations are those of matrix products: a multiplication and an addition are two. Bytes are those that kernels read
from memory and write to it; a fusion is one kernel, whose intermediate results are not in memory.
"""

import dataclasses
from collections.abc import Mapping

from jaxrlhf.config.reading import FORM, to_tree

_PER_DEVICE_OF_GROUP = {
    # bytes that a device sends in a ring of n, per byte of its operand
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1.0,
    "collective-permute": lambda n: 1.0,
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
    groups: str
    """The groups of devices that communicate among themselves, as HLO writes them: 'replica_groups={{0,1},{2,3}}'."""

    def wire_bytes(self, group_size: int) -> float:
        """Bytes that each device of a group sends, as one of a ring, or to one other by `collective-permute`."""
        return self.bytes * _PER_DEVICE_OF_GROUP[self.kind](group_size)


_LISTED = (tuple[tuple[Collective, float], ...], dict, lambda counts: [[to_tree(c), n] for c, n in counts.items()])
"""A mapping of collectives as plain data."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of work, which can be added and multiplied."""

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    """Kernels that are started, those of collectives included."""
    collectives: Mapping[Collective, float] = dataclasses.field(default_factory=dict, metadata={FORM: _LISTED})
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


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """Counts of a program, or of a round of one of its loops."""

    parts: Mapping[str, Counts]
    """Label -> counts outside loops."""
    loops: tuple["Loop", ...] = ()
    """In the order in which they run."""
    unknown: tuple[str, ...] = ()
    """Calls of libraries whose operations are not known and not counted, each once."""

    def total(self, *, rounds: float = 1) -> Counts:
        """Counts of the whole program, loops times their rounds: `rounds` if they end when a condition says so."""
        return sum(self.by_label(rounds=rounds).values(), Counts())

    def by_label(self, *, rounds: float = 1) -> dict[str, Counts]:
        """Label -> counts, loops times their rounds, as in `total`."""
        sums = dict(self.parts)
        for loop in self.loops:
            times = rounds if loop.trips is None else loop.trips
            for label, counts in loop.round.by_label(rounds=rounds).items():
                sums[label] = sums.get(label, Counts()) + counts * times
        return sums


@dataclasses.dataclass(frozen=True)
class Loop:
    name: str
    """Name of its instruction."""
    label: str
    trips: int | None
    """Number of rounds. None means until a condition no longer holds."""
    round: ProgramCounts
    """One round, its condition included."""
