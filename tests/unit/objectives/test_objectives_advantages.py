"""Group advantages by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from relax_sdk.objectives import combine_components, normalize_grouped

MODES = ("group", "batch", "none")


def normalized(scores: list[float], groups: list[int], mode: str, dtype: torch.dtype = torch.float64) -> list[float]:
    return normalize_grouped(torch.tensor(scores, dtype=dtype), torch.tensor(groups), std_mode=mode).tolist()


def test_group_mode_by_hand() -> None:
    # Group 0: mean 2, sample std 1. Group 1: mean 20, sample std sqrt(200 / 2) = 10.
    got = normalized([1, 2, 3, 10, 20, 30], [0, 0, 0, 1, 1, 1], "group")
    assert got == pytest.approx([-1, 0, 1, -1, 0, 1], abs=1e-7)


def test_batch_mode_divides_all_groups_by_one_number() -> None:
    centred = [-1, 0, 1, -10, 0, 10]
    spread = statistics.stdev(centred)
    assert spread == pytest.approx(math.sqrt(202 / 5))
    got = normalized([1, 2, 3, 10, 20, 30], [0, 0, 0, 1, 1, 1], "batch")
    assert got == pytest.approx([value / spread for value in centred], abs=1e-7)


def test_none_mode_is_dr_grpo() -> None:
    assert normalized([1, 2, 3, 10, 20, 30], [0, 0, 0, 1, 1, 1], "none") == pytest.approx([-1, 0, 1, -10, 0, 10])


@pytest.mark.parametrize("mode", MODES)
def test_every_group_has_mean_zero(mode: str) -> None:
    scores = torch.randn(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 100
    groups = torch.arange(24) % 4
    got = normalize_grouped(scores, groups, std_mode=mode)
    for group in range(4):
        assert got[groups == group].mean().abs().item() < 1e-12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 21.7, -0.7, 0.0])
def test_zero_spread_is_exactly_zero(mode: str, dtype: torch.dtype, value: float) -> None:
    """The mean of six times 0.1 is not 0.1 in binary; the rest must not be blown up by a tiny std."""
    for count in (3, 6, 7, 24):
        assert normalized([value] * count, [5] * count, mode, dtype) == [0.0] * count
    # Beside a group with a spread, which keeps its own.
    got = normalized([value] * 6 + [1.0, 3.0], [5] * 6 + [9] * 2, mode, dtype)
    assert got[:6] == [0.0] * 6
    assert got[6] == -got[7] != 0.0


def test_a_flat_group_counts_in_the_batch_spread() -> None:
    """``batch`` is the std over the whole rollout's centred values, zeros included."""
    spread = statistics.stdev([0, 0, -1, 1])
    assert normalized([7, 7, 1, 3], [0, 0, 1, 1], "batch") == pytest.approx([0, 0, -1 / spread, 1 / spread])


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_one_is_zero(mode: str) -> None:
    assert normalized([3.5], [0], mode) == [0.0]
    assert normalized([3.5, 1.0, 2.0], [4, 5, 6], mode) == [0.0, 0.0, 0.0]
    assert normalized([3.5, 1.0, 2.0], [4, 5, 5], mode)[0] == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_groups_need_not_be_contiguous_or_sorted(mode: str) -> None:
    scores, groups = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0], [900, -3, 900, -3, 900, -3]
    got = normalized(scores, groups, mode)
    order = [0, 2, 4, 1, 3, 5]
    want = normalized([scores[row] for row in order], [groups[row] for row in order], mode)
    assert [got[row] for row in order] == pytest.approx(want)


def test_large_ids_that_a_float_would_merge_stay_apart() -> None:
    near = 2**60
    assert normalized([1, 3, 10, 30], [near, near, near + 1, near + 1], "none") == pytest.approx([-1, 1, -10, 10])


def test_float_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="integers"):
        normalize_grouped(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]), std_mode="group")


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="'global'"):
        normalized([1, 2], [0, 0], "global")
    with pytest.raises(ValueError, match=r"\[B\]"):
        normalize_grouped(torch.ones(3), torch.zeros(2, dtype=torch.int64), std_mode="none")
    with pytest.raises(ValueError, match=r"\[B\]"):
        normalize_grouped(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64), std_mode="none")


def test_shift_and_scale_of_a_reward_do_not_matter_with_the_group_std() -> None:
    scores = [0.2, 0.9, 0.4, 0.1]
    plain = normalized(scores, [0] * 4, "group")
    moved = normalized([100 + 7 * score for score in scores], [0] * 4, "group")
    assert moved == pytest.approx(plain, abs=1e-6)


def test_components_are_combined_by_weight() -> None:
    parts = {"a": torch.tensor([1.0, -1.0]), "b": torch.tensor([10.0, 20.0]), "unused": torch.tensor([9e9, 9e9])}
    got = combine_components(parts, {"a": 2.0, "b": 0.5})
    assert got.tolist() == [7.0, 8.0]
    assert got.dtype == torch.float64
    assert parts["a"].tolist() == [1.0, -1.0]


def test_a_weighted_component_must_be_there() -> None:
    with pytest.raises(ValueError, match="'b'"):
        combine_components({"a": torch.ones(2)}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="no component"):
        combine_components({"a": torch.ones(2)}, {})
