import re

import pytest
from jax.sharding import PartitionSpec

from jaxrlhf.sharding.axes import ACTIVATIONS, MESH_AXES, WEIGHTS_AT_REST, WEIGHTS_AT_USE, partition_spec


@pytest.mark.parametrize(
    ("axes", "rules", "spec"),
    [
        (("embed", "heads"), WEIGHTS_AT_REST, PartitionSpec("fsdp", "tensor")),
        (("embed", "heads"), WEIGHTS_AT_USE, PartitionSpec(None, "tensor")),
        (("layers", "mlp", "embed"), WEIGHTS_AT_REST, PartitionSpec(None, "tensor", "fsdp")),
        (("stages", "embed", "heads"), WEIGHTS_AT_REST, PartitionSpec("pipeline", "fsdp", "tensor")),
        (("vocab", "embed"), WEIGHTS_AT_REST, PartitionSpec("tensor", "fsdp")),
        (("norm",), WEIGHTS_AT_REST, PartitionSpec(None)),
        (("batch", "length", "embed"), ACTIVATIONS, PartitionSpec(("data", "fsdp"), None, None)),
        (
            ("batch", "kv_heads", "length", "head_dim"),
            ACTIVATIONS,
            PartitionSpec(("data", "fsdp"), "tensor", None, None),
        ),
        (("batch", "choices"), ACTIVATIONS, PartitionSpec(("data", "fsdp"), None)),
        ((None, "vocab"), ACTIVATIONS, PartitionSpec(None, "tensor")),
        ((), ACTIVATIONS, PartitionSpec()),
    ],
)
def test_rules(axes, rules, spec):
    assert partition_spec(axes, rules) == spec


@pytest.mark.parametrize("rules", [WEIGHTS_AT_REST, WEIGHTS_AT_USE, ACTIVATIONS])
def test_rules_speak_of_mesh_axes_only(rules):
    for entry in rules.values():
        assert entry is None or {entry} <= set(MESH_AXES) or set(entry) <= set(MESH_AXES)


def test_only_fsdp_differs_between_rest_and_use():
    assert {axis for axis, entry in WEIGHTS_AT_REST.items() if WEIGHTS_AT_USE[axis] != entry} == {"embed"}
    assert "fsdp" not in WEIGHTS_AT_USE.values()


@pytest.mark.parametrize(
    ("axes", "entries"),
    [
        (("heads", "mlp"), "['tensor', 'tensor']"),
        (("batch", "batch"), "[('data', 'fsdp'), ('data', 'fsdp')]"),
    ],
)
def test_two_dims_on_one_mesh_axis(axes, entries):
    message = f"Logical axes {axes}: two dims of one array must not be split over one mesh axis. Got {entries}."
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_spec(axes, ACTIVATIONS)


def test_one_mesh_axis_in_a_pair_counts_too():
    with pytest.raises(ValueError, match="two dims of one array"):
        partition_spec(("rows", "width"), {"rows": ("data", "fsdp"), "width": "fsdp"})


def test_unknown_axis():
    message = (
        "Unknown logical axis 'head' in ('embed', 'head'). Known: stages, layers, embed, heads, kv_heads, head_dim, "
        "mlp, vocab, norm, value. Did you mean 'heads'?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_spec(("embed", "head"), WEIGHTS_AT_REST)
