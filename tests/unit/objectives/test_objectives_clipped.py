"""The clipped loss against a plain loop, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch

from relax_sdk.objectives import grpo_clip_loss


def loop_loss(
    new: list[list[float]], old: list[list[float]], advantages: list[float], low: float, high: float
) -> float:
    total = 0.0
    for row, advantage in enumerate(advantages):
        for column in range(len(new[row])):
            rho = math.exp(new[row][column] - old[row][column])
            clipped = min(max(rho, 1 - low), 1 + high)
            total += max(-advantage * rho, -advantage * clipped)
    return total


def example(rows: int = 6, steps: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(rows, steps, generator=generator)
    new = anchor + 0.3 * torch.randn(rows, steps, generator=generator)
    return new, anchor, torch.randn(rows, generator=generator)


@pytest.mark.parametrize(("low", "high"), [(0.1, None), (0.1, 0.3), (0.3, 0.05), (1e-4, None)])
def test_equals_a_plain_loop(low: float, high: float | None) -> None:
    new, anchor, advantages = example()
    loss, statistics = grpo_clip_loss(new, anchor, advantages, eps_clip=low, eps_clip_high=high)
    want = loop_loss(new.tolist(), anchor.tolist(), advantages.tolist(), low, low if high is None else high)
    assert loss.item() == pytest.approx(want, rel=1e-5)
    assert statistics.cells == 18


def test_each_bound_acts_on_its_own_side() -> None:
    """Positive advantage: only the upper bound stops the gain. Negative: only the lower bound."""

    def one(rho: float, advantage: float, **bounds: float) -> float:
        loss, _ = grpo_clip_loss(
            torch.tensor([[math.log(rho)]]),
            torch.zeros(1, 1),
            torch.tensor([advantage]),
            **bounds,  # type: ignore[arg-type]
        )
        return loss.item()

    bounds = {"eps_clip": 0.1, "eps_clip_high": 0.3}
    assert one(1.5, 1.0, **bounds) == pytest.approx(-1.3)
    assert one(1.2, 1.0, **bounds) == pytest.approx(-1.2)
    assert one(0.5, 1.0, **bounds) == pytest.approx(-0.5)
    assert one(0.5, -1.0, **bounds) == pytest.approx(0.9)
    assert one(0.95, -1.0, **bounds) == pytest.approx(0.95)
    assert one(1.5, -1.0, **bounds) == pytest.approx(1.5)


def test_the_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    _, anchor, advantages = example()
    new = anchor.clone().requires_grad_()
    loss, statistics = grpo_clip_loss(new, anchor, advantages, eps_clip=1e-4)
    loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -advantages[:, None].expand(-1, 3))
    assert statistics.ratio_max_deviation.item() == 0.0
    assert statistics.clipped.item() == 0
    assert statistics.approx_kl_sum.item() == 0.0
    assert loss.item() == pytest.approx(-3 * advantages.sum().item(), rel=1e-5)


def test_a_step_outside_the_range_does_not_silence_the_others() -> None:
    anchor = torch.zeros(1, 3)
    new = torch.tensor([[0.5, 0.0, 0.01]]).requires_grad_()
    loss, statistics = grpo_clip_loss(new, anchor, torch.tensor([2.0]), eps_clip=0.1)
    loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -2.0, -2.0 * math.exp(0.01)]]))
    assert statistics.clipped.item() == 1


def test_no_gradient_flows_into_the_anchor() -> None:
    new, anchor, advantages = example()
    new.requires_grad_()
    anchor.requires_grad_()
    loss, statistics = grpo_clip_loss(new, anchor, advantages, eps_clip=0.1)
    loss.backward()
    assert anchor.grad is None
    assert not any(
        getattr(statistics, name).requires_grad for name in ("deviation_sum", "ratio_max", "approx_kl_sum", "clipped")
    )


def test_statistics_by_hand() -> None:
    ratios = [[1.0, 1.5], [0.5, 1.05]]
    new = torch.tensor([[math.log(rho) for rho in row] for row in ratios])
    _, got = grpo_clip_loss(new, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), eps_clip=0.1)
    assert got.deviation_sum.item() == pytest.approx(0.05, rel=1e-5)
    assert got.deviation_square_sum.item() == pytest.approx(0.25 + 0.25 + 0.0025)
    assert got.ratio_min.item() == pytest.approx(0.5)
    assert got.ratio_max.item() == pytest.approx(1.5)
    assert got.ratio_max_deviation.item() == pytest.approx(0.5)
    # 1.5 with a positive advantage and 0.5 with a negative one are held back.
    assert got.clipped.item() == 2
    want = sum(rho - 1 - math.log(rho) for row in ratios for rho in row)
    assert got.approx_kl_sum.item() == pytest.approx(want, rel=1e-5)


def test_steps_of_a_real_policy_are_not_lost_in_rounding() -> None:
    """Their rho lies within 1e-4 of 1: a variance of 1e-8 and a divergence of 5e-9, below float32's grain there."""
    gaps = 1e-4 * torch.randn(256, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    anchor = torch.zeros(256, 4)
    new = gaps.float()
    _, got = grpo_clip_loss(new, anchor, torch.ones(256), eps_clip=0.1)
    exact = new.double()
    rho = exact.exp()
    mean, square = got.deviation_sum.item() / got.cells, got.deviation_square_sum.item() / got.cells
    assert mean == pytest.approx((rho - 1).mean().item(), rel=1e-6)
    assert math.sqrt(square - mean**2) == pytest.approx(rho.std(correction=0).item(), rel=1e-6)
    series = exact.square() / 2 + exact**3 / 6 + exact**4 / 24
    assert got.approx_kl_sum.item() == pytest.approx(series.sum().item(), rel=1e-6)


def test_a_loss_whose_terms_cancel_is_not_lost_in_rounding() -> None:
    """Advantages that sum to 0 leave sum A (1 - rho), 1e-4 of the terms; float32's own sum keeps two digits of it."""
    generator = torch.Generator().manual_seed(5)
    new = (1e-5 * torch.randn(512, 4, generator=generator)).float()
    half = torch.randn(256, generator=generator)
    advantages = torch.cat([half, -half])
    loss, got = grpo_clip_loss(new, torch.zeros(512, 4), advantages, eps_clip=0.1)
    exact = -(advantages.double()[:, None] * torch.expm1(new.double())).sum().item()
    assert got.loss_sum.item() == pytest.approx(exact, rel=1e-9)
    assert loss.item() == pytest.approx(exact, abs=1e-3)
    assert abs(loss.item() - exact) > 1e-9 * abs(exact)


def test_micro_batches_add_up() -> None:
    new, anchor, advantages = example()
    whole, _ = grpo_clip_loss(new, anchor, advantages, eps_clip=0.1)
    parts = sum(
        grpo_clip_loss(new[row : row + 2], anchor[row : row + 2], advantages[row : row + 2], eps_clip=0.1)[0]
        for row in (0, 2, 4)
    )
    torch.testing.assert_close(whole, parts)


def test_a_nan_is_not_hidden() -> None:
    new, anchor, advantages = example()
    advantages[2] = math.nan
    assert not grpo_clip_loss(new, anchor, advantages, eps_clip=0.1)[0].isfinite()


def test_shapes_that_would_broadcast_silently_are_refused() -> None:
    new, anchor, advantages = example()
    for bad in (
        (new, anchor[:, :1], advantages),
        (new, anchor, advantages[:1]),
        (new[0], anchor[0], advantages[:3]),
        (new, anchor, advantages[:, None]),
    ):
        with pytest.raises(ValueError, match=r"\[B, S\]"):
            grpo_clip_loss(*bad, eps_clip=0.1)
