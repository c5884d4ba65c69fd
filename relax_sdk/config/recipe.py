"""What a recipe records besides the configuration: package versions and the git revision of the source tree."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["environment_of_run"]

_PACKAGES = (
    "relax-sdk",
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "safetensors",
    "numpy",
    "ray",
    "TransferQueue",
    "open_clip_torch",
)
_GIT_TIMEOUT_S = 5


def environment_of_run() -> dict[str, Any]:
    """``packages``: name -> version, of those that are installed, plus every plug-in; and ``git_revision``."""
    return {"packages": _packages(), "git_revision": _git_revision(Path(__file__).resolve().parent)}


def _packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional or a not installed package has no version to record
    for point in importlib.metadata.entry_points(group="relax_sdk.plugins"):
        if point.dist is not None:
            versions[point.dist.name] = point.dist.version
    return versions


def _git_revision(folder: Path) -> str | None:
    """The commit of the tree that this file is tracked in; None when it is installed elsewhere or git is absent."""
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed under another project's tree, say: its revision would say nothing
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+changes" if revision and changes else revision


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
