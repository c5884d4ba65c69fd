"""Ends what a killed driver leaves of the Ray cluster that it started.

Ray's processes follow a killed driver one after the other, its agents only after a minute. So a small process waits
on a pipe that the driver alone holds: when the pipe ends without a word, every process with the driver's mark in its
environment gets a moment to end by itself and is then killed. The module runs as a script, too, and needs nothing
but the standard library then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MARK_VARIABLE", "processes_marked", "reaped_when_killed"]

MARK_VARIABLE = "RELAX_CLUSTER_MARK"
_PROC = Path("/proc")
_GRACE_S = 10.0
_END_S = 30.0
_FAREWELL = b"ended"


@contextlib.contextmanager
def reaped_when_killed() -> Iterator[None]:
    """Processes that are started in this block, and theirs, end within some seconds of this one, however it ends.

    For a cluster that this process starts; every process of it inherits the mark.
    """
    mark = uuid.uuid4().hex
    environ = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark, str(_GRACE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ,
        cwd="/",
        # A signal to the driver's whole group must not reach it.
        start_new_session=True,
    )
    os.environ[MARK_VARIABLE] = mark
    try:
        yield
    finally:
        os.environ.pop(MARK_VARIABLE, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.communicate(_FAREWELL, timeout=_END_S)
        if reaper.poll() is None:
            reaper.kill()
            reaper.wait()


def processes_marked(mark: str) -> list[int]:
    """Processes that carry the mark in their environment and have not ended."""
    carried = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and carried in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile, or belongs to another user
    return found


def _main(mark: str, grace_s: float) -> None:
    # Ctrl-C and the like are the driver's; this process ends when the driver does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == _FAREWELL:
        return
    polite = time.monotonic() + grace_s
    while processes_marked(mark) and time.monotonic() < polite:
        time.sleep(0.2)
    end = time.monotonic() + _END_S
    while (left := processes_marked(mark)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]))
