"""Whole runs with the real SGLang server as the engine, on a CPU: both sync modes, the hand-over, a dying server."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, Running, environment, processes_named, processes_of

Train = Callable[..., Run]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

SGLANG = ("--rollout-engine", "sglang", "--offload-train", "--offload-rollout")
FULL = ("--fsdp-trainable-mode", "full", "--lora-rank", "0", "--lora-merge-mode")
SERVER = "sgl_diffusion::scheduler"


def assert_trained(run: Run) -> None:
    assert run.code == 0, run.stderr
    assert run.series("train/policy_version") == [1.0, 2.0]
    assert run.series("train/first_update_ratio_max_deviation") == [0.0, 0.0]
    # The bound is 5e-5 on average; in float32 the worst cell is far below.
    assert max(run.series("train/logp_parity_mean")) < 1e-6
    assert max(run.series("train/logp_parity_max")) < 5e-6
    assert run.series("train/weight_sync_failures") == [0.0, 0.0]


@pytest.mark.parametrize(("flags", "tensors"), [((), 64.0), (FULL, 141.0)], ids=["adapter", "full"])
def test_two_rollouts_in_either_sync_mode(train: Train, mark: str, flags: tuple[str, ...], tensors: float) -> None:
    ours = train(*SGLANG, *flags, name="sglang")
    assert_trained(ours)
    assert ours.series("train/weight_sync_tensors") == [tensors, tensors]
    assert processes_of(mark) == []
    # The embedded engine, and everything resident, trains the same: rewards are of the same pictures.
    theirs = train(*flags, name="local")
    assert theirs.code == 0, theirs.stderr
    for name in ("reward/pickscore_mean", "train/grad_norm", "eval/few/pickscore_mean"):
        assert ours.series(name) == pytest.approx(theirs.series(name), rel=2e-3)


def test_a_server_that_dies_is_started_again_with_the_current_weights(train: Train, tmp_path: Path, mark: str) -> None:
    arguments = (*SGLANG, "--num-rollout", "3")
    with Running(tmp_path / "killed", mark, *arguments, "--use-fault-tolerance") as running:
        running.wait_for("rollout 1/3")
        status = relax_sdk("status", "--json", str(running.run_dir), mark=mark)
        assert json.loads(status.stdout)["policy_version"] >= 1
        (server,) = processes_named(mark, SERVER)
        os.kill(server, signal.SIGKILL)
        run = running.wait()
    assert run.code == 0, run.stderr
    assert "rollout engine 0 is gone" in run.stderr
    assert run.series("rollout/engine_restarts")[-1] >= 1.0
    assert processes_of(mark) == []
    # Nothing was lost and nothing repeated: the run is the one that nobody disturbed.
    calm = train(*arguments, name="calm")
    for name in ("reward/pickscore_mean", "train/grad_norm", "eval/few/pickscore_mean", "train/policy_version"):
        assert run.series(name) == pytest.approx(calm.series(name), rel=1e-5)


def test_without_fault_tolerance_a_dead_server_ends_the_run(tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "run", mark, *SGLANG, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        (server,) = processes_named(mark, SERVER)
        os.kill(server, signal.SIGKILL)
        run = running.wait(limit_s=60)
    assert run.code == 1
    assert run.stderr.count("error:") == 1
    assert "the SGLang server ended with" in run.stderr
    assert "its last lines" in run.stderr
    assert processes_of(mark) == []


def test_stop_ends_a_run_after_its_rollout(tmp_path: Path, mark: str) -> None:
    with Running(tmp_path / "run", mark, "--num-rollout", "1000") as running:
        running.wait_for("rollout    1/1000")
        stopped = relax_sdk("stop", str(running.run_dir), mark=mark)
        assert stopped.returncode == 0, stopped.stderr
        run = running.wait(limit_s=60)
    assert run.code == 0, run.stderr
    assert "stopped as asked, after" in run.stderr
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
