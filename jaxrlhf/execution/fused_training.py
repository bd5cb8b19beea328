"""Two train calls as one pipeline: the instructions of both in one order, for each mini-batch.

The results of each call are the same as by itself; only the order of the work on the devices differs.
"""

from typing import Any

from jaxrlhf.planner.fusion.fusible import FusedOrder
from jaxrlhf.programs.arrays import Outputs
from jaxrlhf.programs.pipeline import Pipelined, PipeRunner, carry_out
from jaxrlhf.programs.pipelined_training import PipelinedTraining, TrainRun


class FusedTraining(Pipelined):
    """`(arguments of the first, arguments of the second) -> (results of the first, results of the second)`, where
    arguments and results are those of `PipelinedTraining`."""

    def __init__(self, first: PipelinedTraining, second: PipelinedTraining, order: FusedOrder) -> None:
        self._calls, self._order = (first, second), order

    def __call__(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, Any]:
        runs = [TrainRun(call.programs, *given) for call, given in zip(self._calls, (first, second), strict=True)]
        assert runs[0].num_updates == runs[1].num_updates, "the plan was checked"
        for update in range(runs[0].num_updates):
            for run in runs:
                run.begin_update(update)
            for term in range(max(run.num_terms for run in runs)):
                self._carry_out(runs, term)
            for run in runs:
                run.end_update()
        self.ends = runs[1].ends
        return runs[0].result(), runs[1].result()

    def _carry_out(self, runs: list[TrainRun], term: int) -> None:
        """Executes the schedule for one term of both losses, or of the loss that still has one."""
        merged: list[MergedStages | None] = []
        for run, count in zip(runs, self._order.merged, strict=True):
            if term < run.num_terms:
                merged += [MergedStages(runner, count) for runner in run.runners(term)]
            else:
                merged += [None] * len(run.programs.groups)
        there = {pipe: runner for pipe, runner in enumerate(merged) if runner is not None}
        carry_out((x for x in self._order.instructions if x.pipe in there), there)
        for run in runs:
            if term < run.num_terms:
                run.end_term(term)


class MergedStages:
    """Consecutive stages of a runner that share a stage of the other call's devices, as one stage."""

    def __init__(self, runner: PipeRunner, count: int) -> None:
        self._runner, self._count = runner, count

    def forward(self, micro_batch: int, stage: int) -> Outputs:
        """Runs the stages in order."""
        outputs = None
        for one in range(stage * self._count, (stage + 1) * self._count):
            outputs = self._runner.forward(micro_batch, one)
        return outputs

    def backward(self, micro_batch: int, stage: int) -> Outputs:
        """Runs the stages in reverse order."""
        outputs = None
        for one in reversed(range(stage * self._count, (stage + 1) * self._count)):
            outputs = self._runner.backward(micro_batch, one)
        return outputs
