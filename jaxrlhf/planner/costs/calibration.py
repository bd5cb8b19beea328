"""Measurements of a machine: seconds of passes, interpolated between row counts, and rates of its devices.

    calibration = read_calibration(calibration_file(machine), machine=machine)
    CostModel(calibration.on(cluster), measured=calibration)

Passes are known at some degrees and row counts, powers of two, and interpolated linearly between. Where nothing similar
was measured there is no answer, and the cost model counts work instead, with the rates of this machine.
`calibration` measures; `python -m jaxrlhf.calibrate` writes the file.

Reference:
    Mei et al. 2024, arXiv:2406.14088, section 5.1 (ReaL): layers profiled at powers of two, interpolated linearly.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrlhf.brief import brief
from jaxrlhf.cluster.hardware import MEASURED, Cluster, Kind
from jaxrlhf.config.reading import ConfigError, build, to_tree
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.lora import LoRAConfig
from jaxrlhf.planner.costs.cache import default_folder
from jaxrlhf.planner.costs.cost_model import MeasuredPhase, PassSeconds
from jaxrlhf.planner.costs.work import SLOT_PHASES
from jaxrlhf.planner.workload import ModelCall
from jaxrlhf.require import require, require_fields, require_not_negative, require_positive
from jaxrlhf.sharding import mesh
from jaxrlhf.sharding.strategy import Remat, Strategy
from jaxrlhf.writing import write_atomically

VERSION = 3
"""The version of the file."""
QUIET = 0.05
"""The CPU share of other processes up to which a measurement counts as undisturbed; Linux may miscount as much."""
_COMMAND = "Measure this machine: python -m jaxrlhf.calibrate --config NAME_OR_PATH."


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine and the compiler of a measurement, which is not valid for others."""

    platform: str
    """'cpu', 'gpu' or 'tpu'."""
    device_kind: str
    """JAX's name of the devices: 'NVIDIA H200'."""
    processor: str
    num_cores: int
    jax: str
    """Versions."""
    jaxlib: str

    def __str__(self) -> str:
        devices = "" if self.platform == "cpu" else f"{self.device_kind}, "
        return f"{devices}{self.processor} with {self.num_cores} cores, jax {self.jax}, jaxlib {self.jaxlib}"

    @property
    def shares_processor(self) -> bool:
        """True if its devices are virtual ones of one CPU, so that they slow one another down."""
        return self.platform == "cpu"


def this_machine() -> Machine:
    """The machine that this process runs on, with the devices that JAX shows."""
    version = importlib.metadata.version
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(mesh.platform(), mesh.device_kind(), _processor(), cores, version("jax"), version("jaxlib"))


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of the host's CPU during a measurement."""

    others: float
    """The fraction of the CPU time of all cores that other processes had."""
    average: float
    """Linux's load average over the last minute of it: the number of runnable processes, those of the measurement
    included."""
    num_cores: int

    def __post_init__(self) -> None:
        require_fields(self, require_not_negative, "others", "average", "num_cores")

    def __str__(self) -> str:
        quiet = "" if self.others <= QUIET else ", too much to tell how long anything takes alone"
        return (
            f"other processes had {100 * self.others:.0f} % of {self.num_cores} cores{quiet}; load average "
            f"{self.average:.1f}"
        )


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one device while all devices of its node do the same: seconds, bytes a second, operations a second."""

    num_devices: int
    """Devices of the node."""
    float32_flops: float
    """Operations a second of large matrix products in float32, at JAX's default precision."""
    bfloat16_flops: float
    half_dim: float
    """Width of a weight at which matrix products with it are half as fast as large ones."""
    memory_bandwidth: float
    kernel_seconds: float
    graph_kernel_seconds: float
    """Seconds between the starts of two kernels in the body of a loop."""
    dispatch_seconds: float
    step_seconds: float
    """Seconds of a loop's iteration beside its kernels."""
    host_bandwidth: float
    collective_seconds: float = 0.0
    """Seconds of the smallest all-reduce, per doubling of the devices that take part. This and the next are 0 if there
    is one device."""
    link_bandwidth: float = 0.0
    """Bytes a second of a large all-reduce over all devices, as a ring."""
    host_seconds: float = 0.0
    """Seconds that host-side work adds to a call per device. 0 if the devices are not virtual ones of the CPU."""

    def __post_init__(self) -> None:
        positive = ("num_devices", "float32_flops", "bfloat16_flops", "memory_bandwidth", "host_bandwidth")
        require_fields(self, require_positive, *positive)
        require_fields(self, require_not_negative, *(field.name for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Case:
    """All properties of a call and its strategy that the seconds of a pass depend on, except its rows. Fields that do
    not matter to the phase are 0, 1 or none."""

    model: ModelConfig
    phase: MeasuredPhase
    prompt: int
    response: int
    outputs: int
    """Columns that get an output of the head."""
    num_samples: int
    data: int
    fsdp: int
    tensor: int
    remat: Remat = "none"
    lora: LoRAConfig | None = None
    prefill_tokens: int = 0

    @property
    def num_row_shards(self) -> int:
        return self.data * self.fsdp


def case_of(call: ModelCall, phase: MeasuredPhase, strategy: Strategy) -> Case:
    """The case to measure, or to look up, for a phase of a call."""
    over_rows = phase != "update"
    generates = phase in ("prefill", "decode", *SLOT_PHASES)
    return Case(
        call.model,
        phase,
        prompt=call.prompt if over_rows else 0,
        response=call.response if over_rows and phase != "prefill" else 0,
        outputs=call.outputs if phase in ("forward", "gradient") else 0,
        num_samples=call.num_samples if generates else 1,
        data=strategy.data,
        fsdp=strategy.fsdp,
        tensor=strategy.tensor,
        remat=strategy.remat if phase == "gradient" else "none",
        lora=None if call.merges else call.lora,
        prefill_tokens=strategy.prefill_tokens if phase == "slot_prefill" else 0,
    )


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement."""

    rows: float
    """Rows on each row shard; sequences for `decode`, slots for `slot_step` and `slot_column`, the width of a group for
    `slot_prefill`, 0 for `update`."""
    layer: float
    """Seconds of one layer."""
    rest: float
    """Seconds of everything else. Negative if the last layer does less than the others."""
    spread: float
    """Half the distance between the quartiles of the runs, as a fraction of their median."""
    others: float
    """The fraction of the host's CPU time that other processes had meanwhile."""

    def __post_init__(self) -> None:
        require_fields(self, require_not_negative, "rows", "layer", "spread", "others")
        require(math.isfinite(self.rest), "rest", "must be finite", self.rest)


@dataclasses.dataclass(frozen=True)
class Curve:
    """The measurements of one case, from the fewest rows on."""

    case: Case
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        rows = [point.rows for point in self.points]
        if not rows or rows != sorted(set(rows)):
            raise ValueError(f"points: must be at least one, from the fewest rows on, each once. Got rows {rows}.")

    def at(self, rows: float) -> PassSeconds:
        """Seconds of a pass on `rows` rows, interpolated linearly, or extrapolated from the two nearest measurements.

        Against noise, extrapolation has a lower bound: more rows than were measured take no less than the most that
        were, fewer no less than their share of the fewest. From a single measurement, seconds are proportional to rows.
        """
        first, last = self.points[0], self.points[-1]
        if len(self.points) == 1:
            return _mixed((first, rows / first.rows if first.rows else 1.0))
        right = next((i for i, point in enumerate(self.points) if point.rows >= rows), len(self.points) - 1)
        a, b = self.points[max(right, 1) - 1], self.points[max(right, 1)]
        part = (rows - a.rows) / (b.rows - a.rows)
        line = _mixed((a, 1 - part), (b, part))
        if first.rows <= rows <= last.rows:
            return line
        bound = _mixed((last, 1.0) if rows > last.rows else (first, rows / first.rows))
        return bound if line.layer < bound.layer else line


def _mixed(*parts: tuple[Point | PassSeconds, float]) -> PassSeconds:
    """The sum of measurements, each times a factor."""
    return PassSeconds(sum(x.layer * times for x, times in parts), sum(x.rest * times for x, times in parts))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """All measurements of a machine. As a function, it is a `cost_model.MeasuredPass`."""

    date: str
    machine: Machine
    rates: Rates
    load: Load
    """The load during the newest measurements."""
    curves: tuple[Curve, ...] = ()
    version: int = VERSION

    def __call__(self, call: ModelCall, phase: MeasuredPhase, strategy: Strategy, rows: float) -> PassSeconds | None:
        """Seconds of a pass, through one layer and the rest; None if nothing similar was measured. Those of an update
        include adding up gradients over copies of the weights if there were any.

        Real devices do not slow one another down, so the nearest measured number of row shards is used. Virtual devices
        of a CPU work on all rows together: seconds are looked up by the rows of all shards, interpolated over the
        logarithm of the number of shards, and multiplied by the stages of a pipeline, which share the CPU; one degree
        of `fsdp` above 1 stands for another with as many shards. `tensor` must be as it was measured.
        """
        found = self._near(call, phase, strategy)
        if found is None:
            return None
        below, above = found
        has_sum = phase == "update" and (strategy.data == 1 or above.case.data > 1)
        if not self.machine.shares_processor:
            return dataclasses.replace(below.at(rows), includes_reduction=has_sum)
        few, many, shards = below.case.num_row_shards, above.case.num_row_shards, strategy.num_row_shards
        one, other = below.at(rows * shards / few), above.at(rows * shards / many)
        between = math.log(shards / few) / math.log(many / few) if few < many else 0.0
        seconds = _mixed((one, 1 - between), (other, between))
        return PassSeconds(seconds.layer * strategy.pipeline, seconds.rest, has_sum)

    def on(self, cluster: Cluster) -> Cluster:
        """A cluster with the rates of this machine for its kind of device."""
        scale = self.rates.num_devices / cluster.devices_per_node if self.machine.shares_processor else 1.0

        source = f"{MEASURED} {self.date}"
        own = self.machine.device_kind
        return cluster.with_kinds(lambda k: _measured_kind(k, self.rates, scale, source) if own in k.names else k)

    def with_points(self, points: Iterable[tuple[Case, Point]]) -> "Calibration":
        """The same with curves through more measurements, which replace those of the same cases. Of two at the same
        rows, the later counts."""
        cases: dict[Case, dict[float, Point]] = {}
        for case, point in points:
            cases.setdefault(case, {})[point.rows] = point
        curves = {curve.case: curve for curve in self.curves}
        for case, by_rows in cases.items():
            curves[case] = Curve(case, tuple(by_rows[rows] for rows in sorted(by_rows)))
        return dataclasses.replace(self, curves=tuple(curves.values()))

    def _near(self, call: ModelCall, phase: MeasuredPhase, strategy: Strategy) -> tuple[Curve, Curve] | None:
        """The curves measured with the next fewer and the next more row shards, if there are any; for devices that
        share no CPU, twice the nearest."""
        curves = self._by_case.get(case_of(call, phase, dataclasses.replace(strategy, data=1, fsdp=1)), {})
        degree, wanted = strategy.fsdp, strategy.num_row_shards
        if self.machine.shares_processor and degree > 1 and degree not in curves:
            degree = min((d for d in curves if d > 1), key=lambda d: abs(math.log(d / strategy.fsdp)), default=degree)
        by_shards = curves.get(degree)
        if not by_shards:
            return None
        if not self.machine.shares_processor:
            nearest = by_shards[min(by_shards, key=lambda shards: abs(math.log(shards / wanted)))]
            return nearest, nearest
        below = max((shards for shards in by_shards if shards <= wanted), default=min(by_shards))
        above = min((shards for shards in by_shards if shards >= wanted), default=max(by_shards))
        return by_shards[below], by_shards[above]

    @functools.cached_property
    def _by_case(self) -> dict[Case, dict[int, dict[int, Curve]]]:
        """Case on one row shard -> degree of `fsdp` -> row shards -> curve."""
        found: dict[Case, dict[int, dict[int, Curve]]] = {}
        for curve in self.curves:
            case = dataclasses.replace(curve.case, data=1, fsdp=1)
            found.setdefault(case, {}).setdefault(curve.case.fsdp, {})[curve.case.num_row_shards] = curve
        return found


def _measured_kind(kind: Kind, rates: Rates, scale: float, source: str) -> Kind:
    """A kind with measured rates, which stand for its peaks too. `scale` is the speed of a device relative to one that
    was measured: above 1 if fewer devices share the CPU."""
    costs, names = kind.coefficients, ("half_dim", "kernel_seconds", "graph_kernel_seconds", "dispatch_seconds")
    bandwidth = rates.link_bandwidth or kind.link.bandwidth * costs.link_efficiency
    return dataclasses.replace(
        kind,
        peak_flops=dataclasses.replace(
            kind.peak_flops, tf32=rates.float32_flops * scale, bfloat16=rates.bfloat16_flops * scale, source=source
        ),
        memory=dataclasses.replace(kind.memory, bandwidth=rates.memory_bandwidth * scale, source=source),
        link=dataclasses.replace(kind.link, bandwidth=bandwidth, source=source),
        coefficients=dataclasses.replace(
            costs,
            matmul_efficiency=1.0,
            memory_efficiency=1.0,
            link_efficiency=1.0,
            **{name: getattr(rates, name) for name in (*names, "step_seconds", "host_seconds")},
            collective_seconds=rates.collective_seconds or costs.collective_seconds,
            host_bandwidth=rates.host_bandwidth * scale,
            source=source,
        ),
    )


# -- files -------------------------------------------------------------------------------------------------------------


def calibration_file(machine: Machine, folder: Path | None = None) -> Path:
    """The file of a machine's measurements, by default in the user's cache folder."""
    text = f"{machine.device_kind} {machine.processor} {machine.num_cores} jax {machine.jax}"
    return (folder or default_folder("calibration")) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', text).strip('-').lower()}.json"


def read_calibration(path: Path, *, machine: Machine) -> Calibration:
    """Reads what `write_calibration` wrote of a machine. Raises ConfigError if there is no such file, it is malformed,
    or another machine was measured."""
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. {_COMMAND}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: must be the JSON of a calibration. Got {error}. {_COMMAND}") from error
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != VERSION:
        raise ConfigError(f"{path}: version: must be {VERSION}. Got {brief(version)}. {_COMMAND}")
    calibration = build(Calibration, tree, where=str(path))
    if calibration.machine != machine:
        raise ConfigError(
            f"{path}: must have been measured on this machine, {machine}. Got {calibration.machine}. {_COMMAND}"
        )
    return calibration


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes a file that `read_calibration` reads, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(to_tree(calibration), indent=1, allow_nan=False) + "\n")
