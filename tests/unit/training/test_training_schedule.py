"""The learning rate, against hand values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from relax_sdk.config import OptimizerSection
from relax_sdk.training import build_optimizer, lr_at_step


def rates(count: int, **options: object) -> list[float]:
    return [lr_at_step(step, **options) for step in range(count)]  # type: ignore[arg-type]


def test_constant_with_warmup() -> None:
    assert rates(6, lr=4e-4, warmup=4, shape="constant") == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])
    assert rates(2, lr=4e-4, warmup=0, shape="constant") == [4e-4, 4e-4]


def test_constant_ignores_the_decay_settings() -> None:
    assert rates(30, lr=1.0, warmup=0, shape="constant", decay=10, min_lr=0.1) == [1.0] * 30


def test_linear() -> None:
    got = rates(9, lr=1.0, warmup=2, shape="linear", decay=6, min_lr=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine() -> None:
    got = rates(9, lr=1.0, warmup=2, shape="cosine", decay=6, min_lr=0.2)
    quarter = 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2
    assert got == pytest.approx([0.5, 1.0, 1.0, quarter, 0.6, 1.2 - quarter, 0.2, 0.2, 0.2])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_it_never_rises_after_the_warmup_nor_leaves_its_bounds(shape: str) -> None:
    got = rates(200, lr=3e-4, warmup=20, shape=shape, decay=150, min_lr=3e-5)
    assert max(got) == pytest.approx(3e-4)
    assert all(here >= after for here, after in itertools.pairwise(got[20:]))
    assert got[150:] == pytest.approx([3e-5] * 50)


@pytest.mark.parametrize("decay", [None, 1, 2])
def test_a_decay_within_the_warmup_is_refused(decay: int | None) -> None:
    with pytest.raises(ValueError, match="lr_decay_iters"):
        lr_at_step(5, lr=1.0, warmup=2, shape="linear", decay=decay)


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="'wsd'"):
        lr_at_step(5, lr=1.0, warmup=2, shape="wsd", decay=6)


def test_the_optimizer_takes_every_setting() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    config = OptimizerSection(lr=0.1, weight_decay=0.2, adam_beta1=0.3, adam_beta2=0.4, adam_eps=0.5)
    made = build_optimizer([weight], config)
    assert type(made) is torch.optim.AdamW
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (0.1, 0.2, (0.3, 0.4), 0.5)
    assert group["params"] == [weight]
