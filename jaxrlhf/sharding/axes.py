"""Mesh axes, logical axes, and the rules that map logical axes to mesh axes.

Weights and activations name their dims logically; a rules table gives the mesh axes over which a logical axis is split.
Weights have two tables, one at rest and one at use: at rest they are split over `fsdp`, and they are gathered for use.

Key-value heads and vocabularies need not divide over `tensor`. Such a weight rests in its true shape, split over
`tensor` along its hidden size instead; at use heads are repeated, and the vocabulary is padded, to what divides.
"""

from collections.abc import Mapping
from typing import Protocol

from jax.sharding import PartitionSpec

from jaxrlhf.brief import did_you_mean

PIPELINE, DATA, FSDP, TENSOR = "pipeline", "data", "fsdp", "tensor"
MESH_AXES = (PIPELINE, DATA, FSDP, TENSOR)
BATCH_AXES = (DATA, FSDP)
"""The mesh axes over which rows are split."""

Rules = Mapping[str, str | tuple[str, ...] | None]


class Splittable(Protocol):
    """What the sharding of a weight depends on."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes, one a dim."""
        ...

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers of units that `tensor` must divide to split a dim: of heads, not of their columns."""
        ...


WEIGHTS_AT_REST: Rules = {
    "stages": PIPELINE,
    "layers": None,
    "embed": FSDP,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "norm": None,
    "value": None,
}
WEIGHTS_AT_USE: Rules = {**WEIGHTS_AT_REST, "embed": None}
ACTIVATIONS: Rules = {
    "batch": BATCH_AXES,
    "length": None,
    "embed": None,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "mlp": TENSOR,
    "vocab": TENSOR,
    "choices": None,
}
"""`choices` is the vocabulary when a token is drawn from it: whole on every device, unlike `vocab`."""


def partition_spec(axes: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """The `PartitionSpec` of an array with logical `axes`; None is a dim that is never split. Raises ValueError if a
    name is not in the rules, or two dims would be split over the same mesh axis."""
    entries = []
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(
                f"Unknown logical axis {axis!r} in {axes}. Known: {', '.join(rules)}.{did_you_mean(axis, rules)}"
            )
        entries.append(None if axis is None else rules[axis])
    used = mesh_axes(PartitionSpec(*entries))
    if len(set(used)) != len(used):
        raise ValueError(
            f"Logical axes {axes}: two dims of one array must not be split over one mesh axis. Got {entries}."
        )
    return PartitionSpec(*entries)


def fits(weight: Splittable, tensor: int) -> bool:
    """True if `tensor` divides all dims of a weight that it splits."""
    return not any(
        axis is not None and WEIGHTS_AT_REST[axis] == TENSOR and units % tensor
        for axis, units in zip(weight.axes, weight.units, strict=True)
    )


def resting_spec(weight: Splittable, degrees: Mapping[str, int]) -> PartitionSpec:
    """The `PartitionSpec` of a weight at rest over mesh axes of these degrees. One that `tensor` does not fit is split
    over it along its hidden size; if that does not divide, or there is none, every device along `tensor` has all."""
    spec, tensor = partition_spec(weight.axes, WEIGHTS_AT_REST), degrees.get(TENSOR, 1)
    if fits(weight, tensor):
        return spec
    entries = [None if entry == TENSOR else entry for entry in spec]
    if "embed" in weight.axes:
        dim = weight.axes.index("embed")
        if weight.shape[dim] % (degrees.get(FSDP, 1) * tensor) == 0:
            entries[dim] = (FSDP, TENSOR)
    return PartitionSpec(*entries)


def mesh_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes of a spec, of all dims."""
    return tuple(name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry))
