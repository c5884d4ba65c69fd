"""Transition and log-probability against float64 statements, statistics, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_family import SCHEDULER, reference_log_prob, reference_moments

from relax_sdk.flow import (
    flow_match_sigmas,
    ode_step,
    replay_log_prob,
    sde_step,
    transition_log_prob,
    transition_moments,
)

SIGMAS = flow_match_sigmas(12, 576, SCHEDULER)
CLAMP = SIGMAS[1]
TYPES = ("sde", "dance", "cps")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def constant(value: float, rows: int) -> torch.Tensor:
    return torch.full((rows,), value)


def moments(x: torch.Tensor, v: torch.Tensor, here: float, after: float, **kwargs: object) -> tuple[torch.Tensor, ...]:
    options = {"eta": 0.7, "sde_type": "sde", "sigma_clamp": CLAMP, **kwargs}
    rows = x.shape[0]
    return transition_moments(x, v, constant(here, rows), constant(after, rows), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 1, 5, 10])
@pytest.mark.parametrize("sde_type", TYPES)
def test_moments_equal_the_float64_formula(sde_type: str, step: int) -> None:
    x, v = normal(3, 16, 4), normal(3, 16, 4, seed=1)
    mean, tau = moments(x, v, SIGMAS[step], SIGMAS[step + 1], sde_type=sde_type)
    want_mean, want_tau = reference_moments(
        x, v, SIGMAS[step], SIGMAS[step + 1], eta=0.7, sde_type=sde_type, clamp=CLAMP
    )
    assert mean.dtype == tau.dtype == torch.float32
    assert mean.shape == x.shape
    assert tau.shape == (3, 1, 1)
    torch.testing.assert_close(mean.double(), want_mean, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(tau.double(), torch.full((3, 1, 1), want_tau, dtype=torch.float64), rtol=1e-6, atol=0)


def test_step_zero_has_the_engines_diffusion_not_the_seeds_clamp() -> None:
    """Known values: 7.0 for the clamp of 0.99 and about 2.92 for what the engine uses."""
    delta = SIGMAS[1] - SIGMAS[0]
    x = normal(1, 4, 4)
    _, tau = moments(x, x, SIGMAS[0], SIGMAS[1], sde_type="sde")
    assert tau.item() / math.sqrt(-delta) == pytest.approx(2.92, abs=0.02)
    _, tau = moments(x, x, SIGMAS[0], SIGMAS[1], sde_type="sde", sigma_clamp=0.99)
    assert tau.item() / math.sqrt(-delta) == pytest.approx(7.0, abs=1e-3)


def test_the_clamp_acts_at_sigma_one_only() -> None:
    x, v = normal(2, 4, 4), normal(2, 4, 4, seed=1)
    for sde_type in TYPES:
        first = moments(x, v, SIGMAS[2], SIGMAS[3], sde_type=sde_type, sigma_clamp=0.5)
        second = moments(x, v, SIGMAS[2], SIGMAS[3], sde_type=sde_type, sigma_clamp=0.99)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    for sde_type in ("dance", "cps"):
        first = moments(x, v, 1.0, SIGMAS[1], sde_type=sde_type, sigma_clamp=0.5)
        second = moments(x, v, 1.0, SIGMAS[1], sde_type=sde_type, sigma_clamp=0.99)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="'ddpm'"):
        moments(normal(1, 2, 2), normal(1, 2, 2), 0.5, 0.4, sde_type="ddpm")


@pytest.mark.parametrize("sde_type", TYPES)
def test_log_prob_is_the_mean_normal_density(sde_type: str) -> None:
    x, v = normal(4, 9, 4), normal(4, 9, 4, seed=1)
    here, after = SIGMAS[3], SIGMAS[4]
    mean, tau = reference_moments(x, v, here, after, eta=0.7, sde_type=sde_type, clamp=CLAMP)
    drawn = (mean + tau * normal(4, 9, 4, seed=2)).float()
    got = replay_log_prob(
        x, drawn, v, constant(here, 4), constant(after, 4), eta=0.7, sde_type=sde_type, sigma_clamp=CLAMP
    )
    assert got.shape == (4,)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), reference_log_prob(drawn, mean, tau), rtol=1e-5, atol=1e-5)


def test_log_prob_does_not_grow_with_the_number_of_elements() -> None:
    """A mean over N and C, not a sum: repeating the tokens and the channels changes nothing."""
    after, mean, tau = normal(2, 5, 4), normal(2, 5, 4, seed=1), torch.full((2, 1, 1), 0.3)
    once = transition_log_prob(after, mean, tau)
    torch.testing.assert_close(transition_log_prob(after.repeat(1, 7, 1), mean.repeat(1, 7, 1), tau), once)
    torch.testing.assert_close(transition_log_prob(after.repeat(1, 1, 3), mean.repeat(1, 1, 3), tau), once)
    # At the mean itself only the constants are left.
    at_mean = transition_log_prob(mean, mean, tau)
    torch.testing.assert_close(at_mean, torch.full((2,), -math.log(0.3) - 0.5 * math.log(2 * math.pi)))


@pytest.mark.parametrize("sde_type", TYPES)
def test_step_draws_from_the_moments_and_scores_what_it_returns(sde_type: str) -> None:
    x, v, noise = normal(2, 8, 4), normal(2, 8, 4, seed=1), normal(2, 8, 4, seed=2)
    sigma, after = constant(SIGMAS[3], 2), constant(SIGMAS[4], 2)
    options = {"eta": 0.7, "sde_type": sde_type, "sigma_clamp": CLAMP}
    drawn, log_prob = sde_step(x, v, noise, sigma, after, **options)  # type: ignore[arg-type]
    want_mean, want_tau = reference_moments(x, v, SIGMAS[3], SIGMAS[4], eta=0.7, sde_type=sde_type, clamp=CLAMP)
    torch.testing.assert_close(drawn.double(), want_mean + want_tau * noise.double(), rtol=2e-6, atol=2e-6)
    replayed = replay_log_prob(x, drawn, v, sigma, after, **options)  # type: ignore[arg-type]
    assert torch.equal(log_prob, replayed), "sampler and replay must agree bit for bit"
    # E[log-prob] = -1/2 - log tau - log(2 pi)/2; here the noise is known exactly.
    exact = -0.5 * noise.double().square().flatten(1).mean(1) - math.log(want_tau) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(log_prob.double(), exact, rtol=1e-4, atol=1e-4)


# A Gaussian data distribution N(m, r^2) has the exact velocity v(x) = E[noise - x_0 | x], affine in x.
DATA_MEAN, DATA_STD = 0.8, 0.5


def marginal(sigma: float) -> tuple[float, float]:
    """Mean and variance of x at sigma."""
    return (1 - sigma) * DATA_MEAN, (1 - sigma) ** 2 * DATA_STD**2 + sigma**2


def exact_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    mean, variance = marginal(sigma)
    score = (x - mean) / variance
    return sigma * score - (DATA_MEAN + (1 - sigma) * DATA_STD**2 * score)


def marginal_error(sde_type: str, sigma: float, delta: float) -> float:
    """How far mean and variance after one step are from the true marginal. The step is affine in x: no sampling."""
    points = torch.tensor([[0.0], [1.0]])
    mean, tau = moments(points, exact_velocity(points, sigma), sigma, sigma - delta, eta=0.7, sde_type=sde_type)
    offset, slope = mean[0].double().item(), (mean[1].double() - mean[0].double()).item()
    before_mean, before_variance = marginal(sigma)
    after_mean, after_variance = marginal(sigma - delta)
    got_variance = slope**2 * before_variance + tau[0].double().item() ** 2
    return max(abs(offset + slope * before_mean - after_mean), abs(got_variance - after_variance))


@pytest.mark.parametrize("sigma", [0.9, 0.6, 0.3])
@pytest.mark.parametrize("sde_type", ["sde", "dance"])
def test_a_small_step_keeps_the_marginal_to_second_order(sde_type: str, sigma: float) -> None:
    wide, narrow = marginal_error(sde_type, sigma, 0.04), marginal_error(sde_type, sigma, 0.02)
    assert narrow < 0.01
    assert wide / narrow > 3.2, "halving the step must quarter the error; a wrong drift only halves it"


def test_monte_carlo_marginal_through_many_steps() -> None:
    generator = torch.Generator().manual_seed(3)
    sigma, rows = 0.9, 100_000
    mean, variance = marginal(sigma)
    x = mean + math.sqrt(variance) * torch.randn(rows, 1, generator=generator)
    for _ in range(30):
        x, _ = sde_step(
            x,
            exact_velocity(x, sigma),
            torch.randn(rows, 1, generator=generator),
            constant(sigma, rows),
            constant(sigma - 0.02, rows),
            eta=0.7,
            sde_type="sde",
            sigma_clamp=CLAMP,
        )
        sigma -= 0.02
    want_mean, want_variance = marginal(sigma)
    assert x.mean().item() == pytest.approx(want_mean, abs=0.02)
    assert x.var().item() == pytest.approx(want_variance, rel=0.05)


@pytest.mark.parametrize("sde_type", TYPES)
def test_vanishing_noise_is_the_ode(sde_type: str) -> None:
    x, v = normal(2, 8, 4), normal(2, 8, 4, seed=1)
    mean, tau = moments(x, v, SIGMAS[4], SIGMAS[5], eta=1e-4, sde_type=sde_type)
    euler = ode_step(x, v, constant(SIGMAS[4], 2), constant(SIGMAS[5], 2))
    torch.testing.assert_close(mean, euler, rtol=1e-5, atol=1e-5)
    assert tau.max().item() < 2e-4


def test_ode_step_in_float64() -> None:
    x, v = normal(2, 8, 4), normal(2, 8, 4, seed=1)
    got = ode_step(x, v, torch.tensor([SIGMAS[2], SIGMAS[5]]), torch.tensor([SIGMAS[3], SIGMAS[6]]))
    delta = torch.tensor([SIGMAS[3] - SIGMAS[2], SIGMAS[6] - SIGMAS[5]], dtype=torch.float64)[:, None, None]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() + delta * v.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
def test_cps_keeps_the_coefficients(eta: float) -> None:
    """For one clean image and one noise, x' is (1 - s') clean + noise of variance s'^2, whatever eta."""
    clean, noise = normal(1, 400, 4), normal(1, 400, 4, seed=1)
    here, after = SIGMAS[4], SIGMAS[5]
    x, v = (1 - here) * clean + here * noise, noise - clean
    mean, tau = moments(x, v, here, after, eta=eta, sde_type="cps")
    kept = (mean - (1 - after) * clean) / noise
    torch.testing.assert_close(kept, torch.full_like(kept, kept[0, 0, 0].item()), rtol=0, atol=2e-3)
    assert kept.median().item() ** 2 + tau.item() ** 2 == pytest.approx(after**2, rel=1e-4)


@pytest.mark.parametrize("sde_type", TYPES)
def test_gradient_reaches_the_velocity_with_the_closed_form(sde_type: str) -> None:
    x, after = normal(2, 6, 4), normal(2, 6, 4, seed=2)
    v = normal(2, 6, 4, seed=1).requires_grad_()
    log_prob = replay_log_prob(
        x,
        after,
        v,
        constant(SIGMAS[3], 2),
        constant(SIGMAS[4], 2),
        eta=0.7,
        sde_type=sde_type,
        sigma_clamp=CLAMP,
    )
    log_prob.sum().backward()
    options = {"eta": 0.7, "sde_type": sde_type, "clamp": CLAMP}
    mean, tau = reference_moments(x, v.detach(), SIGMAS[3], SIGMAS[4], **options)  # type: ignore[arg-type]
    zero, unit = torch.zeros(1), torch.ones(1)
    slope = reference_moments(zero, unit, SIGMAS[3], SIGMAS[4], **options)[0].item()  # type: ignore[arg-type]
    assert v.grad is not None
    torch.testing.assert_close(
        v.grad.double(), (after.double() - mean) / tau**2 * slope / (6 * 4), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("sde_type", TYPES)
def test_bfloat16_inputs_are_computed_in_float32(sde_type: str) -> None:
    x, v, after = (normal(2, 6, 4, seed=seed).bfloat16() for seed in range(3))
    low = replay_log_prob(
        x, after, v, constant(0.6, 2), constant(0.5, 2), eta=0.7, sde_type=sde_type, sigma_clamp=CLAMP
    )
    full = replay_log_prob(
        x.float(),
        after.float(),
        v.float(),
        constant(0.6, 2),
        constant(0.5, 2),
        eta=0.7,
        sde_type=sde_type,
        sigma_clamp=CLAMP,
    )
    assert low.dtype == torch.float32
    assert torch.equal(low, full)
    assert ode_step(x, v, constant(0.6, 2), constant(0.5, 2)).dtype == torch.float32


@pytest.mark.parametrize("sde_type", TYPES)
def test_rows_of_different_sigmas_equal_single_rows(sde_type: str) -> None:
    rows = 11
    x, v, after = (normal(rows, 6, 4, seed=seed) for seed in range(3))
    here, then = torch.tensor(SIGMAS[:rows]), torch.tensor(SIGMAS[1 : rows + 1])
    options = {"eta": 0.7, "sde_type": sde_type, "sigma_clamp": CLAMP}
    together = replay_log_prob(x, after, v, here, then, **options)  # type: ignore[arg-type]
    alone = [
        replay_log_prob(*(part[row : row + 1] for part in (x, after, v, here, then)), **options)  # type: ignore[arg-type]
        for row in range(rows)
    ]
    assert together.isfinite().all()
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=1e-6)


def test_images_of_any_rank() -> None:
    """[B, C, H, W] and [B, N, C] of the same numbers have the same log-probability."""
    x, v, after = (normal(2, 4, 3, 3, seed=seed) for seed in range(3))
    options = {"eta": 0.7, "sde_type": "sde", "sigma_clamp": CLAMP}
    image = replay_log_prob(x, after, v, constant(0.6, 2), constant(0.5, 2), **options)  # type: ignore[arg-type]
    flat = replay_log_prob(
        *(part.flatten(2) for part in (x, after, v)),
        constant(0.6, 2),
        constant(0.5, 2),
        **options,  # type: ignore[arg-type]
    )
    np.testing.assert_allclose(image.numpy(), flat.numpy(), rtol=1e-6)
