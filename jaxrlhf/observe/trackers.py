"""Trackers, which show a run beside its files: TensorBoard, Weights & Biases, MLflow, as its config asks for them.

metrics.jsonl and samples.jsonl are the record. Trackers show the same numbers elsewhere, and may fail: a full disk or a
lost network is reported once, counted, and does not end the run.
"""

import collections
import importlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import text as text_summary

from jaxrlhf.config.reading import leaves, to_tree
from jaxrlhf.config.schema import MlflowConfig, RunConfig, WandbConfig
from jaxrlhf.observe.metrics import TrainingError
from jaxrlhf.writing import write_atomically

GLOBAL_STEP, WARM_START_STEP = "training/global_step", "warm_start/step"
"""Metrics that are the axes of the others."""


class Trackers:
    """The trackers that a config asks for. Once they are open, their errors are reported to `warn` and not raised.

    In a run that is resumed in its folder, records after the steps `resumed_at`, or updates of the warm start
    `warm_start_resumed_at`, are hidden. Raises TrainingError if Weights & Biases or MLflow refuses the run.
    """

    def __init__(
        self, folder: Path, config: RunConfig, *, resumed_at: int | None = None,
        warm_start_resumed_at: int | None = None, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._warn = warn
        self._trackers: dict[str, TensorBoard | WeightsAndBiases | MLflow] = {}
        self._num_failed: collections.Counter[str] = collections.Counter()
        self.shown_at: dict[str, str] = {}
        """Name -> the folder or address where it can be watched."""
        if config.output.tensorboard:
            tensorboard = folder / "tensorboard"
            self._trackers["TensorBoard"] = TensorBoard(tensorboard, resumed_at, warm_start_resumed_at)
            self.shown_at["tensorboard"] = str(tensorboard)
        if config.output.wandb is not None:
            wandb = WeightsAndBiases(folder, config, config.output.wandb)
            self._trackers["Weights & Biases"] = wandb
            self.shown_at["wandb"] = wandb.address
        if config.output.mlflow is not None:
            mlflow = MLflow(folder, config, config.output.mlflow)
            self._trackers["MLflow"] = mlflow
            self.shown_at["mlflow"] = mlflow.address

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Shows a record of metrics.jsonl: of a step, an evaluation, or (with `warm_start/step`) the warm start."""
        self._each(lambda tracker: tracker.metrics(step, values))

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows samples: rows of `prompt`, `completion`, `scores` and `finish`."""
        self._each(lambda tracker: tracker.samples(step, split, rows))

    def close(self, *, failed: bool = False) -> None:
        """Writes the remaining records, and reports how many were lost. `failed`: the run ended by an error."""
        self._each(lambda tracker: tracker.close(failed=failed))
        for name, count in self._num_failed.items():
            self._warn(f"{name}: {count} records were lost. They are in metrics.jsonl and samples.jsonl.")

    def _each(self, act: Callable[["TensorBoard | WeightsAndBiases | MLflow"], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                act(tracker)
            except Exception as error:
                self._num_failed[name] += 1
                if self._num_failed[name] == 1:
                    self._warn(
                        f"{name} failed, and training goes on without it ({type(error).__name__}: {error}). This is "
                        "said once; metrics.jsonl and samples.jsonl are complete."
                    )


class TensorBoard:
    """Scalars and samples for TensorBoard. The warm start has a folder, and so an axis, of its own.

    It is written from the caller's thread: in tensorboardX's own writer a disk error ends a thread, and training then
    hangs at a full queue.
    """

    def __init__(self, folder: Path, resumed_at: int | None, warm_start_resumed_at: int | None) -> None:
        self._axes = {"run": (folder, resumed_at), "warm start": (folder / "warm_start", warm_start_resumed_at)}
        self._writers: dict[str, EventsWriter] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        axis, at = ("warm start", int(values[WARM_START_STEP])) if WARM_START_STEP in values else ("run", step)
        self._write(axis, Event(step=at, summary=Summary(value=scalars)))

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        text = _encodable("\n\n---\n\n".join(map(_sample_text, rows)))
        self._write("run", Event(step=step, summary=text_summary(f"samples/{split}", text)))

    def close(self, *, failed: bool) -> None:
        del failed
        for writer in self._writers.values():
            writer.close()

    def _write(self, axis: str, event: Event) -> None:
        writer = self._writers[axis] if axis in self._writers else self._open(axis)
        event.wall_time = time.time()
        writer.write_event(event)
        writer.flush()

    def _open(self, axis: str) -> EventsWriter:
        folder, resumed_at = self._axes[axis]
        folder.mkdir(parents=True, exist_ok=True)
        # The name has a resolution of one second: a run that is resumed within it must not overwrite its own file.
        self._writers[axis] = writer = EventsWriter(
            str(folder / "events"), f".{time.time_ns() % 10**9:09}.{os.getpid()}"
        )
        if resumed_at is not None:
            start = SessionLog(status=SessionLog.START)
            writer.write_event(Event(step=resumed_at + 1, wall_time=time.time(), session_log=start))
        return writer


class WeightsAndBiases:
    """A run on Weights & Biases. The folder's wandb.json holds its id, under which a resumed run continues."""

    def __init__(self, folder: Path, config: RunConfig, wandb_config: WandbConfig) -> None:
        self._wandb = import_wandb()
        try:
            chosen = {name: value or None for name, value in to_tree(wandb_config).items()}
            self._run = self._wandb.init(
                **chosen,
                name=folder.name,
                id=_run_id(folder / "wandb.json"),
                resume="allow" if wandb_config.mode == "online" else None,
                dir=str(folder),
                config=to_tree(config),
                # capturing the terminal would disturb the progress bar
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise TrainingError(
                f"output.wandb: Weights & Biases must take the run. Got {got}. Log in with `wandb login`, or set "
                "output.wandb.mode=offline and send it later with `wandb sync`."
            ) from error
        self.address: str = self._run.url if wandb_config.mode == "online" else str(folder / "wandb")
        # The step of wandb can only grow, and a resumed run repeats some steps: the axes are metrics instead.
        self._run.define_metric("*", step_metric=GLOBAL_STEP)
        self._run.define_metric("warm_start/*", step_metric=WARM_START_STEP)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        axis = {} if WARM_START_STEP in values else {GLOBAL_STEP: step}
        self._run.log({**values, **axis})

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        scorers = list(rows[0]["scores"])
        table = self._wandb.Table(columns=["step", "prompt", "completion", "finish", *scorers])
        for row in rows:
            texts = (_encodable(row["prompt"]), _encodable(row["completion"]), row["finish"])
            table.add_data(step, *texts, *(row["scores"][name] for name in scorers))
        self._run.log({f"samples/{split}": table, GLOBAL_STEP: step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run on MLflow. The folder's mlflow.json holds its id, under which a resumed run continues."""

    def __init__(self, folder: Path, config: RunConfig, mlflow_config: MlflowConfig) -> None:
        mlflow, file = import_mlflow(), folder / "mlflow.json"
        self._entities = mlflow.entities
        self.address = mlflow_config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        if "://" not in self.address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow would have a database in its place
        try:
            self._client = mlflow.MlflowClient(tracking_uri=self.address)
            if file.exists():
                self._id = json.loads(file.read_text())["id"]
                self._client.update_run(self._id, status="RUNNING")
            else:
                self._id = self._create(mlflow_config.experiment, folder.name, to_tree(config))
                write_atomically(file, json.dumps({"id": self._id}) + "\n")
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise TrainingError(
                f"output.mlflow: {self.address} must take the run. Got {got}. Set output.mlflow.tracking_uri to a "
                "server that can be reached, or to a folder."
            ) from error

    def _create(self, experiment: str, name: str, tree: dict[str, Any]) -> str:
        """A new run, with its config as a file and as parameters. Returns its id."""
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if known is None else known.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        self._client.log_dict(run_id, tree, "config.yaml")
        params = [self._entities.Param(_mlflow_name(key), str(value)[:500]) for key, value in leaves(tree).items()]
        for start in range(0, len(params), 100):  # the most at a time
            self._client.log_batch(run_id, params=params[start : start + 100])
        return run_id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        at, now = int(values.get(WARM_START_STEP, step)), time.time_ns() // 10**6
        metrics = [self._entities.Metric(_mlflow_name(name), value, now, at) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def samples(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        text = _encodable("\n\n---\n\n".join(map(_sample_text, rows)))
        self._client.log_text(self._id, text, f"samples/{split}/{step:06}.md")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """A name as MLflow takes it. Of several slashes the first stays, since a folder of MLflow's cannot hold both
    `eval/reward` and `eval/reward/best@4`.

    >>> _mlflow_name("eval/reward/best@4")
    'eval/reward.best_4'
    """
    first, slash, rest = re.sub(r"[^\w./ -]", "_", name).partition("/")
    return first + slash + rest.replace("/", ".")


def import_wandb() -> Any:
    """The package wandb. Raises ValueError if it is not installed."""
    # A folder called wandb, such as wandb itself writes, can be imported too.
    return _import("wandb", "init")


def import_mlflow() -> Any:
    """The package mlflow. Raises ValueError if it is not installed."""
    return _import("mlflow", "MlflowClient")


def _import(name: str, attribute: str) -> Any:
    """The package of a tracker, which has an attribute."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = None
    if not hasattr(module, attribute):
        raise ValueError(
            f"output.{name}: needs the package {name}. Got none installed. Install it by pip install "
            f"'jaxrlhf[{name}]', or leave output.{name} out."
        )
    return module


def _run_id(path: Path) -> str:
    """The id in a file from an earlier start of the run, or else a new one, which is written to it."""
    if path.exists():
        return json.loads(path.read_text())["id"]
    run_id = uuid.uuid4().hex[:8]
    write_atomically(path, json.dumps({"id": run_id}) + "\n")
    return run_id


def _sample_text(row: Mapping[str, Any]) -> str:
    """A sample in Markdown, with its texts verbatim."""
    scores = ", ".join(f"{name} {score:.4g}" for name, score in row["scores"].items())
    return f"{_block(row['prompt'])}\n\n{_block(row['completion'])}\n\n{scores} ({row['finish']})"


def _block(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _encodable(text: str) -> str:
    """Text without lone surrogates, which a tokenizer may return for half a character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
