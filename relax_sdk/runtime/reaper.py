"""Ends what a killed driver leaves of the Ray cluster that it started.

Ray's processes follow a killed driver one after the other, its agents only after a minute. So a small process waits
on a pipe that the driver alone holds, and remembers the driver's descendants meanwhile. When the pipe ends without a
word, they get a moment to end by themselves and are then killed. An environment variable would not do as a mark:
processes that set their title overwrite what others can read of their environment. The module runs as a script, too,
and needs nothing but the standard library then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["descendants", "reaped_when_killed"]

_PROC = Path("/proc")
_LOOK_S = 2.0
_GRACE_S = 10.0
_END_S = 30.0
_FAREWELL = b"ended"


@contextlib.contextmanager
def reaped_when_killed() -> Iterator[None]:
    """Processes that are started in this block, and theirs, end within some seconds of this one when it is killed.

    For a cluster that this process starts. One that ends by itself ends it itself.
    """
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(_LOOK_S), str(_GRACE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        # A signal to the driver's whole group must not reach it.
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reaper.communicate(_FAREWELL, timeout=_END_S)
        if reaper.poll() is None:
            reaper.kill()
            reaper.wait()


def descendants(roots: set[int]) -> dict[int, str]:
    """Processes below ``roots`` that have not ended: their start times, which name them for good, by pid."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit() and (process := _parent_and_start(int(folder.name))) is not None:
            parents[int(folder.name)], starts[int(folder.name)] = process
    found: dict[int, str] = {}
    fresh = roots
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh and pid not in found}
        found |= {pid: starts[pid] for pid in fresh}
    return found


def _parent_and_start(pid: int) -> tuple[int, str] | None:
    """None for a process that has ended, also when nobody has waited for it yet."""
    try:
        # The command in brackets may hold spaces and brackets of its own.
        state, parent, *fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else (int(parent), fields[17])


def _alive(pid: int, start: str) -> bool:
    process = _parent_and_start(pid)
    return process is not None and process[1] == start


def _main(driver: int, look_s: float, grace_s: float) -> None:
    # Ctrl-C and the like are the driver's; this process ends when the driver does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: dict[int, str] = {}
    while not select.select([sys.stdin], [], [], look_s)[0]:
        known = {pid: start for pid, start in known.items() if _alive(pid, start)} | _others({driver})
    if sys.stdin.buffer.read() == _FAREWELL:
        return
    polite = time.monotonic() + grace_s
    end = polite + _END_S
    while time.monotonic() < end:
        known = {pid: start for pid, start in known.items() if _alive(pid, start)}
        # A process whose parent has just ended has another one now, but what it starts is still below it.
        known |= _others(set(known))
        if not known:
            return
        if time.monotonic() > polite:
            for pid in known:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _others(roots: set[int]) -> dict[int, str]:
    return {pid: start for pid, start in descendants(roots).items() if pid != os.getpid()}


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
