"""Where a plan's costs come from: formulas, compiled programs, or what was measured on this machine."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from jaxrlhf.config.reading import ConfigError
from jaxrlhf.planner.calibrate import calibration_file, read_calibration, this_machine
from jaxrlhf.planner.cost import CostModel
from jaxrlhf.planner.hardware import Cluster
from jaxrlhf.planner.programs.compiled_work import compile_work
from jaxrlhf.planner.programs.cost_cache import CostCache, default_folder
from jaxrlhf.planner.workload import Workload

CostSource = Literal["analytic", "compiled", "measured"]
SOURCES: tuple[CostSource, ...] = get_args(CostSource)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What calls cost, and what is to be known of it."""

    model: CostModel
    notes: tuple[str, ...]


def costs_from(
    source: CostSource, workload: Workload, cluster: Cluster, *, say: Callable[[str], None] = lambda line: None
) -> Costs:
    """What the calls of a workload cost on a cluster.

    Args:
        say: Told how far compiling is, in lines.

    Raises:
        ConfigError: This machine was not measured, or is not of the cluster's kind.
        CompileError: A program does not compile.
    """
    if source == "compiled":
        work, notes = compile_work(
            workload, cluster, cache=CostCache(default_folder()),
            progress=lambda done, total, name: say(f"Compiled {done} of {total}: {name}"),
        )  # fmt: skip
        return Costs(CostModel(cluster, work), ("Costs: counted in compiled programs.", *notes, _efficiencies(cluster)))
    if source == "measured":
        return _measured(cluster, calibration_file(this_machine()))
    return Costs(CostModel(cluster), ("Costs: counted by formulas.", _efficiencies(cluster)))


def usual_source(cluster: Cluster) -> CostSource:
    """Where costs come from that take no time: what was measured on this machine, if it was and is of the cluster's
    kind; else formulas."""
    machine = this_machine()
    known = all(machine.device_kind in group.kind.names for group in cluster.groups)
    return "measured" if known and calibration_file(machine).exists() else "analytic"


def _measured(cluster: Cluster, path: Path) -> Costs:
    machine = this_machine()
    if others := [str(group) for group in cluster.groups if machine.device_kind not in group.kind.names]:
        raise ConfigError(
            f"--costs measured: is for clusters of devices like those of this machine, {machine}. Got {others[0]}. "
            "Use compiled, or analytic."
        )
    calibration = read_calibration(path, machine=machine)
    model = CostModel(calibration.on(cluster), measured=calibration, measured_update=calibration.update)
    return Costs(model, (f"Costs: measured on this machine on {calibration.date}, as far as {path} has them.",))


def _efficiencies(cluster: Cluster) -> str:
    """Where the rates of devices come from."""
    kinds = {group.kind.name: group.kind.coefficients.source for group in cluster.groups}
    return "; ".join(f"What {name} reach of their peaks: {source}" for name, source in kinds.items()) + "."
