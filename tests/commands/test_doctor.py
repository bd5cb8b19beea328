"""What `jaxrlhf doctor` says of machines and installations, made up and real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrlhf.commands import checks, doctor
from jaxrlhf.commands.checks import GB, Finding
from jaxrlhf.config.schema import OutputConfig, RunConfig
from tests.subprocesses import ROOT, environment

H100 = ["NVIDIA H100 80GB HBM3"] * 2
ON_GPUS = {"jax": "0.10.2", "platform": "gpu", "kind": H100[0], "count": 2, "memory": 72 * GB}
ON_CPU = {"jax": "0.10.2", "platform": "cpu", "kind": "cpu", "count": 1, "memory": None}


def said(findings) -> list[tuple[str, str]]:
    """Names and statuses of what is not ok."""
    findings = [findings] if isinstance(findings, Finding) else findings
    return [(finding.name, finding.status) for finding in findings if finding.status != "ok"]


def test_python():
    assert said(checks.check_python((3, 12, 1), least=">=3.11")) == []
    old = checks.check_python((3, 9, 1), least=">=3.11")
    assert old == Finding("Python", "error", "3.9.1", "Make an environment with Python 3.11 or later.")


def test_packages_are_there_and_new_enough():
    versions = {"jax": "0.10.2", "flax": "0.9", "rich": "13.0"}
    findings = checks.check_packages(["jax>=0.10", "flax>=0.12", "optax>=0.2.6", "rich>=13.0"], versions.get)
    assert said(findings) == [("flax", "error"), ("optax", "error")]
    assert findings[1].found == "0.9, and 0.12 is the least that works"
    assert findings[2].remedy == "pip install -U 'optax>=0.2.6'"
    assert said(checks.check_packages([], versions.get)) == [("packages", "note")]
    with pytest.raises(ValueError, match=r"must be NAME>=VERSION\. Got 'jax<1'"):
        checks.parse_requirement("jax<1")


@pytest.mark.parametrize(
    ("gpus", "driver", "devices", "plugins", "platforms", "expected", "remedy"),
    [
        ([], "", ON_CPU, {}, "", [], ""),
        ([], "", ON_CPU, {"cuda13": "0.10.2"}, "", [], ""),  # for the planner's compiler
        (H100, "580.65.06", ON_GPUS, {"cuda13": "0.10.2"}, "", [], ""),
        (H100, "580.65.06", ON_CPU, {}, "", [("GPUs", "note")], "pip install 'jaxrlhf[cuda13]'"),
        (H100, "550.54.15", ON_CPU, {}, "", [("GPUs", "note")], "pip install 'jaxrlhf[cuda12]'"),
        (H100, "470.1", ON_CPU, {}, "", [("GPUs", "note")], "Install a driver from 525 on."),
        (H100, "", ON_CPU, {}, "", [("GPUs", "note")], "pip install 'jaxrlhf[cuda13]'"),
        (H100, "580.65.06", ON_CPU, {"cuda13": "0.10.2"}, "cpu", [("GPUs", "note")], "Unset it."),
        (H100, "550.54.15", ON_CPU, {"cuda13": "0.10.2"}, "", [("driver", "error"), ("GPUs", "note")],
         "Install a newer driver, or: pip install 'jaxrlhf[cuda12]'"),
        (H100, "580.65.06", ON_GPUS, {"cuda13": "0.9.1"}, "", [("CUDA plugin", "error")],
         "pip install -U 'jaxrlhf[cuda13]'"),
        ([], "", ON_CPU, {"cuda13": "0.9.1"}, "", [("CUDA plugin", "note")], "pip install -U 'jaxrlhf[cuda13]'"),
        (H100, "580.65.06", {"error": "no"}, {}, "", [("devices", "error")], "Set JAX_PLATFORMS=cpu to leave"),
        ([], "", {"error": "no"}, {}, "", [("devices", "error")], "Install jax and jaxlib anew."),
    ],
)  # fmt: skip
def test_gpus(gpus, driver, devices, plugins, platforms, expected, remedy):
    findings = checks.check_gpus(gpus, driver, devices, plugins, platforms=platforms)
    assert said(findings) == expected
    assert next((x.remedy for x in findings if x.status != "ok"), "").startswith(remedy)


def test_devices_have_kind_and_memory():
    assert checks.check_gpus(H100, "580.1", ON_GPUS, {})[0].found == f"2 x {H100[0]} (gpu), 72 GB each"


def test_memory():
    assert said(checks.check_memory(16 * GB, 8 * GB)) == []
    assert said(checks.check_memory(16 * GB, GB // 2)) == [("memory", "error")]
    assert said(checks.check_memory(None, None)) == [("memory", "note")]


@pytest.mark.parametrize(("free", "expected"), [(50 * GB, []), (GB, [("runs", "note")]), (0, [("runs", "error")])])
def test_disks(free, expected, tmp_path):
    asked = []
    assert said(checks.check_disk("runs", tmp_path / "a" / "b", lambda path: asked.append(path) or free)) == expected
    assert asked == [tmp_path], "the folder that is there"
    (tmp_path / "file").touch()
    assert said(checks.check_disk("runs", tmp_path / "file" / "runs")) == [("runs", "error")]


def test_processors():
    assert said(checks.check_processors(8, 8, None)) == []
    assert said(checks.check_processors(64, 8, 8.0)) == []
    held_up = checks.check_processors(64, 64, 2.5)
    assert held_up.found == "64 of 64 cores, a quota of 2.5" and held_up.status == "note"


def test_quotas_of_both_versions_of_cgroups(tmp_path):
    assert checks.cpu_quota(tmp_path) is None
    folder = tmp_path / "sys/fs/cgroup"
    (folder / "cpu").mkdir(parents=True)
    for name, text in (("cpu.cfs_quota_us", "-1\n"), ("cpu.cfs_period_us", "100000\n")):
        (folder / "cpu" / name).write_text(text)
    assert checks.cpu_quota(tmp_path) is None
    (folder / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
    assert checks.cpu_quota(tmp_path) == 0.5
    (folder / "cpu.max").write_text("250000 100000\n")
    assert checks.cpu_quota(tmp_path) == 2.5
    (folder / "cpu.max").write_text("max 100000\n")
    assert checks.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "settings", "status", "remedy"),
    [
        ("always [madvise] never", {"works": True}, "ok", ""),
        ("always madvise [never]", {"works": False}, "note", "Runs on CPUs are faster with: echo madvise"),
        ("always madvise [never]", {"works": False, "on_cpus": False}, "ok", ""),
        ("always [madvise] never", {"works": False, "switch": "0"}, "note", "Unset it."),
        ("", {"works": False}, "note", "Runs on CPUs are slower without."),
    ],
)
def test_huge_pages(mode, settings, status, remedy):
    finding = checks.check_huge_pages(mode, **settings)
    assert finding.status == status and finding.remedy.startswith(remedy)


def test_extras_that_are_missing_and_how_to_have_them():
    findings = checks.check_extras(lambda module: module != "wandb")
    assert said(findings) == [("extra wandb", "note")]
    assert findings[-1] == Finding("extra wandb", "note", "missing, for output.wandb", "pip install 'jaxrlhf[wandb]'")


def test_no_sandbox():
    assert checks.check_code_sandbox(None).status == "ok"
    finding = checks.check_code_sandbox("Programs need namespaces. Got EPERM. In a container, add SYS_ADMIN.")
    assert finding.status == "note" and finding.remedy == "In a container, add SYS_ADMIN."
    assert finding.found.endswith("Got EPERM.")


def test_folders_are_those_of_a_run():
    assert list(doctor.FOLDERS.values()) == [OutputConfig.folder, RunConfig.compilation_cache]


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_ends_with_1_and_a_note_with_0(as_json, monkeypatch, capsys):
    flags = ["--json"] if as_json else []
    cases: tuple[tuple[checks.Status, int], ...] = (("note", 0), ("error", 1))
    for status, exit_status in cases:
        findings = [Finding("jax", "ok", "1"), Finding("x", status, "y", "z")]
        monkeypatch.setattr(doctor, "examine", lambda _, findings=findings: findings)
        assert doctor.main(flags) == exit_status
        out = capsys.readouterr().out
        if as_json:
            expected = {"name": "x", "status": status, "found": "y", "remedy": "z"}
            assert json.loads(out)["ok"] == (status == "note") and json.loads(out)["checks"][1] == expected
        else:
            shown = "Runs are possible. 1 note." if status == "note" else "Runs are impossible: 1 to mend. 0 notes."
            assert out.splitlines()[1:] == [f"{status:<5}  x    y", "            -> z", "", shown]


def test_this_machine_without_the_packages_of_a_run(tmp_path):
    """Whatever is missing, it can be said. JAX's own process is the real one."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({['jax', 'flax', 'numpy', 'rich', 'yaml', 'pyarrow']}))"
    code = f"{blocked}\nfrom jaxrlhf.commands.doctor import main\nsys.exit(main(['--json']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each["found"] for each in json.loads(done.stdout)["checks"]}
    assert found["devices"] == "1 x cpu (cpu)" and found["jaxrlhf"].endswith(str(Path("jaxrlhf")))
    assert found["runs"].startswith("runs: ") and str(ROOT) in found["jaxrlhf"]


def test_a_jax_that_does_not_start(monkeypatch):
    monkeypatch.setattr(doctor, "_DEVICES", "import sys; sys.exit('no such backend')")
    assert doctor._devices() == {"error": "no such backend"}
    monkeypatch.setattr(doctor, "_DEVICES", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_SECONDS", 0.5)
    assert doctor._devices() == {"error": "not within 0.5 seconds"}


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06'\necho 'NVIDIA H100 80GB HBM3, 580.65.06'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor._nvidia_smi() == (H100, "580.65.06")
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML, and so on'\nexit 9\n")
    assert doctor._nvidia_smi() == ([], "")
    monkeypatch.setenv("PATH", "")
    assert doctor._nvidia_smi() == ([], "")
