"""The optimizer and its learning rate. AdamW only (Loshchilov and Hutter 2019), as the recipes were tuned with it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from relax_sdk.config import OptimizerSection
from relax_sdk.errors import ConfigError

__all__ = ["build_optimizer", "lr_at_step"]


def lr_at_step(
    step: int, *, lr: float, warmup: int, shape: str, decay: int | None = None, min_lr: float = 0.0
) -> float:
    """The learning rate of an optimizer step (not of a rollout).

    Args:
        step: optimizer steps taken so far, from 0.
        lr: the peak.
        warmup: ``--lr-warmup-iters``: the rate rises linearly and reaches ``lr`` at step ``warmup - 1``.
        shape: after the warm-up: ``constant`` (ignores the rest), ``linear`` or ``cosine``.
        decay: ``--lr-decay-iters``: optimizer steps, warm-up included, after which the rate is ``min_lr``.
        min_lr: the floor.

    Raises:
        ValueError: another shape, or a decaying shape whose ``decay`` does not exceed ``warmup``.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    if shape == "constant":
        return lr
    if decay is None or decay <= warmup:
        raise ValueError(f"{shape} needs lr_decay_iters above lr_warmup_iters, came {decay} and {warmup}")
    done = min((step - warmup) / (decay - warmup), 1.0)
    if shape == "linear":
        return min_lr + (lr - min_lr) * (1.0 - done)
    if shape == "cosine":
        return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
    raise ValueError(f"unknown lr shape {shape!r}; expected constant, linear or cosine")


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerSection) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with the configured betas, eps and weight decay.

    Raises:
        ConfigError: no learning rate is set.
    """
    if config.lr is None:
        raise ConfigError("no learning rate is set", where="--lr")
    return torch.optim.AdamW(
        list(parameters),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
