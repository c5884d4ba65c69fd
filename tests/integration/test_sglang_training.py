"""Whole runs with the real SGLang server as the engine, on a CPU: both sync modes, the hand-over, a dying server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from runs import Run, Running, environment, processes_named, processes_of, run_train

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

SGLANG = ("--rollout-engine", "sglang", "--offload-train", "--offload-rollout")
FULL = ("--fsdp-trainable-mode", "full", "--lora-rank", "0", "--lora-merge-mode")
COMPARED = ("reward/pickscore_mean", "train/grad_norm", "eval/few/pickscore_mean")
SERVER = "sgl_diffusion::scheduler"


def assert_trained(run: Run) -> None:
    assert run.code == 0, run.stderr
    rollouts = len(run.series("train/loss"))
    assert rollouts >= 2
    assert run.series("train/policy_version") == [float(version) for version in range(1, rollouts + 1)]
    assert run.series("train/first_update_ratio_max_deviation") == [0.0] * rollouts
    # The bound is 5e-5 on average; in float32 the worst cell is far below.
    assert max(run.series("train/logp_parity_mean")) < 1e-6
    assert max(run.series("train/logp_parity_max")) < 5e-6
    assert run.series("train/weight_sync_failures") == [0.0] * rollouts


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts with adapter sync that nobody disturbs."""
    mark = uuid.uuid4().hex
    run = run_train(*SGLANG, run_dir=tmp_path_factory.mktemp("calm") / "run", mark=mark)
    assert processes_of(mark) == []
    return run


def test_two_rollouts_with_adapter_sync(calm: Run, plain: Run) -> None:
    assert_trained(calm)
    assert calm.series("train/weight_sync_tensors") == [64.0, 64.0]
    # The embedded engine, and everything resident, trains the same: rewards are of the same pictures.
    for name in COMPARED:
        assert calm.series(name) == pytest.approx(plain.series(name), rel=2e-3)


def test_rollouts_with_full_sync_until_it_is_stopped(tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "run", mark, *SGLANG, *FULL, "--num-rollout", "1000") as running:
        running.wait_for("rollout    2/1000")
        stopped = relax_sdk("stop", str(running.run_dir), mark=mark)
        assert stopped.returncode == 0, stopped.stderr
        run = running.wait()
    assert_trained(run)
    assert set(run.series("train/weight_sync_tensors")) == {141.0}
    assert "stopped as asked, after" in run.stderr
    assert processes_of(mark) == []


def test_a_server_that_dies_is_started_again_with_the_current_weights(calm: Run, tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "killed", mark, *SGLANG, "--use-fault-tolerance") as running:
        running.wait_for("rollout 1/2")
        status = relax_sdk("status", "--json", str(running.run_dir), mark=mark)
        assert json.loads(status.stdout)["status"]["policy_version"] >= 1, status.stdout
        (server,) = processes_named(mark, SERVER)
        os.kill(server, signal.SIGKILL)
        run = running.wait()
    assert run.code == 0, run.stderr
    assert "rollout engine 0 is gone" in run.stderr
    assert run.series("train/policy_version") == [1.0, 2.0]
    assert processes_of(mark) == []
    # Nothing was lost and nothing repeated: the run is the one that nobody disturbed.
    for name in COMPARED:
        assert run.series(name) == pytest.approx(calm.series(name), rel=1e-5)


def test_without_fault_tolerance_a_dead_server_ends_the_run(tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "run", mark, *SGLANG, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        (server,) = processes_named(mark, SERVER)
        os.kill(server, signal.SIGKILL)
        run = running.wait(limit_s=60)
    assert run.code == 1
    assert run.stderr.count("error:") == 1
    assert "worker 0 of the SGLang server ended" in run.stderr
    assert "its last lines" in run.stderr
    assert processes_of(mark) == []


def relax_sdk(*arguments: str, mark: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relax_sdk", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(mark),
        check=False,
    )
