"""The sources of a plan's costs: formulas, compiled programs, or measurements of this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from jaxrlhf.cluster.hardware import Cluster
from jaxrlhf.config.reading import ConfigError
from jaxrlhf.planner.compiled.compiled_work import compile_work
from jaxrlhf.planner.costs.cache import CostCache, default_folder
from jaxrlhf.planner.costs.calibration import Calibration, calibration_file, read_calibration, this_machine
from jaxrlhf.planner.costs.cost_model import CostModel
from jaxrlhf.planner.costs.work import PHASES
from jaxrlhf.planner.workload import Workload

CostSource = Literal["analytic", "compiled", "measured"]
SOURCES: tuple[CostSource, ...] = get_args(CostSource)
_MEASURE_FIRST = (
    " On a CPU these are far too short for small models, and the plan need not be faster than one written by hand. "
    "Measure it first: python -m jaxrlhf.calibrate --config ..."
)


def costs_from(
    source: CostSource,
    workload: Workload,
    cluster: Cluster,
    *,
    calibration: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[CostModel, tuple[str, ...]]:
    """The costs of the calls of a workload on a cluster, and notes about them. `calibration` is a file of measurements,
    by default that of this machine. `say` is told the progress of compiling, in lines.

    Raises:
        ConfigError: This machine was not measured, or is not of the cluster's kind.
        CompileError: A program does not compile.
    """
    if source == "compiled":
        work, notes = compile_work(workload, cluster, cache=CostCache(default_folder()), say=say)
        return CostModel(cluster, work), ("Costs: counted in compiled programs.", *notes)
    if source == "measured":
        return _measured(workload, cluster, calibration or calibration_file(this_machine()))
    far_off = any(group.kind.target is None for group in cluster.groups)
    return CostModel(cluster), ("Costs: counted by formulas." + (_MEASURE_FIRST if far_off else ""),)


def usual_source(cluster: Cluster) -> CostSource:
    """The source that takes no time: measurements of this machine if there are some and it is of the cluster's kind,
    else formulas."""
    machine = this_machine()
    known = all(machine.device_kind in group.kind.names for group in cluster.groups)
    return "measured" if known and calibration_file(machine).exists() else "analytic"


def _measured(workload: Workload, cluster: Cluster, path: Path) -> tuple[CostModel, tuple[str, ...]]:
    machine = this_machine()
    if others := [str(group) for group in cluster.groups if machine.device_kind not in group.kind.names]:
        raise ConfigError(
            f"--costs measured: is for clusters of devices like those of this machine, {machine}. Got {others[0]}. "
            "Use compiled, or analytic."
        )
    calibration = read_calibration(path, machine=machine)
    model = CostModel(calibration.on(cluster), measured=calibration)
    note = f"Costs: measured on this machine on {calibration.date} ({path}): {_covered(workload, calibration)}."
    return model, (note, f"While it was measured, {calibration.load}.")


def _covered(workload: Workload, calibration: Calibration) -> str:
    known = {(curve.case.model, curve.case.phase) for curve in calibration.curves}
    measured = [c.name for c in workload.calls if all((c.model, phase) in known for phase in PHASES[c.kind])]
    others = [call.name for call in workload.calls if call.name not in measured]
    if not others:
        return "all calls, at some degrees and rows; between them by the rates of its devices"
    return f"{', '.join(measured) or 'no call'}; of {', '.join(others)} only what the devices do in a second"
