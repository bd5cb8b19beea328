"""The files of a run as pages show them: of a run that has ended, is still going, or was killed.

Only metrics or a config must be there. Optional files that are missing or cannot be read leave a note.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.brief import cut
from jaxrlhf.config.plan_config import Placement
from jaxrlhf.config.reading import build, read_yaml
from jaxrlhf.observe.chrome_trace import Rows, TraceError, read_rows
from jaxrlhf.observe.json_lines import read_json_lines
from jaxrlhf.observe.metrics import read_metrics
from jaxrlhf.planner.plans.plan import PlanData
from jaxrlhf.planner.plans.saved_plan import SavedPlan, read_plan

CONFIG, METRICS, SAMPLES, TIMELINE = "config.yaml", "metrics.jsonl", "samples.jsonl", "timeline.json"
PLAN, GRAPH, PLANNED, OUTCOME, VERSIONS = "plan.json", "graph.json", "planned.json", "outcome.json", "versions.json"


_OF_A_CALL = ("name", "role", "kind", "num_rows", "weights", "reads", "writes", "needs", "inputs")


class ReportError(ValueError):
    """Runs of which no report can be made."""


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What is known of a run."""

    name: str
    path: Path
    is_running: bool
    config: Mapping[str, Any]
    config_text: str
    records: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    rows: Rows | None
    """Those of its timeline; None without one."""
    placements: Mapping[str, Placement | None] | None
    """Call of the step -> its placement, None for those on the host; None without a plan."""
    calls: Sequence[Mapping[str, Any]]
    """The calls of the step, as graph.json has them."""
    saved: SavedPlan | None
    versions: Mapping[str, Any]
    outcome: Mapping[str, Any] | None
    """None if it has not ended by itself."""
    notes: tuple[str, ...]
    """What could not be read, and why."""

    @property
    def steps_done(self) -> int:
        steps = [record for record in self.records if "timing_s/step" in record] or self.records
        return max((int(record["step"]) for record in steps), default=0)

    @property
    def state(self) -> str:
        """How far it is, in words."""
        of = f" of {self.config['steps']}" if "steps" in self.config else ""
        how = "running" if self.is_running else "finished" if self.outcome is not None else "stopped"
        return f"{how}, step {self.steps_done}{of}"


def read_run(path: Path, *, name: str = "", is_running: bool = False) -> RunFiles:
    """The files of a run's folder.

    Raises:
        ReportError: It is no such folder, or a record of its metrics has no step.
        ValueError: A line of metrics or samples, other than half a last one, is no JSON object.
    """
    if not path.is_dir() or not any((path / file).is_file() for file in (CONFIG, METRICS)):
        got = f"a folder without {CONFIG} and {METRICS}" if path.is_dir() else "no such folder"
        raise ReportError(f"{path}: must be the folder of a run. Got {got}. Name one, such as runs/latest.")
    notes: list[str] = []

    def optional(file: str, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """What a file holds; without it, or with a note that it cannot be read, something else."""
        if not (path / file).is_file():
            return otherwise
        try:
            return read(path / file)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            reason = str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"
            notes.append(f"{file} is left out: {cut(reason)}")
            return otherwise

    records = read_metrics(path / METRICS) if (path / METRICS).is_file() else []
    if odd := next((i for i, record in enumerate(records, start=1) if not isinstance(record.get("step"), int)), 0):
        got = cut(str(records[odd - 1]))
        raise ReportError(f"{path / METRICS}, line {odd}: must have a whole number as its step. Got {got}. Remove it.")
    graph = optional(GRAPH, _step_calls, [])
    placements = optional(PLAN, _placements, None)
    return RunFiles(
        name=name or path.resolve().name,
        path=path,
        is_running=is_running,
        config=optional(CONFIG, read_yaml, {}),
        config_text=optional(CONFIG, _text, ""),
        records=records,
        samples=read_json_lines(path / SAMPLES) if (path / SAMPLES).is_file() else [],
        rows=optional(TIMELINE, read_rows, None),
        placements=None if placements is None else {**dict.fromkeys(call["name"] for call in graph), **placements},
        calls=graph,
        saved=optional(PLANNED, read_plan, None),
        versions=optional(VERSIONS, _mapping, {}),
        outcome=optional(OUTCOME, _mapping, None),
        notes=tuple(notes),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _mapping(path: Path) -> Mapping[str, Any]:
    data = json.loads(_text(path))
    if not isinstance(data, Mapping):
        raise ValueError(f"must be a JSON object. Got {type(data).__name__}.")
    return data


def _step_calls(path: Path) -> list[Mapping[str, Any]]:
    """The calls of the step; what pages show of each must be there."""
    return [{key: call[key] for key in _OF_A_CALL} for call in _mapping(path)["step"]]


def _placements(path: Path) -> dict[str, Placement]:
    plan = build(PlanData, _mapping(path)["step"], where=path.name)
    return {name: placement.with_devices() for name, placement in plan.calls.items()}
