"""A run in this process: made, stepped, asked, saved, exported, closed."""

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from jaxrlhf.api.configs import run_config
from jaxrlhf.api.displays import GraphDisplay, PlanDisplay, TimelineDisplay
from jaxrlhf.api.generating import SamplingKeys, check_request, responses
from jaxrlhf.api.keys import Config, RunKeys, spelled_out, with_keys
from jaxrlhf.api.metrics_table import metrics_table
from jaxrlhf.brief import brief, did_you_mean
from jaxrlhf.config.reading import to_tree
from jaxrlhf.config.schema import RunConfig
from jaxrlhf.execution.executor import Executor
from jaxrlhf.execution.process_channel import Channel
from jaxrlhf.observe.console import Console
from jaxrlhf.observe.json_lines import read_json_lines
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.pages.run_html import run_html
from jaxrlhf.programs.roles import ModelRole
from jaxrlhf.require import errors_as
from jaxrlhf.run.checked_run import InputError, check_run
from jaxrlhf.run.open_run import OpenRun
from jaxrlhf.run.trainer import Trainer

if TYPE_CHECKING:
    import pandas


class RunEndedError(RuntimeError):
    """A run that has ended cannot do what it was asked: it was closed, failed, or has done all of its steps.

    >>> ended = rl.Run(config, quiet=True)
    >>> ended.close()
    >>> ended.step()
    Traceback (most recent call last):
    ...
    jaxrlhf.api.run.RunEndedError: step: the run must be open. Got a run that is closed. Go on with a new run.
    """


class Run:
    """A run in this process. It is checked when it is made; the first step loads weights, compiles, and makes the
    run's folder.

        run = rl.Run("grpo_arithmetic", steps=20)
        for metrics in run:
            print(metrics["critic/score/mean"])

    Its results are those of the same config on the command line, bit for bit: metrics, samples, checkpoints, weights.
    Ctrl-C during a step lets the step end, saves, and raises RunStopped: the run can then go on. A second Ctrl-C ends
    it at once.

    `close` frees its folder, its threads and its weights; so do a `with` block, and the end of the last reference.
    """

    @with_keys
    def __init__(self, config: Config | None = None, *, quiet: bool = False, **keys: Unpack[RunKeys]) -> None:
        """
        Args:
            config: The name of a shipped config, a YAML file, a mapping, or a config. None means that the keys say all.
            quiet: Print nothing.
            keys: Keys of the config, laid over it.

        Raises:
            InputError: Config, data and plan do not fit together. Nothing was compiled.
            OutOfMemoryError: The devices have too little memory.

        Example:
            >>> rl.Run(config, steps=3, quiet=True)
            <run of rloo: 0 of 3 steps>
        """
        self._console = Console(quiet=quiet)
        with errors_as(InputError):
            made = run_config(config, keys)
        self._checked = check_run(made, None, say=self._console.line)
        if not self._checked.channel.is_first:  # of several processes, one says everything
            self._console = Console(quiet=True)
        for note in self._checked.notes():
            self._console.line(f"Note: {note}")
        self._open = OpenRun(self._checked, self._console, pauses=True)
        self._generators: list[Executor] = []
        """The executor of `generate`, if there is one."""
        self._ended = ""
        """Why it cannot go on."""
        self._close = weakref.finalize(self, _close, self._open, self._generators, self._checked.channel)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Takes one step. After the last one, weights are exported and all files are complete.

        Returns:
            The metrics of the step, by the names in docs/metrics.md; with `eval/...` if an evaluation was due after it.

        Raises:
            RunStopped: Ctrl-C or SIGTERM came during the step. The step is done and saved, and the run can go on.
            RunEndedError: There is no step left, or the run was closed or failed before.
            RewardError, TrainingError, CheckpointError, UnwritableError, OutOfMemoryError: The run cannot continue. The
                message says what is saved.

        Example:
            >>> metrics = run.step()
            >>> run.done, metrics["training/global_step"], "critic/score/mean" in metrics
            (3, 3, True)
        """
        with self._listening("step") as trainer:
            self._check_steps_left(trainer)
            metrics = trainer.step()
            self._open.finish_if_done()
        return metrics

    def __iter__(self) -> Iterator[dict[str, float]]:
        """Takes the steps that are left, one at a time."""
        while self.done < self.config.steps:
            yield self.step()

    def train(self, steps: int | None = None) -> Self:
        """Takes the steps that are left, or the next `steps` of them, and shows their progress. Raises as `step`.

        Metrics are read a step late, so that the devices never wait for Python: this is faster than single steps.

        Example:
            >>> rl.Run(config, steps=2, quiet=True).train(1).done
            1
        """
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(
                f"train: steps must be at least 1. Got {brief(steps)}. Leave it out for all that are left."
            )
        if steps is None and self._open.outcome is not None:
            return self
        started, last = time.perf_counter(), self.config.steps
        with self._listening("train") as trainer:
            if steps is not None:
                self._check_steps_left(trainer)
            trainer.train(last if steps is None else min(last, trainer.done + steps))
            self._open.finish_if_done()
        self._open.print_outcome(time.perf_counter() - started)
        return self

    # -- questions -----------------------------------------------------------------------------------------------------

    @functools.partial(spelled_out, keys=SamplingKeys, default_text="as in training, but greedy")
    def generate(
        self, prompts: Sequence[str | Mapping[str, Any]], *, role: str = "actor", seed: int = 0,
        **sampling: Unpack[SamplingKeys],
    ) -> list[str]:  # fmt: skip
        """Responses of a role to prompts with its present weights, greedy by default.

        Args:
            prompts: Texts for `data.prompt_column`; or whole rows, for a `data.template` over other columns and for
                lists of messages.
            role: A role with a language model.
            seed: The seed of the noise.
            sampling: Fields of `Sampling`: temperature, max_new_tokens, num_samples ... Others are those of training.

        Returns:
            The texts, `num_samples` consecutive ones for each prompt.

        Raises:
            ValueError: A prompt is too long or not a valid row of the run, or the role has no language model.
            RunEndedError: The run was closed, or failed before.

        Example:
            >>> len(run.generate(["1+2=", "3+4="], temperature=1.0, num_samples=2, max_new_tokens=4))
            4
        """
        assembly = self._checked.assembly
        settings = check_request(assembly, prompts, role, sampling)
        trainer = self._started("generate")
        if not prompts:
            return []
        trainer.wait()
        if not self._generators:
            roles, weights = assembly.train.roles, trainer.weights
            self._generators.append(
                Executor(roles, seed=self.config.seed, channel=self._checked.channel, weights=weights)
            )
        executor = self._generators[0]
        try:
            return responses(assembly, executor, prompts, role=role, seed=seed, sampling=settings)
        except KeyboardInterrupt:
            self._generators.clear()  # it may be in the middle of a call
            executor.close()
            raise

    def evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation of the present weights, as `evaluation` of the config says: `eval/...`.

        They are returned, and not written to the run's records.

        Raises:
            ValueError: The config has no evaluation.
            RunEndedError: The run was closed, or failed before.

        Example:
            >>> sorted(run.evaluate())
            ['eval/response_length', 'eval/reward']
        """
        if self.config.evaluation is None:
            raise ValueError(
                "evaluate: needs the section `evaluation` of the config. Got none. Make the run with "
                "evaluation={'num_prompts': 128}, say."
            )
        return self._started("evaluate").evaluate()

    def weights(self, role: str = "actor") -> Any:
        """The present weights of a role: a nested dict of jax arrays, where they lie. Of adapters, the adapters alone.

        They are for reading: the next step may delete these arrays.

        Raises:
            ValueError: The role has no weights of its own.
            RunEndedError: The run was closed, or failed before.

        Example:
            >>> run.weights("actor")["lm_head"].shape
            (16, 264)
        """
        own = self._owned(role, "weights")
        return self._started("weights").weights.snapshot(own)[1]

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Saves a checkpoint of the present state. Returns its folder, from which `rl.resume` starts a new run.

        Raises:
            UnwritableError: The disk is full, say.
            RunEndedError: The run was closed, or failed before.

        Example:
            >>> checkpoint = run.save()
            >>> checkpoint.name == str(run.done), rl.resume(checkpoint, quiet=True).done == run.done
            (True, True)
        """
        if self._open.outcome is not None:  # the last step saves
            trainer = self._started("save")
            return trainer.checkpoint()
        with self._listening("save") as trainer:
            return trainer.save()

    def export(self, path: str | os.PathLike[str], role: str = "actor", *, merge_adapters: bool | None = None) -> Path:
        """Writes the present weights of a role to a folder in Hugging Face's format, with the tokenizer.

        Args:
            merge_adapters: Of a role with adapters, write the whole model with the adapters added in, instead of the
                adapters alone. None means as `output.merge_adapters` of the config.

        Raises:
            ValueError: The role has no weights of its own.
            UnwritableError: The folder cannot be written.
            RunEndedError: The run was closed, or failed before.

        Example:
            >>> sorted(path.name for path in run.export(folder / "model").glob("*.safetensors"))
            ['model.safetensors']
        """
        self._owned(role, "export")
        self._started("export").export(role, Path(path), merge_adapters=merge_adapters)
        return Path(path)

    @property
    def folder(self) -> Path:
        """The folder of the run: metrics, samples, checkpoints, timeline, exports. It is made when it is first asked
        for, or by the first step."""
        return self._open.find_folder().path

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of metrics so far, in order: one for each step and each evaluation."""
        return read_metrics(self._file("metrics")) if self._open.folder is not None else []

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The metrics so far as a table of pandas: a row for each step, with the evaluation after it; `step` is the
        index. Records of a warm start are left out.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> run.metrics["critic/score/mean"].index.name
            'step'
        """
        return metrics_table(self.records)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples that were written so far, by `output.samples_every`.

        Example:
            >>> sorted(run.samples[0])
            ['completion', 'finish', 'prompt', 'scores', 'split', 'step']
        """
        return read_json_lines(self._file("samples")) if self._open.folder is not None else []

    @property
    def rewards(self) -> list[float]:
        """The mean score of every step so far."""
        return [record["critic/score/mean"] for record in self.records if "critic/score/mean" in record]

    def timeline(self, steps: int | tuple[int, int] | None = None) -> TimelineDisplay:
        """The timeline: events by device, a picture in a notebook, with the events as `rows`.

        Args:
            steps: A step, from 1 on, or the first and the last one of several. None means all; the picture then has the
                last three.

        Example:
            >>> run.timeline(1).rows[0]["step"]
            1
        """
        wanted = (steps, steps) if isinstance(steps, int) else steps
        trainer, folder = self._open.trainer, self._open.folder
        events = trainer.events().events if trainer is not None else ()
        if not events and folder is not None and folder.timeline.exists():
            return TimelineDisplay(folder.timeline, wanted)
        return TimelineDisplay(events, wanted)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> RunConfig:
        """The config of the run, with all defaults."""
        return self._checked.assembly.config

    @property
    def plan(self) -> PlanDisplay:
        """The plan of the step: a placement for every call.

        Example:
            >>> str(run.plan["actor.train"])
            'one device on 0'
        """
        train = self._checked.assembly.train
        return PlanDisplay(train.plan, train.graph, train.roles)

    @property
    def graph(self) -> GraphDisplay:
        """The calls of the step, and which needs which.

        Example:
            >>> [row["call"] for row in run.graph.rows]
            ['actor.generate', 'reference.logprobs', 'reward.scores', 'rloo_batch', 'actor.train']
        """
        return GraphDisplay(self._checked.assembly.train)

    @property
    def done(self) -> int:
        """Steps done, those before a resume included."""
        if self._open.trainer is not None:
            return self._open.trainer.done
        return (self._checked.resume.steps_done or 0) if self._checked.resume is not None else 0

    def __repr__(self) -> str:
        where = f" in {self._open.folder.path}" if self._open.folder is not None else ""
        last = f", last reward {rewards[-1]:.3g}" if (rewards := self.rewards) else ""
        steps = f"{self.done} of {self.config.steps} steps"
        return f"<run of {self.config.algorithm}: {steps}{where}{last}{f', {self._ended}' if self._ended else ''}>"

    def _repr_html_(self) -> str | None:
        if self._open.folder is None:
            return None
        return run_html(self._open.folder.path, records=self.records, config=to_tree(self.config))

    # -- its end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes its files, ends its threads, unlocks its folder and gives up its weights. Later calls do nothing."""
        self._ended = self._ended or "closed"
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _listening(self, what: str) -> Iterator[Trainer]:
        """The trainer, for steps that Ctrl-C lets end."""
        self._check_open(what)
        try:
            with self._open.listening() as trainer:
                yield trainer
        except BaseException as error:
            if self._open.trainer is None or self._open.trainer.is_closed:
                self._ended = f"ended by {type(error).__name__}"
                self._close()
            raise

    def _started(self, what: str) -> Trainer:
        """The trainer, with weights."""
        self._check_open(what)
        if self._open.trainer is None:
            with self._listening(what):
                pass
        assert self._open.trainer is not None
        return self._open.trainer

    def _check_open(self, what: str) -> None:
        if self._ended:
            folder = self._open.folder
            there = f"rl.resume({str(folder.path)!r})" if folder is not None and folder.config.exists() else "a new run"
            raise RunEndedError(f"{what}: the run must be open. Got a run that is {self._ended}. Go on with {there}.")

    def _check_steps_left(self, trainer: Trainer) -> None:
        if trainer.done >= self.config.steps:
            raise RunEndedError(
                f"step: a run has as many steps as its config says. Got all {trainer.done} of them done. For more, "
                f"rl.resume({str(self.folder)!r}, steps={2 * trainer.done or 1}), say."
            )

    def _owned(self, role: str, what: str) -> str:
        """The set of weights of a role."""
        roles = self._checked.assembly.train.roles
        own = {name: x.weights or name for name, x in roles.items() if isinstance(x, ModelRole)}
        if role not in own:
            known = f"Known: {', '.join(own) or 'none'}.{did_you_mean(role, own)}"
            raise ValueError(f"{what}: role must have weights. Got {brief(role)}. {known}")
        return own[role]

    def _file(self, name: str) -> Path:
        assert self._open.folder is not None
        return getattr(self._open.folder, name)


def _close(opened: OpenRun, generators: list[Executor], channel: Channel) -> None:
    """Closes a run; also when nobody refers to it any more."""
    with contextlib.ExitStack() as closing:
        closing.callback(channel.close)
        closing.callback(opened.close)
        for executor in generators:
            closing.callback(executor.close)
        generators.clear()
