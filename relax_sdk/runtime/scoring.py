"""From a round's scores to advantages, training rows and reward metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from relax_sdk.metrics import group_statistics
from relax_sdk.objectives import combine_components, normalize_grouped
from relax_sdk.protocols import RewardScores, TrainRow
from relax_sdk.rollout import RolloutBatch

__all__ = ["combined_advantages", "reward_statistics", "train_rows"]


def combined_advantages(
    scores: RewardScores, weights: Mapping[str, float], *, group_size: int, std_mode: str
) -> Tensor:
    """[B] float64: each weighted component normalised within its prompt group, then combined.

    Args:
        scores: rows ``group * group_size + slot``.
        weights: component -> weight.
        group_size: candidates K.
        std_mode: see `normalize_grouped`.
    """
    normalised = {}
    for name in weights:
        values = torch.tensor(scores.components[name], dtype=torch.float64)
        groups = torch.arange(len(values)) // group_size
        normalised[name] = normalize_grouped(values, groups, std_mode=std_mode)
    return combine_components(normalised, weights)


def train_rows(
    batch: RolloutBatch, scores: RewardScores, advantages: Tensor, *, weight_manifest_hash: str = ""
) -> list[TrainRow]:
    """One row per candidate, in (group, slot) order.

    Args:
        batch: a training round; every group has its sidecar.
        scores: rows ``group * K + slot``.
        advantages: [B].
        weight_manifest_hash: of the sync that made the weights the round was sampled with.
    """
    assert batch.rollout_id is not None
    size = batch.samples_per_prompt
    return [
        TrainRow(
            rollout_id=batch.rollout_id,
            group_index=group.group_index,
            slot=slot,
            advantage=advantages[group.group_index * size + slot].item(),
            rewards={name: values[group.group_index * size + slot] for name, values in scores.components.items()},
            sidecar=str(group.sidecar),
            policy_version=batch.policy_version,
            sampling_fingerprint=batch.sampling_fingerprint,
            weight_manifest_hash=weight_manifest_hash,
        )
        for group in batch.groups
        for slot in range(size)
    ]


def reward_statistics(
    scores: RewardScores, advantages: Tensor, weights: Mapping[str, float], *, group_size: int
) -> dict[str, float]:
    """The ``reward/...`` metrics of a round; arguments as `combined_advantages`, advantages [B]."""

    def grouped(values: Sequence[float]) -> list[Sequence[float]]:
        return [values[start : start + group_size] for start in range(0, len(values), group_size)]

    return group_statistics(
        {name: grouped(values) for name, values in scores.components.items()},
        weights=weights,
        advantages=grouped(advantages.tolist()),
    )
