"""Transfer protocols: which device receives which rows of a call's inputs.

A protocol names the mesh axes over which rows are split; devices along all other axes receive the same rows. It moves
nothing itself: each device receives its own part, straight from a device that has it. HybridFlow's protocols also
collect outputs; a `jax.Array` knows where its parts are, so outputs are collected by being read.

Reference:
    Sheng et al. 2024 (HybridFlow), arXiv:2409.19256, section 4.1 and table 3.
"""

from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf.brief import did_you_mean
from jaxrlhf.sharding.axes import BATCH_AXES, MESH_AXES
from jaxrlhf.sharding.layout import Layout
from jaxrlhf.sharding.strategy import Strategy

AUTO = "auto"
"""In a plan: rows are split as the program of the call expects them."""

PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    # every device receives everything
    "ONE_TO_ALL": (),
    # one part for each data group, which here includes the replicas that generation has in a group of training
    "3D_PROTO": BATCH_AXES,
    "3D_ALL_MICRO_DP": BATCH_AXES,
    "3D_PP_ONLY": (),
    # one part for each device
    "DP_PROTO": MESH_AXES,
    "ALL_TO_ALL": MESH_AXES,
}
"""HybridFlow's protocols: name -> the mesh axes over which they split rows, the first one slowest."""


def split_axes(protocol: str, strategy: Strategy) -> tuple[str, ...]:
    """The mesh axes over which a protocol splits rows.

    A split that is the same as that of programs is written as theirs; written in another way, it would compile them
    again.

    Raises:
        ValueError: There is no protocol of that name.
    """
    if protocol == AUTO:
        return BATCH_AXES
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"protocol: must be {AUTO} or one of {', '.join(PROTOCOLS)}. Got {protocol!r}."
            f"{did_you_mean(protocol, PROTOCOLS)}"
        )
    axes = PROTOCOLS[protocol]
    same = all(getattr(strategy, axis) == 1 for axis in set(axes) ^ set(BATCH_AXES))
    return BATCH_AXES if same else axes


def input_shardings(has_rows: Sequence[bool], layout: Layout, protocol: str = AUTO) -> list[NamedSharding]:
    """The sharding of each input of a call: rows by a protocol, everything else on every device. `has_rows`: one flag
    for each input. Inputs without rows are settings and states."""
    axes = split_axes(protocol, layout.strategy)
    rows = NamedSharding(layout.mesh, PartitionSpec(axes) if axes else PartitionSpec())
    return [rows if each else layout.replicated for each in has_rows]
