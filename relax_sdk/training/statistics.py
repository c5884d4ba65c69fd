"""Statistics of a rollout's updates, reduced over ranks once at the end."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from relax_sdk.objectives import ClipStatistics

__all__ = ["UpdateStatistics"]


class UpdateStatistics:
    """Collects on the device; only `reduce` brings the numbers to the host.

    Args:
        device: the rank's device.
    """

    _SUMS = ("loss", "deviation", "square", "clipped", "kl", "cells", "parity", "parity_cells")
    _MAXIMA = ("ratio_max", "ratio_min_negated", "deviation", "first_deviation", "parity_max")

    def __init__(self, device: torch.device) -> None:
        self.skips = 0
        self._grad_norms: list[float] = []
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self._SUMS}
        floor = torch.tensor(-math.inf, dtype=torch.float64, device=device)
        self._maxima = {name: floor.clone() for name in self._MAXIMA}

    def add_micro_batch(self, update: int, clip: ClipStatistics) -> None:
        """Add one micro-batch of update number ``update``."""
        parts = {
            "loss": clip.loss_sum,
            "deviation": clip.deviation_sum,
            "square": clip.deviation_square_sum,
            "clipped": clip.clipped,
            "kl": clip.approx_kl_sum,
            "cells": torch.tensor(clip.cells),
        }
        for name, value in parts.items():
            self._sums[name] += value.to(self._sums[name])
        peaks = {
            "ratio_max": clip.ratio_max,
            "ratio_min_negated": -clip.ratio_min,
            "deviation": clip.ratio_max_deviation,
        }
        if update == 0:
            peaks["first_deviation"] = clip.ratio_max_deviation
        self._raise_maxima(peaks)

    def add_parity(self, gaps: Tensor) -> None:
        """Add |replay - engine| log-prob differences, flat."""
        self._sums["parity"] += gaps.double().sum().to(self._sums["parity"])
        self._sums["parity_cells"] += gaps.numel()
        self._raise_maxima({"parity_max": gaps.max()})

    def add_grad_norm(self, norm: float) -> None:
        """Add the (global) gradient norm of an update, before clipping."""
        self._grad_norms.append(norm)

    def _raise_maxima(self, peaks: dict[str, Tensor]) -> None:
        for name, value in peaks.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value.to(self._maxima[name]))

    def reduce(self) -> dict[str, float]:
        """Metrics over all ranks: extremes by MAX, everything else as a mean over cells."""
        sums = torch.stack([self._sums[name] for name in self._SUMS])
        maxima = torch.stack([self._maxima[name] for name in self._MAXIMA])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        total = dict(zip(self._SUMS, sums.tolist(), strict=True))
        peak = dict(zip(self._MAXIMA, maxima.tolist(), strict=True))
        cells = total["cells"]
        deviation = total["deviation"] / cells
        return {
            "train/loss": total["loss"] / cells,
            "train/ratio_mean": 1.0 + deviation,
            "train/ratio_std": math.sqrt(max(total["square"] / cells - deviation * deviation, 0.0)),
            "train/ratio_min": -peak["ratio_min_negated"],
            "train/ratio_max": peak["ratio_max"],
            "train/ratio_max_deviation": peak["deviation"],
            "train/first_update_ratio_max_deviation": peak["first_deviation"],
            "train/clip_fraction": total["clipped"] / cells,
            "train/approx_kl": total["kl"] / cells,
            "train/logp_parity_mean": total["parity"] / total["parity_cells"],
            "train/logp_parity_max": peak["parity_max"],
            "train/grad_norm": sum(self._grad_norms) / len(self._grad_norms) if self._grad_norms else 0.0,
            "train/optimizer_skips": float(self.skips),
        }
