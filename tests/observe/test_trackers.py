import json
import math
import os
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from jaxrlhf.config.schema import RunConfig, load_run
from jaxrlhf.observe.metrics import TrainingError
from jaxrlhf.observe.trackers import Trackers, import_mlflow, import_wandb

SAMPLE = {"prompt": "2+2=", "completion": "4\n# four \udce9", "scores": {"math": 1.0, "b": math.nan}, "finish": "stop"}


def config(*overrides: str) -> RunConfig:
    return load_run("ppo_arithmetic", list(overrides))


def events(folder: Path) -> list[Any]:
    """All events of TensorBoard's files in a folder, in the order in which it reads them."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)  # then 4 bytes of checksum, the event, 4 more
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """What TensorBoard shows: without what a restart purged."""
    shown: list[tuple[int, str, float]] = []
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            shown = [point for point in shown if point[0] < event.step]
        shown += [
            (event.step, value.tag, value.simple_value) for value in event.summary.value if not value.HasField("tensor")
        ]
    return shown


class Run:
    """Stands for wandb's run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.logged: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}
        self.exit_code: int | None = None
        self.url = "https://wandb.example/run" if settings["mode"] == "online" else None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Table:
    def __init__(self, columns: list[str]) -> None:
        self.columns, self.rows = columns, []

    def add_data(self, *row: Any) -> None:
        self.rows.append(row)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A wandb that remembers its runs."""
    module: Any = types.ModuleType("wandb")
    module.runs = []

    def init(**settings: Any) -> Run:
        module.runs.append(Run(settings))
        return module.runs[-1]

    module.init, module.Table, module.Settings = init, Table, dict
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tensorboard_has_metrics_at_their_steps_and_the_warm_start_apart(tmp_path: Path) -> None:
    trackers = Trackers(tmp_path, config(), warn=pytest.fail)
    trackers.metrics(0, {"warm_start/step": 50, "warm_start/actor/loss": 2.0})
    trackers.metrics(0, {"eval/exact_match": 0.25})
    trackers.metrics(1, {"actor/loss": 0.5, "x": math.nan})
    # Flushed: TensorBoard sees it while the run goes on.
    shown = scalars(tmp_path / "tensorboard")
    assert shown[:2] == [(0, "eval/exact_match", 0.25), (1, "actor/loss", 0.5)] and math.isnan(shown[2][2])
    assert scalars(tmp_path / "tensorboard" / "warm_start")[1] == (50, "warm_start/actor/loss", 2.0)
    trackers.close()
    assert trackers.shown_at == {"tensorboard": str(tmp_path / "tensorboard")}


def test_tensorboard_shows_samples_as_they_are(tmp_path: Path) -> None:
    trackers = Trackers(tmp_path, config(), warn=pytest.fail)
    trackers.samples(3, "held-out", [SAMPLE, SAMPLE])
    trackers.close()
    (event,) = (event for event in events(tmp_path / "tensorboard") if event.summary.value)
    (value,) = event.summary.value
    assert (event.step, value.tag) == (3, "samples/held-out/text_summary")
    text = value.tensor.string_val[0].decode()
    assert text.count("    2+2=\n\n    4\n    # four \\udce9\n\nmath 1, b nan (stop)") == 2


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    first = Trackers(tmp_path, config(), warn=pytest.fail)
    for update in (50, 100):
        first.metrics(0, {"warm_start/step": update, "loss": 1.0})
    for step in (1, 2, 3):
        first.metrics(step, {"x": step})
    first.close(failed=True)
    second = Trackers(tmp_path, config(), resumed_at=1, warn=pytest.fail)
    second.metrics(2, {"x": 20.0})
    second.close()
    assert scalars(tmp_path / "tensorboard") == [(1, "x", 1.0), (2, "x", 20.0)]
    assert [step for step, _, _ in scalars(tmp_path / "tensorboard" / "warm_start")] == [50, 50, 100, 100]

    third = Trackers(tmp_path, config(), resumed_at=0, warm_start_resumed_at=50, warn=pytest.fail)
    third.metrics(0, {"warm_start/step": 100})
    third.metrics(1, {"x": 10.0})
    third.close()
    assert scalars(tmp_path / "tensorboard") == [(1, "x", 10.0)]
    assert [step for step, _, _ in scalars(tmp_path / "tensorboard" / "warm_start")] == [50, 50, 100]


def test_no_tracker_where_none_is_asked_for(tmp_path: Path) -> None:
    trackers = Trackers(tmp_path, config("output.tensorboard=false"), warn=pytest.fail)
    trackers.metrics(1, {"x": 1.0})
    trackers.samples(1, "train", [SAMPLE])
    trackers.close()
    assert list(tmp_path.iterdir()) == [] and trackers.shown_at == {}


def test_wandb_gets_metrics_samples_and_the_config(tmp_path: Path, wandb: Any) -> None:
    asked = config("output.tensorboard=false", "output.wandb={project: p, entity: e, tags: [a]}")
    trackers = Trackers(tmp_path / "", asked, warn=pytest.fail)
    (run,) = wandb.runs
    settings = run.settings
    assert (settings["project"], settings["entity"], settings["tags"], settings["group"]) == ("p", "e", ["a"], None)
    assert (settings["mode"], settings["resume"], settings["name"]) == ("online", "allow", tmp_path.name)
    assert settings["config"]["settings"]["gae_lambda"] == 0.95 and settings["dir"] == str(tmp_path)
    json.dumps(settings["config"])
    assert run.axes == {"*": "training/global_step", "warm_start/*": "warm_start/step"}
    trackers.metrics(0, {"warm_start/step": 50, "warm_start/actor/loss": 2.0})
    trackers.metrics(4, {"eval/x": 0.5})
    trackers.samples(4, "train", [SAMPLE])
    trackers.samples(4, "train", [])
    trackers.close(failed=True)
    warm, evaluation, sampled = run.logged
    assert warm == {"warm_start/step": 50, "warm_start/actor/loss": 2.0}
    assert evaluation == {"eval/x": 0.5, "training/global_step": 4}
    table = sampled["samples/train"]
    assert table.columns == ["step", "prompt", "completion", "finish", "math", "b"]
    assert table.rows[0][:5] == (4, "2+2=", "4\n# four \\udce9", "stop", 1.0) and sampled["training/global_step"] == 4
    assert run.exit_code == 1
    assert trackers.shown_at == {"wandb": "https://wandb.example/run"}


def test_a_resumed_run_keeps_its_id_on_wandb(tmp_path: Path, wandb: Any) -> None:
    asked = config("output.wandb={mode: offline}")
    for resumed_at in (None, 3):
        trackers = Trackers(tmp_path, asked, resumed_at=resumed_at, warn=pytest.fail)
        assert trackers.shown_at["wandb"] == str(tmp_path / "wandb")
        trackers.close()
    first, second = wandb.runs
    assert first.settings["id"] == second.settings["id"] and first.settings["mode"] == "offline"
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": first.settings["id"]}


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")], ids=["nothing", "a folder of that name"])
def test_wandb_that_is_not_installed_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(ValueError, match=r"output\.wandb: needs the package wandb\. Got none.*jaxrlhf\[wandb\]"):
        import_wandb()


def test_wandb_that_refuses_the_run_ends_it_before_it_starts(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**settings: Any) -> None:
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    message = r"output\.wandb: .* Got RuntimeError: no API key configured\. Log in .* output\.wandb\.mode=offline"
    with pytest.raises(TrainingError, match=message):
        Trackers(tmp_path, config("output.wandb={}"), warn=pytest.fail)


def test_a_tracker_that_fails_is_told_once_and_counted_and_the_others_go_on(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    trackers = Trackers(tmp_path, config("output.wandb={}"), warn=told.append)
    (tmp_path / "tensorboard").write_text("a file in the way")
    for step in range(3):
        trackers.metrics(step, {"x": 1.0})
    assert len(told) == 1 and told[0].startswith("TensorBoard failed, and training goes on without it (FileExistsError")
    trackers.close()
    assert told[1:] == ["TensorBoard: 3 records were lost. They are in metrics.jsonl and samples.jsonl."]
    assert len(wandb.runs[0].logged) == 3 and wandb.runs[0].exit_code == 0


class Client:
    """Stands for MLflow's client, over runs that all clients see."""

    def __init__(self, module: Any, address: str) -> None:
        self._module = module
        module.addresses.append((address, os.environ.get("MLFLOW_ALLOW_FILE_STORE")))

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id=name) if name in self._module.experiments else None

    def create_experiment(self, name: str) -> str:
        self._module.experiments.append(name)
        return name

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"id{len(self._module.runs)}"
        self._module.runs[run_id] = {"of": (experiment_id, run_name), "metrics": [], "params": {}, "files": {}}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self._module.runs[run_id]["status"] = status

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self._module.runs[run_id]["metrics"] += metrics
        self._module.runs[run_id]["params"] |= dict(params)

    def log_dict(self, run_id: str, tree: Any, file: str) -> None:
        self._module.runs[run_id]["files"][file] = json.loads(json.dumps(tree))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self._module.runs[run_id]["files"][file] = text

    def set_terminated(self, run_id: str, status: str) -> None:
        self._module.runs[run_id]["status"] = status


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An MLflow that remembers its runs."""
    module: Any = types.ModuleType("mlflow")
    module.runs, module.experiments, module.addresses = {}, [], []
    module.MlflowClient = lambda tracking_uri: Client(module, tracking_uri)
    module.entities = types.SimpleNamespace(
        Metric=lambda name, value, timestamp, step: (name, value, step), Param=lambda name, value: (name, value)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that what a tracker sets is set back
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return module


def test_mlflow_gets_metrics_samples_and_the_config(tmp_path: Path, mlflow: Any) -> None:
    asked = config("output.tensorboard=false", "output.mlflow={experiment: e}")
    trackers = Trackers(tmp_path, asked, warn=pytest.fail)
    trackers.metrics(0, {"warm_start/step": 50, "warm_start/actor/loss": 2.0})
    trackers.metrics(4, {"eval/x": 0.5, "eval/x/best@4": 1.0})
    trackers.samples(4, "held-out", [SAMPLE])
    trackers.close(failed=True)
    run = mlflow.runs["id0"]
    assert run["of"] == ("e", tmp_path.name) and run["status"] == "FAILED" and mlflow.experiments == ["e"]
    assert run["metrics"] == [
        ("warm_start/step", 50, 50), ("warm_start/actor.loss", 2.0, 50), ("eval/x", 0.5, 4), ("eval/x.best_4", 1.0, 4),
    ]  # fmt: skip
    assert run["params"]["settings.gae_lambda"] == "0.95" and len(run["params"]) > 100
    assert run["files"]["config.yaml"]["settings"]["gae_lambda"] == 0.95
    assert "# four \\udce9" in run["files"]["samples/held-out/000004.md"]
    assert trackers.shown_at == {"mlflow": "mlruns"} and mlflow.addresses == [("mlruns", "true")]


def test_a_resumed_run_keeps_its_id_on_mlflow(tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("output.mlflow={}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    Trackers(tmp_path, asked, warn=pytest.fail).close()
    assert mlflow.runs["id0"]["status"] == "FINISHED" and json.loads((tmp_path / "mlflow.json").read_text()) == {
        "id": "id0"
    }
    trackers = Trackers(tmp_path, asked, resumed_at=3, warn=pytest.fail)
    assert list(mlflow.runs) == ["id0"] and mlflow.runs["id0"]["status"] == "RUNNING"
    assert trackers.shown_at["mlflow"] == "https://mlflow.example"
    assert mlflow.addresses == [("https://mlflow.example", None)] * 2, "a server needs no file store"
    (tmp_path / "other").mkdir()
    Trackers(tmp_path / "other", config("output.mlflow={tracking_uri: here}"), warn=pytest.fail)
    assert mlflow.addresses[-1] == ("here", "true") and mlflow.experiments == ["jaxrlhf"]


def test_mlflow_that_is_not_there_or_refuses_the_run(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "create_run", lambda *_, **__: 1 / 0)
    with pytest.raises(
        TrainingError, match=r"output\.mlflow: mlruns must take the run\. Got ZeroDivisionError: division"
    ):
        Trackers(tmp_path, config("output.mlflow={}"), warn=pytest.fail)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"output\.mlflow: needs the package mlflow\. Got none.*jaxrlhf\[mlflow\]"):
        import_mlflow()
