"""What ends a run early: one clear error, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, Running, processes_named, processes_of

Train = Callable[..., Run]


def test_rewards_that_cannot_train(train: Train, mark: str) -> None:
    """Equal ones skip the optimizer; one that is no number ends the run."""
    run = train("--reward", "scorers:FailingScorer",
                "--reward-required-components", '["brightness"]')  # fmt: skip
    assert run.series("reward/degenerate") == [1]
    assert run.series("train/optimizer_steps") == [0.0]
    assert run.series("train/optimizer_skips") == run.series("train/num_microbatches")
    assert run.code == 1
    assert "nan for group 0, candidate 3" in run.stderr
    assert "reward 'scorers:FailingScorer'" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("error:") == 1
    assert processes_of(mark) == []


def test_ctrl_c_during_a_rollout(tmp_path: Path, mark: str) -> None:
    """As a terminal does it: the signal goes to every process of the foreground group."""
    with Running(tmp_path / "run", mark, "--num-rollout", "1000") as running:
        running.wait_for("rollout    2/1000")
        os.killpg(running.process.pid, signal.SIGINT)
        run = running.wait(limit_s=60)
    assert run.code == 130
    assert "Traceback" not in run.stderr, run.stderr
    assert processes_of(mark) == []
    assert list(run.run_dir.rglob("*.tmp")) == []


@pytest.mark.parametrize("asked", ["the driver", "every process"])
def test_a_request_to_terminate_ends_the_run_like_ctrl_c(asked: str, tmp_path: Path, mark: str) -> None:
    """Batch systems ask every process, Ray's own included, which end before the driver is done with them."""
    with Running(tmp_path / "run", mark, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        if asked == "the driver":
            running.process.terminate()
        else:
            os.killpg(running.process.pid, signal.SIGTERM)
        run = running.wait(limit_s=60)
    assert run.code == 128 + signal.SIGTERM
    assert "SIGTERM received" not in run.stderr, run.stderr
    assert processes_of(mark) == []


@pytest.mark.parametrize(
    ("role", "said"),
    [("ray::ActorRole", "actor rank 0 died during"), ("ray::RolloutRole", "rollout engine 0 died during")],
)
def test_a_killed_role_ends_the_run_with_one_error(role: str, said: str, tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "run", mark, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        (pid,) = processes_named(mark, role)
        os.kill(pid, signal.SIGKILL)
        run = running.wait(limit_s=60)
    assert run.code == 1
    assert said in run.stderr
    assert run.stderr.count("error:") == 1
    assert "Traceback" not in run.stderr
    assert processes_of(mark) == []


def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path, mark: str) -> None:
    """Not even Ray's agents, which would look for their node for a minute."""
    with Running(tmp_path / "run", mark, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        assert len(processes_named(mark, "ray::")) > 2
        running.process.kill()
        killed = time.monotonic()
        while processes_of(mark) and time.monotonic() < killed + 60:
            time.sleep(0.2)
    assert {pid: (Path("/proc") / str(pid) / "cmdline").read_bytes()[:200] for pid in processes_of(mark)} == {}
