"""A gate for GPUs that needs none: programs are compiled for a described A100 and H100, and stay as they are.

    GPU_COUNTS=write python -m pytest -n 0 tests/described_gpus      # writes counts.json again

It fails where a count differs at all, upwards or downwards: write the counts again in the same commit, and say in it
why they have changed. They depend on the version of XLA, and are kept for the two of requirements/pinned.txt: write
them with Python 3.11 and with a later one. With other versions only the rules are checked.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrlhf.models.architecture import num_parameters
from jaxrlhf.planner.compiled.hlo import parse
from tests.described_gpus.programs import (
    CONTROL,
    MARK,
    MODEL,
    PROMPT,
    RESPONSE,
    ROWS,
    wide_gathers,
    written_in_decoding,
)
from tests.planner.compiled.described_programs import require_gpu_compiler
from tests.planner.compiled.program_flops import program_flops
from tests.subprocesses import ROOT

COUNTS = Path(__file__).parent / "counts.json"
KINDS = ("a100-80g", "h100")


def compiled(kind: str) -> tuple[dict[str, Any], list[str]]:
    """Program -> its figures, and the programs of which XLA said that it copies arrays onto every device."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "tests.described_gpus.programs", kind]
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=280)
    assert run.returncode == 0, run.stderr[-4000:]
    said = [section.split("\n", 1) for section in run.stderr.split(f"{MARK} ")[1:]]
    copied = [name for name, *rest in said if "nvoluntary full rematerialization" in "".join(rest)]
    return json.loads(run.stdout), copied


def differences(golden: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Program by program, the counts that are not the same."""
    return [
        f"{program}: {count} was {was.get(count)}, is {now.get(count)}"
        for program in dict.fromkeys([*golden, *got])
        for was, now in [(golden.get(program, {}), got.get(program, {}))]
        for count in dict.fromkeys([*was, *now])
        if was.get(count) != now.get(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_are_as_they_were(kind):
    """Every kind of program compiles; no activation is copied onto every device, no cache in a step of decoding, no
    matrix gathered wide; operations of each head are those of the formulas; all counts are the golden ones."""
    require_gpu_compiler()
    programs, copied = compiled(kind)
    assert copied == [CONTROL]
    assert {name: found for name, each in programs.items() if (found := each["copies of caches"])} == {}
    assert {name: found for name, each in programs.items() if (found := each["wide gathers"])} == {}
    for name, head, devices in (("logprobs", "lm", 4), ("values", "scalar", 4), ("policy_and_values", "both", 2)):
        expected = program_flops(
            dataclasses.replace(MODEL, head=head),
            rows=ROWS,
            columns=PROMPT + RESPONSE - 1,
            scored=RESPONSE,
            attention="cudnn",
        )
        assert programs[name]["counts"]["flops"] * devices == pytest.approx(expected, rel=0.01), name

    for name, devices in (("train", 4), ("train, scalar head", 2)):  # weights and two moments in float32, in place
        model = dataclasses.replace(MODEL, head="scalar" if "scalar" in name else "lm")
        donated = programs[name]["counts"]["donated bytes"]
        assert donated == pytest.approx(12 * num_parameters(model) / devices, rel=0.05), name

    here = f"jax {jax.__version__}, {kind}: "
    kept, got = json.loads(COUNTS.read_text()), {here + name: each["counts"] for name, each in programs.items()}
    golden = {name: counts for name, counts in kept.items() if name.startswith(here)}
    if os.environ.get("GPU_COUNTS") == "write":
        others = {name: counts for name, counts in kept.items() if name not in golden}
        lines = [f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in sorted((others | got).items())]
        COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    if not golden:
        pytest.skip(f"no counts for jax {jax.__version__} in {COUNTS.name}, but the rules hold")
    changed = differences(golden, got)
    assert not changed, "\n".join([
        f"{len(changed)} counts have changed:", *changed,
        "If they should have, say why in the commit, with counts.json written again by "
        "GPU_COUNTS=write python -m pytest -n 0 tests/described_gpus",
    ])  # fmt: skip


def test_counts_are_kept_for_the_versions_that_are_tested_together():
    pinned = re.findall(r"^jax==([\d.]+)", (ROOT / "requirements" / "pinned.txt").read_text(), re.MULTILINE)
    kept = {name.split(":")[0] for name in json.loads(COUNTS.read_text())}
    assert kept == {f"jax {version}, {kind}" for version in pinned for kind in KINDS}


def test_what_differs_is_named():
    golden, got = {"train": {"flops": 2, "all-gather f32": 1}}, {"train": {"flops": 3}, "new": {"flops": 1}}
    assert differences(golden, golden) == []
    assert differences(golden, got) == [
        "train: flops was 2, is 3", "train: all-gather f32 was 1, is None", "new: flops was None, is 1"
    ]  # fmt: skip


LOOP = """HloModule program
%updated (cache: bf16[8,1,56,32], new: bf16[8,1,1,32], i: s32[]) -> bf16[8,1,56,32] {
  %cache = bf16[8,1,56,32] parameter(0)
  %new = bf16[8,1,1,32] parameter(1)
  %i = s32[] parameter(2)
  ROOT %dus = bf16[8,1,56,32] dynamic-update-slice(%cache, %new, %i, %i, %i, %i)
}
%widened (given: bf16[8,1,56,32]) -> f32[8,1,56,32] {
  %given = bf16[8,1,56,32] parameter(0)
  ROOT %convert = f32[8,1,56,32] convert(%given)
}
%kept (x: bf16[8,1,56,32]) -> bf16[8,1,56,32] {
  %x = bf16[8,1,56,32] parameter(0)
  ROOT %copy = bf16[8,1,56,32] copy(%x)
}
%body (state: bf16[8,1,56,32]) -> bf16[8,1,56,32] {
  %state = bf16[8,1,56,32] parameter(0)
  %token = bf16[8,1,1,32] constant({...})
  %zero = s32[] constant(0)
  %write = bf16[8,1,56,32] fusion(%state, %token, %zero), kind=kLoop, calls=%updated
  %wide = f32[8,1,56,32] fusion(%write), kind=kLoop, calls=%widened
  ROOT %either = bf16[8,1,56,32] conditional(%zero, %write), branch_computations={%kept}
}
ENTRY %main (start: bf16[8,1,56,32], head: f32[32,272]) -> bf16[8,1,56,32] {
  %start = bf16[8,1,56,32] parameter(0)
  %head = f32[32,272] parameter(1)
  %gathered = f32[64,272] all-gather(%head), replica_groups={{0,1}}, dimensions={0}
  %before = bf16[8,1,56,32] copy(%start)
  ROOT %loop = bf16[8,1,56,32] while(%before), body=%body, metadata={op_name="jit(f)/decode/while"}
}
"""


def test_what_no_program_may_do_is_seen():
    module = parse(LOOP)
    assert written_in_decoding(module, 14336) == ["fusion f32[8, 1, 56, 32]", "copy bf16[8, 1, 56, 32]"]
    assert written_in_decoding(module, 14337) == []
    assert wide_gathers(module) == ["f32[64, 272]"]
