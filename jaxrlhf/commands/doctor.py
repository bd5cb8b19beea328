"""Checks this machine and installation for runs.

jaxrlhf doctor [--json]

It needs no package beside Python's own, so that it can say what is missing.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrlhf import __version__
from jaxrlhf.cluster.host_memory import host_memory, total_memory
from jaxrlhf.commands import checks
from jaxrlhf.commands.checks import Finding
from jaxrlhf.huge_pages import SWITCH, add_tunable
from jaxrlhf.rewards.sandbox import SandboxError, check_sandbox

# Programs of processes of their own: the devices stay free, and what crashes is reported.
_DEVICES = """
import json, jax
from jaxrlhf.sharding import mesh
mesh.skip_cuda_check_without_gpu()
print(json.dumps({"jax": jax.__version__, "platform": mesh.platform(), "kind": mesh.device_kind(),
                  "count": mesh.num_devices(), "memory": mesh.memory_bytes()}))
"""
_HUGE_PAGES = """
held = bytearray(b"x") * (64 << 20)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) > 16 << 10)
"""
_SECONDS = 120
"""The most that JAX may take to start its devices."""
FOLDERS = {"runs": "runs", "compilation cache": "~/.cache/jaxrlhf/xla"}
"""Default folders of runs and compiled programs."""
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="jaxrlhf doctor", description="Check this machine and installation for runs.")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if something makes runs impossible, 0 otherwise."""
    options = parser().parse_args(arguments)
    findings = examine(os.environ)
    possible = all(finding.status != "error" for finding in findings)
    if options.json:
        document = {"ok": possible, "checks": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(document, indent=2))
    else:
        print(shown(findings))
    return int(not possible)


def shown(findings: Sequence[Finding]) -> str:
    """A line for each finding, with its remedy below it, and whether runs are possible."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<5}  {finding.name:<{width}}  {finding.found}")
        lines += [f"{'':<5}  {'':<{width}}  -> {finding.remedy}"] if finding.remedy else []
    errors, notes = (sum(finding.status == status for finding in findings) for status in ("error", "note"))
    outcome = f"Runs are impossible: {errors} to mend" if errors else "Runs are possible"
    return "\n".join([*lines, "", f"{outcome}. {notes} note{'s' if notes != 1 else ''}."])


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """All checks of this machine."""
    required = required_packages()
    has = importlib.util.find_spec
    devices = _devices()
    gpus, driver = _nvidia_smi()
    plugins = {cuda: version for cuda in checks.DRIVERS if (version := version_of(f"jax-{cuda}-plugin"))}
    on_cpus = devices.get("platform") == "cpu"
    return [
        Finding("jaxrlhf", "ok", f"{__version__}, {Path(__file__).parents[1]}"),
        checks.check_python(sys.version_info[:3], least=_least_python()),
        *checks.check_packages(required, version_of),
        *([Finding("jaxlib", "ok", version)] if (version := version_of("jaxlib")) else []),
        *checks.check_gpus(gpus, driver, devices, plugins, platforms=environment.get("JAX_PLATFORMS", "")),
        checks.check_memory(total_memory(), host_memory()),
        *(checks.check_disk(name, Path(folder).expanduser()) for name, folder in FOLDERS.items()),
        checks.check_processors(os.cpu_count() or 1, num_allowed(), checks.cpu_quota()),
        checks.check_huge_pages(
            _PAGES.read_text() if _PAGES.is_file() else "",
            works=_has_huge_pages(), switch=environment.get(SWITCH, ""), on_cpus=on_cpus,
        ),
        checks.check_code_sandbox(_sandbox_error()),
        *checks.check_extras(lambda module: has(module) is not None),
    ]  # fmt: skip


def required_packages() -> list[str]:
    """Required packages: requirements without a marker. Empty if the package is not installed."""
    try:
        return [text for text in importlib.metadata.requires("jaxrlhf") or () if ";" not in text]
    except importlib.metadata.PackageNotFoundError:
        return []


def version_of(name: str) -> str | None:
    """The version of an installed package."""
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def num_allowed() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _least_python() -> str:
    try:
        return importlib.metadata.metadata("jaxrlhf")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> dict[str, Any]:
    """Devices that JAX finds in a process of its own, or its error."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = _run([sys.executable, "-c", _DEVICES], environment)
    except subprocess.TimeoutExpired:
        return {"error": f"not within {_SECONDS} seconds"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _nvidia_smi() -> tuple[list[str], str]:
    """Names of the GPUs, and the version of their driver."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    try:
        done = _run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], dict(os.environ))
    except (OSError, subprocess.TimeoutExpired):
        return [], ""
    rows = [line.rpartition(", ") for line in done.stdout.splitlines() if ", " in line] if not done.returncode else []
    return [name for name, _, _ in rows], rows[0][2].strip() if rows else ""


def _has_huge_pages() -> bool:
    """A process that asks for huge pages, as runs do, gets some."""
    environment = dict(os.environ)
    if SWITCH in environment and environment[SWITCH] == "0":
        return False
    if "glibc.malloc.hugetlb" not in environment.get("GLIBC_TUNABLES", ""):
        add_tunable(environment)
    done = _run([sys.executable, "-c", _HUGE_PAGES], environment)
    return done.stdout.strip() == "True"


def _sandbox_error() -> str | None:
    try:
        check_sandbox()
    except SandboxError as error:
        return str(error)
    return None


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)


if __name__ == "__main__":
    sys.exit(main())
