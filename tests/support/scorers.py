"""Scorers that misbehave, named by their dotted path from the command line."""

from __future__ import annotations

import math
from typing import Any

from relax_sdk.protocols import RewardBatch, RewardScores


class _Brightness:
    components: tuple[str, ...] = ("brightness",)
    required_tracks: tuple[str, ...] = ("image",)

    def __init__(self, *, model_path: str | None, device: str) -> None:
        self.device = device

    def values(self, batch: RewardBatch) -> list[float]:
        images: Any = batch.tracks["image"]
        return [float(value) for value in images.float().flatten(1).mean(dim=1) / 255]

    def score(self, batch: RewardBatch) -> RewardScores:
        return RewardScores(components={"brightness": tuple(self.values(batch))})


class FailingScorer(_Brightness):
    """Every image is as good as every other, until the fourth image of the second rollout has no score at all."""

    def __init__(self, *, model_path: str | None, device: str) -> None:
        super().__init__(model_path=model_path, device=device)
        self.rollouts = 0

    def score(self, batch: RewardBatch) -> RewardScores:
        values = [0.5] * len(batch.prompts)
        if len(values) > 3:  # an evaluation has three
            self.rollouts += 1
            if self.rollouts == 2:
                values[3] = math.nan
        return RewardScores(components={"brightness": tuple(values)})
