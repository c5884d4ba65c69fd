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


class NanScorer(_Brightness):
    """The fourth image of a rollout has no score; the shorter evaluation passes."""

    def score(self, batch: RewardBatch) -> RewardScores:
        values = self.values(batch)
        if len(values) > 3:
            values[3] = math.nan
        return RewardScores(components={"brightness": tuple(values)})


class ConstantScorer(_Brightness):
    """Every image is as good as every other."""

    def score(self, batch: RewardBatch) -> RewardScores:
        return RewardScores(components={"brightness": (0.5,) * len(batch.prompts)})
