"""Optimized HLO, XLA's programs as text: instructions and shapes.

    %fusion.3 = f32[256,128]{1,0} fusion(%param.1, %dot.2), kind=kLoop, calls=%fused_computation.3, metadata={...}

A module is computations, lists of such instructions; one of them is the entry, and instructions call others. Only what
counting needs is read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

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


def parse(text: str) -> Module:
    """The module that a text describes, as `compiled.as_text()` gives it. Raises HloError if it cannot be read."""
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
        raise HloError(
            f"HLO: must have an entry computation. Got a text that begins with {text.partition(chr(10))[0][:80]!r}."
        )
    return Module(computations, entry)


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
