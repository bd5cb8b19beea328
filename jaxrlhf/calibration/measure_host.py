"""CPU time of a run's own work on the host, beside the programs of its calls."""

import time

from jaxrlhf.execution.executor import Executor
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.planner.plans.plan import Plan
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.first_weights import load_first_weights
from jaxrlhf.sharding import mesh

COMPILING_STEPS = 2
"""The first steps of a run, in which programs are compiled."""
_STEPS = 8


def run_steps(
    assembly: Assembly, plan: Plan, steps: int, *, timeline: Timeline | None = None, one_at_a_time: bool = False
) -> float:
    """CPU seconds of the main thread for a step of a run: for arguments, layouts, and starting programs.

    It is the mean of some steps, after those that compile. `one_at_a_time` is as of `Executor`.
    """
    phase = assembly.train
    executor = Executor(phase.roles, seed=assembly.config.seed, timeline=timeline, one_at_a_time=one_at_a_time)
    load_first_weights(executor, phase, assembly.config, {})
    state, began = phase.first_state, 0.0
    for step in range(COMPILING_STEPS + steps):
        if step == COMPILING_STEPS:
            began = time.thread_time()
        state = executor.run(phase.graph, plan, state, assembly.train_rows(step), step=step).state
        if step < COMPILING_STEPS:
            executor.wait()
    executor.wait()
    taken = time.thread_time() - began
    executor.close()
    return taken / steps


def host_seconds(assembly: Assembly, num_cores: int) -> float:
    """Seconds that host-side work adds to a call per device, if the devices are virtual ones of the CPU; else 0."""
    if mesh.platform() != "cpu":
        return 0.0
    graph, plan = assembly.train.graph, assembly.train.plan
    devices = sum(len(plan[call].devices) for call in graph.calls if call.kind != "host")
    return run_steps(assembly, plan, _STEPS) / devices / num_cores
