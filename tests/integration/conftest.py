"""Whole runs of the installed command on a CPU: real Ray, real TransferQueue, real FSDP2, the bundled tiny models."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_sdk.metrics import read_metrics

HERE = Path(__file__).parent
MARK = "RELAX_TEST_MARK"
TIMEOUT_S = 280

SMALL = (
    "--plugin", "qwen_image",
    "--num-rollout", "2",
    "--rollout-batch-size", "2",
    "--n-samples-per-prompt", "4",
    "--micro-batch-size", "2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished `relax-sdk train`."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path

    def records(self) -> list[dict[str, float]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    def series(self, name: str) -> list[float]:
        return [record[name] for record in self.records() if name in record]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "relax_sdk", "train", *SMALL, *arguments]


def environment(mark: str) -> dict[str, str]:
    """This process's own, with the test helpers importable by Ray's workers, and a mark to find processes by."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, MARK: mark}


def processes_of(mark: str) -> list[int]:
    """Processes that still carry the mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                carries = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue  # it ended while we looked
            if carries and state != "Z":
                found.append(int(folder.name))
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for this test's processes; whatever still carries it at the end is killed."""
    value = uuid.uuid4().hex
    yield value
    for pid in processes_of(value):
        os.kill(pid, 9)


@pytest.fixture
def train(tmp_path: Path, mark: str) -> Callable[..., Run]:
    """Run `relax-sdk train` on the small geometry and wait for it."""

    def run(*arguments: str, name: str = "run") -> Run:
        run_dir = tmp_path / name
        done = subprocess.run(
            command("--run-dir", str(run_dir), *arguments),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(mark),
            check=False,
        )
        return Run(code=done.returncode, stdout=done.stdout, stderr=done.stderr, run_dir=run_dir)

    return run


@pytest.fixture
def held_out(tmp_path: Path) -> tuple[str, ...]:
    """Flags for a held-out set of three prompts."""
    path = tmp_path / "held_out.txt"
    path.write_text("a small red circle on white\na big blue square on black\na green triangle on gray\n")
    return ("--eval-prompt-data", "few", str(path))
