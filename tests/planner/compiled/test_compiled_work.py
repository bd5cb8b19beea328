"""The work of calls from counts of programs."""

import dataclasses
import functools
from typing import Any

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.generation.rollout_settings import decoding_stages, mean_columns
from jaxrlhf.models.architecture import forward_flops
from jaxrlhf.planner.compiled.compiled_work import ROWS, compile_work, depths, tensor_degrees, work_from_counts
from jaxrlhf.planner.compiled.program_counts import Collective, Counts, Loop, ProgramCounts
from jaxrlhf.planner.costs.cache import CostCache
from jaxrlhf.planner.costs.work import analytic_work
from jaxrlhf.planner.workload import Workload
from tests.planner.described_step import TINY, ppo

STEP = ppo()
GROUP = "replica_groups={{0,1,2,3}}"


def linear(num_layers: int, rows: int, per_layer: float, rest: float) -> Counts:
    """Work that grows with layers and rows, with an all-reduce in every layer and one beside."""
    both = per_layer * num_layers + rest
    reduce = Collective("all-reduce", "f32", 6.0 * rows, GROUP)
    gather = Collective("all-gather", "f32", 2.0 * rows, GROUP)
    return Counts(1e3 * rows * both, 1e6 * rows * both, both + 1, {reduce: float(num_layers), gather: 1.0})


def test_layers_and_the_rest_are_told_apart():
    call = STEP.workload.call("critic.values")
    rows = ROWS["infer"]
    counts = {(call.name, n, 4): ProgramCounts({"rest": linear(n, rows, 5.0, 2.0)}) for n in depths(call)}
    layer, rest = functools.partial(work_from_counts, counts)(call, "forward", tensor=4, fsdp=2, remat="none")
    formula = analytic_work(call, "forward", tensor=4, fsdp=2, remat="none")
    assert (layer.flops, rest.flops) == (5e3, 2e3)
    assert layer.row_bytes == pytest.approx(5e6 - formula.layer.weight_bytes / rows)
    assert (layer.weight_bytes, layer.fsdp_bytes) == (formula.layer.weight_bytes, formula.layer.fsdp_bytes)
    assert (layer.tensor_collectives, rest.tensor_collectives) == (1.0, 1.0)
    assert layer.tensor_bytes == pytest.approx(6.0)
    # an all-gather of four parts of 2 bytes sends 6, as an all-reduce of 4 bytes does
    assert rest.tensor_bytes == pytest.approx(4.0)
    assert layer.kernels == pytest.approx(4.0)  # beside the collective


def test_what_is_computed_anew_is_counted_again():
    call = STEP.workload.call("actor.train")
    rows = ROWS["train"]
    counts = {
        (call.name, n, 1): ProgramCounts(
            {"forward": Counts(1.0 * n * rows), "backward": Counts(2.0 * n * rows), "rest": Counts(99.0)}
        )
        for n in depths(call)
    }
    work = functools.partial(work_from_counts, counts)
    none, layer = (work(call, "gradient", tensor=1, fsdp=1, remat=remat).layer.flops for remat in ("none", "layer"))
    assert (none, layer) == (3.0, 4.0)  # and no update of the weights


def test_a_decoding_step_is_the_mean_over_growing_caches():
    call = ppo(response=80, num_samples=2).workload.call("actor.generate")
    rows, stages = ROWS["generate"] * 2, decoding_stages(call.prompt, 80)
    assert len(stages) > 1

    def program(num_layers: int) -> ProgramCounts:
        loops = [
            Loop(f"while.{i}", "decode", None, ProgramCounts({"decode": Counts(1.0 * size * num_layers * rows)}))
            for i, (size, _) in enumerate(stages)
        ]
        return ProgramCounts({"prefill": Counts(7.0 * num_layers * ROWS["generate"])}, tuple(loops))

    work = functools.partial(work_from_counts, {(call.name, n, 1): program(n) for n in depths(call)})
    mean = mean_columns(call.prompt, 80)
    assert mean == pytest.approx(sum(size * steps for size, steps in stages) / 80)
    assert work(call, "decode", tensor=1, fsdp=1, remat="none").layer.flops == pytest.approx(mean)
    assert work(call, "prefill", tensor=1, fsdp=1, remat="none").layer.flops == 7.0


def test_calls_without_programs_are_counted_by_formulas():
    call = dataclasses.replace(STEP.workload.call("critic.values"), described=None)
    asked: dict[str, Any] = dict(tensor=1, fsdp=1, remat="none")
    assert functools.partial(work_from_counts, {})(call, "forward", **asked) == analytic_work(call, "forward", **asked)


def test_degrees_are_those_that_a_model_splits():
    assert tensor_degrees(STEP.workload.call("critic.values"), 8) == [1, 2, 4]


def test_real_programs_are_compiled_counted_and_kept(tmp_path):
    """On a processor: what products compute, attention in blocks, is what formulas count, to a tenth."""
    call = dataclasses.replace(STEP.workload.call("reward.scores"), needs=())
    workload, cluster = Workload((call,)), read_cluster("cpu:2")
    answered: list[str] = []
    for _ in range(2):
        work, notes = compile_work(workload, cluster, cache=CostCache(tmp_path), say=answered.append)
        assert notes == ()
    assert len(answered) == 4  # two depths for each of two degrees, once
    layer, rest = work(call, "forward", tensor=1, fsdp=1, remat="none")
    whole = forward_flops(TINY, rows=1, columns=call.columns, scored=1)
    assert (layer * TINY.num_layers + rest).flops == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(("prompt", "response"), [(8, 8), (8, 100)])
def test_decoding_counts_the_slots_that_its_program_multiplies(prompt, response):
    """Layers of the compiled loops, weighted by their steps, and of the formula: operations agree to a percent."""
    step = ppo(dataclasses.replace(TINY, max_position_embeddings=prompt + response), prompt=prompt, response=response)
    call = dataclasses.replace(step.workload.call("actor.generate"), needs=())
    work, _ = compile_work(Workload((call,)), read_cluster("cpu:1"), cache=None)
    compiled, ours = (w(call, "decode", tensor=1, fsdp=1, remat="none").layer.flops for w in (work, analytic_work))
    assert ours == pytest.approx(compiled, rel=0.01)
