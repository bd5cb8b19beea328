"""Checks of a machine and an installation. Each is a function of facts, which returns findings."""

import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrlhf.cluster.host_memory import PROCESS_BYTES
from jaxrlhf.huge_pages import SWITCH

Status = Literal["ok", "note", "error"]
"""`note`: runs work, but something is missing or slow. `error`: runs are impossible."""
GB = 10**9
LEAST_DISK, EASY_DISK = GB // 10, 5 * GB
DRIVERS = {"cuda13": 580, "cuda12": 525}
"""Extra -> the first driver of NVIDIA that runs its version of CUDA."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def check_python(version: Sequence[int], *, least: str) -> Finding:
    """The version of Python, against the package's `requires-python`."""
    shown, wanted = ".".join(map(str, version[:3])), least.removeprefix(">=")
    if tuple(version[:2]) < _numbers(wanted)[:2]:
        return Finding("Python", "error", shown, f"Make an environment with Python {wanted} or later.")
    return Finding("Python", "ok", shown)


def check_packages(required: Sequence[str], version_of: Callable[[str], str | None]) -> list[Finding]:
    """Packages that the package needs: `jax>=0.10`, and the version that is installed, None without one."""
    findings = []
    for text in required:
        name, least = parse_requirement(text)
        found, pip = version_of(name), f"pip install -U '{text}'"
        if found is None:
            findings.append(Finding(name, "error", "not installed", pip))
        elif _numbers(found) < _numbers(least):
            findings.append(Finding(name, "error", f"{found}, and {least} is the least that works", pip))
        else:
            findings.append(Finding(name, "ok", found))
    if not required:
        findings.append(Finding("packages", "note", "jaxrlhf is not installed, so what it needs is unknown",
                                "pip install -e . in its folder"))  # fmt: skip
    return findings


def parse_requirement(text: str) -> tuple[str, str]:
    """Name and least version of a requirement without a marker.

    >>> parse_requirement("orbax-checkpoint>=0.11.20"), parse_requirement("jax[cuda13]")
    (('orbax-checkpoint', '0.11.20'), ('jax', ''))
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(?:>=([\w.]+))?", text.strip())
    if match is None:
        raise ValueError(f"A requirement of jaxrlhf must be NAME>=VERSION. Got {text!r}.")
    return match[1], match[2] or ""


def check_gpus(
    gpus: Sequence[str], driver: str, devices: Mapping[str, Any], plugins: Mapping[str, str], *, platforms: str = ""
) -> list[Finding]:
    """NVIDIA GPUs and JAX's use of them.

    Args:
        gpus: Their names, as nvidia-smi lists them.
        driver: Its version, empty if unknown.
        devices: What JAX sees: `platform`, `kind`, `count`, `memory` in bytes or None, `jax`; or `error`.
        plugins: Installed CUDA plugins of JAX and their versions, by `cuda12` and `cuda13`.
        platforms: JAX_PLATFORMS.
    """
    if "error" in devices:
        found = f"JAX does not start: {devices['error']}"
        remedy = "Set JAX_PLATFORMS=cpu to leave accelerators alone." if gpus else "Install jax and jaxlib anew."
        findings = [Finding("devices", "error", found, remedy)]
    else:
        memory = f", {devices['memory'] / GB:.0f} GB each" if devices["memory"] else ""
        findings = [Finding("devices", "ok", f"{devices['count']} x {devices['kind']} ({devices['platform']}){memory}")]
    number = (_numbers(driver) or (0,))[0]
    extra = next((name for name, least in DRIVERS.items() if number >= least or not number), None)
    pip = f"pip install 'jaxrlhf[{extra}]'" if extra else f"Install a driver from {DRIVERS['cuda12']} on."
    for name, version in plugins.items():
        if "jax" in devices and _numbers(version)[:2] != _numbers(devices["jax"])[:2]:
            rule = f"JAX's plugin for {name} is {version}, and jax {devices['jax']}: they go together"
            findings.append(
                Finding("CUDA plugin", "error" if gpus else "note", rule, f"pip install -U 'jaxrlhf[{name}]'")
            )
        elif gpus and 0 < number < DRIVERS[name]:
            rule = f"driver {driver}, and {name} needs {DRIVERS[name]}"
            findings.append(Finding("driver", "error", rule, f"Install a newer driver, or: {pip}" if extra else pip))
    if gpus:
        listed = f"{len(gpus)} x {gpus[0]}, driver {driver or 'unknown'}"
        unused = devices.get("platform") == "cpu"
        if unused and platforms:
            findings.append(Finding("GPUs", "note", f"{listed}; JAX_PLATFORMS={platforms} hides them", "Unset it."))
        elif unused:
            findings.append(Finding("GPUs", "note", f"{listed}; JAX does not use them", pip))
        else:
            findings.append(Finding("GPUs", "ok", listed))
    return findings


def check_memory(total: int | None, available: int | None) -> Finding:
    """Memory of the host, within the limits of a container."""
    if total is None or available is None:
        return Finding("memory", "note", "unknown on this system", "Set devices_memory in configs.")
    found = f"{available / GB:.1f} GB available of {total / GB:.1f} GB"
    if available < PROCESS_BYTES:
        least = f"A run needs {PROCESS_BYTES / GB:.0f} GB beside its arrays: end other programs, or raise the limit."
        return Finding("memory", "error", found, least)
    return Finding("memory", "ok", found)


def check_disk(name: str, folder: Path, free: Callable[[Path], int] | None = None) -> Finding:
    """The disk of a folder that is written to, or made."""
    free = free or (lambda path: shutil.disk_usage(path).free)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding(name, "error", f"{folder}: {existing} cannot be written to", "Choose another folder.")
    size = free(existing)
    found = f"{folder}: {size / GB:.1f} GB free"
    if size < EASY_DISK:
        status: Status = "error" if size < LEAST_DISK else "note"
        return Finding(name, status, found, "Free some, or choose another folder: checkpoints take gigabytes.")
    return Finding(name, "ok", found)


def check_processors(count: int, allowed: int, quota: float | None) -> Finding:
    """CPU cores: of the machine, those that this process may use, and the quota of its cgroup in cores."""
    found = f"{allowed} of {count} cores" + (f", a quota of {quota:g}" if quota is not None else "")
    if quota is not None and quota < allowed:
        remedy = (
            f"More than {max(1, int(quota))} busy threads are held up: raise the quota, or set the affinity to as many."
        )
        return Finding("CPU", "note", found, remedy)
    return Finding("CPU", "ok", found)


def check_huge_pages(mode: str, *, works: bool, switch: str = "", on_cpus: bool = True) -> Finding:
    """Huge pages of the host's memory, which make runs on CPUs faster. `mode`: as the kernel writes it; `works`: a
    process that asked for them got some."""
    chosen = re.search(r"\[(\w+)\]", mode)
    found = f"{chosen[1]}" if chosen else "none on this system"
    if works:
        return Finding("huge pages", "ok", found)
    if not on_cpus:
        return Finding("huge pages", "ok", f"{found}; not needed with accelerators")
    if switch == "0":
        return Finding("huge pages", "note", f"{found}; {SWITCH}=0 turns them off", "Unset it.")
    if chosen is None:
        return Finding("huge pages", "note", found, "Runs on CPUs are slower without.")
    remedy = "Runs on CPUs are faster with: echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding("huge pages", "note", f"{found}; a process that asked for them got none", remedy)


EXTRAS = {
    "gguf": ("gguf", "convert reads GGUF files"),
    "maths": ("math_verify", "the reward maths_answer"),
    "mlflow": ("mlflow", "output.mlflow"),
    "pictures": ("matplotlib", "timeline, and pictures of plans"),
    "planner": ("numba", "searches for plans, a hundred times as fast"),
    "wandb": ("wandb", "output.wandb"),
}
"""Extra -> a module that it brings, and what needs it."""


def check_extras(has: Callable[[str], bool]) -> list[Finding]:
    """Optional packages that are installed, and what needs those that are not."""
    return [
        Finding(f"extra {extra}", "ok" if has(module) else "note", use if has(module) else f"missing, for {use}",
                "" if has(module) else f"pip install 'jaxrlhf[{extra}]'")
        for extra, (module, use) in EXTRAS.items()
    ]  # fmt: skip


def check_code_sandbox(error: str | None) -> Finding:
    """The sandbox of rewards that run code. `error`: why this machine lets none be made."""
    if error is None:
        return Finding("sandbox", "ok", "for the reward code_tests")
    got, _, remedy = error.partition(" In a container, ")
    return Finding("sandbox", "note", f"the reward code_tests cannot run here. {got}", f"In a container, {remedy}")


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores of the cgroup's quota, version 2 or 1; None without one."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            folder = root / "sys/fs/cgroup/cpu"
            quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return float(quota) / float(period) if quota.strip() not in ("max", "-1") else None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, up to the first part that is none.

    >>> _numbers("0.10.2"), _numbers("2.0rc1"), _numbers("")
    ((0, 10, 2), (2, 0), ())
    """
    numbers = []
    for part in version.split("."):
        if (match := re.match(r"\d+", part)) is None:
            break
        numbers.append(int(match[0]))
        if match[0] != part:
            break
    return tuple(numbers)
