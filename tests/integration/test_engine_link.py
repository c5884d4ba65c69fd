"""What a rank hears of its engine over real Ray: results in order, the engine's own errors, death, and silence."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch.distributed as dist

from relax_sdk.errors import RunError, WeightSyncError
from relax_sdk.runtime.engine_link import ControlGroups, RayEngineLink


class Role:
    """Answers `call_engine` as a rollout role does."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def call_engine(self, method: str, *args: Any) -> Any:
        self.seen.append(args[0] if args else method)
        if method == "refuse":
            raise WeightSyncError("shape [3] was announced", where="proj_in.bias", expected="[4]")
        if method == "die":
            os._exit(1)
        if method == "hang":
            time.sleep(60)
        return list(self.seen)


@pytest.fixture
def link(tmp_path: Any) -> Iterator[RayEngineLink]:
    """To an engine that has 3 s for an answer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        worker = ray.remote(Role).remote()
        ray.get(worker.call_engine.remote("ready"), timeout=120)
        groups = ControlGroups.create(rank=0, world=1, ranks_per_engine=1, timeout_s=4.0)
        yield RayEngineLink([worker], groups=groups, rank=0, world=1, ranks_per_engine=1, timeout_s=4.0)
    finally:
        ray.shutdown()
        dist.destroy_process_group()


def test_answers_errors_death_and_silence(link: RayEngineLink) -> None:
    first, second = link.submit("receive", 1), link.submit("receive", 2)
    assert second() == ["ready", 1, 2], "in the order of their submission, without waiting in between"
    assert first() == ["ready", 1]
    with pytest.raises(WeightSyncError) as refused:
        link.submit("refuse")()
    assert (refused.value.where, refused.value.expected) == ("proj_in.bias", "[4]")
    started = time.monotonic()
    with pytest.raises(RunError, match=r"weight sync \(hang\) did not finish within 3 s") as silent:
        link.submit("hang")()
    assert time.monotonic() - started < 20
    assert "rollout engine 0" in str(silent.value)


def test_a_dead_engine_is_named(link: RayEngineLink) -> None:
    waiting = [link.submit("die"), link.submit("abort_sync")]
    for method, answer in zip(("die", "abort_sync"), waiting, strict=True):
        with pytest.raises(RunError, match=rf"rollout engine 0 died during weight sync \({method}\)"):
            answer()
