"""What the planner says is on every device between programs, beside what a run has there: to a fiftieth."""

import dataclasses
import gc
import json

import jax
import pytest

from jaxrlhf.calibration.measure_host import run_steps
from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.schema import load_run
from jaxrlhf.observe.events import Event
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.search.choices import memory_problem
from jaxrlhf.planner.search.peak_memory import DeviceMemory, memory_during_all
from jaxrlhf.planner.workload import step_workload
from jaxrlhf.run.assembly import assemble
from tests.small_run import ROWS

MODEL = "roles.actor.model={vocab_size: 264, hidden_size: 128, intermediate_size: 256, num_layers: 2, num_heads: 8"
PLANS = {
    "apart": "{default: {data: 8}, calls: {reference.logprobs: {data: 4}, critic.values: {data: 4, devices: 4-7}, "
    "actor.train: {fsdp: 2, tensor: 2}, critic.train: {fsdp: 2, tensor: 2, devices: 4-7}}}",
    "together": "{default: {data: 8}}",
    "stages": "{default: {data: 2, pipeline: 2}, calls: {actor.train: {data: 4}}}",
}


class LiveBytes(Timeline):
    """A timeline that notes what is on every device when a call of a model has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[tuple[int, str], list[int]] = {}

    def record(self, event: Event) -> None:
        if event.kind in ("generate", "infer", "train"):
            self.noted[event.step, event.name] = live_bytes()
        super().record(event)


def live_bytes() -> list[int]:
    """Device -> bytes of all arrays there. What several arrays have in common counts once."""
    found: dict[tuple[int, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    totals = [0] * jax.device_count()
    for (device, _), size in found.items():
        totals[device] += size
    return totals


@pytest.mark.parametrize(
    ("config", "more", "plan"),
    [
        ("ppo_arithmetic", "dtype: bfloat16", "together"),
        ("ppo_arithmetic", "scan_layers: true", "stages"),
        ("ppo_lora_arithmetic", "", "apart"),
        ("ppo_lora_arithmetic", "scan_layers: true", "together"),
    ],
)
def test_what_rests_and_is_copied_is_what_a_run_has(config, more, plan, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    run = load_run(config, [
        f"{MODEL}, num_kv_heads: 4, {more}}}", f"plan={PLANS[plan]}", "batch_size=8", "warm_start=null",
        "evaluation=null", "settings.actor_update.mini_batches=1", "settings.critic_update.mini_batches=1",
    ])  # fmt: skip
    gc.collect()  # what tests before left in circles of references
    before, timeline = live_bytes(), LiveBytes()
    assembly = assemble(run, 8, 8)
    run_steps(assembly, assembly.train.plan, 1, timeline=timeline, one_at_a_time=True)
    workload, placements = step_workload(assembly.train.graph, assembly.train.roles), assembly.train.plan.placements
    last = max(step for step, _ in timeline.noted)
    problem = memory_problem(workload, read_cluster("1x8:h100"), placements)
    states = zip(*memory_during_all(problem, [0] * len(problem.calls)), strict=True)
    forecast = {call.name: each for call, each in zip(problem.calls, states, strict=True)}
    for call in workload.calls:
        live = [now - then for now, then in zip(timeline.noted[last, call.name], before, strict=True)]
        ours = [held(state) for state in forecast[call.name]]
        if plan == "stages":  # what is counted of a stage is what the fullest one has
            live, ours = [max(live)], [max(ours)]
        assert ours == pytest.approx(live, rel=0.02), call.name
        if call.trains:  # copies of what it trains are gone, which a sum of all that is ever there would count
            assert not any(name.startswith(f"{call.weights}.") for name in forecast[call.name][0].copies)


def held(state: DeviceMemory) -> int:
    """Bytes between programs."""
    return dataclasses.replace(state, working=0, beside={}).total
