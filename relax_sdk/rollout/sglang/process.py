"""One SGLang server as a subprocess: its own process group, a lifeline, a log file, and no orphans.

The server ends when its owner ends, however that happens: it reads from a pipe whose other end only the owner holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_sdk.errors import RolloutError
from relax_sdk.rollout.sglang.client import SGLangClient
from relax_sdk.rollout.sglang.session import LIFELINE_VARIABLE, OWNER_VARIABLE, SESSION_VARIABLE, report_name

__all__ = ["ServerProcess", "leftover_servers", "reserve_ports"]

_PROC = Path("/proc")
_POLL_S = 0.25
_TERM_GRACE_S = 1.5
_KILL_GRACE_S = 30.0
_LEADER_GRACE_S = 3.0
_STARTS = 3
_FIRST_PORT = 20_000
"""Where ``ray start`` places workers is below, 10002 to 19999."""
_ENOUGH_PORTS = 1_000
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_OUTGOING = 32_768
_PORT_TAKEN = re.compile(rb"address already in use|EADDRINUSE|is unavailable and --strict-ports", re.IGNORECASE)
_LOG_LINES, _LOG_BYTES = 25, 20_000
_LAUNCHER = "from sglang.cli.main import main; main()"


def reserve_ports(stack: contextlib.ExitStack, count: int) -> list[int]:
    """Distinct free ports of the loopback interface, which no other engine chooses until ``stack`` is closed.

    A server loads for a minute or more before it listens, while Ray's processes open connections all the time: so they
    lie below those that the system gives to outgoing connections, wherever that leaves enough. The port after each is
    free too: SGLang's broker takes the one after its HTTP port.

    Raises:
        RolloutError: there are not so many.
    """
    try:
        first_outgoing = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = _USUAL_FIRST_OUTGOING
    end = first_outgoing if first_outgoing >= _FIRST_PORT + _ENOUGH_PORTS else 2**16
    candidates = list(range(_FIRST_PORT, end - 1, 2))
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe, socket.socket() as after:
            probe.bind(("127.0.0.1", port))
            after.bind(("127.0.0.1", port + 1))
            stack.enter_context(_claimed(port))
            ports.append(port)
    if len(ports) < count:
        raise RolloutError(f"no {count} free ports from {_FIRST_PORT} on", where="starting the rollout engine")
    return ports


def _claimed(port: int) -> socket.socket:
    """A socket that has the port's name among engines: one without a file, and of the same network as the port.

    Raises:
        OSError: another engine has it.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0relax-sdk-port-{port}")
    except OSError:
        claim.close()
        raise
    return claim


def leftover_servers() -> list[str]:
    """Servers of ours whose owner is gone, as texts for a message: pid, command, and how to end it."""
    found = []
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if not folder.name.isdigit():
            continue
        try:
            pairs = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            group = os.getpgid(int(folder.name))
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        environ = dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
        owner = environ.get(OWNER_VARIABLE)
        if owner is not None and not _alive(owner):
            found.append(f"pid {folder.name} ({command[:60]}): kill -9 -- -{group}")
    return found


def _owner() -> str:
    return f"{os.getpid()}:{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    """A process's start in clock ticks since boot: with the pid it names a process for good. Empty when it ended."""
    try:
        # The command in brackets may hold spaces and brackets of its own.
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Nobody may ever wait for a killed owner: a zombie has ended too.
    return "" if state in "ZX" else fields[18]


def _alive(owner: str) -> bool:
    pid, _, started = owner.partition(":")
    return bool(started) and pid.isdigit() and _start_time(int(pid)) == started


class ServerProcess:
    """Start, watch, stop.

    Args:
        arguments: of ``sglang serve``, without host and ports.
        environ: further environment variables.
        folder: the session's: reports, log.
        workers: how many worker processes will report.
        required: hook targets that every report must name.
        timeout_s: of one call to the server.
    """

    def __init__(
        self,
        *,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        workers: int,
        required: Sequence[str],
        timeout_s: float,
    ) -> None:
        self._arguments, self._environ = tuple(arguments), dict(environ)
        self._folder, self._workers, self._required = folder, workers, tuple(required)
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._ports = contextlib.ExitStack()
        self._worker_processes: dict[int, str] = {}
        self._log_start = 0
        self.log = folder / "server.log"

    @property
    def pid(self) -> int | None:
        """Of the server's main process, which leads its process group; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self, *, limit_s: float) -> SGLangClient:
        """Start the server and wait until it is healthy and every worker has reported.

        Its ports are free when they are chosen. Where another program takes one before the server does, it is started
        again on others.

        Args:
            limit_s: longest wait, for all starts.

        Raises:
            RolloutError: it ended, did not become healthy in time, or lacks a hook; its last lines are quoted.
        """
        deadline = time.monotonic() + limit_s
        for attempt in range(_STARTS):
            client = self._start(deadline, limit_s, last=attempt == _STARTS - 1)
            if client is not None:
                return client
        raise AssertionError("the last start returns or raises")

    def _start(self, deadline: float, limit_s: float, *, last: bool) -> SGLangClient | None:
        """One start; None where a port was taken meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._workers):
            (self._folder / report_name(rank)).unlink(missing_ok=True)
        port, scheduler, master = reserve_ports(self._ports, 3)
        ports = ["--host", "127.0.0.1", "--port", str(port), "--scheduler-port", str(scheduler)]
        command = [sys.executable, "-c", _LAUNCHER, "serve", *self._arguments, *ports, "--master-port", str(master)]
        reading, self._lifeline = os.pipe()
        environ = os.environ | self._environ
        environ |= {
            SESSION_VARIABLE: str(self._folder),
            OWNER_VARIABLE: _owner(),
            LIFELINE_VARIABLE: str(reading),
        }
        client = SGLangClient(port=port, timeout_s=self._timeout_s)
        try:
            try:
                with self.log.open("ab") as log:
                    self._log_start = log.tell()
                    self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environ,
                        pass_fds=(reading,),
                        start_new_session=True,
                    )
            finally:
                os.close(reading)
            self._wait_healthy(client, deadline, limit_s)
            self._check_reports()
        except BaseException as error:
            again = not last and isinstance(error, RolloutError) and self._a_port_was_taken()
            self.stop()
            if again:
                return None
            raise
        return client

    def problem(self) -> str | None:
        """Why the server is gone, with its last lines; None while it runs."""
        if self._process is None:
            return "the SGLang server is not running"
        # Before the server itself is asked: when both have ended, how the server ended is the better text.
        lost = [rank for rank, owner in self._worker_processes.items() if not _alive(owner)]
        code = self._process.poll()
        if code is None and lost:
            # A signal to the whole group can reach the workers first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(timeout=_LEADER_GRACE_S)
        if code is None:
            # The HTTP side outlives a worker that was killed, and answers that it is gone.
            if not lost:
                return None
            names = ", ".join(f"worker {rank}" for rank in lost)
            return f"{names} of the SGLang server ended; its last lines ({self.log}):\n{self.tail()}"
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        return f"the SGLang server ended with {how}; its last lines ({self.log}):\n{self.tail()}"

    def wait_problem(self, *, limit_s: float) -> str | None:
        """`problem`, after giving a dying server a moment to end."""
        deadline = time.monotonic() + limit_s
        while self.problem() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.problem()

    def tail(self) -> str:
        """The last lines that this server wrote to the log, indented."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_start, self.log.stat().st_size - _LOG_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError as error:
            return f"  (no log: {error})"
        return "\n".join(f"  | {line}" for line in lines)

    def _a_port_was_taken(self) -> bool:
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            return _PORT_TAKEN.search(log.read()) is not None
        return False

    def stop(self) -> None:
        """End the whole process group and wait for it. Safe to call twice.

        Raises:
            RolloutError: a process outlives SIGKILL: the device memory is still taken.
        """
        process, self._process = self._process, None
        self._worker_processes = {}
        try:
            if process is not None:
                self._end_group(process)
        finally:
            self._ports.close()
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        # The leader's pid is the group's id, also when the leader is gone and workers are left.
        for number, wait_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                if not _group_exists(process.pid):
                    process.wait(timeout=_KILL_GRACE_S)
                    return
                time.sleep(0.05)
        raise RolloutError(
            f"processes of the SGLang server are still there {_KILL_GRACE_S:.0f} s after SIGKILL",
            next_step=f"kill -9 -- -{process.pid}, and look for processes in state D",
        )

    def _wait_healthy(self, client: SGLangClient, deadline: float, limit_s: float) -> None:
        while True:
            healthy = client.healthy()
            gone = self.problem()
            if gone is not None:
                raise RolloutError(gone, where="starting the rollout engine")
            if healthy:
                return
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"the SGLang server was not ready within {limit_s:.0f} s; "
                    f"its last lines ({self.log}):\n{self.tail()}"
                )
            time.sleep(_POLL_S)

    def _check_reports(self) -> None:
        problems = []
        for rank, report in self.reports().items():
            if report is None:
                problems.append(f"worker {rank} did not report: the plug-in was not loaded there")
                continue
            missing = sorted(set(self._required) - set(report["hooks"]))
            problems += [f"worker {rank} did not apply {target}" for target in missing]
            pid = int(report["pid"])
            self._worker_processes[rank] = f"{pid}:{_start_time(pid)}"
        if problems:
            raise RolloutError(
                "the SGLang server runs without what training relies on:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
                + f"\nits last lines ({self.log}):\n{self.tail()}",
                where="starting the rollout engine",
            )

    def reports(self) -> dict[int, dict[str, Any] | None]:
        """What each worker wrote after loading its model; None where nothing was written."""
        reports: dict[int, dict[str, Any] | None] = {}
        for rank in range(self._workers):
            path = self._folder / report_name(rank)
            reports[rank] = json.loads(path.read_text()) if path.exists() else None
        return reports


def _group_exists(group: int) -> bool:
    """Whether a process of the group has not ended; a zombie, which nobody may ever wait for, has."""
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                state, _parent, its_group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(its_group) == group and state not in "ZX":
                return True
    return False
