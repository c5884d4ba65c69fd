"""The rollout role hands over engine and scorer together; a sync brings the engine's weights back alone."""

from __future__ import annotations

from typing import Any

import pytest

from relax_sdk.protocols import RewardBatch, RewardScores
from relax_sdk.runtime.rollout_role import RolloutRole


class Scorer:
    components: tuple[str, ...] = ("c",)
    required_tracks: tuple[str, ...] = ("image",)

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def score(self, batch: RewardBatch) -> RewardScores:
        raise AssertionError


class MovableScorer(Scorer):
    def release(self) -> None:
        self.calls.append("scorer leaves")

    def resume(self) -> None:
        self.calls.append("scorer returns")


class Engine:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def release(self) -> None:
        self.calls.append("engine leaves")

    def resume(self, *, weights_only: bool) -> None:
        self.calls.append("weights return" if weights_only else "engine returns")


def hand_overs(scorer: type[Scorer]) -> list[str]:
    calls: list[str] = []
    role: Any = RolloutRole.__new__(RolloutRole)
    role._engine, role._scorer = Engine(calls), scorer(calls)
    role.release()
    role.resume(weights_only=True)
    role.resume(weights_only=False)
    return calls


@pytest.mark.parametrize("scorer", [Scorer, MovableScorer])
def test_the_scorer_is_away_while_the_actor_needs_the_device(scorer: type[Scorer]) -> None:
    moved = hand_overs(scorer)
    engine = ["engine leaves", "weights return", "engine returns"]
    assert [call for call in moved if "scorer" not in call] == engine
    if scorer is Scorer:
        assert moved == engine, "one that cannot move stays"
    else:
        assert moved == ["engine leaves", "scorer leaves", "weights return", "engine returns", "scorer returns"]
