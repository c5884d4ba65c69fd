"""Noise as a function of a candidate's identity: the same numbers in every process, on every device, in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["seeded_noise"]


def seeded_noise(seeds: Sequence[int], shape: Sequence[int], *, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal noise, one row per seed, drawn on the CPU so that the device does not change it.

    Args:
        seeds: one integer in 0 .. 2^63 - 1 per row, of which torch's CPU generator uses the lower 32 bits.
        shape: shape of one row.
        device: where the result is put.

    Returns:
        [len(seeds), *shape], float32. Row k depends on ``seeds[k]`` and ``shape`` alone.
    """
    # Device and dtype are spelt out: a process may have changed torch's defaults.
    rows = [
        torch.randn(tuple(shape), generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)
        for seed in seeds
    ]
    return torch.stack(rows).to(device)
