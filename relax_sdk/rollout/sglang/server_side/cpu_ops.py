"""The two fused operators that SGLang's CPU path calls and that no CPU wheel of its kernels holds, in plain torch.

Both normalise in float32 and round once, to the input's dtype. An operator that is already registered (a CPU build of
the kernels) is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["norm_scale_shift", "register_cpu_ops", "residual_norm_scale_shift"]

_SCHEMAS = {
    "fused_norm_scale_shift_cpu": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps) -> Tensor"
    ),
    "fused_scale_residual_norm_scale_shift_cpu": (
        "(Tensor residual, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, "
        "str norm_type, float eps) -> (Tensor, Tensor)"
    ),
}
# Registrations live as long as the library object.
_library: torch.library.Library | None = None


def norm_scale_shift(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, norm_type: str, eps: float
) -> Tensor:
    """``norm(x) * (1 + scale) + shift`` over the last axis; ``norm_type`` is ``"layer"`` or ``"rms"``.

    Raises:
        ValueError: another ``norm_type``.
    """
    normed = x.float()
    if norm_type == "layer":
        normed = normed - normed.mean(-1, keepdim=True)
    elif norm_type != "rms":
        raise ValueError(f"unknown norm_type {norm_type!r}; expected 'layer' or 'rms'")
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


def residual_norm_scale_shift(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    norm_type: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The new residual ``residual + gate * x``, rounded to its dtype, and `norm_scale_shift` of it (returned first)."""
    update = x.float() if gate is None else x.float() * gate.float()
    total = (residual.float() + update).to(residual.dtype)
    return norm_scale_shift(total, weight, bias, scale, shift, norm_type, eps), total


def register_cpu_ops() -> list[str]:
    """Register what is missing; returns the names that were added (an empty list the second time)."""
    global _library
    if _library is not None:
        return []
    implementations: dict[str, Callable[..., Any]] = {
        "fused_norm_scale_shift_cpu": norm_scale_shift,
        "fused_scale_residual_norm_scale_shift_cpu": residual_norm_scale_shift,
    }
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    added = []
    for name, implementation in implementations.items():
        if hasattr(torch.ops.sgl_kernel, name):
            continue
        _library.define(name + _SCHEMAS[name])
        _library.impl(name, implementation, "CPU")
        added.append(name)
    return added
