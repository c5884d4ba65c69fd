"""The environment, looked at without importing torch or starting Ray: findings for ``relax-sdk doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from relax_sdk.registry import Registry

__all__ = ["Finding", "doctor"]

_NVIDIA_SMI_TIMEOUT_S = 10
_ENGINE_CHECK_TIMEOUT_S = 60
_GIB = 2**30
_MIN_DISK_GIB = 10
_MIN_SHM_GIB = 1
_REQUIRED = {"torch": (2, 11), "ray": (2, 49), "TransferQueue": (0, 1, 11), "peft": (0, 18), "safetensors": (0, 4, 5)}
_SGLANG_INSTALL = 'pip install "relax-sdk[sglang]"'
_ENGINE_CHECK = (
    "import json; from relax_sdk.registry import Registry; "
    "print(json.dumps(Registry().engine('sglang').preflight_problems()))"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``fail`` means that training cannot start; ``advice`` says what to do."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""


def doctor(
    registry: Registry, *, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> list[Finding]:
    """Look at interpreter, packages, SGLang, GPUs, memory, disk and plug-ins. Takes seconds; never raises.

    Args:
        registry: the plug-ins; every one is loaded, guarded.
        environ: environment variables; ``os.environ`` when None.
        folder: where runs would be written; the current folder when None.
    """
    variables = os.environ if environ is None else environ
    findings = [_python(), *_packages(), _sglang(), _gpus(), _cores(), _disk(folder or Path.cwd()), _shared_memory()]
    return [*findings, *_variables(variables), *_plugins(registry)]


def _python() -> Finding:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    return Finding(
        "python", "ok" if fine else "fail", f"{version} at {sys.executable}", "" if fine else "use 3.11 or newer"
    )


def _packages() -> Iterator[Finding]:
    for name, least in _REQUIRED.items():
        wanted = ".".join(map(str, least))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
            continue
        fine = _numbers(version) >= least
        yield Finding(name, "ok" if fine else "fail", version, "" if fine else f"pip install '{name}>={wanted}'")


def _sglang() -> Finding:
    """Whether the installed SGLang fits its engine; training with another engine starts without it.

    The engine's check reads SGLang's source, but lies in a room that loads torch; hence a process of its own.
    """
    name = "sglang"
    if importlib.util.find_spec(name) is None:
        return Finding(name, "ok", "not installed; only --rollout-engine sglang needs it", _SGLANG_INSTALL)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    advice = "relax-sdk preflight --rollout-engine sglang"
    command = [sys.executable, "-P", "-c", _ENGINE_CHECK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ENGINE_CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, "warn", f"{version}, not read within {_ENGINE_CHECK_TIMEOUT_S} s", advice)
    except OSError as error:
        return Finding(name, "warn", f"{version}, not checked: {error.strerror}", advice)
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().splitlines()
        return Finding(name, "warn", f"{version}, not checked: {reason[-1] if reason else 'no answer'}", advice)
    problems: list[str] = json.loads(done.stdout.splitlines()[-1])
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Finding(name, "warn", f"{version} does not fit its engine: {problems[0]}{more}", _SGLANG_INSTALL)
    return Finding(name, "ok", f"{version}, fits --rollout-engine sglang")


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``2.11.0+cu129`` -> (2, 11, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _gpus() -> Finding:
    """What ``nvidia-smi`` lists; none is fine, training then runs on the CPU."""
    if shutil.which("nvidia-smi") is None:
        return Finding("gpu", "ok", "none (no nvidia-smi): runs on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("gpu", "warn", f"nvidia-smi did not answer in {_NVIDIA_SMI_TIMEOUT_S} s", "check the driver")
    except OSError as error:
        return Finding("gpu", "warn", f"nvidia-smi cannot run: {error.strerror}", "check the driver")
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not names:
        reason = (done.stdout + done.stderr).strip().splitlines()
        return Finding("gpu", "warn", reason[0] if reason else "nvidia-smi lists no GPU", "check the driver")
    return Finding("gpu", "ok", f"{len(names)} x {names[0]}" if len(set(names)) == 1 else "; ".join(names))


def available_cores() -> int:
    """Cores that this process may use: its affinity, or its container's quota when that is less; at least 1."""
    cores, quota = _cores_by_affinity(), _cgroup_cores()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cores() -> Finding:
    cores, limit = _cores_by_affinity(), _cgroup_cores()
    detail = f"{cores} cores" + (f", limited to {limit:g} by the container" if limit and limit < cores else "")
    return Finding("cpu", "ok" if cores >= 2 else "warn", detail, "" if cores >= 2 else "two cores or more are usual")


def _cores_by_affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _disk(folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free / _GIB
    except OSError as error:
        return Finding("disk", "fail", f"{folder}: {error.strerror}", "choose another folder")
    fine = free >= _MIN_DISK_GIB
    advice = (
        "" if fine else "sidecars and images fill disks: lower --artifact-retention-rollouts or use --artifact-root"
    )
    return Finding("disk", "ok" if fine else "warn", f"{free:.1f} GiB free in {folder}", advice)


def _shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Ray keeps its object store here."""
    try:
        free = shutil.disk_usage(path).free / _GIB
    except OSError:
        return Finding("shared memory", "warn", f"no {path}", "Ray will use slower files in its temporary folder")
    fine = free >= _MIN_SHM_GIB
    advice = "" if fine else "in a container, start it with --shm-size=2g or more"
    return Finding("shared memory", "ok" if fine else "warn", f"{free:.1f} GiB free in {path}", advice)


def _variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").replace(" ", "").lower():
            yield Finding(name, "fail", environ[name], "remove expandable_segments: weights travel between processes")
    given = sorted(name for name in environ if name.startswith("RELAX_"))
    if given:
        yield Finding("variables", "ok", ", ".join(f"{name}={environ[name]}" for name in given))


def _plugins(registry: Registry) -> Iterator[Finding]:
    for record in registry.plugins():
        detail = f"{record.distribution} {record.version}"
        if record.status in ("ok", "disabled"):
            yield Finding(f"plug-in {record.name}", "ok", detail if record.status == "ok" else f"{detail}, disabled")
        else:
            reason = (record.reason or "").splitlines()[0]
            yield Finding(f"plug-in {record.name}", "warn", f"{detail}: {reason}", "relax-sdk plugins list")
