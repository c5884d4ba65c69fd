"""The ranks' link over real process groups: two ranks in two processes, with two engines and with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from link_ranks import TIMEOUT_S, link_rank_entry

from relax_sdk.errors import WeightSyncError
from relax_sdk.runtime.engine_link import ControlGroups, RayEngineLink


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; rank 1 dies in the last scenario."""
    folder = tmp_path_factory.mktemp("link")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=link_rank_entry, args=(rank, str(folder))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 7]
    return [torch.load(folder / f"link{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_engines_get_the_weights(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        came = found["well 1"]
        assert (came["error"], came["held"], came["version"]) == ("", 5, 1)
        assert came["name"] == f"rollout engine {rank}"


def test_two_ranks_serve_one_engine(ranks: list[dict[str, Any]]) -> None:
    leader, other = (found["well 2"] for found in ranks)
    assert (leader["error"], leader["held"], leader["version"], leader["buffers"]) == ("", 5, 1, 2)
    assert (other["error"], other["calls"], other["name"]) == ("", [], "rollout engine 0")


@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_a_refusal_reaches_every_rank(ranks: list[dict[str, Any]], ranks_per_engine: int) -> None:
    texts = [found[f"refused {ranks_per_engine}"]["error"] for found in ranks]
    assert texts[0] == texts[1]
    assert "failed at rollout engine 0: bad bytes" in texts[0]
    for found in ranks:
        calls = found[f"refused {ranks_per_engine}"]["calls"]
        assert calls[-1:] == ["abort_sync"] or not calls
        assert "commit_sync" not in calls


def test_a_rank_that_dies_does_not_hang_the_others(ranks: list[dict[str, Any]]) -> None:
    survivor = ranks[0]["died"]
    assert "weight sync to version 1 failed" in survivor["error"]
    assert survivor["calls"][-1] == "abort_sync"
    assert survivor["version"] == 0
    assert survivor["seconds"] < 4 * TIMEOUT_S


@pytest.mark.usefixtures("process_group")
def test_engines_must_tile_the_ranks() -> None:
    groups = ControlGroups.create(rank=0, world=1, ranks_per_engine=1, timeout_s=5.0)
    for workers, ranks_per_engine in ((2, 1), (1, 2), (0, 1)):
        with pytest.raises(WeightSyncError, match=f"{workers} engines of {ranks_per_engine} devices for 1 ranks"):
            RayEngineLink(
                [None] * workers, groups=groups, rank=0, world=1, ranks_per_engine=ranks_per_engine, timeout_s=5.0
            )
    alone = RayEngineLink([None], groups=groups, rank=0, world=1, ranks_per_engine=1, timeout_s=5.0)
    assert (alone.share("a"), alone.agree({"b": 1}), alone.is_leader) == (["a"], [{"b": 1}], True)
