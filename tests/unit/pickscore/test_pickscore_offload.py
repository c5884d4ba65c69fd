"""The scorer off its device and back: nothing about its scores changes, and none are given in between."""

from __future__ import annotations

import pytest
import torch
from relax_pickscore.assets_path import tiny_model
from relax_pickscore.scorer import PickScoreScorer

from relax_sdk import RewardError
from relax_sdk.protocols import OffloadableScorer, RewardBatch


@pytest.fixture(scope="module")
def scorer() -> PickScoreScorer:
    return PickScoreScorer(model_path=tiny_model())


@pytest.fixture
def batch() -> RewardBatch:
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    return RewardBatch(prompts=("a red circle", "a blue square", "a cat"), tracks={"image": images})


def test_it_is_one_that_the_runtime_moves(scorer: PickScoreScorer) -> None:
    assert isinstance(scorer, OffloadableScorer)


def test_scores_are_the_same_after_every_return(scorer: PickScoreScorer, batch: RewardBatch) -> None:
    before = scorer.score(batch)
    for _ in range(2):
        scorer.release()
        scorer.release()
        scorer.resume()
        scorer.resume()
        assert scorer.score(batch) == before


def test_no_scores_while_it_is_away(scorer: PickScoreScorer, batch: RewardBatch) -> None:
    scorer.release()
    try:
        with pytest.raises(RewardError, match="off its device"):
            scorer.score(batch)
    finally:
        scorer.resume()
