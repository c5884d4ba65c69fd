"""What ends a run early: one clear error, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import TIMEOUT_S, Run, command, environment, processes_of

Train = Callable[..., Run]


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [("NanScorer", "nan for group 0, candidate 3"), ("ShortScorer", "7 values of 'brightness' for 8 rows")],
)
def test_a_reward_that_cannot_train(train: Train, mark: str, scorer: str, expected: str) -> None:
    run = train("--reward", f"scorers:{scorer}",
                "--reward-required-components", '["brightness"]')  # fmt: skip
    assert run.code == 1
    assert expected in run.stderr
    assert f"reward 'scorers:{scorer}'" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("error:") == 1
    assert processes_of(mark) == []


def test_ctrl_c_during_a_rollout(tmp_path: Path, mark: str) -> None:
    """As a terminal does it: the signal goes to every process of the foreground group."""
    run_dir = tmp_path / "run"
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command("--run-dir", str(run_dir), "--num-rollout", "1000"),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment(mark),
            start_new_session=True,
        )
        deadline = time.monotonic() + TIMEOUT_S
        while b"rollout    2/1000" not in (tmp_path / "stderr").read_bytes():
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    text = (tmp_path / "stderr").read_text()
    assert "Traceback" not in text, text
    assert processes_of(mark) == []
    assert list(run_dir.rglob("*.tmp")) == []
