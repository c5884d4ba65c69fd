"""A run over two nodes of a Ray cluster: the same training as on one, and folders that a node does not see."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from ray.cluster_utils import Cluster
from runs import HERE, MARK, Run, processes_of

Train = Callable[..., Run]
TWO_NODES = '{"actor": [2, 1], "rollout": [2, 1]}'


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes of four cores each, as Ray sees them; both on this machine. A run does not join them unasked."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        node = {"num_cpus": 4, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=4)
            cluster.wait_for_nodes(timeout=60)
            yield str(cluster.address)
        finally:
            cluster.shutdown()
    # Ray's agents notice a moment later that their node is gone.
    deadline = time.monotonic() + 60
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_two_nodes_train_as_two_ranks_of_one(
    two_ranks: Run, train: Train, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    apart = train("--resource", TWO_NODES)
    assert apart.code == 0, apart.stderr
    # The ranks have more threads here, which round differently, in bf16 from the second rollout on. The loss is a sum
    # of terms near 1 that cancel: it is known to the float32 rounding of these.
    assert apart.series("train/loss") == pytest.approx(two_ranks.series("train/loss"), rel=0, abs=2 * 2**-23)
    for name in ("train/grad_norm", "reward/pickscore_mean", "train/policy_version"):
        assert apart.series(name) == pytest.approx(two_ranks.series(name), rel=1e-3), name
    assert len(apart.series("train/loss")) == 2


def test_a_node_with_too_few_devices_is_refused_with_what_there_is(
    train: Train, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    run = train("--resource", '{"actor": [3, 1], "rollout": [3, 1]}')
    assert run.code == 2, run.stderr
    assert "3 nodes with {'CPU': 1.0} asked for, 2 found" in run.stderr
