"""The environment report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from relax_sdk.preflight import doctor as run_doctor
from relax_sdk.preflight.doctor import _cgroup_cores, _disk, _gpus, _numbers, _sglang, _shared_memory
from relax_sdk.registry import Registry
from relax_sdk.registry.loading import PluginEntry


def test_it_reports_everything_and_never_raises(tmp_path):
    registry = Registry([PluginEntry("wilted", "no_such_module", "wilted-dist", "1.0")])
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "RELAX_LR": "1"}
    findings = {item.name: item for item in run_doctor(registry, environ=environ, folder=tmp_path)}
    assert {"python", "torch", "ray", "sglang", "gpu", "cpu", "disk", "shared memory", "plug-in core"} <= set(findings)
    assert findings["python"].status == "ok"
    assert findings["PYTORCH_CUDA_ALLOC_CONF"].status == "fail"
    assert findings["variables"].detail == "RELAX_LR=1"
    assert findings["plug-in wilted"].status == "warn"
    assert "no_such_module" in findings["plug-in wilted"].detail
    assert all(item.advice for item in findings.values() if item.status != "ok")


def fake_smi(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    """Whatever process is started ends like this."""
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/" + name)

    def run(*_arguments: object, **_options: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr("subprocess.run", run)


@pytest.mark.parametrize(
    ("outcome", "status", "detail"),
    [
        (subprocess.CompletedProcess([], 0, "NVIDIA H200, 143771 MiB, 570\n" * 2, ""), "ok", "2 x NVIDIA H200"),
        (subprocess.CompletedProcess([], 9, "", "NVIDIA-SMI has failed\n"), "warn", "NVIDIA-SMI has failed"),
        (subprocess.TimeoutExpired("nvidia-smi", 10), "warn", "did not answer"),
        (PermissionError(13, "Permission denied"), "warn", "Permission denied"),
    ],
)
def test_gpus(monkeypatch, outcome, status, detail):
    fake_smi(monkeypatch, outcome)
    finding = _gpus()
    assert (finding.status, detail in finding.detail) == (status, True)


def test_no_gpu_is_fine(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert _gpus().status == "ok"


def installed_sglang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with nothing in it, which a process started from here finds too."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_without_sglang_training_can_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = _sglang()
    assert (finding.status, finding.advice) == ("ok", 'pip install "relax-sdk[sglang]"')


def test_an_sglang_that_does_not_fit_is_told_without_importing_it(monkeypatch, tmp_path):
    installed_sglang(tmp_path, monkeypatch)
    finding = _sglang()
    assert finding.status == "warn"
    assert "does not fit its engine: sglang/multimodal_gen" in finding.detail


@pytest.mark.parametrize(
    ("outcome", "status", "detail"),
    [
        (subprocess.CompletedProcess([], 0, json.dumps([]), ""), "ok", ", fits --rollout-engine sglang"),
        (subprocess.CompletedProcess([], 0, json.dumps(["first", "b", "c"]), ""), "warn", "first (and 2 more)"),
        (subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: gone\n"), "warn", "ImportError: gone"),
        (subprocess.TimeoutExpired("python", 60), "warn", "not read within 60 s"),
        (PermissionError(13, "Permission denied"), "warn", "Permission denied"),
    ],
)
def test_sglang_as_its_check_answers(monkeypatch, tmp_path, outcome, status, detail):
    installed_sglang(tmp_path, monkeypatch)
    fake_smi(monkeypatch, outcome)
    finding = _sglang()
    assert (finding.status, detail in finding.detail) == (status, True)


def test_container_limits_and_missing_places(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _cgroup_cores(tmp_path / "cpu.max") == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_cores(tmp_path / "cpu.max") is None
    assert _cgroup_cores(tmp_path / "absent") is None
    assert _disk(tmp_path / "absent").status == "fail"
    assert _shared_memory(tmp_path / "absent").status == "warn"


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.11.0+cu129", (2, 11, 0)), ("2.9.0rc1", (2, 9)), ("0.1.11", (0, 1, 11))]
)
def test_versions(version, numbers):
    assert _numbers(version) == numbers
