"""The two operators that SGLang's CPU path lacks, against torch's own normalisation in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from relax_sdk.rollout.sglang.server_side import cpu_ops
from relax_sdk.rollout.sglang.server_side.cpu_ops import (
    norm_scale_shift,
    register_cpu_ops,
    residual_norm_scale_shift,
)

EPS = 1e-6
SHAPE = (2, 5, 16)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor, shift: Tensor, kind: str) -> Tensor:
    """float64, by torch's own layer norm, or the definition of the root mean square."""
    x64 = x.double()
    gain = None if weight is None else weight.double()
    offset = None if bias is None else bias.double()
    if kind == "layer":
        normed = functional.layer_norm(x64, x.shape[-1:], gain, offset, EPS)
    else:
        normed = x64 / (x64.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt()
        normed = normed if gain is None else normed * gain
        normed = normed if offset is None else normed + offset
    return normed * (1 + scale.double()) + shift.double()


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
def test_norm_scale_shift_is_the_norm_of_torch(kind: str, affine: bool) -> None:
    x = 3 + drawn(*SHAPE, seed=1)
    weight, bias = (drawn(16, seed=2), drawn(16, seed=3)) if affine else (None, None)
    # One modulation per sample, broadcast over its tokens, as adaptive norms have it.
    scale, shift = drawn(2, 1, 16, seed=4), drawn(2, 1, 16, seed=5)
    got = norm_scale_shift(x, weight, bias, scale, shift, kind, EPS)
    torch.testing.assert_close(got.double(), reference(x, weight, bias, scale, shift, kind), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("gated", [True, False])
def test_the_residual_is_added_first_and_returned_second(kind: str, gated: bool) -> None:
    residual, x = drawn(*SHAPE, seed=1), drawn(*SHAPE, seed=2)
    gate = drawn(2, 1, 16, seed=3) if gated else None
    scale, shift, weight = drawn(2, 1, 16, seed=4), drawn(2, 1, 16, seed=5), drawn(16, seed=6)
    modulated, total = residual_norm_scale_shift(residual, x, gate, weight, None, scale, shift, kind, EPS)
    expected = residual.double() + x.double() * (1.0 if gate is None else gate.double())
    torch.testing.assert_close(total.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        modulated.double(), reference(total, weight, None, scale, shift, kind), atol=3e-6, rtol=3e-6
    )


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bfloat16_is_rounded_once_at_the_end(kind: str) -> None:
    """Half a unit in the last place from the float64 result, up to float32 noise; a second rounding would show."""
    x = 3 + drawn(64, 32, seed=1)
    x, scale, shift = x.bfloat16(), drawn(1, 32, seed=2).bfloat16(), drawn(1, 32, seed=3).bfloat16()
    got = norm_scale_shift(x, None, None, scale, shift, kind, EPS)
    exact = reference(x, None, None, scale, shift, kind)
    assert got.dtype == torch.bfloat16
    # 8 bits of significand: half a unit is at most 2^-9 of the next power of two.
    half = torch.exp2(torch.floor(torch.log2(exact.abs())) - 8)
    assert bool(((got.double() - exact).abs() <= half + 1e-5).all())


def test_bfloat16_residual_is_rounded_once_and_normalised_as_it_is_returned() -> None:
    residual, x, gate = (drawn(*SHAPE, seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    zero = torch.zeros(16, dtype=torch.bfloat16)
    modulated, total = residual_norm_scale_shift(residual, x, gate, None, None, zero, zero, "layer", EPS)
    assert torch.equal(total, (residual.double() + x.double() * gate.double()).bfloat16())
    assert torch.equal(modulated, norm_scale_shift(total, None, None, zero, zero, "layer", EPS))


def test_an_unknown_norm_is_refused() -> None:
    zero = torch.zeros(4)
    with pytest.raises(ValueError, match=r"unknown norm_type 'group'.*'layer' or 'rms'"):
        norm_scale_shift(zero, None, None, zero, zero, "group", EPS)


def test_torch_finds_the_registered_operators() -> None:
    register_cpu_ops()
    x, scale, shift = drawn(2, 4, seed=1), drawn(4, seed=2), drawn(4, seed=3)
    ops = torch.ops.sgl_kernel
    modulated = ops.fused_norm_scale_shift_cpu(x, None, None, scale, shift, "rms", EPS)
    assert torch.equal(modulated, norm_scale_shift(x, None, None, scale, shift, "rms", EPS))
    modulated, total = ops.fused_scale_residual_norm_scale_shift_cpu(x, x, None, None, None, scale, shift, "layer", EPS)
    assert torch.equal(total, 2 * x)
    assert torch.equal(modulated, norm_scale_shift(2 * x, None, None, scale, shift, "layer", EPS))


def test_registering_twice_adds_nothing() -> None:
    register_cpu_ops()
    assert register_cpu_ops() == []


def test_an_operator_that_is_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cpu_ops()
    # As in a process where the kernels' own library has registered them: defining one again would raise.
    monkeypatch.setattr(cpu_ops, "_library", None)
    assert register_cpu_ops() == []
