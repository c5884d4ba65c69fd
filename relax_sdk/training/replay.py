"""Replay of recorded transitions through the trained transformer."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_sdk.errors import TrainingError
from relax_sdk.flow import replay_log_prob
from relax_sdk.protocols import GenerativeModelAdapter, ReplayBatch, Trajectory

__all__ = ["replay_cells", "replay_geometry"]


def replay_geometry(trajectory: Trajectory, slots: Sequence[int], columns: Sequence[int]) -> Hashable:
    """All shapes that a forward of these cells sees: forwards with the same one cost the same."""
    conditions = sorted((name, tuple(value.shape)) for name, value in trajectory.conditions.items())
    tokens = tuple(trajectory.latents.shape[2:])
    return len(slots) * len(columns), tokens, trajectory.height, trajectory.width, tuple(conditions)


def replay_cells(
    adapter: GenerativeModelAdapter,
    model: Any,
    trajectory: Trajectory,
    slots: Sequence[int],
    columns: Sequence[int],
    *,
    device: torch.device,
) -> Tensor:
    """Log-probabilities of the (candidate, trained step) cells of a micro-batch, in one forward of B*S rows.

    Args:
        adapter: gives the velocity.
        model: the trained module.
        trajectory: the candidates' group, on the CPU.
        slots: the B candidates.
        columns: S positions among the trajectory's trained steps.
        device: where the model is.

    Returns:
        [B, S] float32; with gradient when grad mode is on.

    Raises:
        TrainingError: a cell is NaN or infinite, with candidate and step named.
    """
    steps = trajectory.sde_indices[list(columns)]
    rows, count = len(slots), len(steps)
    picked = torch.tensor(list(slots))[:, None], torch.tensor(list(columns))[None, :]
    here = trajectory.sigmas[steps].repeat(rows).to(device)
    after = trajectory.sigmas[steps + 1].repeat(rows).to(device)
    latents = trajectory.latents[picked].flatten(0, 1).to(device)
    next_latents = trajectory.next_latents[picked].flatten(0, 1).to(device)
    # One shared copy of the text conditions, referenced by every row.
    condition = {name: value.to(device) for name, value in trajectory.conditions.items()}
    batch = ReplayBatch(
        latents=latents,
        sigmas=here,
        conditions=(condition,) * (rows * count),
        height=trajectory.height,
        width=trajectory.width,
    )
    with warnings.catch_warnings():
        # FSDP2 warns of in-place changes to a view that a module returns; nothing here changes one.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        velocity = adapter.replay_transition(model, batch)
    log_prob = replay_log_prob(
        latents,
        next_latents,
        velocity,
        here,
        after,
        eta=trajectory.eta,
        sde_type=trajectory.sde_type,
        sigma_clamp=trajectory.sigma_clamp,
    ).reshape(rows, count)
    if not bool(log_prob.isfinite().all()):
        row, column = (~log_prob.isfinite()).nonzero()[0].tolist()
        raise TrainingError(
            f"replay gave a log-probability of {log_prob[row, column].item()}",
            where=f"group {trajectory.group_index}, candidate {slots[row]}, SDE step {int(steps[column])}",
        )
    return log_prob
