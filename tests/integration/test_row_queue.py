"""Rows through the real TransferQueue on a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import transfer_queue

from relax_sdk.errors import RunError
from relax_sdk.protocols import TrainRow
from relax_sdk.runtime.rows import RowQueue

# Ray and TransferQueue leave sockets and sub-processes to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def queue() -> Iterator[RowQueue]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    made = RowQueue("run", start=True, timeout_s=30.0)
    yield made
    made.close()
    ray.shutdown()


def row(rollout: int, group: int, slot: int, **changes: Any) -> TrainRow:
    values: dict[str, Any] = {
        "rollout_id": rollout,
        "group_index": group,
        "slot": slot,
        "advantage": 0.1 + group + slot / 7,
        "rewards": {"pickscore": 0.3 * slot, "other": -1.0 * group},
        "sidecar": f"/artefakte/größe_{group}.safetensors",
        "policy_version": rollout,
        "sampling_fingerprint": "5a" * 32,
        "weight_manifest_hash": "",
    }
    return TrainRow(**{**values, **changes})


def rows(rollout: int) -> list[TrainRow]:
    return [row(rollout, group, slot) for group in range(2) for slot in range(3)]


def test_rows_come_back_whole_and_in_order(queue: RowQueue) -> None:
    queue.put(list(reversed(rows(0))))
    assert queue.take(0, groups=2, candidates=3) == rows(0)
    # Every rank reads all rows; clearing them ends the rollout.
    assert queue.take(0, groups=2, candidates=3) == rows(0)
    queue.clear(0, groups=2, candidates=3)
    with pytest.raises(RunError, match="6 lost"):
        queue.take(0, groups=2, candidates=3)


def test_a_lost_row_is_named(queue: RowQueue) -> None:
    queue.put([item for item in rows(1) if (item.group_index, item.slot) != (1, 2)])
    with pytest.raises(RunError, match=r"1 lost \(first: \['group_00000001_sample_0002'\]\)"):
        queue.take(1, groups=2, candidates=3)


def test_a_row_too_many_is_named(queue: RowQueue) -> None:
    queue.put([*rows(2), row(2, 2, 0)])
    with pytest.raises(RunError, match=r"1 too many \(first: \['group_00000002_sample_0000'\]\)"):
        queue.take(2, groups=2, candidates=3)


def test_two_rows_for_one_candidate_are_refused(queue: RowQueue) -> None:
    with pytest.raises(RunError, match="1 rows of rollout 3 stand for the same candidate"):
        queue.put([*rows(3), row(3, 0, 0)])
    with pytest.raises(RunError, match="2 rollouts were put together"):
        queue.put([*rows(3), row(4, 2, 0)])


def test_a_second_run_on_the_same_cluster_is_refused(queue: RowQueue) -> None:
    with pytest.raises(RunError, match="serves one run at a time"):
        RowQueue("other", start=True, timeout_s=30.0)
    assert transfer_queue.kv_list() is not None  # the first run's queue is still there
