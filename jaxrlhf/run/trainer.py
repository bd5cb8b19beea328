"""The loop of a run: first or restored weights, warm start, steps, evaluations, checkpoints."""

import collections
import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError

from jaxrlhf.cluster.cluster_text import local_cluster
from jaxrlhf.configured.sampling import samplings_of
from jaxrlhf.data.loader import PromptLoader
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.function_threads import FunctionAbandonedError
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.observe.chrome_trace import write_chrome_trace
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import WAIT
from jaxrlhf.observe.json_lines import split_non_finite
from jaxrlhf.observe.metrics import TrainingError, check_finite, flatten, without_times
from jaxrlhf.observe.progress import Progress
from jaxrlhf.observe.step_timers import timer_seconds
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.programs.roles import ENCODE, weighted_sum
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.checkpoints import Checkpoints, restore, weight_sets_of
from jaxrlhf.run.evaluation import Evaluator
from jaxrlhf.run.export import export, export_step
from jaxrlhf.run.export import is_due as export_is_due
from jaxrlhf.run.first_weights import Placed, load_first_weights
from jaxrlhf.run.interruption import Requests, RunStopped, StopRequest
from jaxrlhf.run.memory_remedies import OutOfMemoryError, forecast_step, is_out_of_memory, out_of_memory
from jaxrlhf.run.records import Records
from jaxrlhf.run.resume_point import ResumePoint, newest_position, what_is_kept
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.step_metrics import balance_metrics, count_tokens, decoding_metrics, throughput_metrics
from jaxrlhf.run.tail_refinement import TailRefinement
from jaxrlhf.sharding import mesh
from jaxrlhf.writing import UnwritableError, writing

WARM_START_STEP = 2**31
"""The first step number of a warm start, which is not one of training."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of a run from its first step on, also if it was resumed."""

    steps: int
    evaluations: tuple[tuple[int, dict[str, float]], ...]
    """(steps done, metrics), in order."""
    best: tuple[int, float] | None
    """Steps done and value of the best evaluation, whose checkpoint is kept."""
    rewards: tuple[float, ...]
    """The mean score of every step."""
    samples: tuple[dict[str, Any], ...]
    """The latest sampled prompts and completions, with their scores. Empty after a resume until the next samples."""
    shown_at: dict[str, str]
    """The paths or addresses at which trackers show the run, by tracker."""
    folder: RunFolder
    weights: WeightStore
    """The last weights, on the devices."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for outcome.json."""
        evaluations = [
            {"step": done, **split_non_finite(without_times(metrics))[0]} for done, metrics in self.evaluations
        ]
        best = None if self.best is None else {"step": self.best[0], "value": self.best[1]}
        return {"steps": self.steps, "best": best, "evaluations": evaluations, "rewards": list(self.rewards)}


class Trainer:
    """Executes an assembled run in its folder, from the start or from where it is resumed. Between two steps it asks
    whether to stop. Every process of a run has a trainer.
    """

    def __init__(
        self, assembly: Assembly, folder: RunFolder, console: Console, *, resume: ResumePoint | None, stop: StopRequest,
        channel: Channel,
    ) -> None:  # fmt: skip
        self._assembly, self._folder, self._console = assembly, folder, console
        self._config, self._resume, self._channel = assembly.config, resume, channel
        self._timeline = Timeline(own_devices=mesh.own_positions())
        self._executor = Executor(
            assembly.train.roles, seed=self._config.seed, timeline=self._timeline, channel=channel,
            part_tokens=assembly.config.output.part_tokens,
        )  # fmt: skip
        self._records = Records(channel, folder, assembly.config, assembly.table, resume, console.line)
        self._checkpoints = Checkpoints(assembly, folder, channel)
        stop.abandon = self._executor.abandon_functions
        self._requests = Requests(stop, self._checkpoints, channel)
        done, is_branch = (resume.steps_done, resume.is_branch) if resume is not None else (None, False)
        self._evaluator = Evaluator(assembly, self._records.history, since=(done or 0) if is_branch else 0)
        self._tails = TailRefinement(
            assembly.train, every=self._config.plan.refine_tails,
            most=max((s.max_new_tokens for s in samplings_of(self._config.settings)), default=1),
            cluster=lambda: local_cluster(self._config.devices_memory, any_kind=True),
            history=self._records.history, say=console.line,
        )  # fmt: skip
        scored = [record for record in self._records.history if "critic/score/mean" in record]
        self._rewards: list[float] = [record["critic/score/mean"] for record in scored]
        self._reported = 0.0
        self._saved = None if is_branch else done
        """Steps done at the newest checkpoint of this folder."""

    def run(self) -> Outcome:
        """Executes the run. Raises RunStopped if it was asked to stop, and has saved."""
        try:
            self._requests.has_unsaved(False)
            try:
                first_step, state = self._start()
                self._train(first_step, state)
            except FunctionAbandonedError as error:
                kept = "No step was saved." if self._saved is None else f"Saved after {self._saved} steps."
                raise self._requests.stopped(f"{error} {kept}") from error
            self._requests.has_unsaved(True)  # exports
            self._executor.wait()
            with writing(self._folder.path, SafetensorError):
                export(self._assembly, self._executor, self._folder, self._channel)
        except BaseException as error:
            lacks_memory = self._out_of_memory(error) if is_out_of_memory(error) else None
            if not self._is_in_all(error):
                unwritten = isinstance(error, UnwritableError)
                message = f"{error} {what_is_kept(self._folder)}" if unwritten else None
                self._channel.abort(error, message=message if lacks_memory is None else str(lacks_memory))
            if lacks_memory is not None:
                raise lacks_memory from error
            raise
        finally:
            self._close(sys.exception())
        return Outcome(
            steps=self._config.steps,
            evaluations=tuple(self._evaluator.results),
            best=self._evaluator.best(),
            rewards=tuple(self._rewards),
            samples=tuple(self._records.latest_samples),
            shown_at=self._records.shown_at,
            folder=self._folder,
            weights=self._executor.weights,
        )

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """The error of a run that ran out of memory, after the table of what its calls need."""
        self._checkpoints.wait()
        memory = forecast_step(self._assembly)
        self._console.table(f"Memory of the step's calls, {memory.unit} on each device", memory.rows)
        return out_of_memory(error, self._assembly, what_is_kept(self._folder))

    def _close(self, error: BaseException | None) -> None:
        """Closes everything, also if a part fails. Raises the first failure, unless the run ended by an error."""
        failures: list[Exception] = []
        for close in (
            lambda: self._write_timeline(error),
            lambda: self._records.close(failed=error is not None),
            self._executor.close,
            self._checkpoints.close,
        ):
            try:
                close()
            except Exception as failure:
                failures.append(failure)
        if failures and error is None:
            raise failures[0]
        for failure in failures:  # the error that ended the run is raised, with notes on what failed after it
            assert error is not None
            error.add_note(f"Then, in closing: {type(failure).__name__}: {failure}")

    def _write_timeline(self, error: BaseException | None) -> None:
        if not self._config.output.timeline:
            return
        # after an error of this process alone, the others do not take part in `gather`
        together = error is None or self._is_in_all(error)
        others = self._channel.gather(self._timeline.seen())[1:] if together else []
        if self._channel.is_first:
            write_chrome_trace(self._folder.timeline, [self._timeline.seen(), *others])

    def _start(self) -> tuple[int, Any]:
        """Loads or restores all weights. Returns the steps done and the algorithm's state after them."""
        phase, resume = self._assembly.train, self._resume
        if resume is not None and resume.position is not None:
            self._console.line(f"Going on from {resume.checkpoint}, after {resume.position}")
            if resume.position.phase == "steps":
                done, state = resume.position.done, restore(resume, phase, self._executor)
                if self._evaluator.is_missing(done):
                    self._evaluate(done, state)
                return done, state
        self._checkpoints.start_over()
        first = {"actor": self._warm_start()} if self._assembly.warm_start is not None else {}
        load_first_weights(self._executor, phase, self._config, first)
        self._evaluate(0, phase.first_state)
        if first:  # so that a kill does not undo the warm start
            self._save(0, phase.first_state)
            self._checkpoints.drop_warm_start()
        return 0, phase.first_state

    def _warm_start(self) -> Placed:
        """The actor's weights after supervised training."""
        phase, config = self._assembly.warm_start, self._config.warm_start
        assert phase is not None and config is not None
        executor = Executor(phase.roles, seed=self._config.seed, timeline=self._timeline, channel=self._channel)
        try:
            if self._resume is None or self._resume.position is None:
                load_first_weights(executor, phase, self._config, {})
                first, state = 0, phase.first_state
            else:
                first, state = self._resume.position.done, restore(self._resume, phase, executor)
            new_tokens = phase.graph.calls[0].terms[0].batch["sequences"].response.shape[1]
            loader = PromptLoader(self._assembly.table, config.batch_size * config.updates_per_step, self._config.seed)
            self._console.header(f"Warm start: {config.steps} supervised updates of {config.batch_size} rows")
            with self._console.progress(config.steps, start=first) as progress:
                for done in range(first + config.updates_per_step, config.steps + 1, config.updates_per_step):
                    call = done // config.updates_per_step - 1
                    rows, step = loader.batch(call, "demonstrations", max_new_tokens=new_tokens), WARM_START_STEP + call
                    at = {"step": step, "phase": "warm start", "number": done}
                    result = executor.run(phase.graph, phase.plan, state, rows, **at)
                    state = result.state
                    self._requests.has_unsaved(True)
                    metrics = flatten({"warm_start": result.fetch()}) | {"warm_start/step": float(done)}
                    self._records.write_metrics(0, metrics)
                    check_finite(metrics, step=done)
                    progress.update(done, {"loss": metrics["warm_start/actor/loss"]})
                    stops, saves = self._requests.look()
                    if stops or saves:
                        self._records.sync()
                        self._checkpoints.save_warm_start(done, executor, state)
                        self._requests.has_unsaved(False)
                        progress.resume()
                    if stops:
                        self._checkpoints.wait()
                        raise self._requests.stopped(f"Saved after {done} of {config.steps} updates of the warm start.")
            return executor.weights.snapshot("actor")
        finally:
            executor.close()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _train(self, first_step: int, state: Any) -> None:
        phase, config = self._assembly.train, self._config
        self._console.header(f"{config.algorithm}: {config.steps} steps of {self._assembly.train_rows.in_words()}")
        unread: collections.deque[tuple[int, StepResult]] = collections.deque()
        self._reported = time.perf_counter()
        with self._console.progress(config.steps, start=first_step) as progress:
            self._executor.say = progress.within_step
            if self._saved is not None:
                progress.saved(self._saved)
            if first_step < config.steps and self._requests.look()[0]:  # requested while weights were made
                self._save(first_step, state)
                raise self._stopped(first_step)
            for step in range(first_step, config.steps):
                rows, versions = self._assembly.train_rows(step), self._versions()
                if self._tails.is_due(step):
                    while unread:
                        self._report(*unread.popleft(), progress)
                    self._tails.refine(self._channel)
                try:
                    result = self._executor.run(phase.graph, self._tails.plan, state, rows, step=step)
                except Exception as error:
                    if step > first_step and self._versions() == versions and self._is_in_all(error):
                        self._rescue(step, state, unread, progress)
                    raise
                self._requests.has_unsaved(True)
                state, done = result.state, step + 1
                unread.append((step, result))
                asked_to_stop, asked_to_save = self._requests.look()
                evaluates, stops = self._evaluator.is_due(done), asked_to_stop and done < config.steps
                saves = self._checkpoints.is_due(done) or asked_to_save or stops
                exports = export_is_due(self._assembly, done)
                # metrics are read a step late, so that the devices do not wait for Python
                while len(unread) > (0 if evaluates or saves or exports else 1):
                    self._report(*unread.popleft(), progress)
                if evaluates and self._evaluate(done, state) and config.output.keep_best:
                    saves = True
                if exports:  # before the checkpoint, from which a run that is killed now would go on without it
                    self._export_step(done)
                if saves:
                    self._save(done, state)
                    progress.saved(done)
                if evaluates or saves or exports:
                    self._reported = time.perf_counter()
                    progress.resume()
                if stops:
                    raise self._stopped(done)

    def _report(self, step: int, result: StepResult, progress: Progress) -> None:
        """Reads the metrics of a step, writes, checks and shows them."""
        done = step + 1
        metrics = flatten(result.fetch())
        self._executor.wait(done)
        now = time.perf_counter()
        seconds, self._reported = now - self._reported, now
        seen = self._channel.gather(self._timeline.seen(steps=range(done - 1, done + 2)))
        timings = self._timeline.summary(done, seen[1:])
        metrics |= timings
        metrics |= throughput_metrics(count_tokens(result), timings, seconds=seconds, num_devices=mesh.num_devices())
        metrics |= balance_metrics(result, self._tails.plan)
        metrics |= decoding_metrics(result, self._tails.plan) | self._tails.metrics()
        self._tails.saw(metrics)
        if self._assembly.train_rows.length_means is not None:
            self._assembly.train_rows.length_means.add_step(result)
        if result.staleness is not None:
            metrics["staleness/steps"] = result.staleness
        if len(scores := _scores(result)) > 1:
            metrics |= {f"reward/{name}/mean": float(values.mean()) for name, values in scores.items()}
        metrics |= {f"reward/{name}": float(count) for name, count in result.counts().items()}
        metrics |= {"training/global_step": done, "training/epoch": self._assembly.train_rows.epoch(done)}
        self._records.write_metrics(done, metrics)
        try:
            check_finite(metrics, step=done)
        except TrainingError as error:
            raise TrainingError(f"{error} {self._last_good()}") from error
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        every = self._config.output.samples_every
        if every and (done == 1 or done % every == 0 or done == self._config.steps):
            self._write_step_samples(done, result)
        self._show(progress, done, metrics)

    def _show(self, progress: Progress, done: int, metrics: Mapping[str, float]) -> None:
        names = {"reward": "critic/score/mean", "KL": "kl/mean", "length": "response_length/mean"}
        if names["reward"] not in metrics:
            names = {"loss": next((name for name in metrics if name.endswith("/loss")), "")}
        shown = {short: metrics[name] for short, name in names.items() if name in metrics}
        progress.update(
            done, shown, timer_seconds(metrics), tokens=metrics["perf/total_num_tokens"],
            busy=metrics.get("perf/busy_fraction"), overlap=metrics.get("perf/overlap", 0.0),
        )  # fmt: skip

    def _write_step_samples(self, done: int, result: StepResult) -> None:
        """Writes samples of the first rollout of a step, with all its scores."""
        generate = next((c for c in result.graph.calls if c.kind == "generate"), None)
        if generate is not None:
            scores = _scores(result, of=generate.name)
            self._records.write_samples(done, "train", result.outputs(generate.name), scores)

    def _evaluate(self, done: int, state: Any) -> bool:
        """Evaluates, and returns whether the policy is better than after any step before."""
        if self._assembly.evaluation is None and self._assembly.held_out is None:
            return False
        before = self._evaluator.best()
        try:
            self._evaluator.run(done, state, self._executor, self._records)
        except Exception as error:
            if self._is_in_all(error):
                self._save(done, state)
                self._checkpoints.wait()
                self._console.line(f"Saved after {done} steps, before the evaluation that failed.")
            raise
        assert self._config.evaluation is not None
        self._console.evaluation(self._evaluator.results, self._config.evaluation.num_prompts)
        return self._evaluator.best() != before

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self, done: int, state: Any) -> None:
        """Saves the state after a step. All steps up to it must have been reported, with finite losses."""
        if self._saved == done:
            return
        self._records.sync()
        value = self._evaluator.value(done) if self._config.output.keep_best else None
        with self._timeline.host("checkpoint", kind=WAIT, step=done, phase="checkpoint"):
            self._checkpoints.save_steps(done, self._executor, state, value=value)
        self._saved = done
        self._requests.has_unsaved(False)

    def _export_step(self, done: int) -> None:
        """Exports the weights after a step. All steps up to it must have been reported, with finite losses."""
        with (
            self._timeline.host("export", kind=WAIT, step=done, phase="export"),
            writing(self._folder.exports, SafetensorError),
        ):
            export_step(self._assembly, self._executor, self._folder, self._channel, done)

    def _stopped(self, done: int) -> RunStopped:
        """The exception for a run that was asked to stop, and has saved."""
        self._checkpoints.wait()
        return self._requests.stopped(f"Saved after {done} of {self._config.steps} steps.")

    def _rescue(
        self, done: int, state: Any, unread: collections.deque[tuple[int, StepResult]], progress: Progress
    ) -> None:
        """Saves the complete steps after the next one failed before it changed any weights."""
        while unread:
            self._report(*unread.popleft(), progress)
        self._save(done, state)
        self._checkpoints.wait()
        self._console.line(f"Saved after {done} steps, before the one that failed.")

    def _is_in_all(self, error: BaseException) -> bool:
        """Returns whether every process of the run has this error now, so that they can save and close together."""
        common = isinstance(error, TrainingError | RunStopped)  # from metrics and requests, which are shared
        return self._channel.count == 1 or common or self._channel.is_shared(error)

    def _last_good(self) -> str:
        """A sentence about the last checkpoint before a step with losses that are not finite."""
        self._checkpoints.wait()
        position = newest_position(self._folder)
        if position is None:
            return "No checkpoint was saved before it: set output.checkpoint_every or output.checkpoint_minutes."
        newest = position.checkpoint(self._folder)
        return f"The last good checkpoint is {newest}; if the same comes of it, name one before."

    def _versions(self) -> dict[str, int]:
        """The version of each set of weights that changes."""
        names = weight_sets_of(self._assembly.train, changing=True)
        return {name: self._executor.weights.version(name) for name in names}


def _scores(result: StepResult, *, of: str | None = None) -> dict[str, np.ndarray]:
    """The scores of rollouts by role, and their weighted sums. `of`: only those of the rollout of this call."""
    chosen: dict[str, str] = {}
    graph = result.graph
    encoded = {call.name for call in graph.calls if call.method == ENCODE and of in graph.dependencies(call)}
    for call in graph.calls:
        of_it = of is None or not {of, *encoded}.isdisjoint(ref.call for ref in call.refs)
        scores = call.method == "scores" and of_it
        if scores or (call.function is weighted_sum and all(ref.call in chosen for ref in call.refs)):
            chosen[call.name] = call.name.replace(".scores", "").replace(f".{weighted_sum.__name__}", "")
    return {role: result.outputs(name) for name, role in chosen.items()}
