"""Counts of a compiled program's work, from its HLO: loops times their trips, conditionals as their dearer branch.

Labels tell the parts of a program apart, by the origin of an instruction in the Python program. An instruction that
XLA made has the label of its latest operand that has one, or else of the loop or call that contains it.
"""

import collections
import math
import re

from jaxrlhf.planner.compiled.hlo import Computation, HloError, HloInstruction, Module, parse, scopes
from jaxrlhf.planner.compiled.program_counts import Collective, Counts, Loop, ProgramCounts

REST = "rest"
"""The label of instructions that have no other."""
_COLLECTIVES = {
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
}  # fmt: skip
_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "domain",
}  # fmt: skip
_NAMELESS = {"parameter", "constant"}
"""Instructions whose `op_name` says nothing about their use."""
_LAZY = {"bitcast", "convert", "copy"}
"""Instructions of a fusion that pass their input on, and only those elements of it that are used."""
_SLICES = {"slice", "dynamic-slice", "gather"}
_GROUPS = r"((?:replica_groups|source_target_pairs)=(?:mesh|device_ids|'[^']*'|[^a-z'])*)"
"""The attribute of a collective that names groups of devices, in all the forms that XLA gives it."""
_PRODUCT = "dot_general"
"""JAX's name for a matrix product, also where XLA computes it in another way."""
_NO_PRODUCTS = {"TopK", "AllocateBuffer", "PadToStatic", "SliceToDynamic", "cu_threefry2x32", "cu_threefry2x32_ffi"}
"""Calls of libraries that compute no matrix products."""


def count(text: str, *, widened: bool = False) -> ProgramCounts:
    """Counts what one device does in a program, by the labels of `by_phase`. `text` is from `compiled.as_text()`. Of a
    bfloat16 program that the CPU's compiler widened to float32, half of all bytes count. Raises HloError."""
    module = parse(text)
    return _Tally(module, widened=widened).inside(REST, module.entry)


def by_phase(op_name: str) -> str | None:
    """The label of an instruction by its `op_name`: `prefill` and `decode` of generation, `forward` and `backward` of a
    train call, the latter with what it recomputes; None for the rest, such as the update of the weights."""
    found = set(scopes(op_name))
    for label in ("decode", "prefill"):
        if label in found:
            return label
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else None


class _Tally:
    """Adds up the work of instructions, by label."""

    def __init__(self, module: Module, *, widened: bool) -> None:
        self.module = module
        self.widened = widened
        self.parts = collections.defaultdict[str, Counts](Counts)
        self.loops: list[Loop] = []
        self.unknown: dict[str, None] = {}

    def inside(self, label: str, *computations: str) -> ProgramCounts:
        """The work of some computations by themselves; labels are as in `walk`."""
        inner = _Tally(self.module, widened=self.widened)
        for computation in computations:
            inner.walk(computation, label)
        return ProgramCounts(dict(inner.parts), tuple(inner.loops), tuple(inner.unknown))

    def walk(self, name: str, inherited: str, *, inside_kernel: bool = False) -> None:
        """Adds the work of a computation, whose instructions without a label inherit one. Inside a kernel, it is part
        of a fusion, which has its bytes counted."""
        computation = self.module.computations[name]
        labels: dict[str, tuple[int, str]] = {}  # instruction -> its position and label, where it has one of its own
        for i, instruction in enumerate(computation.instructions):
            taken = [labels[operand] for operand in instruction.operands if operand in labels]
            if instruction.op_name and instruction.op not in _NAMELESS:
                labels[instruction.name] = i, by_phase(instruction.op_name) or inherited
            elif taken:
                labels[instruction.name] = i, max(taken)[1]
            _, label = labels.get(instruction.name, (i, inherited))
            if not self._enters(computation, instruction, label, inside_kernel=inside_kernel):
                self._add(computation, instruction, label, inside_kernel=inside_kernel)

    def _enters(self, outer: Computation, instruction: HloInstruction, label: str, *, inside_kernel: bool) -> bool:
        """Adds the work of the computations that an instruction calls; False if it calls none."""
        op = instruction.op
        if op == "while":
            self._loop(instruction, label)
        elif op == "conditional":
            self._branch(instruction, label)
        elif op == "fusion":
            called = _called(instruction, "calls")
            self.walk(called, label, inside_kernel=True)
            if not inside_kernel:
                fused = self.module.computations[called]
                self._kernel(label, _fusion_bytes(outer, instruction, fused))
        elif op in ("call", "async-start"):
            attribute = "calls" if op == "async-start" else "to_apply"
            self.walk(_called(instruction, attribute), label, inside_kernel=inside_kernel)
        else:
            return False
        return True

    def _loop(self, instruction: HloInstruction, label: str) -> None:
        round_ = self.inside(label, _called(instruction, "body"), _called(instruction, "condition"))
        trips = instruction.text(r'"known_trip_count":\{"n":"(\d+)"')
        self.unknown |= dict.fromkeys(round_.unknown)
        self.loops.append(Loop(instruction.name, label, int(trips) if trips else None, round_))

    def _branch(self, instruction: HloInstruction, label: str) -> None:
        """Adds the branch with the most operations; among equals, the one with the most bytes."""

        def dearness(side: ProgramCounts) -> tuple[float, float]:
            once = side.total()
            return once.flops, once.bytes

        dearest = max((self.inside(label, name) for name in instruction.branches), key=dearness)
        for name, counts in dearest.parts.items():
            self.parts[name] += counts
        self.loops += dearest.loops
        self.unknown |= dict.fromkeys(dearest.unknown)

    def _add(self, computation: Computation, instruction: HloInstruction, label: str, *, inside_kernel: bool) -> None:
        """Adds the work of an instruction that calls no computation."""
        op = instruction.op
        if op.endswith(("-done", "-update")) or op in _FREE:
            return
        if op in _COLLECTIVES or op == "send":
            operands = [computation.by_name[name] for name in instruction.operands]
            shapes = [shape for operand in operands for shape in operand.shapes]
            dtype, size = max(shapes, key=lambda shape: shape.bytes).dtype, sum(shape.bytes for shape in shapes)
            if self.widened and dtype == "f32":
                dtype, size = "bf16", size / 2
            groups = instruction.text(_GROUPS)
            if groups is None:
                raise HloError(
                    f"HLO: a collective must name its groups of devices. Got {instruction.attributes[:200]!r}."
                )
            collective = Collective("collective-permute" if op == "send" else op, dtype, size, groups)
            self.parts[label] += Counts(kernels=1, collectives={collective: 1})
            return
        if flops := self._flops(computation, instruction):
            self.parts[label] += Counts(flops)
        if not inside_kernel:
            self._kernel(label, _bytes(computation, instruction))

    def _kernel(self, label: str, bytes_: float) -> None:
        self.parts[label] += Counts(bytes=bytes_ / 2 if self.widened else bytes_, kernels=1)

    def _flops(self, computation: Computation, instruction: HloInstruction) -> float:
        """Operations of matrix products in an instruction. XLA may turn the product of a matrix with a single row into
        an elementwise multiplication and a sum."""
        op = instruction.op
        target = instruction.text(r'custom_call_target="([^"]*)"') or "" if op == "custom-call" else None
        if op == "dot":
            return _dot_flops(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
        if op == "multiply" and instruction.op_name.endswith(f"/{_PRODUCT}"):
            return 2.0 * instruction.shapes[0].size
        if target is not None and target.startswith("__cublas$"):
            return _dot_flops(computation, instruction, r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
        if target is not None and target.startswith("__cudnn$fmha"):
            return _attention_flops(computation, instruction, target)
        if op in ("convolution", "ragged-dot", "scaled-dot") or (target is not None and target not in _NO_PRODUCTS):
            self.unknown[target or op] = None
        return 0.0


def _called(instruction: HloInstruction, attribute: str) -> str:
    name = instruction.called(attribute)
    assert name is not None, (attribute, instruction)
    return name


def _dot_flops(computation: Computation, instruction: HloInstruction, contracted: str) -> float:
    """Operations of a product. `contracted` is the pattern of the attribute that names the contracted dims."""
    left = computation.operand(instruction, 0).shapes[0].dims
    return 2.0 * instruction.shapes[0].size * math.prod(left[dim] for dim in instruction.numbers(contracted))


def _attention_flops(computation: Computation, instruction: HloInstruction, target: str) -> float:
    """Operations of cuDNN's attention: two products forward, scores and the sum of values. Five backward, since scores
    are recomputed, and each of the two has two derivatives. A causal mask leaves out what lies above the diagonal; any
    other mask is an input, and leaves out nothing."""
    scores = instruction.numbers(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]')
    head_size = computation.operand(instruction, 0).shapes[0].dims[-1]
    rows_heads, (queries, keys) = math.prod(scores[:-2]), scores[-2:]
    pairs = queries * keys
    if re.search(r'"mask_type":\s*"(PADDING_)?CAUSAL"', instruction.attributes):
        pairs = sum(min(query + 1, keys) for query in range(queries))
    return (5 if target.endswith("Backward") else 2) * 2.0 * rows_heads * pairs * head_size


def _bytes(computation: Computation, instruction: HloInstruction) -> float:
    """Bytes that an instruction outside fusions reads and writes."""
    op = instruction.op
    operands = [computation.by_name[name] for name in instruction.operands]
    if op in ("slice", "dynamic-slice"):
        return 2 * instruction.bytes
    if op == "gather":
        return 2 * instruction.bytes + operands[1].bytes
    if op == "dynamic-update-slice":
        return 2 * operands[1].bytes
    if op == "scatter":
        return _scattered_bytes(operands) + sum(operand.bytes for operand in operands[len(operands) // 2 :])
    if op == "custom-call":
        has_workspace = len(instruction.shapes) > 1 and instruction.shapes[-1].dtype in ("s8", "u8")
        results = instruction.shapes[:-1] if has_workspace else instruction.shapes
        return sum(each.bytes for each in (*results, *operands))
    if op == "copy":  # also of an asynchronous one, whose result is more than the copy
        return 2 * operands[0].bytes
    return instruction.bytes + sum(operand.bytes for operand in operands)


def _scattered_bytes(operands: list[HloInstruction]) -> float:
    """Bytes that a scatter in place reads and writes of its arrays. `operands`: n arrays, the indices, n updates."""
    return 2 * sum(update.bytes for update in operands[len(operands) // 2 + 1 :])


def _fusion_bytes(computation: Computation, instruction: HloInstruction, fused: Computation) -> float:
    """Bytes that a fusion reads and writes. Of an input that it slices, only the slices count; of an array that it
    updates in place, only the updates."""
    roots = [_through_bitcasts(fused, root) for root in _roots(fused)]
    in_place = {root.name for root in roots if root.op in ("dynamic-update-slice", "scatter")}
    read = sum(
        _read_bytes(fused, parameter, computation.by_name[operand].bytes, in_place)
        for parameter, operand in zip(fused.parameters, instruction.operands, strict=True)
    )
    return read + sum(_written_bytes(fused, root) for root in roots)


def _roots(fused: Computation) -> list[HloInstruction]:
    root = fused.root
    return [fused.by_name[name] for name in root.operands] if root.op == "tuple" else [root]


def _through_bitcasts(fused: Computation, instruction: HloInstruction) -> HloInstruction:
    while instruction.op == "bitcast":
        instruction = fused.operand(instruction, 0)
    return instruction


def _written_bytes(fused: Computation, root: HloInstruction) -> float:
    if root.op == "dynamic-update-slice":
        return fused.operand(root, 1).bytes
    if root.op == "scatter":
        return _scattered_bytes([fused.by_name[name] for name in root.operands])
    return root.bytes


def _read_bytes(fused: Computation, parameter: HloInstruction, whole: float, in_place: set[str]) -> float:
    """Bytes that a fusion reads of a parameter of `whole` bytes."""
    item = whole / max(1, sum(shape.size for shape in parameter.shapes))
    read = 0.0
    for name, user in _users(fused, parameter.name):
        at_first = user.operands.index(name) == 0
        if user.op in _SLICES and at_first:
            read += user.shapes[0].size * item
        elif not (user.name in in_place and at_first):
            return whole
    return min(read, whole)


def _users(fused: Computation, name: str) -> list[tuple[str, HloInstruction]]:
    """The users of a value, also through instructions that only pass it on: (the operand's name, the user)."""
    found = []
    for user in fused.users.get(name, ()):
        found += _users(fused, user.name) if user.op in _LAZY and not user.is_root else [(name, user)]
    return found
