"""From raw reward components to one advantage per candidate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["STD_EPSILON", "combine_components", "normalize_grouped"]

STD_EPSILON = 1e-8
"""Added to every standard deviation before dividing. Only here."""


def normalize_grouped(scores: Tensor, group_ids: Tensor, *, std_mode: str) -> Tensor:
    """Centre scores on their prompt group's mean and divide by a standard deviation.

    Args:
        scores: [B] raw values of one component.
        group_ids: [B] int64: explicit group identities, never derived from text or a float.
        std_mode: ``"group"`` divides by the group's own std (text GRPO), ``"batch"`` by the std of all centred
            values of the rollout (the global std of diffusion recipes), ``"none"`` does not divide (Dr. GRPO).
            Sample standard deviations (n - 1).

    Returns:
        [B] float64. Exactly 0 throughout a group whose scores are all equal, and throughout a group of one.

    Raises:
        ValueError: shapes differ, ids are not integers, or another ``std_mode``.
    """
    if scores.shape != group_ids.shape or scores.dim() != 1:
        raise ValueError(f"expected scores and group_ids [B], came {list(scores.shape)} and {list(group_ids.shape)}")
    if group_ids.dtype.is_floating_point:
        raise ValueError(f"group_ids must be integers, came {group_ids.dtype}")
    if std_mode not in ("group", "batch", "none"):
        raise ValueError(f"unknown std_mode {std_mode!r}; expected 'group', 'batch' or 'none'")
    values = scores.double()
    centred = torch.zeros_like(values)
    divisor = torch.ones_like(values)
    for group in torch.unique(group_ids):
        rows = group_ids == group
        members = values[rows]
        # Compared, not subtracted: the mean of equal floats need not round back to the float itself.
        if members.numel() < 2 or bool((members == members[0]).all()):
            continue
        centred[rows] = members - members.mean()
        if std_mode == "group":
            divisor[rows] = members.std(correction=1) + STD_EPSILON
    if std_mode == "batch" and values.numel() > 1:
        divisor = divisor * (centred.std(correction=1) + STD_EPSILON)
    return centred / divisor


def combine_components(components: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The weighted sum of normalised components.

    Args:
        components: name -> [B] normalised values.
        weights: name -> weight; a component without a weight does not count.

    Returns:
        [B] float64.

    Raises:
        ValueError: a weighted component is missing, or no component has a weight.
    """
    missing = sorted(set(weights) - set(components))
    if missing:
        raise ValueError(f"no scores for weighted components {missing}; there are {sorted(components)}")
    if not weights:
        raise ValueError("no component has a weight")
    total: Tensor | None = None
    for name, weight in weights.items():
        part = components[name].double() * weight
        total = part if total is None else total + part
    assert total is not None
    return total
