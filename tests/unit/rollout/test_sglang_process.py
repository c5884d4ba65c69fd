"""The server as a process: how its failures are told, and that nothing of it is left, however it or its owner ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang_server import ORDERS, answer
from live_processes import alive, gone_within

from relax_sdk.errors import RolloutError
from relax_sdk.rollout.sglang import process
from relax_sdk.rollout.sglang.client import ServerUnreachableError, SGLangClient
from relax_sdk.rollout.sglang.process import ServerProcess, leftover_servers, reserve_ports
from relax_sdk.rollout.sglang.session import OWNER_VARIABLE

HELPERS = Path(__file__).parents[1] / "helpers"
LAUNCHER = f"import sys; sys.path.insert(0, {str(HELPERS)!r}); from fake_sglang_server import main; main()"
HOOKS = ["a.b", "c.d"]
GENERATE = "/rollout/generate"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Makes servers that follow orders, and stops them all."""
    monkeypatch.setattr(process, "_LAUNCHER", LAUNCHER)
    monkeypatch.setattr(process, "_TERM_GRACE_S", 0.5)
    monkeypatch.setattr(process, "_POLL_S", 0.05)
    all_of_them: list[ServerProcess] = []

    def make(*, workers: int = 1, timeout_s: float = 10.0, **orders: Any) -> ServerProcess:
        server = ServerProcess(
            arguments=["--model-path", "m"],
            environ={ORDERS: json.dumps({"hooks": [HOOKS] * workers, **orders})},
            folder=tmp_path / "session",
            workers=workers,
            required=HOOKS,
            timeout_s=timeout_s,
        )
        all_of_them.append(server)
        return server

    yield make
    for server in all_of_them:
        server.stop()


def children_in(log: Path) -> list[int]:
    return [int(number) for number in re.findall(r"^child (\d+)$", log.read_text(), re.MULTILINE)]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- a server that works ----------------------------------------------------------------------------------------------


def test_a_server_is_started_in_a_group_of_its_own_and_stopped_without_a_trace(
    made: Callable[..., ServerProcess],
) -> None:
    before = open_descriptors()
    server = made(workers=2)
    client = server.start(limit_s=30)
    assert client.healthy()
    assert server.problem() is None
    pid = server.pid
    assert pid is not None
    assert os.getpgid(pid) == pid != os.getpgid(0)
    reports = server.reports()
    assert sorted(reports) == [0, 1]
    first = reports[0]
    assert first is not None
    assert first["argv"][:5] == ["serve", "--model-path", "m", "--host", "127.0.0.1"]
    ports = [first["argv"][first["argv"].index(f"--{name}port") + 1] for name in ("", "scheduler-", "master-")]
    assert len(set(ports)) == 3

    server.stop()
    assert not alive(pid)
    with pytest.raises(ChildProcessError):  # no zombie is left to wait for
        os.waitpid(pid, os.WNOHANG)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(ports[0])))
    assert open_descriptors() == before
    server.stop()
    assert server.problem() == "the SGLang server is not running"


def test_ports_that_are_taken_meanwhile_are_chosen_anew(
    made: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[int]] = []

    def ports(stack: contextlib.ExitStack, count: int) -> list[int]:
        free = reserve_ports(stack, count)
        chosen.append([taken.getsockname()[1], *free[1:]] if len(chosen) < busy else free)
        return chosen[-1]

    monkeypatch.setattr(process, "reserve_ports", ports)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = 2
        server = made()
        assert server.start(limit_s=30).healthy()
        assert len(chosen) == 3
        server.stop()
        busy, chosen = 9, []
        with pytest.raises(RolloutError, match="Address already in use"):
            server.start(limit_s=30)
        assert len(chosen) == 3


def test_a_server_can_be_started_again(made: Callable[..., ServerProcess]) -> None:
    server = made()
    server.start(limit_s=30)
    first = server.pid
    server.stop()
    assert server.start(limit_s=30).healthy()
    assert server.pid != first


def test_ports_are_distinct_and_free_and_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(process, "_OUTGOING_PORTS", limits)
    for first, last in ((32768, 32767), (1024, 65535), (20500, 65535)):
        limits.write_text(f"{first}\t60999\n")
        with contextlib.ExitStack() as stack:
            ports = reserve_ports(stack, 20)
            used = {port + further for port in ports for further in (0, 1)}
            assert len(used) == 40
            assert min(used) >= 20_000
            assert max(used) <= last
            for port in used:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))


def test_no_port_is_given_twice_while_it_is_held_or_where_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        (port,) = reserve_ports(first, 1)
        monkeypatch.setattr(process, "_FIRST_PORT", port)
        monkeypatch.setattr(process, "_ENOUGH_PORTS", 1)
        monkeypatch.setattr(process, "_OUTGOING_PORTS", Path("/no/such/file"))
        monkeypatch.setattr(process, "_USUAL_FIRST_OUTGOING", port + 2)
        with pytest.raises(RolloutError, match="no 1 free ports from"):
            reserve_ports(second, 1)
        first.close()
        assert reserve_ports(second, 1) == [port]
        second.close()
        with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(RolloutError, match="no 1 free ports from"):
            reserve_ports(second, 1)


# --- a server that does not start -------------------------------------------------------------------------------------


def refused(server: ServerProcess, *, limit_s: float = 30) -> str:
    before = open_descriptors()
    with pytest.raises(RolloutError) as caught:
        server.start(limit_s=limit_s)
    assert server.pid is None
    assert open_descriptors() == before
    return str(caught.value)


def last_lines(text: str) -> list[str]:
    return re.findall(r"^  \| (.*)$", text, re.MULTILINE)


def test_a_server_that_ends_at_once_is_told_with_its_exit_code_and_last_lines(
    made: Callable[..., ServerProcess],
) -> None:
    server = made(exit=3)
    text = refused(server)
    assert f"the SGLang server ended with exit code 3; its last lines ({server.log}):" in text
    lines = last_lines(text)
    assert lines[-1] == "error: no such model"
    assert (len(lines), lines[0]) == (25, "loading part 6")
    assert "where:    starting the rollout engine" in text


def test_a_signal_is_told_by_its_name(made: Callable[..., ServerProcess]) -> None:
    assert "ended with signal 11 (SIGSEGV)" in refused(made(signal=int(signal.SIGSEGV)))


def test_a_server_that_does_not_become_healthy_is_given_up_in_time(made: Callable[..., ServerProcess]) -> None:
    server = made(answers={"/health": answer("", 503)}, children=1)
    started = time.monotonic()
    text = refused(server, limit_s=2)
    assert time.monotonic() - started < 10
    assert "was not ready within 2 s" in text
    assert last_lines(text)[-1] == "ready"
    (child,) = children_in(server.log)
    assert gone_within(child, 2)


@pytest.mark.parametrize(
    ("workers", "hooks", "problems"),
    [
        (1, [None], ["worker 0 did not report: the plug-in was not loaded there"]),
        (1, [["a.b", "x.y"]], ["worker 0 did not apply c.d"]),
        (2, [HOOKS], ["worker 1 did not report: the plug-in was not loaded there"]),
        (2, [["c.d"], []], ["worker 0 did not apply a.b", "worker 1 did not apply a.b", "worker 1 did not apply c.d"]),
    ],
    ids=["no report", "one hook missing", "one worker silent", "several"],
)
def test_a_server_without_every_hook_in_every_worker_is_refused(
    made: Callable[..., ServerProcess], workers: int, hooks: list[Any], problems: list[str]
) -> None:
    text = refused(made(workers=workers, hooks=hooks))
    assert text.startswith("the SGLang server runs without what training relies on:\n")
    assert re.findall(r"^  - (.*)$", text, re.MULTILINE) == problems
    assert last_lines(text)[-1] == "ready"


def test_a_report_of_an_earlier_server_does_not_count(made: Callable[..., ServerProcess], tmp_path: Path) -> None:
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "worker-0.json").write_text(json.dumps({"hooks": HOOKS}))
    assert "worker 0 did not report" in refused(made(hooks=[None]))


def test_lines_of_an_earlier_server_are_not_quoted(made: Callable[..., ServerProcess], tmp_path: Path) -> None:
    (tmp_path / "session").mkdir()
    (tmp_path / "session" / "server.log").write_text("the error of yesterday\n")
    server = made(quiet=True)
    assert "yesterday" not in refused(server)
    assert "yesterday" in server.log.read_text(), "but they are kept"


def test_an_interrupted_start_leaves_nothing(
    made: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int | None] = []
    server = made(answers={"/health": answer("", 503)})

    def interrupt(client: SGLangClient) -> bool:
        pids.append(server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(SGLangClient, "healthy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start(limit_s=30)
    (pid,) = pids
    assert pid is not None
    assert not alive(pid)


def test_a_program_that_cannot_be_started_leaves_nothing_open(
    made: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.sys, "executable", "/no/such/python")
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        made().start(limit_s=5)
    assert open_descriptors() == before


# --- a server that ends later -----------------------------------------------------------------------------------------


def test_a_server_that_dies_during_a_request_is_told_by_how_it_ended(made: Callable[..., ServerProcess]) -> None:
    server = made(answers={GENERATE: answer(then="die")})
    client = server.start(limit_s=30)
    with pytest.raises(ServerUnreachableError):
        client.generate({})
    problem = server.wait_problem(limit_s=5)
    assert problem is not None
    assert "ended with signal 9 (SIGKILL)" in problem
    assert last_lines(problem)[-1] == "fatal: out of luck"


def test_a_server_that_runs_has_no_problem_however_long_one_waits(made: Callable[..., ServerProcess]) -> None:
    server = made()
    server.start(limit_s=30)
    started = time.monotonic()
    assert server.wait_problem(limit_s=0.2) is None
    assert 0.2 <= time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("leader", "expected"),
    [("runs on", "worker 0 of the SGLang server ended;"), ("ends a little later", "ended with signal 9 (SIGKILL);")],
)
def test_a_lost_worker_is_told_only_when_the_server_outlives_it(
    made: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, leader: str, expected: str
) -> None:
    """A signal to the whole group ends the processes in any order."""
    monkeypatch.setattr(process, "_LEADER_GRACE_S", 0.5 if leader == "runs on" else 20.0)
    server = made()
    server.start(limit_s=30)
    pid = server.pid
    assert pid is not None
    server._worker_processes = {0: f"{pid}:of-another-process"}
    if leader != "runs on":
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    problem = server.problem()
    assert problem is not None
    assert expected in problem


@pytest.mark.parametrize("leader", ["runs", "was killed"])
def test_stop_ends_children_that_ignore_a_polite_request(made: Callable[..., ServerProcess], leader: str) -> None:
    server = made(children=2)
    server.start(limit_s=30)
    children = children_in(server.log)
    assert len(children) == 2
    assert server.pid is not None
    if leader == "was killed":
        os.kill(server.pid, signal.SIGKILL)
    assert all(alive(child) for child in children)
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 5
    assert all(gone_within(child, 2) for child in children)


def test_a_log_that_is_not_there_is_said_to_be_so(made: Callable[..., ServerProcess]) -> None:
    server = made()
    assert "no log" in server.tail()
    assert server.problem() == "the SGLang server is not running"


# --- an owner that ends -----------------------------------------------------------------------------------------------


OWNER = """
import json, sys, time
from pathlib import Path
from relax_sdk.rollout.sglang import process
from relax_sdk.rollout.sglang.process import ServerProcess, leftover_servers
process._LAUNCHER = sys.argv[1]
kept = []
for name, orders in (("watching", {"lifeline": True, "children": 1}), ("blind", {"children": 1})):
    server = ServerProcess(
        arguments=[], environ={"FAKE_SGLANG": json.dumps({"hooks": [[]], **orders})}, folder=Path(sys.argv[2]) / name,
        workers=1, required=[], timeout_s=10,
    )
    server.start(limit_s=60)
    kept.append(server)
print(*(server.pid for server in kept), flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A process with two servers, of which the second does not notice that its owner is gone; all their pids."""
    started = subprocess.Popen(
        [sys.executable, "-c", OWNER, LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    pids: list[int] = []
    try:
        pids = [int(text) for text in started.stdout.readline().split()]
        watching, blind = pids
        yield started, watching, blind
    finally:
        started.kill()
        started.wait(10)
        started.stdout.close()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def named(pid: int, found: list[str]) -> list[str]:
    return [text for text in found if text.startswith(f"pid {pid} ")]


def test_a_killed_owner_takes_its_server_along_and_a_blind_one_is_named(
    owner: tuple[subprocess.Popen[str], int, int], tmp_path: Path
) -> None:
    started, watching, blind = owner
    (child,) = children_in(tmp_path / "watching" / "server.log")
    found = leftover_servers()
    assert not named(watching, found)
    assert not named(blind, found)
    assert alive(child)

    # Not waited for: until its parent does, the owner is a zombie, and gone all the same. It closes its end of the
    # servers' pipe a moment before it is one.
    started.kill()
    assert gone_within(started.pid, 5)
    assert gone_within(watching, 5)
    assert gone_within(child, 5)
    assert alive(blind)
    (text,) = named(blind, leftover_servers())
    assert text.endswith(f"kill -9 -- -{blind}")
    assert "python" in text
    started.wait(10)
    assert len(named(blind, leftover_servers())) == 1
    # its child carries the same mark, and the same command ends it
    (other,) = children_in(tmp_path / "blind" / "server.log")
    assert named(other, leftover_servers())[0].endswith(f"kill -9 -- -{blind}")

    command = text.rpartition(": ")[2].split()
    subprocess.run(command, check=True, timeout=10)
    assert gone_within(blind, 5)
    assert gone_within(other, 5)
    assert not named(blind, leftover_servers())


@pytest.mark.parametrize(
    ("mark", "left"),
    [
        (lambda: process._owner(), False),
        # the same number, given to another process since
        (lambda: f"{os.getpid()}:1", True),
        (lambda: "999999999:5", True),
        (lambda: "", True),
    ],
    ids=["this process", "a number used again", "nobody", "unreadable"],
)
def test_an_owner_is_known_by_its_number_and_its_start(mark: Callable[[], str], left: bool) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={OWNER_VARIABLE: mark()})
    try:
        deadline = time.monotonic() + 5
        while bool(named(sleeper.pid, leftover_servers())) != left and time.monotonic() < deadline:
            time.sleep(0.05)  # the environment is its parent's until the program is loaded
        assert bool(named(sleeper.pid, leftover_servers())) == left
    finally:
        sleeper.kill()
        sleeper.wait(10)
    assert not named(sleeper.pid, leftover_servers())
