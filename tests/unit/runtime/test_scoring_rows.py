"""From scores to advantages and rows, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_sdk.protocols import PromptRecord, RewardScores
from relax_sdk.rollout import GroupResult, RolloutBatch
from relax_sdk.runtime.scoring import combined_advantages, reward_statistics, train_rows

SCORES = RewardScores(components={"a": (1.0, 3.0, 5.0, 5.0), "b": (0.0, 10.0, 2.0, 4.0)})


def batch() -> RolloutBatch:
    groups = tuple(
        GroupResult(
            group_index=index,
            prompt=PromptRecord(prompt=f"p{index}", prompt_id=str(index)),
            media={"image": torch.full((2, 3, 4, 4), 10 * index, dtype=torch.uint8)},
            sidecar=Path(f"/s/{index}"),
            truncated=index == 1,
        )
        for index in range(2)
    )
    return RolloutBatch(rollout_id=3, policy_version=7, sde_indices=(1,), samples_per_prompt=2, groups=groups)


def test_components_are_normalised_in_their_group_and_then_weighted() -> None:
    # a: group 0 is [-1, 1] without division, group 1 has no spread; b: [-5, 5] and [-1, 1].
    got = combined_advantages(SCORES, {"a": 2.0, "b": 0.5}, group_size=2, std_mode="none")
    assert got.tolist() == pytest.approx([-2 - 2.5, 2 + 2.5, -0.5, 0.5])


def test_an_unweighted_component_does_not_count() -> None:
    assert combined_advantages(SCORES, {"a": 1.0}, group_size=2, std_mode="none").tolist() == [-1, 1, 0, 0]


def test_rows_pair_every_candidate_with_its_own_numbers() -> None:
    advantages = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    rows = train_rows(batch(), SCORES, advantages)
    assert [(row.group_index, row.slot, row.advantage, row.sidecar) for row in rows] == [
        (0, 0, 0.1, "/s/0"),
        (0, 1, 0.2, "/s/0"),
        (1, 0, 0.3, "/s/1"),
        (1, 1, 0.4, "/s/1"),
    ]
    assert rows[2].rewards == {"a": 5.0, "b": 2.0}
    assert {(row.rollout_id, row.policy_version) for row in rows} == {(3, 7)}
    traced = train_rows(batch(), SCORES, advantages, weight_manifest_hash="ab")
    assert {row.weight_manifest_hash for row in traced} == {"ab"}


def test_the_reward_batch_keeps_prompt_and_image_together() -> None:
    made = batch().reward_batch()
    assert made.prompts == ("p0", "p0", "p1", "p1")
    assert made.tracks["image"][:, 0, 0, 0].tolist() == [0, 0, 10, 10]
    assert batch().truncated_prompts() == 1


def test_statistics_see_the_group_without_spread() -> None:
    advantages = combined_advantages(SCORES, {"a": 1.0}, group_size=2, std_mode="group")
    metrics = reward_statistics(SCORES, advantages, {"a": 1.0}, group_size=2)
    assert metrics["reward/num_groups"] == 2
    assert metrics["reward/zero_spread_groups"] == 1
    assert metrics["reward/a_mean"] == 3.5
    assert metrics["reward/degenerate"] == 0
