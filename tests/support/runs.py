"""Running the installed command from a test, and finding what it left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from relax_sdk.metrics import read_metrics

HERE = Path(__file__).parent
MARK = "TEST_RUN_MARK"
TIMEOUT_S = 280

SMALL = (
    "--plugin", "qwen_image",
    "--num-rollout", "2",
    "--rollout-batch-size", "2",
    "--n-samples-per-prompt", "4",
    "--micro-batch-size", "2",
    "--resource", '{"actor": [1, 1], "rollout": [1, 1]}',
    "--eval-prompt-data", "few", str(HERE / "held_out.txt"),
    "--n-samples-per-eval-prompt", "1",
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


@contextlib.contextmanager
def _interrupts_heard() -> Iterator[None]:
    """What is started meanwhile hears interrupts, as at a terminal: a shell ignores them for what it starts in the
    background, and so would everything that this starts in turn."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Running:
    """A `relax-sdk train` under way, in a process group of its own; ended with the block."""

    def __init__(self, run_dir: Path, mark: str, *arguments: str) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".stderr")
        with self.log.open("wb") as stderr, _interrupts_heard():
            self.process = subprocess.Popen(
                command("--run-dir", str(run_dir), *arguments),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment(mark),
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait(timeout=60)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until stderr has ``text``."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait(self, *, limit_s: float = TIMEOUT_S) -> Run:
        """Wait for its end."""
        code = self.process.wait(timeout=limit_s)
        return Run(code=code, stdout="", stderr=self.text(), run_dir=self.run_dir)


def processes_named(mark: str, *words: str) -> list[int]:
    """Processes of a run whose title or command line holds one of ``words``."""
    found = []
    for pid in processes_of(mark):
        try:
            title = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if any(word in title for word in words):
            found.append(pid)
    return found


def run_train(*arguments: str, run_dir: Path, mark: str) -> Run:
    """Run `relax-sdk train` on the small geometry and wait for it."""
    done = subprocess.run(
        command("--run-dir", str(run_dir), *arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(mark),
        check=False,
    )
    return Run(code=done.returncode, stdout=done.stdout, stderr=done.stderr, run_dir=run_dir)
