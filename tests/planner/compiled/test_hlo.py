"""HLO as text: instructions and shapes."""

import re

import pytest

from jaxrlhf.planner.compiled.hlo import HloError, Shape, bits_of, parse, scopes

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
    assert module.entry == "main.3"
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


def test_scopes_are_told_apart_from_what_wraps_them():
    assert list(scopes("jit(f)/transpose(jvp(attention))/vmap()/dot_general")) == [
        "jit(f)", "attention", "", "dot_general",
    ]  # fmt: skip
