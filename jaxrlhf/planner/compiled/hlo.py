"""Optimized HLO, XLA's programs as text: instructions, shapes, and which devices talk to one another.

    %fusion.3 = f32[256,128]{1,0} fusion(%param.1, %dot.2), kind=kLoop, calls=%fused_computation.3, metadata={...}

A module is computations, lists of such instructions; one of them is the entry, and instructions call others. Only what
counting needs is read.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

_BITS = {
    "pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128,
    "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4,
    **{f"{kind}{bits}": bits for kind in "suf" for bits in (8, 16, 32, 64)},
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+[a-z]*)?)\[((?:<=)?[\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")

DeviceGroups = tuple[tuple[int, ...], ...]
"""Groups of devices that communicate among themselves, by their positions in the mesh."""


class HloError(ValueError):
    """A text that is not HLO as this module knows it."""


@dataclasses.dataclass(frozen=True)
class Shape:
    dtype: str
    """Element type, as in HLO: 'f32', 'bf16', 'pred'."""
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.size * bits_of(self.dtype) / 8


def bits_of(dtype: str) -> int:
    """Bits of an element."""
    if dtype not in _BITS:
        if match := re.match(r"f(\d+)e", dtype):
            return int(match[1])  # f8e4m3fn
        raise HloError(f"HLO: unknown element type {dtype!r}. Known: {', '.join(_BITS)}.")
    return _BITS[dtype]


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    name: str
    op: str
    """The operation, without the `-start` of an asynchronous one."""
    type_text: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: str
    """All that follows the operands."""
    is_root: bool = False

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of its result; several for a tuple."""
        found = _SHAPE.findall(self.type_text)
        return tuple(Shape(dtype, tuple(int(n.strip("<=")) for n in dims.split(",") if n)) for dtype, dims in found)

    @property
    def bytes(self) -> float:
        """Bytes of its result."""
        return sum(shape.bytes for shape in self.shapes)

    @functools.cached_property
    def op_name(self) -> str:
        """Its origin in the Python program: 'jit(program)/attention/dot_general'. Empty if XLA made it."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    def text(self, pattern: str) -> str | None:
        """The value of an attribute: the first group of a regular expression. None if that does not match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def numbers(self, pattern: str) -> tuple[int, ...]:
        """The numbers in an attribute."""
        return tuple(int(n) for n in re.findall(r"\d+", self.text(pattern) or ""))

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names: `calls`, `body`."""
        return self.text(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = self.text(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            return tuple(name.strip().lstrip("%") for name in listed.split(","))
        return tuple(name for side in ("true", "false") if (name := self.called(f"{side}_computation")))


@dataclasses.dataclass(frozen=True)
class Computation:
    instructions: tuple[HloInstruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, HloInstruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[HloInstruction, ...]]:
        """HloInstruction -> the instructions that use its result."""
        found: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @property
    def root(self) -> HloInstruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> tuple[HloInstruction, ...]:
        """The parameters, in order."""
        found = [i for i in self.instructions if i.op == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.operands[0])))

    def operand(self, instruction: HloInstruction, index: int) -> HloInstruction:
        return self.by_name[instruction.operands[index]]


@dataclasses.dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: str
    num_devices: int
    """Devices that run it together."""


def parse(text: str) -> Module:
    """The module that a text describes, as `compiled.as_text()` gives it.

    Raises:
        HloError: It has no entry computation, or a line cannot be read.
    """
    header, _, _ = text.partition("\n")
    computations: dict[str, Computation] = {}
    entry, name = None, None
    lines: list[HloInstruction] = []
    for line in text.splitlines():
        if name is None:
            match = _COMPUTATION.match(line)
            if match and "->" in line:
                name, lines = match[2], []
                entry = name if match[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(tuple(lines))
            name = None
        elif match := _INSTRUCTION.match(line):
            lines.append(_instruction(match[2], line[match.end() :], is_root=bool(match[1])))
    if entry is None:
        raise HloError(f"HLO: must have an entry computation. Got a text that begins with {header[:80]!r}.")
    partitions, replicas = _PARTITIONS.search(header), _REPLICAS.search(header)
    num_devices = (int(partitions[1]) if partitions else 1) * (int(replicas[1]) if replicas else 1)
    return Module(computations, entry, num_devices)


def _instruction(name: str, rest: str, *, is_root: bool) -> HloInstruction:
    """An instruction from what follows its name: type, operation, operands in parentheses, attributes."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if end <= 0 or opening < 0:
        raise HloError(f"HLO: cannot read the instruction {name!r}. Got {(type_text + rest)[:120]!r}.")
    op, closing = rest[:opening], _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = (inside,) if op == "parameter" else () if op == "constant" else tuple(_NAME.findall(inside))
    if op != "async-start":
        op = op.removesuffix("-start")
    return HloInstruction(name, op, type_text, operands, rest[closing + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise HloError(f"HLO: a parenthesis must be closed. Got {text[opening : opening + 120]!r}.")


def scopes(op_name: str) -> Iterator[str]:
    """The named scopes and functions of an `op_name`, outermost first, without what JAX wraps around them.

    >>> list(scopes("jit(program)/transpose(jvp(attention))/dot_general"))
    ['jit(program)', 'attention', 'dot_general']
    """
    for part in op_name.split("/"):
        while match := re.fullmatch(r"(?:jvp|transpose|vmap)\((.*)\)", part):
            part = match[1]
        yield part


def device_groups(attributes: str, num_devices: int) -> DeviceGroups:
    """The groups of a collective, in whatever form they are written.

        replica_groups={{0,1},{2,3}}                                        listed; {} is all devices
        replica_groups=[2,4]<=[8]T(1,0)                                     as a transposed grid of numbers
        replica_groups=mesh['a'=2,'b'=4], device_ids=([8]T(0)) {'a'}        along axes of a mesh, or parts of an axis
        source_target_pairs={{0,1},{1,0}}                                   from one device to another

    Raises:
        HloError: They are in none of these forms.
    """
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return _listed(match[1])
    if match := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _listed(match[1]) or (tuple(range(num_devices)),)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _as_groups(_grid(match[2]).reshape(_integers(match[1])))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", attributes):
        return _along_axes(match[1], match[2], match[3])
    raise HloError(f"HLO: a collective must name its groups of devices. Got {attributes[:200]!r}.")


def _listed(text: str) -> DeviceGroups:
    return tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _grid(text: str) -> np.ndarray:
    """Numbers from 0 on in a grid, maybe with its dims in another order: '[2,4]T(1,0)'."""
    dims, _, order = text.partition("T")
    shape = _integers(dims.strip("[]"))
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_integers(order.strip("()"))) if order else grid


def _as_groups(rows: np.ndarray) -> DeviceGroups:
    return tuple(tuple(row) for row in rows.tolist())


def _along_axes(mesh: str, device_ids: str | None, chosen: str) -> DeviceGroups:
    """Groups of the devices that differ only along some axes, or parts of axes: 'a':(2)4 are the coordinates of `a`
    divided into 2 parts, of which each is divided into 4, and which of these 4."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    ]
    dims: list[int] = []
    position: dict[tuple[str, int], list[int]] = {}  # (axis, parts before) -> dims that the part of the axis is made of
    for name, size in sizes.items():
        inner = {cut for axis, before, count in wanted if axis == name for cut in (before, before * count)}
        cuts = sorted({1, size, *inner})
        first = len(dims)
        dims += [after // before for before, after in itertools.pairwise(cuts)]
        for axis, before, count in wanted:
            if axis == name:
                parts = range(cuts.index(before), cuts.index(before * count))
                position[name, before] = [first + part for part in parts]
    if device_ids is None:
        ids = np.arange(math.prod(dims))
    elif device_ids.startswith("["):
        ids = _grid(device_ids).reshape(-1)
    else:
        ids = np.array(_integers(device_ids))
    along = [dim for name, before, _ in wanted for dim in position[name, before]]
    others = [dim for dim in range(len(dims)) if dim not in along]
    size = math.prod(dims[dim] for dim in along)
    return _as_groups(ids.reshape(dims).transpose(others + along).reshape(-1, size))
