"""Two gloo ranks in two processes against one rank in this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_training import make_trainer, repeatable, shifted, tiny_groups, weights


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("scenario", ["full", "lora", "redundant"])
def test_two_ranks_train_like_one(two_ranks: list[dict[str, Any]], scenario: str) -> None:
    """``redundant``: three candidates, which two ranks cannot share."""
    candidates, mode = (3, "full") if scenario == "redundant" else (4, scenario)
    one = make_trainer(mode=mode, micro=1, updates=2)
    metrics = repeatable(one.update(tiny_groups(4, candidates)).metrics)
    first, second = (results[scenario] for results in two_ranks)
    assert first["metrics"] == second["metrics"]
    for name, tensor in weights(one.module).items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        gap = (first["weights"][name] - tensor).norm() / tensor.norm().clamp_min(1e-3)
        assert gap.item() < 1e-4, name
    for name, value in metrics.items():
        if name == "train/num_microbatches":
            assert first["metrics"][name] == (value if scenario == "redundant" else value / 2)
        elif name != "train/logp_parity_max":
            assert first["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert first["metrics"]["train/first_update_ratio_max_deviation"] == 0.0
    replayed = 4 * candidates * 2
    assert first["replayed"] == second["replayed"] == (replayed if scenario == "redundant" else replayed // 2)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_four_ranks_train_like_one(four_ranks: list[dict[str, Any]], mode: str) -> None:
    one = make_trainer(mode=mode, micro=1, updates=2)
    metrics = one.update(tiny_groups(4, 4)).metrics
    for results in four_ranks:
        assert results[mode]["replayed"] == 4 * 4 * 2 // 4
        assert results[mode]["metrics"]["train/first_update_ratio_max_deviation"] == 0.0
        assert results[mode]["metrics"]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-4)
        for name, tensor in weights(one.module).items():
            gap = (results[mode]["weights"][name] - tensor).norm() / tensor.norm().clamp_min(1e-3)
            assert gap.item() < 1e-4, name


@pytest.mark.usefixtures("process_group")
def test_the_loss_of_two_ranks_is_that_of_one(two_ranks: list[dict[str, Any]]) -> None:
    """Advantages that do not cancel give a loss that can be compared relatively: about -2."""
    one = make_trainer(mode="full", micro=1, updates=2).update(shifted(tiny_groups(4, 4), 2.0)).metrics
    assert one["train/loss"] < -1
    for results in two_ranks:
        for name in ("train/loss", "train/grad_norm"):
            assert results["uncentred"]["metrics"][name] == pytest.approx(one[name], rel=1e-4), name


def test_ranks_with_different_counts_raise_instead_of_hanging(two_ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(two_ranks):
        assert "micro-batches" in results["misaligned"]
        assert f"rank {rank} has {4 if rank == 0 else 3}" in results["misaligned"]


def test_a_poisoned_candidate_stops_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    """Only one rank replays it; the other must not wait for a collective that never comes."""
    for results in two_ranks:
        assert results["poisoned"].startswith("TrainingError")
        assert "group 3" in results["poisoned"]
