"""The colocated scorer leaves a CUDA device whole and returns with the same scores."""

from __future__ import annotations

import pytest
import torch
from relax_pickscore.assets_path import tiny_model
from relax_pickscore.scorer import PickScoreScorer

from relax_sdk.protocols import RewardBatch

pytestmark = pytest.mark.gpu(1)


def test_nothing_of_it_stays_on_the_device() -> None:
    empty = torch.cuda.memory_allocated()
    scorer = PickScoreScorer(model_path=tiny_model(), device="cuda")
    resident = torch.cuda.memory_allocated() - empty
    assert resident > 1 << 20
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    batch = RewardBatch(prompts=("a red circle",) * 4, tracks={"image": images})
    before = scorer.score(batch)
    for _ in range(3):
        scorer.release()
        assert torch.cuda.memory_allocated() - empty < resident / 100
        scorer.resume()
        assert scorer.score(batch) == before
