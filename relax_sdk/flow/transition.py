"""One denoising transition: its mean and standard deviation, its log-probability, and the step itself.

Shared by the sampler and by the trainer's replay, so that both evaluate the very same expressions. Everything runs
in float32, whatever the network computed in. Symbols: x = x_i, x' = x_{i+1}, s = sigma_i, s' = sigma_{i+1},
D = s' - s < 0, v the velocity, eta the noise level, tau the standard deviation of the step.

- ``sde``: Flow-SDE, diffusion g = eta sqrt(s / (1 - s~)), tau = g sqrt(-D),
  mean = x (1 + g^2 D / (2 s)) + v (1 + g^2 (1 - s) / (2 s)) D.
  Source: Liu et al. 2025, "Flow-GRPO: Training Flow Matching Models via Online RL", eq. 12. s~ is s, except at
  s = 1, where the coefficient is singular and ``sigma_clamp`` stands in for it.
- ``dance``: the same with g = eta. Source: Xue et al. 2025, "DanceGRPO: Unleashing GRPO on Visual Generation".
- ``cps``: coefficient-preserving sampling, tau = s' sin(eta pi / 2), x0 = x - s v, x1 = x + (1 - s) v,
  mean = x0 (1 - s') + x1 sqrt(s'^2 - tau^2). Source: Wang and Yu 2025, "Coefficients-Preserving Sampling for
  Reinforcement Learning with Flow Matching".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["ode_step", "replay_log_prob", "sde_step", "transition_log_prob", "transition_moments"]


def transition_moments(
    latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float,
    sde_type: str,
    sigma_clamp: float,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x' given x.

    Args:
        latents: x, [B, ...], any float dtype (computed in float32).
        velocity: v, the shape of ``latents``.
        sigma: s, [B].
        sigma_next: s', [B], below ``sigma``.
        eta: noise level.
        sde_type: ``"sde"``, ``"dance"`` or ``"cps"``.
        sigma_clamp: s~ for rows with s = 1 (``sde`` only): the second sigma of the schedule.

    Returns:
        mean [B, ...] and tau [B, 1, ...], float32.

    Raises:
        ValueError: another ``sde_type``.
    """
    x, v = latents.float(), velocity.float()
    shape = (-1,) + (1,) * (x.dim() - 1)
    here, after = sigma.float().reshape(shape), sigma_next.float().reshape(shape)
    delta = after - here
    if sde_type == "cps":
        tau = after * math.sin(eta * math.pi / 2)
        clean = x - here * v
        noise = x + (1 - here) * v
        mean = clean * (1 - after) + noise * torch.sqrt((after.square() - tau.square()).clamp_min(0))
        return mean, tau
    if sde_type == "sde":
        tilde = torch.where(here >= 1, torch.full_like(here, sigma_clamp), here)
        diffusion = eta * torch.sqrt(here / (1 - tilde))
    elif sde_type == "dance":
        diffusion = torch.full_like(here, eta)
    else:
        raise ValueError(f"unknown sde_type {sde_type!r}; expected 'sde', 'dance' or 'cps'")
    squared = diffusion.square()
    mean = x * (1 + squared * delta / (2 * here)) + v * (1 + squared * (1 - here) / (2 * here)) * delta
    return mean, diffusion * torch.sqrt(-delta)


def transition_log_prob(next_latents: Tensor, mean: Tensor, tau: Tensor) -> Tensor:
    """Gaussian log-density of x', as a mean (not a sum) over all but the batch dimension.

    The mean over N and C is what makes clip ranges of 1e-5 to 1e-4 meaningful.

    Args:
        next_latents: x', [B, ...].
        mean: [B, ...], float32.
        tau: standard deviation, broadcastable to ``mean``.

    Returns:
        [B], float32: mean of -(x' - mean)^2 / (2 tau^2) - log tau - log(2 pi) / 2.
    """
    gap = next_latents.float() - mean
    density = -gap.square() / (2 * tau.square()) - torch.log(tau) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(dim=1)


def replay_log_prob(
    latents: Tensor,
    next_latents: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float,
    sde_type: str,
    sigma_clamp: float,
) -> Tensor:
    """Log-probability [B] of recorded transitions under a (new) velocity; arguments as `transition_moments`."""
    mean, tau = transition_moments(
        latents, velocity, sigma, sigma_next, eta=eta, sde_type=sde_type, sigma_clamp=sigma_clamp
    )
    return transition_log_prob(next_latents, mean, tau)


def sde_step(
    latents: Tensor,
    velocity: Tensor,
    noise: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float,
    sde_type: str,
    sigma_clamp: float,
) -> tuple[Tensor, Tensor]:
    """Draw x' = mean + tau * noise.

    Args:
        noise: standard normal, the shape of ``latents``; the rest as `transition_moments`.

    Returns:
        x' [B, ...] float32 and its log-probability [B], evaluated from the x' that is returned.
    """
    mean, tau = transition_moments(
        latents, velocity, sigma, sigma_next, eta=eta, sde_type=sde_type, sigma_clamp=sigma_clamp
    )
    drawn = mean + tau * noise.float()
    return drawn, transition_log_prob(drawn, mean, tau)


def ode_step(latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """The deterministic Euler step x' = x + (s' - s) v, float32; arguments as `transition_moments`."""
    shape = (-1,) + (1,) * (latents.dim() - 1)
    delta = (sigma_next.float() - sigma.float()).reshape(shape)
    return latents.float() + delta * velocity.float()
