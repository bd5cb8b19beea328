"""The loop of a run: first weights, warm start, steps, evaluations, and what is said of them on the way."""

import collections
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrlhf.checkpoint.store import CheckpointStore, checkpoints_of
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.data.tokenizer import JSONTokenizer
from jaxrlhf.experience import LENGTH, STOP, Rollout
from jaxrlhf.models.huggingface import save_params
from jaxrlhf.runtime.assembly import Assembly, decode_responses
from jaxrlhf.runtime.console import Console, Progress
from jaxrlhf.runtime.executor import Executor, StepResult
from jaxrlhf.runtime.first_weights import Placed, load_first_weights
from jaxrlhf.runtime.metrics import MetricsWriter, check_finite, flatten
from jaxrlhf.runtime.roles import ModelRole
from jaxrlhf.runtime.run_folder import RunFolder
from jaxrlhf.runtime.samples import SamplesWriter
from jaxrlhf.runtime.stages import stage_seconds
from jaxrlhf.runtime.throughput import count_tokens, throughput_metrics
from jaxrlhf.runtime.timeline import Timeline
from jaxrlhf.sharding import mesh

FINISH_NAMES = {STOP: "stop", LENGTH: "length"}
EVALUATION_STEP = 2**32 - 1
"""The step number that decides an evaluation's noise: the same in every evaluation, and that of no training step."""
WARM_START_STEP = 2**31
"""The first step number of a warm start, apart from those of training."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    evaluations: tuple[tuple[int, dict[str, float]], ...]
    """(steps done, metrics), in order."""
    rewards: tuple[float, ...]
    """The mean score of every step."""
    samples: tuple[dict[str, Any], ...]
    """The latest sampled prompts and completions, with their scores."""
    last_metrics: dict[str, float]


class Trainer:
    """Runs an assembled run. Holds the executor, the writers and what has been seen so far."""

    def __init__(self, assembly: Assembly, folder: RunFolder, console: Console) -> None:
        self._assembly, self._folder, self._console = assembly, folder, console
        self._config: RunConfig = assembly.config
        self._timeline = Timeline()
        self._executor = Executor(assembly.train.roles, seed=self._config.seed, timeline=self._timeline)
        self._metrics = MetricsWriter(folder.metrics)
        self._samples = SamplesWriter(folder.samples)
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._rewards: list[float] = []
        self._latest_samples: list[dict[str, Any]] = []
        self._last: dict[str, float] = {}
        self._reported = 0.0
        self._model_roles = [name for name, role in assembly.train.roles.items() if isinstance(role, ModelRole)]
        self._checkpoints = CheckpointStore(folder.checkpoints)

    def run(self) -> Outcome:
        """The whole run. Raises what goes wrong in it, after closing what it had open."""
        try:
            resumed = self._config.resume != "never"
            started_from = {"actor": self._warm_start()} if self._assembly.warm_start and not resumed else {}
            load_first_weights(self._executor, self._assembly.train, self._config, started_from)
            first_step, state = (
                self._resume(Path(self._config.resume)) if resumed else (0, self._assembly.train.first_state)
            )
            if not resumed:
                self._evaluate(0)
            self._train(first_step, state)
            self._executor.wait()
            self._export()
        finally:
            if self._config.output.timeline:
                self._timeline.write_chrome_trace(self._folder.timeline)
            self._metrics.close()
            self._samples.close()
            self._checkpoints.close()
            self._executor.close()
        return Outcome(tuple(self._evaluations), tuple(self._rewards), tuple(self._latest_samples), self._last)

    # -- warm start ---------------------------------------------------------------------------------------------------

    def _warm_start(self) -> Placed:
        """The actor's weights after supervised training."""
        phase, config = self._assembly.warm_start, self._config.warm_start
        assert phase is not None and config is not None
        executor = Executor(phase.roles, seed=self._config.seed, timeline=self._timeline)
        load_first_weights(executor, phase, self._config, {})
        num_calls = config.steps // config.updates_per_step
        new_tokens = phase.graph.calls[0].args[1]["sequences"].response.shape[1]
        self._console.header(f"Warm start: {config.steps} supervised updates of {config.batch_size} rows")
        with self._console.progress(config.steps) as progress:
            state = phase.first_state
            for i in range(num_calls):
                rows = self._assembly.loader.demonstrations(i, config.batch_size * config.updates_per_step, new_tokens)
                done = (i + 1) * config.updates_per_step
                result = executor.run(
                    phase.graph, phase.plan, state, rows, step=WARM_START_STEP + i, phase="warm start", number=done
                )
                state = result.state
                metrics = flatten({"warm_start": result.fetch()}) | {"warm_start/step": done}
                check_finite(metrics, step=done)
                self._metrics.write(0, metrics)
                progress.update(done, {"loss": metrics["warm_start/actor/loss"]})
        weights = executor.weights.snapshot("actor")
        executor.close()
        return weights

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _train(self, first_step: int, state: Any) -> None:
        phase, config = self._assembly.train, self._config
        self._console.header(f"{config.algorithm}: {config.steps} steps of {config.batch_size} prompts")
        unread: collections.deque[tuple[int, StepResult]] = collections.deque()
        self._reported = time.perf_counter()
        with self._console.progress(config.steps, start=first_step) as progress:
            for step in range(first_step, config.steps):
                rows = self._assembly.train_rows(step)
                result = self._executor.run(phase.graph, phase.plan, state, rows, step=step)
                state = result.state
                unread.append((step, result))
                done = step + 1
                pauses = self._evaluation_is_due(done) or self._checkpoint_is_due(done)
                # metrics are read a step late, so that the devices do not wait for Python
                while len(unread) > (0 if pauses else 1):
                    self._report(*unread.popleft(), progress)
                if self._evaluation_is_due(done):
                    self._evaluate(done)
                if self._checkpoint_is_due(done):
                    self._save(done, state)
                    progress.saved(done)
                if pauses:
                    self._reported = time.perf_counter()

    def _report(self, step: int, result: StepResult, progress: Progress) -> None:
        """Read a step's metrics, check them, write them, show them."""
        done = step + 1
        metrics = flatten(result.fetch())
        self._executor.wait(done)
        now = time.perf_counter()
        seconds, self._reported = now - self._reported, now
        timings = self._timeline.summary(done)
        metrics |= timings
        metrics |= throughput_metrics(count_tokens(result), timings, seconds=seconds, num_devices=mesh.num_devices())
        metrics |= {"training/global_step": done, "training/epoch": self._assembly.loader.epoch(done)}
        check_finite(metrics, step=done)
        self._metrics.write(done, metrics)
        self._last = metrics
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        every = self._config.output.samples_every
        if every and (done == 1 or done % every == 0 or done == self._config.steps):
            self._write_step_samples(done, result)
        self._show(progress, done, metrics)

    def _show(self, progress: Progress, done: int, metrics: Mapping[str, float]) -> None:
        names = {"reward": "critic/score/mean", "KL": "kl/mean", "length": "response_length/mean"}
        if names["reward"] not in metrics:
            names = {"loss": "actor/loss"}
        shown = {short: metrics[name] for short, name in names.items() if name in metrics}
        rate = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        progress.update(done, shown, stage_seconds(metrics), tokens_per_second=rate or None)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _checkpoint_is_due(self, done: int) -> bool:
        every = self._config.output.checkpoint_every
        return done == self._config.steps or bool(every and done % every == 0)

    def _checkpointed(self, state: Any) -> dict[str, Any]:
        """All arrays that the next step depends on."""
        roles = {name: self._executor.weights.state(name) for name in self._model_roles}
        return {"roles": roles, "algorithm": state}

    def _save(self, done: int, state: Any) -> None:
        versions = {name: self._executor.weights.version(name) for name in self._model_roles}
        self._checkpoints.save(done, self._checkpointed(state), {"versions": versions, "seed": self._config.seed})

    def _resume(self, folder: Path) -> tuple[int, Any]:
        """The steps done and the algorithm's state at the newest checkpoint of another run; weights are taken over."""
        with CheckpointStore(checkpoints_of(folder)) as store:
            done = store.latest()
            assert done is not None
            like = jax.tree.map(_restorable, self._checkpointed(self._assembly.train.first_state))
            restored, meta = store.restore(done, like)
        for name in self._model_roles:
            self._executor.weights.restore(name, restored["roles"][name], meta["versions"][name])
        self._console.line(f"Resumed from {folder} after {done} steps")
        return done, restored["algorithm"]

    def _export(self) -> None:
        """Write roles' last weights in Hugging Face's format."""
        for name in self._config.output.export:
            role = self._assembly.train.roles[name]
            assert isinstance(role, ModelRole)
            tokenizer = self._assembly.table.tokenizer
            save_params(
                self._executor.weights.snapshot(name)[1], role.model, self._folder.path / name, dtype=role.model.dtype,
                end_id=tokenizer.end_id, pad_id=tokenizer.pad_id,
            )  # fmt: skip
            if isinstance(tokenizer, JSONTokenizer):
                tokenizer.save(self._folder.path / name / "tokenizer.json")

    # -- evaluation and samples ----------------------------------------------------------------------------------------

    def _evaluation_is_due(self, done: int) -> bool:
        evaluation = self._config.evaluation
        if evaluation is None or done == 0:
            return False
        return done == self._config.steps or bool(evaluation.every and done % evaluation.every == 0)

    def _evaluate(self, done: int) -> None:
        """Mean scores of responses to the held-out prompts."""
        phase = self._assembly.evaluation
        if phase is None:
            return
        started = time.perf_counter()
        scores: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        lengths: list[np.ndarray] = []
        for batch in self._assembly.eval_batches:
            result = self._executor.run(
                phase.graph, phase.plan, phase.first_state, batch, step=EVALUATION_STEP, phase="evaluation", number=done
            )
            fetched = result.fetch()
            for name, value in fetched["scores"].items():
                scores[name].append(value)
            lengths.append(fetched["rollout"].lengths)
            self._write_samples(done, "held-out", fetched["rollout"], fetched["scores"])
        metrics = {f"eval/{name}": float(np.concatenate(values).mean()) for name, values in scores.items()}
        metrics["eval/response_length"] = float(np.concatenate(lengths).mean())
        metrics["timing_s/testing"] = time.perf_counter() - started
        self._metrics.write(done, metrics)
        self._evaluations.append((done, metrics))
        self._console.evaluation(self._evaluations, num_prompts=sum(map(len, lengths)))

    def _write_step_samples(self, done: int, result: StepResult) -> None:
        """The first rollout of a step, with everything that scored it."""
        generate = next((c for c in result.graph.calls if c.kind == "generate"), None)
        if generate is None:
            return
        scorers = [
            c for c in result.graph.calls if c.method == "scores" and any(ref.call == generate.name for ref in c.refs)
        ]
        scores = {call.role or call.name: result.outputs(call.name) for call in scorers}
        self._write_samples(done, "train", result.outputs(generate.name), scores)

    def _write_samples(self, step: int, split: str, rollout: Rollout, scores: Mapping[str, np.ndarray]) -> None:
        few = jax.tree.map(lambda x: x[: self._config.output.num_samples], rollout)
        self._latest_samples = [
            {
                "prompt": self._assembly.table.prompt(int(few.row[i])),
                "completion": completion,
                "scores": {name: float(values[i]) for name, values in scores.items()},
                "finish": FINISH_NAMES[int(few.finish[i])],
            }
            for i, completion in enumerate(decode_responses(few, self._assembly.table))
        ]
        for sample in self._latest_samples:
            self._samples.write(step=step, split=split, **sample)


def _restorable(x: Any) -> Any:
    """What Orbax is to restore in place of an array."""
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return np.asarray(x)
