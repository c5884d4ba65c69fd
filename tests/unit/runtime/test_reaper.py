"""A killed driver's processes are ended from outside; those of one that ends by itself are left to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_processes import alive, gone_within

from relax_sdk.runtime import reaper
from relax_sdk.runtime.reaper import descendants

DRIVER = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[2])  # by itself: it needs nothing else
import reaper
reaper._LOOK_S, reaper._GRACE_S = 0.1, float(sys.argv[1])
with reaper.reaped_when_killed():
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
                             start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    if sys.stdin.readline().strip() == "orphan":
        keeper = subprocess.Popen([sys.executable, "-c", "import subprocess, sys, time; print(subprocess.Popen("
            "['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True); time.sleep(0.6)"], stdout=subprocess.PIPE)
        pid = keeper.stdout.readline().decode()
        keeper.wait()
        print(pid, flush=True)
        sys.stdin.readline()
"""  # noqa: E501


class Driver:
    def __init__(self, grace_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(grace_s), str(Path(reaper.__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        (self.reaper,) = set(descendants({self.process.pid})) - {self.child}
        time.sleep(0.7)  # for its signals to be set up, and a look around


@pytest.fixture
def driver() -> Iterator[Callable[[float], Driver]]:
    made: list[Driver] = []

    def make(grace_s: float) -> Driver:
        made.append(Driver(grace_s))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()
        for pid in (one.child, one.reaper):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("whole_group", [False, True])
def test_what_a_killed_driver_started_is_ended(driver: Callable[[float], Driver], whole_group: bool) -> None:
    """Also when the kill goes to its whole process group."""
    one = driver(0.3)
    if whole_group:
        os.killpg(one.process.pid, signal.SIGKILL)
    else:
        one.process.kill()
    assert gone_within(one.child, 10)
    assert gone_within(one.reaper, 10)


def test_processes_get_a_moment_to_end_by_themselves(driver: Callable[[float], Driver]) -> None:
    one = driver(2.0)
    one.process.kill()
    time.sleep(1.0)
    assert alive(one.child)
    assert gone_within(one.child, 10)


def test_a_driver_that_ends_by_itself_is_left_alone(driver: Callable[[float], Driver]) -> None:
    one = driver(0.0)
    one.process.communicate("end\n", timeout=30)
    assert not alive(one.reaper)
    time.sleep(0.5)
    assert alive(one.child)


def test_ctrl_c_and_requests_to_terminate_are_the_drivers(driver: Callable[[float], Driver]) -> None:
    one = driver(0.0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(one.reaper, number)
    assert not gone_within(one.reaper, 0.5)
    one.process.kill()
    assert gone_within(one.child, 10)


def test_processes_of_another_run_are_left_alone(driver: Callable[[float], Driver]) -> None:
    first, second = driver(0.0), driver(0.0)
    first.process.kill()
    assert gone_within(first.reaper, 10)
    assert not alive(first.child)
    assert alive(second.child)


def test_a_process_that_lost_its_parent_is_remembered(driver: Callable[[float], Driver]) -> None:
    """As Ray's agents, whose parent is killed before them."""
    one = driver(0.0)
    one.process.stdin.write("orphan\n")  # type: ignore[union-attr]
    one.process.stdin.flush()  # type: ignore[union-attr]
    orphan = int(one.process.stdout.readline())  # type: ignore[union-attr]
    assert not gone_within(orphan, 0.3)
    one.process.kill()
    assert gone_within(orphan, 10)


def test_descendants_are_those_below_and_no_others(driver: Callable[[float], Driver]) -> None:
    one, other = driver(0.0), driver(0.0)
    assert set(descendants({one.process.pid})) == {one.child, one.reaper}
    assert set(descendants({one.process.pid, other.process.pid})) == {one.child, one.reaper, other.child, other.reaper}
    assert descendants({one.child}) == {}
    assert {one.process.pid, other.process.pid} <= set(descendants({os.getpid()}))
