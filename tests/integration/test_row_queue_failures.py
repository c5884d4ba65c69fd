"""A row queue without a place, and one whose processes die. TransferQueue itself waits for ever, or for minutes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from live_processes import gone_within

from relax_sdk.errors import RunError
from relax_sdk.protocols import TrainRow
from relax_sdk.runtime import rows
from relax_sdk.runtime.rows import RowQueue

# Ray and TransferQueue leave sockets and sub-processes to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ROW = TrainRow(
    rollout_id=0,
    group_index=0,
    slot=0,
    advantage=0.5,
    rewards={"pickscore": 0.3},
    sidecar="/somewhere.safetensors",
    policy_version=0,
    sampling_fingerprint="5a" * 32,
    weight_manifest_hash="",
)


@pytest.fixture
def cpus(request: pytest.FixtureRequest) -> Iterator[int]:
    """A Ray with so many CPUs."""
    ray.init(
        address="local", num_cpus=request.param, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield request.param
    ray.shutdown()


@pytest.mark.parametrize("cpus", [1], indirect=True)
def test_a_queue_that_finds_no_place_is_refused(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_START_TIMEOUT_S", 10.0)
    with pytest.raises(RunError, match="starting the row queue did not finish within 10 s") as caught:
        RowQueue("run", start=True, timeout_s=30.0)
    assert "2 CPUs of the cluster that nobody holds" in str(caught.value)


@pytest.mark.parametrize("cpus", [2], indirect=True)
def test_a_queue_that_dies_is_named_at_once(cpus: int) -> None:
    for title, said in (
        ("ray::TransferQueueController", "TransferQueue's controller died during listing rows"),
        ("ray::SimpleStorageUnit", "TransferQueue's storage died during reading rows"),
    ):
        queue = RowQueue("run", start=True, timeout_s=30.0)
        queue.put([ROW])
        pids = titled("ray::TransferQueueController") + titled("ray::SimpleStorageUnit")
        assert len(pids) == 2
        os.kill(titled(title)[0], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RunError, match=said):
            queue.take(0, groups=1, candidates=1)
        queue.close()
        assert time.monotonic() - begun < 25
        assert all(gone_within(pid, 5) for pid in pids)


def titled(title: str) -> list[int]:
    """Processes with that title."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if (folder / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found
