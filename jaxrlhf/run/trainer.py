"""The loop of a run: first or restored weights, warm start, steps, evaluations, checkpoints."""

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from jaxrlhf.cluster.cluster_text import local_cluster
from jaxrlhf.configured.sampling import samplings_of
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.function_threads import FunctionAbandonedError
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.execution.step_result import StepResult
from jaxrlhf.execution.weight_store import WeightStore
from jaxrlhf.observe.chrome_trace import write_chrome_trace
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.events import WAIT, ProcessEvents
from jaxrlhf.observe.metrics import TrainingError, check_finite, flatten
from jaxrlhf.observe.progress import Progress
from jaxrlhf.observe.step_timers import timer_seconds
from jaxrlhf.observe.timeline_recorder import Timeline
from jaxrlhf.run.assembly import Assembly
from jaxrlhf.run.checkpoints import Checkpoints, restore, weight_sets_of
from jaxrlhf.run.evaluation import Evaluator
from jaxrlhf.run.export import export, export_step, export_to
from jaxrlhf.run.export import is_due as export_is_due
from jaxrlhf.run.first_weights import Placed, load_first_weights
from jaxrlhf.run.interruption import Requests, RunStopped, StopRequest
from jaxrlhf.run.memory_remedies import OutOfMemoryError, forecast_step, is_out_of_memory, out_of_memory
from jaxrlhf.run.outcome import Outcome
from jaxrlhf.run.records import Records
from jaxrlhf.run.resume_point import Position, ResumePoint, newest_position, what_is_kept
from jaxrlhf.run.run_folder import RunFolder
from jaxrlhf.run.step_metrics import (
    balance_metrics,
    count_tokens,
    decoding_metrics,
    reward_metrics,
    scores_of,
    throughput_metrics,
)
from jaxrlhf.run.tail_refinement import TailRefinement
from jaxrlhf.run.warm_start import train_actor_first
from jaxrlhf.sharding import mesh
from jaxrlhf.writing import UnwritableError, writing


class Trainer:
    """Executes an assembled run in its folder, from the start or from where it is resumed: all at once (`run`), or by
    `start`, then `step` or `train` as often as there are steps, `finish` and `close`. Between two steps it asks whether
    to stop. Every process of a run has a trainer.

    Args:
        pauses: A request to stop between two steps leaves the trainer as it is, so that it can go on. Otherwise it is
            closed, as after any error.
    """

    def __init__(
        self, assembly: Assembly, folder: RunFolder, console: Console, *, resume: ResumePoint | None, stop: StopRequest,
        channel: Channel, pauses: bool = False,
    ) -> None:  # fmt: skip
        self._assembly, self._folder, self._console = assembly, folder, console
        self._config, self._resume, self._channel, self._pauses = assembly.config, resume, channel, pauses
        self._timeline = Timeline(own_devices=mesh.own_positions())
        self._executor = Executor(
            assembly.train.roles, seed=self._config.seed, timeline=self._timeline, channel=channel,
            part_tokens=assembly.config.output.part_tokens,
        )  # fmt: skip
        self._records = Records(channel, folder, assembly.config, assembly.table, resume, console.line)
        self._checkpoints = Checkpoints(assembly, folder, channel)
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
        self.done = 0
        """Steps done, of this start and those before."""
        self._state: Any = None
        """The algorithm's state after them."""
        self._first_step = 0
        self._unread: collections.deque[tuple[int, StepResult]] = collections.deque()
        """Steps whose metrics are not read yet."""
        self._latest: dict[str, float] = {}
        """The metrics of the last step that was read, and of an evaluation after it."""
        self._progress = self._unseen_progress()
        self._reported = 0.0
        self._saved = None if is_branch else done
        """Steps done at the newest checkpoint of this folder."""
        self._to_close = ["timeline", "records", "executor", "checkpoints"]
        """The parts that are still open, in the order in which they are closed."""
        self.listen(stop)

    def listen(self, stop: StopRequest) -> None:
        """Looks for requests to stop at another place than before."""
        stop.abandon = self._executor.abandon_functions
        self._requests = Requests(stop, self._checkpoints, self._channel)
        self._has_unsaved(False)

    def run(self) -> Outcome:
        """Executes the run. Raises RunStopped if it was asked to stop, and has saved."""
        self.start()
        self.train(self._config.steps)
        outcome = self.finish()
        self.close()
        return outcome

    def start(self) -> None:
        """Loads or restores all weights, after the warm start where there is one. Evaluates if that is due."""
        with self._closed_by_errors():
            self.done, self._state = self._start()
            self._first_step = self.done

    def step(self) -> dict[str, float]:
        """Takes one step. Returns its metrics, with those of an evaluation after it where one was due."""
        with self._closed_by_errors():
            self._stop_if_asked()
            self._reported = time.perf_counter()
            self._step(reads_late=False)
            self._pause_if_asked()
        return dict(self._latest)

    def train(self, until: int) -> None:
        """Takes the steps up to the number `until`, and shows their progress."""
        with self._closed_by_errors():
            rows = self._assembly.train_rows.in_words()
            self._console.header(f"{self._config.algorithm}: {self._config.steps} steps of {rows}")
            self._reported = time.perf_counter()
            with self._console.progress(self._config.steps, start=self.done) as self._progress:
                self._executor.say = self._progress.within_step
                try:
                    if self._saved is not None:
                        self._progress.saved(self._saved)
                    if self.done < until:
                        self._stop_if_asked()
                    while self.done < until:
                        # metrics are read a step late, so that the devices do not wait for Python
                        self._step(reads_late=self.done + 1 < until)
                    self._pause_if_asked()
                finally:
                    self._progress = self._unseen_progress()
                    self._executor.say = self._progress.within_step

    def finish(self) -> Outcome:
        """Exports the last weights and closes all files. The executor stays, for calls on these weights."""
        with self._closed_by_errors():
            self._has_unsaved(True)  # exports
            self._executor.wait()
            with writing(self._folder.path, SafetensorError):
                export(self._assembly, self._executor, self._folder, self._channel)
        self._close(None, but=("executor",))
        return self.outcome()

    def outcome(self) -> Outcome:
        """The results up to now."""
        return Outcome(
            steps=self.done,
            evaluations=tuple(self._evaluator.results),
            best=self._evaluator.best(),
            rewards=tuple(self._rewards),
            samples=tuple(self._records.latest_samples),
            shown_at=self._records.shown_at,
            folder=self._folder,
            weights=self._executor.weights,
        )

    def close(self) -> None:
        """Closes what is still open. No further step can be taken."""
        unused = ("timeline",) if self.done == self._first_step else ()  # that of an earlier start stays
        self._to_close = [name for name in self._to_close if name not in unused]
        self._close(None)

    @property
    def is_closed(self) -> bool:
        """True if there is nothing to go on with: after `close`, and after an error."""
        return not self._to_close

    # -- between steps -------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation of the present weights. They are returned, and written nowhere."""
        return self._evaluator.measure(self.done, self._state, self._executor)

    def save(self) -> Path:
        """Saves the present state. Returns the folder of the checkpoint when it is on the disk."""
        with self._closed_by_errors():
            self._save(self.done, self._state)
            self._checkpoints.wait()
        return self.checkpoint()

    def checkpoint(self) -> Path:
        """The folder of the checkpoint of the present state, whether it exists or not."""
        return Position("steps", self.done).checkpoint(self._folder)

    def wait(self) -> None:
        """Waits for all that was dispatched."""
        self._executor.wait()

    @property
    def weights(self) -> WeightStore:
        """The present weights, on the devices."""
        return self._executor.weights

    def export(self, role: str, target: Path, *, merge_adapters: bool | None) -> None:
        """Writes the present weights of a role to a folder."""
        self._executor.wait()
        parts = self._assembly, self._executor, self._folder, self._channel
        with writing(target, SafetensorError):
            export_to(*parts, role, target, merge_adapters=merge_adapters)

    def events(self) -> ProcessEvents:
        """What ran since the start, in this process."""
        return self._timeline.seen()

    # -- errors --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Closes the trainer if an error, or a request to stop that is no pause, ends the block."""
        try:
            try:
                yield
            except FunctionAbandonedError as error:
                kept = "No step was saved." if self._saved is None else f"Saved after {self._saved} steps."
                raise self._requests.stopped(f"{error} {kept}") from error
        except BaseException as error:
            if isinstance(error, _Paused) and self._pauses:
                raise
            lacks_memory = self._out_of_memory(error) if is_out_of_memory(error) else None
            if not self._is_in_all(error):
                unwritten = isinstance(error, UnwritableError)
                message = f"{error} {what_is_kept(self._folder)}" if unwritten else None
                self._channel.abort(error, message=message if lacks_memory is None else str(lacks_memory))
            self._close(error if lacks_memory is None else lacks_memory)
            if lacks_memory is not None:
                raise lacks_memory from error
            raise

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """The error of a run that ran out of memory, after the table of what its calls need."""
        self._checkpoints.wait()
        memory = forecast_step(self._assembly)
        self._console.table(f"Memory of the step's calls, {memory.unit} on each device", memory.rows)
        return out_of_memory(error, self._assembly, what_is_kept(self._folder))

    def _close(self, error: BaseException | None, *, but: tuple[str, ...] = ()) -> None:
        """Closes everything, `but` some parts, also if a part fails. Raises the first failure, unless the run ended by
        an error."""
        close_of = {
            "timeline": lambda: self._write_timeline(error),
            "records": lambda: self._records.close(failed=error is not None),
            "executor": self._executor.close,
            "checkpoints": self._checkpoints.close,
        }
        closing, self._to_close = self._to_close, [name for name in self._to_close if name in but]
        failures: list[Exception] = []
        for name in (name for name in closing if name not in but):
            try:
                close_of[name]()
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
        return train_actor_first(
            self._assembly, resume=self._resume, timeline=self._timeline, channel=self._channel, console=self._console,
            records=self._records, checkpoints=self._checkpoints, requests=self._requests,
        )  # fmt: skip

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, *, reads_late: bool) -> None:
        """Takes the next step, and what is due after it. `reads_late`: its metrics may be left for the step after it,
        as those of the step before were."""
        phase, config, step, unread = self._assembly.train, self._config, self.done, self._unread
        rows, versions = self._assembly.train_rows(step), self._versions()
        if self._tails.is_due(step):
            self._report_all()
            self._tails.refine(self._channel)
        try:
            result = self._executor.run(phase.graph, self._tails.plan, self._state, rows, step=step)
        except Exception as error:
            if step > self._first_step and self._versions() == versions and self._is_in_all(error):
                self._rescue()
            raise
        self._has_unsaved(True)
        self._state, self.done = result.state, step + 1
        unread.append((step, result))
        asked_to_stop, asked_to_save = self._requests.look()
        evaluates, stops = self._evaluator.is_due(self.done), asked_to_stop and self.done < config.steps
        saves = self._checkpoints.is_due(self.done) or asked_to_save or stops
        exports = export_is_due(self._assembly, self.done)
        while len(unread) > (1 if reads_late and not (evaluates or saves or exports) else 0):
            self._report(*unread.popleft())
        if evaluates and self._evaluate(self.done, self._state) and config.output.keep_best:
            saves = True
        if exports:  # before the checkpoint, from which a run that is killed now would go on without it
            self._export_step(self.done)
        if saves:
            self._save(self.done, self._state)
            self._progress.saved(self.done)
        if evaluates or saves or exports:
            self._reported = time.perf_counter()
            self._progress.resume()
        if stops:
            raise self._stopped()

    def _stop_if_asked(self) -> None:
        """Saves and stops, if that was requested since the last step: while weights were made, say."""
        if self._requests.look()[0]:
            self._save(self.done, self._state)
            raise self._stopped()

    def _pause_if_asked(self) -> None:
        """The same for a request after the last look, in an evaluation: the next step may be far away."""
        if self._pauses and self.done < self._config.steps:
            self._stop_if_asked()

    def _report_all(self) -> None:
        while self._unread:
            self._report(*self._unread.popleft())

    def _report(self, step: int, result: StepResult) -> None:
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
        metrics |= reward_metrics(result)
        metrics |= {"training/global_step": done, "training/epoch": self._assembly.train_rows.epoch(done)}
        self._latest = metrics
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
        self._show(done, metrics)

    def _show(self, done: int, metrics: Mapping[str, float]) -> None:
        names = {"reward": "critic/score/mean", "KL": "kl/mean", "length": "response_length/mean"}
        if names["reward"] not in metrics:
            names = {"loss": next((name for name in metrics if name.endswith("/loss")), "")}
        shown = {short: metrics[name] for short, name in names.items() if name in metrics}
        self._progress.update(
            done, shown, timer_seconds(metrics), tokens=metrics["perf/total_num_tokens"],
            busy=metrics.get("perf/busy_fraction"), overlap=metrics.get("perf/overlap", 0.0),
        )  # fmt: skip

    def _write_step_samples(self, done: int, result: StepResult) -> None:
        """Writes samples of the first rollout of a step, with all its scores."""
        generate = next((c for c in result.graph.calls if c.kind == "generate"), None)
        if generate is not None:
            scores = scores_of(result, of=generate.name)
            self._records.write_samples(done, "train", result.outputs(generate.name), scores)

    def _evaluate(self, done: int, state: Any) -> bool:
        """Evaluates, and returns whether the policy is better than after any step before."""
        if self._assembly.evaluation is None and self._assembly.held_out is None:
            return False
        before = self._evaluator.best()
        try:
            self._latest |= self._evaluator.run(done, state, self._executor, self._records)
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
        self._has_unsaved(False)

    def _export_step(self, done: int) -> None:
        """Exports the weights after a step. All steps up to it must have been reported, with finite losses."""
        with (
            self._timeline.host("export", kind=WAIT, step=done, phase="export"),
            writing(self._folder.exports, SafetensorError),
        ):
            export_step(self._assembly, self._executor, self._folder, self._channel, done)

    def _stopped(self) -> "_Paused":
        """The exception for a run that was asked to stop, and has saved."""
        self._checkpoints.wait()
        stopped = self._requests.stopped(f"Saved after {self.done} of {self._config.steps} steps.")
        return _Paused(stopped.signal_number, str(stopped))

    def _rescue(self) -> None:
        """Saves the complete steps after the next one failed before it changed any weights."""
        self._report_all()
        self._save(self.done, self._state)
        self._checkpoints.wait()
        self._console.line(f"Saved after {self.done} steps, before the one that failed.")

    def _has_unsaved(self, unsaved: bool) -> None:
        """Takes note of whether there is work that is not on the disk. A trainer that pauses has its weights to lose,
        once a step has changed them."""
        self._requests.has_unsaved(unsaved or (self._pauses and self.done > self._first_step))

    def _unseen_progress(self) -> Progress:
        """The progress of steps that are taken one by one."""
        return Progress(lambda line: None, self._config.steps, start=self.done, every=10, clock=time.perf_counter)

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


class _Paused(RunStopped):
    """A run that was asked to stop stands between two steps."""
