"""What programs do, counted: on instructions written by hand, and on real programs against formulas."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.cluster.cluster_text import kinds
from jaxrlhf.config.reading import build, to_tree
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.compiled.described_devices import described_devices
from jaxrlhf.planner.compiled.hlo_counts import REST, by_phase, count
from jaxrlhf.planner.compiled.program_counts import Collective, Counts, ProgramCounts
from tests.planner.compiled.described_programs import Subject, described, lower
from tests.planner.compiled.device_groups import device_groups
from tests.planner.compiled.program_flops import program_flops


def of_entry(lines: str, *, computations: str = "", devices: int = 4) -> ProgramCounts:
    """What an entry computation does, given by its instructions."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return count(
        f"HloModule m, num_partitions={devices}\n{computations}\nENTRY %e (a: f32[]) -> f32[] {{\n{body}\n}}\n"
    )


def test_a_product_and_what_stands_beside_it():
    counts = of_entry(
        """
        %a = bf16[2,3,5]{2,1,0} parameter(0)
        %b = bf16[2,5,7]{2,1,0} parameter(1)
        %same = bf16[30]{0} bitcast(%a)
        ROOT %dot = f32[2,3,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}
        """
    ).total()
    assert counts == Counts(flops=2 * 2 * 3 * 7 * 5, bytes=2 * 30 + 2 * 70 + 4 * 42, kernels=1)


def test_libraries_of_products_and_of_attention():
    program = of_entry(
        """
        %a = bf16[3,5]{1,0} parameter(0)
        %b = bf16[5,7]{1,0} parameter(1)
        %gemm = (bf16[3,7]{1,0}, s8[1000]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
        %q = bf16[1,16,4,8]{3,2,1,0} parameter(2)
        %k = bf16[1,32,2,8]{3,2,1,0} parameter(3)
        %fwd = (bf16[1,4,16,8]{3,1,2,0}, u8[9]{0}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaScaleBiasSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["1","4","16","32"]},"mask_type":"NO_MASK"}}
        ROOT %bwd = (bf16[1,4,16,8]{3,1,2,0}, u8[9]{0}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape":{"dimensions":["1","4","16","16"]},"mask_type":"CAUSAL"}}
        """
    )
    counts = program.total()
    forward, backward = 2 * 2 * 4 * 16 * 32 * 8, 5 * 2 * 4 * (16 * 17 // 2) * 8
    assert counts.flops == 2 * 3 * 7 * 5 + forward + backward
    q, k, out = 2 * 16 * 4 * 8, 2 * 32 * 2 * 8, 2 * 4 * 16 * 8
    assert counts.bytes == 2 * (15 + 35 + 21) + 2 * (q + 2 * k + out)
    assert program.unknown == ()


def test_a_library_that_nobody_knows_is_named():
    program = of_entry(
        """
        %a = f32[3]{0} parameter(0)
        ROOT %b = f32[3]{0} custom-call(%a), custom_call_target="my_kernel"
        """
    )
    assert program.unknown == ("my_kernel",)
    assert program.total() == Counts(bytes=24, kernels=1)


FUSIONS = """
%sliced (p0: f32[100,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %wide = f64[100,8]{1,0} convert(%p0)
  ROOT %row = f64[1,8]{1,0} dynamic-slice(%wide, %p1, %p1), dynamic_slice_sizes={1,8}
}

%written (p0: f32[100,8], p1: f32[1,8], p2: s32[]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%gemv (p0: f32[5,7], p1: f32[5]) -> f32[7] {
  %p0 = f32[5,7]{1,0} parameter(0)
  %p1 = f32[5]{0} parameter(1)
  %rows = f32[5,7]{1,0} broadcast(%p1), dimensions={0}, metadata={op_name="jit(f)/dot_general"}
  %multiply = f32[5,7]{1,0} multiply(%rows, %p0), metadata={op_name="jit(f)/dot_general"}
  %zero = f32[] constant(0)
  ROOT %sum = f32[7]{0} reduce(%multiply, %zero), dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/dot_general"}
}
"""


def test_a_fusion_reads_and_writes_once_and_of_slices_only_these():
    counts = of_entry(
        """
        %table = f32[100,8]{1,0} parameter(0)
        %at = s32[] parameter(1)
        %taken = f64[1,8]{1,0} fusion(%table, %at), kind=kLoop, calls=%sliced
        %row = f32[1,8]{1,0} parameter(2)
        ROOT %cache = f32[100,8]{1,0} fusion(%table, %row, %at), kind=kLoop, calls=%written
        """,
        computations=FUSIONS,
    ).total()
    assert counts == Counts(bytes=(4 * 8 + 4 + 8 * 8) + (4 * 8 + 4 + 4 * 8), kernels=2)


def test_a_product_with_one_row_is_still_a_product():
    counts = of_entry(
        """
        %a = f32[5,7]{1,0} parameter(0)
        %b = f32[5]{0} parameter(1)
        ROOT %c = f32[7]{0} fusion(%a, %b), kind=kInput, calls=%gemv
        """,
        computations=FUSIONS,
    ).total()
    assert counts == Counts(flops=2 * 5 * 7, bytes=4 * (35 + 5 + 7), kernels=1)


LOOPS = """
%round (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %s = (s32[], f32[4,4]{1,0}) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%s), index=1
  %i = s32[] get-tuple-element(%s), index=0
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(f)/decode/dot_general"}
  %z = f32[4,4]{1,0} all-reduce(%y), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[4,4]{1,0}) tuple(%i, %z)
}

%goes_on (s: (s32[], f32[4,4])) -> pred[] {
  %s = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}

%cheap (x: f32[4,4]) -> f32[4,4] {
  ROOT %x = f32[4,4]{1,0} parameter(0)
}

%dear (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  ROOT %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
IN_LOOP = """
        %s = (s32[], f32[4,4]{1,0}) parameter(0)
        ROOT %while.7 = (s32[], f32[4,4]{1,0}) while(%s), condition=%goes_on, body=%round"""


def test_loops_count_as_often_as_they_go_around():
    known = of_entry(IN_LOOP + ', backend_config={"known_trip_count":{"n":"6"}}', computations=LOOPS)
    one = Counts(128.0, 3 * 64 + 9, 3, {Collective("all-reduce", "f32", 64, "replica_groups={{0,1},{2,3}}, "): 1})
    assert known.parts == {}
    assert [(loop.name, loop.label, loop.trips) for loop in known.loops] == [("while.7", REST, 6)]
    assert known.loops[0].round.total() == one
    assert known.total() == one * 6
    ends_itself = of_entry(IN_LOOP, computations=LOOPS)
    assert ends_itself.loops[0].trips is None
    assert ends_itself.total(rounds=10) == one * 10


@pytest.mark.parametrize(
    "branches", ["branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"]
)
def test_of_branches_the_dearer_counts(branches):
    counts = of_entry(
        f"""
        %x = f32[4,4]{{1,0}} parameter(0)
        %p = pred[] parameter(1)
        ROOT %y = f32[4,4]{{1,0}} conditional(%p, %x, %x), {branches}
        """,
        computations=LOOPS,
    ).total()
    assert counts == Counts(flops=128, bytes=3 * 64, kernels=1)


def test_what_starts_and_is_awaited_later_counts_once():
    counts = of_entry(
        """
        %x = bf16[8]{0} parameter(0)
        %gather = (bf16[8]{0}, bf16[32]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
        %gathered = bf16[32]{0} all-gather-done(%gather)
        %scatter = ((bf16[32]{0}), bf16[8]{0}) reduce-scatter-start(%gathered), replica_groups={{0,1,2,3}}
        %scattered = bf16[8]{0} reduce-scatter-done(%scatter)
        %later = ((bf16[8]{0}), bf16[8]{0}, s32[]) async-start(%scattered), calls=%permutes
        %ended = bf16[8]{0} async-done(%later)
        %copy = (bf16[8]{0}, bf16[8]{0}, u32[]) copy-start(%ended)
        ROOT %copied = bf16[8]{0} copy-done(%copy)
        """,
        computations="""
%permutes (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  ROOT %p = bf16[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}
""",
    ).total()
    assert counts.collectives == {
        Collective("all-gather", "bf16", 16, "replica_groups=[1,4]<=[4], "): 1,
        Collective("reduce-scatter", "bf16", 64, "replica_groups={{0,1,2,3}}"): 1,
        Collective("collective-permute", "bf16", 16, "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"): 1,
    }
    assert (counts.kernels, counts.bytes) == (4, 32)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [("all-reduce", 2 * 3 / 4), ("all-gather", 3), ("reduce-scatter", 3 / 4), ("all-to-all", 3 / 4)],
)
def test_bytes_on_the_wire_are_those_of_a_ring(kind, wire):
    collective = Collective(kind, "f32", 100.0, "replica_groups={{0,1,2,3},{4,5,6,7}}")
    assert collective.wire_bytes(4) == pytest.approx(100 * wire)
    assert collective.wire_bytes(1) == 0


def test_counts_add_and_scale():
    one = Collective("all-reduce", "f32", 8.0, "")
    counts = Counts(1, 2, 3, {one: 4})
    assert counts + counts == counts * 2 == Counts(2, 4, 6, {one: 8})


def test_labels_are_those_of_scopes_or_of_what_stands_around():
    body = IN_LOOP + ', metadata={op_name="jit(f)/decode/while"}'
    text = f"HloModule m, num_partitions=4\n{LOOPS}\nENTRY %e (a: f32[]) -> f32[] {{{body.replace(8 * ' ', '  ')}\n}}\n"
    by_label = count(text).by_label(rounds=1)
    assert list(by_label) == ["decode"]
    assert [by_phase(name) for name in ("a/decode/b", "jit(decode)/b")] == ["decode", None]
    assert by_phase("jit(program)/decode/while/body/dot_general") == "decode"
    assert by_phase("jit(program)/prefill/attention/dot_general") == "prefill"
    assert by_phase("jit(program)/jvp(attention)/dot_general") == "forward"
    assert by_phase("jit(program)/transpose(jvp(jvp()))/checkpoint/rematted_computation/mul") == "backward"
    assert by_phase("jit(program)/sqrt") is None


def test_counts_survive_as_json():
    program = of_entry(IN_LOOP, computations=LOOPS)
    assert build(ProgramCounts, json.loads(json.dumps(to_tree(program))), where="") == program
    with_parts = ProgramCounts({"a": Counts(1, 2, 3, dict(program.loops[0].round.parts[REST].collectives))}, (), ("x",))
    assert build(ProgramCounts, json.loads(json.dumps(to_tree(with_parts))), where="") == with_parts


MODEL = ModelConfig(
    vocab_size=264, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32
)
ROWS, COLUMNS, RESPONSE = 8, 201, 96


@pytest.mark.parametrize("kind", ["infer", "train"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_flops_of_real_programs_are_those_of_the_formulas(kind, tensor):
    """A call whose sequences have 201 columns feeds 200: in blocks of 64 queries, the last of 8."""
    call = described(kind, MODEL, rows=ROWS, columns=COLUMNS, response=RESPONSE)
    devices = described_devices(kinds()["cpu"], tensor)
    program = lower(Subject(call, tensor), devices).compile()
    expected = program_flops(
        MODEL, rows=ROWS, columns=COLUMNS - 1, scored=RESPONSE, attention="xla", gradient=kind == "train"
    )
    counts = count(program.as_text() or "")
    assert counts.unknown == ()
    assert counts.total().flops == pytest.approx(expected / tensor, rel=0.01)
    groups = {c.groups for c in counts.total().collectives}
    assert {len(group) for each in groups for group in device_groups(each, 2)} == ({2} if tensor == 2 else set())
    if kind == "train":
        by_label = counts.by_label()
        assert by_label["backward"].flops == pytest.approx(2 * by_label["forward"].flops, rel=0.01)
        assert by_label[REST].flops == 0


def test_a_scan_counts_its_layers():
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    shapes = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)
    program = count(jax.jit(layers).lower(*shapes).compile().as_text() or "")
    assert [loop.trips for loop in program.loops] == [5]
    assert program.total().flops == 5 * 2 * 8 * 16 * 16
