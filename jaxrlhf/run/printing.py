"""A run on the console: its roles, plans and memory before it starts, and its results."""

from jaxrlhf.observe.console import Console
from jaxrlhf.observe.forecast_errors import Comparison
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.observe.step_timers import time_rows
from jaxrlhf.observe.utilization import utilization_line
from jaxrlhf.planner.plans.plan_table import plan_rows
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.run.checked_run import CheckedRun
from jaxrlhf.run.outcome import Outcome
from jaxrlhf.sharding import mesh


def print_run(run: CheckedRun, console: Console) -> None:
    """Prints roles, plans, memory and notes. Raises OutOfMemoryError if the devices have too little memory."""
    assembly, memory = run.assembly, run.memory
    count = mesh.num_devices()
    console.line(f"{count} device{'s' if count > 1 else ''} of kind {mesh.device_kind()}")
    for line in assembly.tables.columns_read():
        console.line(line)
    console.table("Roles", assembly.role_rows())
    for name, phase in assembly.phases.items():
        models = {role: x.model for role, x in phase.roles.items() if isinstance(x, ModelRole)}
        console.table(f"Plan of the {name}", plan_rows(phase.plan, phase.graph, models))
    if memory.rows:
        console.table(f"Memory of the step's calls, {memory.unit} on each device", memory.rows)
        for line in memory.lines:
            console.line(line)
    for note in run.notes():
        console.line(f"Note: {note}")


def print_outcome(outcome: Outcome, console: Console, seconds: float, compared: Comparison | None) -> None:
    """Prints what a run has come to, where its time went and where its files are."""
    folder = outcome.folder
    if outcome.samples:
        console.samples("Samples", outcome.samples)
    console.header(f"Done in {seconds:.0f} s")
    if outcome.rewards:
        console.curve("reward", outcome.rewards)
    if outcome.evaluations:
        first, last = outcome.evaluations[0][1], outcome.evaluations[-1][1]
        for name in (name for name in first if name.startswith("eval/") and name in last):
            console.line(f"{name}: {first[name]:.3f} before, {last[name]:.3f} after")
    if outcome.best is not None and outcome.best[0] < outcome.steps:
        console.line(f"best after {outcome.best[0]} steps: {outcome.best[1]:.3f}")
    records = read_metrics(folder.metrics)
    console.table("Where the time went", time_rows(records))
    if busy := utilization_line(records):
        console.line(busy)
    if compared is not None and compared.steps:
        of_steps = f"median of {compared.steps} step{'s' if compared.steps > 1 else ''}"
        console.table(f"Predicted and measured, {of_steps}", compared.rows())
    elif compared is not None:
        console.line("No step was measured beside the predictions: the first one of every start compiles.")
    written = {"metrics": folder.metrics, "samples": folder.samples, "checkpoints": folder.checkpoints}
    if folder.timeline.exists():
        written["timeline"] = folder.timeline
    console.where({**written, **outcome.shown_at, "all": folder.path})
