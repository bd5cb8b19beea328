"""Plans on disk: a plan, what it was made for, and its forecast.

write_plan(path, saved)
saved = read_plan(path)
saved.check_work(workload)
saved.check_devices(devices_per_node=8, kinds=["NVIDIA H200"])
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf.brief import brief, cut
from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.reading import FORM, ConfigError, build, leaves, to_tree
from jaxrlhf.planner.plans.plan import Plan, PlanData, PlanError
from jaxrlhf.planner.workload import Workload
from jaxrlhf.writing import write_atomically

VERSION = 2
"""The version of the file."""
_AGAIN = "Plan again: python -m jaxrlhf.plan --config ... --out {}."
_OF_A_CALL = (
    "role", "kind", "model", "weights", "rows", "prompt", "response", "needs", "scored", "num_samples", "mini_batches",
    "epochs", "lora",
)  # fmt: skip
"""The fields of a call that a plan depends on."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that a plan is for."""

    cluster: str
    """The cluster, as a user describes it: '2x8:h100'."""
    num_devices: int
    devices_per_node: int
    names: tuple[tuple[str, ...], ...] = ()
    """Node -> JAX's possible names of its devices: 'NVIDIA H200'. Empty if not known."""

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.num_devices < 1 or self.num_devices % self.devices_per_node:
            raise ValueError(f"must be whole nodes. Got {self.num_devices} devices, {self.devices_per_node} a node.")
        nodes = self.num_devices // self.devices_per_node
        if self.names and len(self.names) != nodes:
            raise ValueError(f"names: must be those of {nodes} nodes. Got those of {len(self.names)}.")


@dataclasses.dataclass(frozen=True)
class CallForecast:
    """The forecast of a call. Each of two fused calls has that of both together."""

    seconds: float
    memory_bytes: int
    """Bytes in the fullest memory of its devices while it runs, weights of other calls included."""


@dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A plan, what it was made for, and its forecast."""

    devices: Devices
    method: str
    """The search method that found it: `strategy` in the file."""
    step_seconds: float
    """Seconds of one iteration in the steady state."""
    calls: Mapping[str, CallForecast]
    plan: Plan = dataclasses.field(metadata={FORM: (PlanData, PlanData.plan, Plan.to_json)})
    work: Mapping[str, Any]
    """Call -> its sizes, as plain data."""
    asked: Any = None
    """The config's `plan`, as plain data. None if not known."""
    source: str = "plan"
    """The file that it was read from, for error messages."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain data."""
        tree = to_tree(self)
        del tree["source"]
        return {"version": VERSION, "strategy": tree.pop("method"), **tree}

    def check_work(self, workload: Workload) -> None:
        """Raises PlanError, which says what differs, if the plan was made for other calls than this workload's."""
        here, there = described_work(workload), to_tree(self.work)
        if here == there:
            return
        missing, unknown = [n for n in here if n not in there], [n for n in there if n not in here]
        if missing or unknown:
            listed = [f"no plan for {', '.join(missing)}"] if missing else []
            listed += [f"a plan for {', '.join(unknown)}, which this run does not have"] if unknown else []
            got = " and ".join(listed)
        else:
            before, now = leaves(there), leaves(here)
            key = next(k for k in [*before, *now] if before.get(k) != now.get(k))
            got = f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} in this run"
        raise PlanError(
            f"{self.source}: must have been made for the calls of this run. Got {got}. {_AGAIN.format(self.source)}"
        )

    def check_devices(self, *, devices_per_node: int, kinds: Sequence[str]) -> None:
        """Raises PlanError, which says what differs, if the plan was made for other devices than these nodes have.
        `kinds` is node -> JAX's name of its devices."""
        planned = self.devices
        nodes = (planned.num_devices // planned.devices_per_node, planned.devices_per_node)
        here = (len(kinds), devices_per_node)
        if nodes != here:
            raise PlanError(
                f"{self.source}: must have been made for as many nodes and devices as there are. Got a plan for "
                f"{planned.cluster}, {nodes[0]} nodes of {nodes[1]} devices, where there are {here[0]} of {here[1]}. "
                f"{_AGAIN.format(self.source)}"
            )
        for node, (kind, names) in enumerate(zip(kinds, planned.names or [()] * len(kinds), strict=True)):
            if names and kind not in names:
                where = f", of {kind} on node {node}" if len(set(kinds)) > 1 or len(set(planned.names)) > 1 else ""
                raise PlanError(
                    f"{self.source}: must have been made for the kind of devices that there are. Got a plan for "
                    f"{planned.cluster} ({' or '.join(names)}), where there are {', '.join(dict.fromkeys(kinds))}"
                    f"{where}. {_AGAIN.format(self.source)}"
                )


def devices_of(cluster: Cluster) -> Devices:
    """The devices of a cluster."""
    names = tuple(group.kind.names for group in cluster.groups for _ in range(group.nodes))
    return Devices(str(cluster), cluster.num_devices, cluster.devices_per_node, names)


def described_work(workload: Workload) -> dict[str, Any]:
    """Call -> the fields that a plan depends on, as plain data."""
    return {call.name: {field: to_tree(getattr(call, field)) for field in _OF_A_CALL} for call in workload.calls}


def plan_text(saved: SavedPlan) -> str:
    """A plan as JSON that can be read and changed by hand: lists of numbers are in one line."""
    text = json.dumps(saved.to_json(), indent=2, allow_nan=False) + "\n"
    return re.sub(r"\[\n([\d,\s]*)\]", lambda numbers: f"[{', '.join(re.findall(r'[0-9]+', numbers[1]))}]", text)


def write_plan(path: Path, saved: SavedPlan) -> None:
    """Writes a plan, whole or not at all."""
    write_atomically(path, plan_text(saved))


def read_plan(path: str | Path) -> SavedPlan:
    """The plan that `write_plan` wrote. Raises PlanError if there is no such file, or it is no plan."""
    where = cut(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no name that a file can have
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise PlanError(
            f"{where}: must be what python -m jaxrlhf.plan --out wrote. Got a file that cannot be read: {reason}."
        ) from error
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{where}: must be JSON. Got {error}. {_AGAIN.format(where)}") from error
    version = tree.get("version") if isinstance(tree, Mapping) else None
    if version != VERSION:
        raise PlanError(
            f"{where}: must be a plan of version {VERSION}, as python -m jaxrlhf.plan --out writes it. Got "
            f"{'version ' + brief(version) if version is not None else 'something else'}. {_AGAIN.format(where)}"
        )
    try:
        fields = {"method" if key == "strategy" else key: value for key, value in tree.items() if key != "version"}
        saved = build(SavedPlan, fields, where=where)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    if missing := [name for name in saved.work if name not in saved.plan.placements or name not in saved.calls]:
        raise PlanError(
            f"{where}: must have a placement and a forecast for each of its calls. Got none for {missing[0]}. "
            f"{_AGAIN.format(where)}"
        )
    return dataclasses.replace(saved, source=where)
