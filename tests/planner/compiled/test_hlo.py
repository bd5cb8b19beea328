"""HLO as text: instructions, shapes, and all the ways in which groups of devices are written."""

import re

import numpy as np
import pytest

from jaxrlhf.planner.compiled.hlo import HloError, Shape, bits_of, device_groups, parse, scopes

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[4]{0}}, num_partitions=4

%fused (param_0: f32[4,8], param_1: f32[]) -> f32[4] {
  %param_1 = f32[] parameter(1)
  %param_0 = f32[4,8]{1,0} parameter(0)
  ROOT %reduce.1 = f32[4]{0} reduce(%param_0, %param_1), dimensions={1}, to_apply=%add
}

ENTRY %main.3 (x: f32[4,8]) -> (f32[4], s32[]) {
  %x = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %constant.2 = f32[] constant(0)
  %fusion = f32[4]{0} fusion(%x, %constant.2), kind=kInput, calls=%fused, metadata={op_name="jit(f)/mlp/sum" line=3}
  %start = (f32[4]{0}, f32[4]{0}) all-reduce-start(%fusion), replica_groups={}, to_apply=%add
  %done = f32[4]{0} all-reduce-done(%start)
  %zero = s32[] constant(0)
  ROOT %tuple = (f32[4]{0}, /*index=1*/s32[]) tuple(%done, %zero)
}
"""


def test_a_module_is_computations_of_instructions():
    module = parse(MODULE)
    assert (module.entry, module.num_devices) == ("main.3", 4)
    assert list(module.computations) == ["fused", "main.3"]
    entry, fused = module.computations["main.3"], module.computations["fused"]
    assert [i.op for i in entry.instructions] == [
        "parameter", "constant", "fusion", "all-reduce", "all-reduce-done", "constant", "tuple",
    ]  # fmt: skip
    assert [p.name for p in fused.parameters] == ["param_0", "param_1"]
    assert (fused.root.name, entry.root.name) == ("reduce.1", "tuple")
    fusion = entry.by_name["fusion"]
    assert (fusion.operands, fusion.called("calls"), fusion.op_name) == (("x", "constant.2"), "fused", "jit(f)/mlp/sum")
    assert entry.by_name["done"].op_name == ""
    assert [user.name for user in entry.users["fusion"]] == ["start"]
    assert entry.by_name["x"].shapes == (Shape("f32", (4, 8)),)
    assert entry.by_name["tuple"].shapes == (Shape("f32", (4,)), Shape("s32", ()))
    assert entry.by_name["tuple"].bytes == 4 * 4 + 4


@pytest.mark.parametrize(
    ("dtype", "bits"), [("pred", 8), ("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("f64", 64), ("c64", 64), ("token", 0)]
)
def test_bits_of_an_element(dtype, bits):
    assert bits_of(dtype) == bits


def test_texts_that_are_no_hlo():
    with pytest.raises(HloError, match=re.escape("must have an entry computation. Got a text that begins with 'x y'")):
        parse("x y\nz")
    with pytest.raises(HloError, match=re.escape("cannot read the instruction 'a'. Got 'f32[2]{0}'.")):
        parse("HloModule m\nENTRY %e () -> f32[2] {\n  %a = f32[2]{0}\n}")
    with pytest.raises(HloError, match=re.escape("a parenthesis must be closed. Got '(%b, '.")):
        parse("HloModule m\nENTRY %e () -> f32[2] {\n  %a = f32[2]{0} add(%b, \n}")
    with pytest.raises(HloError, match="unknown element type 'q7'"):
        bits_of("q7")
    with pytest.raises(
        HloError, match=re.escape("a collective must name its groups of devices. Got ', channel_id=1'.")
    ):
        device_groups(", channel_id=1", 4)


def test_scopes_are_told_apart_from_what_wraps_them():
    assert list(scopes("jit(f)/transpose(jvp(attention))/vmap()/dot_general")) == [
        "jit(f)", "attention", "", "dot_general",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, to_apply=%add", [[0, 1], [2, 3]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2), x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}, x", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=4], device_ids=(3,1,2,0) {'a'}, x", [[3, 1, 2, 0]]),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)4}, x", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=8,'b'=1] {'a':(1)2,'a':(4)2}, x", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_groups_of_devices(attributes, groups):
    assert [list(group) for group in device_groups(f", channel_id=1, {attributes}", 4)] == groups


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_grids_and_meshes_say_the_same(order):
    """A transposed grid, and a mesh along whose last axis the groups lie."""
    dims = (2, 3, 4)
    sizes = [dims[i] for i in order]
    listed = ",".join(map(str, order))
    grid = f"replica_groups=[{sizes[0] * sizes[1]},{sizes[2]}]<=[2,3,4]T({listed}), x"
    mesh = f"replica_groups=mesh['a'={sizes[0]},'b'={sizes[1]},'c'={sizes[2]}], device_ids=([2,3,4]T({listed})) {{'c'}}"
    expected = np.arange(24).reshape(dims).transpose(order).reshape(-1, sizes[2]).tolist()
    assert [list(group) for group in device_groups(grid, 24)] == expected
    assert [list(group) for group in device_groups(mesh, 24)] == expected
