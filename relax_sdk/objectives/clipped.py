"""The clipped policy objective of FlowGRPO, per (sample, step) cell."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

__all__ = ["ClipStatistics", "grpo_clip_loss"]


@dataclasses.dataclass(frozen=True)
class ClipStatistics:
    """Health of one clipped update over its cells; plain tensors of shape [], detached.

    Attributes:
        loss_sum: the loss again, in float64 from the float32 log-probabilities: its terms are of the size of an
            advantage and all but cancel, which leaves rounding where they are added up in float32.
        deviation_sum, deviation_square_sum: of rho - 1, for mean and std of rho over cells; float64, and around 1,
            because policy steps move rho by 1e-4, whose square a float32 near 1 does not hold.
        ratio_min, ratio_max: extremes of rho.
        ratio_max_deviation: max |rho - 1|.
        clipped: cells where the clipped branch was the active one.
        approx_kl_sum: sum of the low-variance estimate (rho - 1) - log rho (Schulman 2020, "Approximating KL
            divergence"); float64.
        cells: how many cells.
    """

    loss_sum: Tensor
    deviation_sum: Tensor
    deviation_square_sum: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    ratio_max_deviation: Tensor
    clipped: Tensor
    approx_kl_sum: Tensor
    cells: int


def grpo_clip_loss(
    log_prob: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, ClipStatistics]:
    """Sum over cells of max(-A rho, -A clip(rho, 1 - c, 1 + c_high)), rho = exp(log_prob - anchor).

    A sum, so that micro-batches of any size add up to the same gradient; the caller divides by the number of cells
    of the whole update. Per cell rather than per trajectory, so that one step outside the clip range does not
    silence the others.

    Args:
        log_prob: [B, S] float32, with gradient.
        anchor: [B, S] float32, frozen before the first optimizer step of the rollout.
        advantages: [B].
        eps_clip: c.
        eps_clip_high: c_high; None means c.

    Returns:
        The loss sum [] and the statistics.

    Raises:
        ValueError: shapes do not agree.
    """
    if log_prob.shape != anchor.shape or log_prob.dim() != 2 or advantages.shape != log_prob.shape[:1]:
        raise ValueError(
            f"expected log_prob and anchor [B, S] and advantages [B], came {list(log_prob.shape)}, "
            f"{list(anchor.shape)} and {list(advantages.shape)}"
        )
    high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio = log_prob.float() - anchor.detach().float()
    ratio = torch.exp(log_ratio)
    advantage = advantages.to(ratio)[:, None]
    plain = -advantage * ratio
    clipped = -advantage * torch.clamp(ratio, 1 - eps_clip, 1 + high)
    loss = torch.maximum(plain, clipped).sum()
    with torch.no_grad():
        r, exact = ratio.detach(), log_ratio.detach().double()
        deviation = torch.expm1(exact)
        rho, weight = 1 + deviation, -advantage.double()
        statistics = ClipStatistics(
            loss_sum=torch.maximum(weight * rho, weight * torch.clamp(rho, 1 - eps_clip, 1 + high)).sum(),
            deviation_sum=deviation.sum(),
            deviation_square_sum=deviation.square().sum(),
            ratio_min=r.min(),
            ratio_max=r.max(),
            ratio_max_deviation=(r - 1).abs().max(),
            clipped=(clipped > plain).sum(),
            approx_kl_sum=(deviation - exact).sum(),
            cells=r.numel(),
        )
    return loss, statistics
