"""Advantages and the clipped loss: pure torch functions, no state."""

from relax_sdk.objectives.advantages import STD_EPSILON, combine_components, normalize_grouped
from relax_sdk.objectives.clipped import ClipStatistics, grpo_clip_loss

__all__ = ["STD_EPSILON", "ClipStatistics", "combine_components", "grpo_clip_loss", "normalize_grouped"]
