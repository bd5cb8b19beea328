"""Mesh axes, logical axes, and the rules that map logical axes to mesh axes.

Weights and activations name their dims logically; a rules table gives the mesh axes over which a logical axis is split.
Weights have two tables, one at rest and one at use: at rest they are split over `fsdp`, and they are gathered for use.
"""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jaxrlhf.brief import did_you_mean

PIPELINE, DATA, FSDP, TENSOR = "pipeline", "data", "fsdp", "tensor"
MESH_AXES = (PIPELINE, DATA, FSDP, TENSOR)
BATCH_AXES = (DATA, FSDP)
"""The mesh axes over which rows are split."""

Rules = Mapping[str, str | tuple[str, ...] | None]

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
    used = [name for entry in entries if entry for name in ((entry,) if isinstance(entry, str) else entry)]
    if len(set(used)) != len(used):
        raise ValueError(
            f"Logical axes {axes}: two dims of one array must not be split over one mesh axis. Got {entries}."
        )
    return PartitionSpec(*entries)
