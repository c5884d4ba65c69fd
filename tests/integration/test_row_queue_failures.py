"""A row queue without a place, and one whose processes die. TransferQueue itself waits for ever, or for minutes."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
import ray
from live_processes import gone_within
from runs import MARK, processes_named

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
def mark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the processes of a Ray with so many CPUs."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    ray.init(
        address="local", num_cpus=request.param, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    yield value
    ray.shutdown()


@pytest.mark.parametrize("mark", [1], indirect=True)
@pytest.mark.usefixtures("mark")
def test_a_queue_that_finds_no_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_START_TIMEOUT_S", 10.0)
    with pytest.raises(RunError, match="starting the row queue did not finish within 10 s") as caught:
        RowQueue("run", start=True, timeout_s=30.0)
    assert "2 CPUs of the cluster that nobody holds" in str(caught.value)
    assert threads_left() == []


@pytest.mark.parametrize("mark", [1], indirect=True)
@pytest.mark.usefixtures("mark")
def test_an_interrupt_while_it_waits_leaves_no_thread_in_ray() -> None:
    """Ray would end the process on the way out, with no word of what happened."""
    threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            RowQueue("run", start=True, timeout_s=30.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert threads_left() == []


@pytest.mark.parametrize("mark", [1], indirect=True)
@pytest.mark.usefixtures("mark")
def test_a_rank_does_not_start_a_queue_of_its_own() -> None:
    with pytest.raises(RunError, match="TransferQueue's controller is gone"):
        RowQueue("run", start=False, timeout_s=30.0)


@pytest.mark.parametrize("mark", [2], indirect=True)
def test_a_queue_that_dies_is_named_at_once(mark: str) -> None:
    for title, said in (
        ("ray::TransferQueueController", "TransferQueue's controller died during listing rows"),
        ("ray::SimpleStorageUnit", "TransferQueue's storage died during reading rows"),
    ):
        queue = RowQueue("run", start=True, timeout_s=30.0)
        queue.put([ROW])
        pids = processes_named(mark, "ray::TransferQueueController", "ray::SimpleStorageUnit")
        assert len(pids) == 2
        (pid,) = processes_named(mark, title)
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RunError, match=said):
            queue.take(0, groups=1, candidates=1)
        queue.close()
        assert time.monotonic() - begun < 25
        assert all(gone_within(pid, 5) for pid in pids)


def threads_left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "row queue" in thread.name]
