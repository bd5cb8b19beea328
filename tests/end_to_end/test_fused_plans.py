"""A plan whose train calls are fused runs the schedule that it was priced with: from the search by way of a file."""

import json
import math
from pathlib import Path

import pytest

from jaxrlhf.cluster.cluster_text import read_cluster
from jaxrlhf.config.schema import load_run
from jaxrlhf.execution import executor
from jaxrlhf.execution.fused_training import FusedTraining
from jaxrlhf.planner import make_plan as planning
from jaxrlhf.planner.fusion.fused_choice import best_fused
from jaxrlhf.planner.fusion.fusible import FusedOrder
from jaxrlhf.planner.make_plan import Planned
from jaxrlhf.planner.plans.plan import SCHEDULES
from jaxrlhf.planner.plans.saved_plan import read_plan, write_plan
from jaxrlhf.programs.pipelined_training import PipelinedTraining
from jaxrlhf.run.find_plan import plan_draft
from jaxrlhf.run.step_draft import draft_step
from jaxrlhf.schedules.schedule import topological_order

SETS = (
    "devices=cpu:8", "warm_start=null", "evaluation=null", "steps=1", "roles.actor.model.num_layers=2",
    "settings.actor_update.mini_batches=1",
)  # fmt: skip


@pytest.fixture
def fused(train, monkeypatch) -> tuple[Planned, Path]:
    """A plan for the run of `train` in which two train calls are fused, whether that is faster or not; and its file."""
    monkeypatch.setattr(planning, "best_fused", lambda *args, beat: best_fused(*args, beat=math.inf))
    draft = draft_step(load_run("tiny.yaml", ["plan=auto", *SETS]))
    planned = plan_draft(draft, read_cluster("cpu:8"), seconds=0.2, costs="analytic")
    assert planned.fuse == ("actor.train", "critic.train")
    path = Path("fused.json")
    write_plan(path, planned.saved(planned.plan_for(draft.graph)))
    return planned, path


def arguments(path: Path, *more: str) -> list[str]:
    return [x for each in (*SETS, f"plan={path}") for x in ("--set", each)] + list(more)


def test_a_run_does_its_fused_calls_by_the_schedule_that_its_plan_was_priced_with(train, fused, monkeypatch):
    planned, path = fused
    assert read_plan(path).plan.schedules == planned.schedules
    ran: list[FusedOrder] = []

    class Spied(FusedTraining):
        def __init__(self, first: PipelinedTraining, second: PipelinedTraining, order: FusedOrder) -> None:
            ran.append(order)
            super().__init__(first, second, order)

    monkeypatch.setattr(executor, "FusedTraining", Spied)
    status, _, error = train(*arguments(path))
    assert status == 0, error
    (run,) = Path("runs").glob("*tiny*")
    written = json.loads((run / "plan.json").read_text())["step"][SCHEDULES]
    assert written == json.loads(path.read_text())["plan"][SCHEDULES] == planned.saved().plan.to_json()[SCHEDULES]
    (order,) = ran
    (schedule,) = planned.schedules  # of a group of either call, and all others alike
    groups = planned.placements()["actor.train"].strategy.data
    for group in range(groups):
        own = [x._replace(pipe=x.pipe // groups) for x in order.instructions if x.pipe % groups == group]
        assert tuple(own) == topological_order(schedule)


def test_a_schedule_that_was_edited_is_refused_and_one_that_is_missing_found_again(train, fused):
    _, path = fused
    tree = json.loads(path.read_text())
    first = tree["plan"][SCHEDULES][0]["orders"][0].split()
    tree["plan"][SCHEDULES][0]["orders"][0] = " ".join(reversed(first))
    path.write_text(json.dumps(tree))
    status, _, error = train(*arguments(path, "--dry-run"))
    message = " ".join(error.split())
    assert status == 1 and f"fused.json: plan.{SCHEDULES}: A schedule: workers must not wait for one another" in message

    del tree["plan"][SCHEDULES]
    path.write_text(json.dumps(tree))
    status, _, error = train(*arguments(path, "--dry-run"))
    assert status == 0, error
